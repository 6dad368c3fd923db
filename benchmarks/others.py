"""Packed batches, biases, other scores and normalizers, and access to the weights."""

import random
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import regard
from benchmarks import peers
from benchmarks.dots import Shape, random_tensors, with_gradients
from benchmarks.harness import Call, Candidates, Comparison

LONG = Shape(1, 8, 2048)
VERY_LONG = Shape(1, 8, 8192, causal=True)


def packed() -> Iterator[Comparison]:
    """Sentences of 5 to 60 tokens: packed in regard, padded to the longest for SDPA."""
    draw = random.Random(0).randint
    lengths = [draw(5, 60) for _ in range(64)]

    def setup() -> Candidates:
        mask = regard.Documents(lengths)
        leaves = [x.requires_grad_() for x in random_tensors(*[(8, sum(lengths), 64)] * 3)]
        packed_calls: dict[str, Call] = {"regard": partial(regard.attention, *leaves, mask=mask)}
        padded = [x.requires_grad_() for x in random_tensors(*[(len(lengths), 8, max(lengths), 64)] * 3)]
        visible = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None, None, None]  # b 1 1 n
        padded_calls: dict[str, Call] = {
            "padded sdpa": partial(scaled_dot_product_attention, *padded, attn_mask=visible)
        }
        implementation = regard.explain(*leaves, mask=mask).implementation
        return Candidates(
            with_gradients(packed_calls, leaves) | with_gradients(padded_calls, padded), implementation
        )

    flops = 14 * 8 * 64 * sum(length**2 for length in lengths)
    name = f"{len(lengths)} sentences, {sum(lengths)} tokens"
    yield Comparison("packed", name, setup, backward=True, flops=flops, target=3.0)


def relative() -> Iterator[Comparison]:
    """A bias that depends on the distance: one value per distance in regard, a dense matrix for SDPA."""
    shape = Shape(1, 8, 2048, causal=True)

    def setup() -> Candidates:
        leaves = [x.requires_grad_() for x in shape.tensors()]
        bias, causal = regard.ALiBi(shape.h), regard.Causal()
        future = torch.ones(shape.q, shape.q, dtype=torch.bool).triu(1)
        dense = bias.dense(shape.q, shape.q).masked_fill(future, -torch.inf)[None]
        calls: dict[str, Call] = {
            "regard": partial(regard.attention, *leaves, mask=causal, bias=bias),
            "sdpa": partial(scaled_dot_product_attention, *leaves, attn_mask=dense),
        }
        implementation = regard.explain(*leaves, mask=causal, bias=bias).implementation
        return Candidates(with_gradients(calls, leaves), implementation)

    yield Comparison("relative", f"ALiBi {shape}", setup, backward=True, flops=3.5 * shape.flops, target=2.0)


def additive() -> Iterator[Comparison]:
    """Bahdanau's additive score, including the gradients of its parameters."""

    def setup(backward: bool) -> Candidates:
        inputs = [x.requires_grad_(backward) for x in random_tensors(*[(64, 24, 256)] * 3)]
        torch.manual_seed(0)
        score = regard.Additive(256, 256)
        parameters = [score.query_map, score.key_map, score.vector]
        calls: dict[str, Call] = {
            "regard": partial(regard.attention, *inputs, score=score),
            "broadcast": partial(peers.broadcast, *inputs, *parameters),
        }
        implementation = regard.explain(*inputs, score=score).implementation
        return Candidates(with_gradients(calls, inputs + parameters) if backward else calls, implementation)

    for backward, target in ((False, 15.0), (True, 10.0)):
        name = f"64,24,24,256{' + backward' if backward else ''}"
        yield Comparison("additive", name, partial(setup, backward), backward=backward, target=target)


def sparse() -> Iterator[Comparison]:
    """Sparse normalizers, compared with the entmax package."""
    try:
        import entmax
    except ImportError:
        peers.skip("entmax", "is not installed")
        return

    def setup(normalizer: regard.Normalizer, function: Callable[..., Tensor]) -> Candidates:
        leaves = [x.requires_grad_() for x in LONG.tensors()]
        query, key, value = leaves
        calls: dict[str, Call] = {
            "regard": partial(regard.attention, *leaves, normalize=normalizer),
            "entmax": lambda: function(query @ key.mT / LONG.d**0.5, dim=-1) @ value,
        }
        implementation = regard.explain(*leaves, normalize=normalizer).implementation
        return Candidates(with_gradients(calls, leaves), implementation)

    for name, *normalizers in (
        ("sparsemax", regard.Sparsemax(), entmax.sparsemax),
        ("entmax15", regard.Entmax15(), entmax.entmax15),
    ):
        build = partial(setup, *normalizers)
        yield Comparison("sparse", f"{name} {LONG}", build, backward=True, flops=3.5 * LONG.flops, target=3.0)


def visible() -> Iterator[Comparison]:
    """Cost of `attend` and of statistics of its weights, compared with `attention` alone."""

    def setup(shape: Shape, read: Callable[[regard.Weights], object] | None = None) -> Candidates:
        inputs, mask = shape.tensors(), regard.Causal() if shape.causal else None
        call: Call = partial(regard.attend, *inputs, mask=mask)
        if read is not None:
            call = partial(read, regard.attend(*inputs, mask=mask)[1])
        calls = {"regard": call, "attention": partial(regard.attention, *inputs, mask=mask)}
        return Candidates(calls, regard.explain(*inputs, mask=mask).implementation)

    for shape in (Shape(64, 8, 24), Shape(1, 8, 512), Shape(1, 8, 2048, causal=True), Shape(16, 8, 1, 512)):
        build = partial(setup, shape)
        yield Comparison("visible", f"attend {shape}", build, flops=shape.flops, limit=1.02)
    readers: dict[str, Callable[[regard.Weights], object]] = {
        "topk(8)": lambda weights: weights.topk(8),
        "entropy()": lambda weights: weights.entropy(),
        "received()": lambda weights: weights.received(),
    }
    for name, read in readers.items():
        yield Comparison("visible", f"{name} {VERY_LONG}", partial(setup, VERY_LONG, read), limit=1.5)
