"""Races of all that is not plain: packed batches, biases, other scores and normalizers, visible weights."""

import random
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import regard
from benchmarks import peers
from benchmarks.dots import Shape, differentiate, randoms
from benchmarks.harness import Contender, Lineup, Race

LONG = Shape(1, 8, 2048)
VERY_LONG = Shape(1, 8, 8192, causal=True)


def packed() -> Iterator[Race]:
    """Sentences of 5 to 60 tokens: one after the other here, padded to the longest elsewhere."""
    draw = random.Random(0).randint
    lengths = [draw(5, 60) for _ in range(64)]

    def contenders() -> Lineup:
        mask = regard.Documents(lengths)
        leaves = [x.requires_grad_() for x in randoms(*[(8, sum(lengths), 64)] * 3)]
        ours: dict[str, Contender] = {"regard": partial(regard.attention, *leaves, mask=mask)}
        wide = [x.requires_grad_() for x in randoms(*[(len(lengths), 8, max(lengths), 64)] * 3)]
        real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None, None, None]  # b 1 1 n
        theirs = {"padded sdpa": partial(scaled_dot_product_attention, *wide, attn_mask=real)}
        implementation = regard.explain(*leaves, mask=mask).implementation
        return Lineup(differentiate(ours, leaves) | differentiate(theirs, wide), implementation)

    flops = 14 * 8 * 64 * sum(length**2 for length in lengths)
    name = f"{len(lengths)} sentences, {sum(lengths)} tokens"
    yield Race("packed", name, contenders, backward=True, flops=flops, target=3.0)


def relative() -> Iterator[Race]:
    """A bias that depends on the distance: a line of numbers here, a dense matrix elsewhere."""
    shape = Shape(1, 8, 2048, causal=True)

    def contenders() -> Lineup:
        leaves = [x.requires_grad_() for x in shape.tensors()]
        bias, causal = regard.ALiBi(shape.h), regard.Causal()
        hidden = torch.ones(shape.q, shape.q, dtype=torch.bool).triu(1)
        dense = bias.dense(shape.q, shape.q).masked_fill(hidden, -torch.inf)[None]
        calls: dict[str, Contender] = {
            "regard": partial(regard.attention, *leaves, mask=causal, bias=bias),
            "sdpa": partial(scaled_dot_product_attention, *leaves, attn_mask=dense),
        }
        implementation = regard.explain(*leaves, mask=causal, bias=bias).implementation
        return Lineup(differentiate(calls, leaves), implementation)

    yield Race("relative", f"ALiBi {shape}", contenders, backward=True, flops=3.5 * shape.flops, target=2.0)


def additive() -> Iterator[Race]:
    """Bahdanau's score, its parameters' gradients included."""

    def contenders(backward: bool) -> Lineup:
        inputs = [x.requires_grad_(backward) for x in randoms(*[(64, 24, 256)] * 3)]
        torch.manual_seed(0)
        score = regard.Additive(256, 256)
        parameters = [score.query_map, score.key_map, score.vector]
        calls: dict[str, Contender] = {
            "regard": partial(regard.attention, *inputs, score=score),
            "broadcast": partial(peers.broadcast, *inputs, *parameters),
        }
        implementation = regard.explain(*inputs, score=score).implementation
        return Lineup(differentiate(calls, inputs + parameters) if backward else calls, implementation)

    for backward, target in ((False, 15.0), (True, 10.0)):
        name = f"64,24,24,256{' + backward' if backward else ''}"
        yield Race("additive", name, partial(contenders, backward), backward=backward, target=target)


def sparse() -> Iterator[Race]:
    """Normalizers that give weights of exactly zero, against the entmax package."""
    try:
        import entmax
    except ImportError:
        peers.skip("entmax", "is not installed")
        return

    def contenders(ours: regard.Normalizer, theirs: Callable[..., Tensor]) -> Lineup:
        leaves = [x.requires_grad_() for x in LONG.tensors()]
        query, key, value = leaves
        calls: dict[str, Contender] = {
            "regard": partial(regard.attention, *leaves, normalize=ours),
            "entmax": lambda: theirs(query @ key.mT / LONG.d**0.5, dim=-1) @ value,
        }
        implementation = regard.explain(*leaves, normalize=ours).implementation
        return Lineup(differentiate(calls, leaves), implementation)

    for name, *sides in (
        ("sparsemax", regard.Sparsemax(), entmax.sparsemax),
        ("entmax15", regard.Entmax15(), entmax.entmax15),
    ):
        lineup = partial(contenders, *sides)
        yield Race("sparse", f"{name} {LONG}", lineup, backward=True, flops=3.5 * LONG.flops, target=3.0)


def visible() -> Iterator[Race]:
    """What it costs to have the weights, and to look at them, beside `attention` alone."""

    def contenders(shape: Shape, look: Callable[[regard.Weights], object] | None = None) -> Lineup:
        inputs, mask = shape.tensors(), regard.Causal() if shape.causal else None
        ours: Contender = partial(regard.attend, *inputs, mask=mask)
        if look is not None:
            ours = partial(look, regard.attend(*inputs, mask=mask)[1])
        calls = {"regard": ours, "attention": partial(regard.attention, *inputs, mask=mask)}
        return Lineup(calls, regard.explain(*inputs, mask=mask).implementation)

    for shape in (Shape(64, 8, 24), Shape(1, 8, 512), Shape(1, 8, 2048, causal=True), Shape(16, 8, 1, 512)):
        lineup = partial(contenders, shape)
        yield Race("visible", f"attend {shape}", lineup, flops=shape.flops, limit=1.02)
    looks: dict[str, Callable[[regard.Weights], object]] = {
        "topk(8)": lambda weights: weights.topk(8),
        "entropy()": lambda weights: weights.entropy(),
        "received()": lambda weights: weights.received(),
    }
    for name, look in looks.items():
        yield Race("visible", f"{name} {VERY_LONG}", partial(contenders, VERY_LONG, look), limit=1.5)
