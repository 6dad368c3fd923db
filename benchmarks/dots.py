"""Dot-product attention with softmax: forward, backward, decoding, other shapes, and tiny calls."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import regard
from benchmarks import peers
from benchmarks.harness import Call, Candidates, Comparison

THREADS = (2, 1)


@dataclass(frozen=True)
class Shape:
    """Sizes of a call, b h q d and b g k d. Defaults: as many keys as queries, as many key heads as heads."""

    b: int
    h: int
    q: int
    k: int = 0
    d: int = 64
    g: int = 0
    causal: bool = False
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        heads = f"{self.h}/{self.g}" if self.g else str(self.h)
        keys = f",{self.k}" if self.k else ""
        width = f" d={self.d}" if self.d != 64 else ""
        dtype = "" if self.dtype == torch.float32 else f" {str(self.dtype).removeprefix('torch.')}"
        return f"{self.b},{heads},{self.q}{keys}{' causal' if self.causal else ''}{width}{dtype}"

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass: two matrix products over the visible query-key pairs."""
        pairs = self.q * (self.q + 1) / 2 if self.causal else self.q * (self.k or self.q)
        return 4 * self.b * self.h * pairs * self.d

    @property
    def bytes(self) -> float:
        """Size of key and value."""
        return 2 * self.b * (self.g or self.h) * (self.k or self.q) * self.d * self.dtype.itemsize

    def tensors(self) -> list[Tensor]:
        """Create query, key and value."""
        key = (self.b, self.g or self.h, self.k or self.q, self.d)
        return [x.to(self.dtype) for x in random_tensors((self.b, self.h, self.q, self.d), key, key)]


def random_tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Draw normally distributed tensors with a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def with_gradients(
    calls: Mapping[str, Call], leaves: list[Tensor], grad: Tensor | None = None
) -> dict[str, Call]:
    """Extend each call to return the gradients of `leaves`. The default `grad` has the first leaf's shape."""
    grad = torch.ones_like(leaves[0]) + leaves[0].detach().flip(0) if grad is None else grad

    def extend(call: Call) -> Call:
        return lambda: torch.autograd.grad(call(), leaves, grad)  # type: ignore[arg-type]

    return {name: extend(call) for name, call in calls.items()}


def candidates(shape: Shape, backward: bool, peer_names: tuple[str, ...]) -> Candidates:
    """Build the calls of regard, SDPA and the named peers on the same tensors."""
    leaves = [x.requires_grad_(backward) for x in shape.tensors()]
    mask = regard.Causal() if shape.causal else None
    calls: dict[str, Call] = {
        "regard": partial(regard.attention, *leaves, mask=mask),
        "sdpa": partial(
            scaled_dot_product_attention, *leaves, is_causal=shape.causal, enable_gqa=bool(shape.g)
        ),
    }
    if "eager" in peer_names:
        calls["eager"] = partial(peers.eager, *leaves, causal=shape.causal)
    if torch.get_num_threads() > 1:  # flex stays compiled for two threads; jax has no thread setting
        calls |= peers.flex(*leaves, shape.causal) if "flex" in peer_names else {}
        calls |= peers.jax(*leaves, shape.causal) if "jax" in peer_names else {}
    implementation = regard.explain(*leaves, mask=mask).implementation
    return Candidates(with_gradients(calls, leaves) if backward else calls, implementation)


def compare(
    group: str,
    shape: Shape,
    target: float | None,
    *peer_names: str,
    backward: bool = False,
    decode: bool = False,
    threads: tuple[int, ...] = (2,),
) -> Comparison:
    """Compare regard with SDPA and the named peers. target: speedup over the better of SDPA and eager."""
    name = f"{shape} + backward" if backward and group == "shapes" else str(shape)
    return Comparison(
        group,
        name,
        partial(candidates, shape, backward, peer_names),
        backward=backward,
        # backward: five more products, the recomputed scores and four gradients
        flops=shape.flops * (3.5 if backward else 1),
        bytes=shape.bytes if decode else None,
        target=target,
        rivals=("sdpa", "eager"),
        threads=threads,
    )


def forward() -> Iterator[Comparison]:
    for shape, target, *peer_names in (
        (Shape(64, 8, 24), 1.6, "eager", "jax"),
        (Shape(64, 8, 32), 1.6, "eager", "jax"),
        (Shape(16, 8, 64), 1.6, "eager", "jax"),
        (Shape(1, 8, 128), 1.6, "eager", "jax"),
        (Shape(1, 8, 512), 1.3, "eager", "flex", "jax"),
        (Shape(1, 8, 2048), 1.2, "eager", "flex", "jax"),
        (Shape(1, 8, 2048, causal=True), 1.5, "eager", "flex", "jax"),
        (Shape(1, 8, 8192, causal=True), 1.35),
        (Shape(1, 8, 2048, d=128, causal=True), 1.3, "eager"),
    ):
        yield compare("forward", shape, target, *peer_names, threads=THREADS)


def backward() -> Iterator[Comparison]:
    for shape, target in (
        (Shape(64, 8, 24), 1.6),
        (Shape(64, 8, 32), 1.6),
        (Shape(16, 8, 64), 1.6),
        (Shape(1, 8, 128), 1.6),
        (Shape(1, 8, 512), 1.4),
        (Shape(1, 8, 2048), 1.4),
        (Shape(1, 8, 2048, causal=True), 1.65),
    ):
        yield compare("backward", shape, target, "eager", backward=True, threads=THREADS)


def decode() -> Iterator[Comparison]:
    for shape, target in (
        (Shape(64, 8, 1, 32), 2.7),
        (Shape(16, 8, 1, 512), 2.0),
        (Shape(1, 8, 1, 8192), 2.0),
        (Shape(1, 32, 1, 8192, d=128), 3.0),
    ):
        yield compare("decode", shape, target, "eager", decode=True, threads=THREADS)
    grouped = Shape(1, 32, 1, 8192, d=128, g=8)
    for shape in (
        grouped,
        replace(grouped, dtype=torch.bfloat16),
        Shape(1, 8, 1, 8192, dtype=torch.bfloat16),
    ):
        yield compare("decode", shape, 2.0, decode=True, threads=THREADS)


def shapes() -> Iterator[Comparison]:
    """Unusual shapes, whose only target is to match SDPA's speed, and bfloat16."""
    with_backward = [
        Shape(1, 8, 777),
        *(Shape(1, 8, 512, d=width) for width in (32, 40, 80, 96, 192, 256)),
        Shape(1, 32, 512, g=8),
        Shape(1, 8, 512, dtype=torch.float16),
    ]
    for shape in (*with_backward, Shape(4, 32, 1, 2048, g=8), Shape(1, 8, 4, 16384)):
        yield compare("shapes", shape, 1.0)
    for shape in (Shape(1, 8, 512), Shape(1, 8, 2048), Shape(1, 8, 2048, causal=True)):
        yield compare("shapes", replace(shape, dtype=torch.bfloat16), 1.7)
    for shape in (*with_backward, Shape(1, 8, 512, dtype=torch.bfloat16)):
        yield compare("shapes", shape, 1.0, backward=True)


def small() -> Iterator[Comparison]:
    """One short sentence on one thread: the overhead of a call."""
    yield compare("small", Shape(1, 8, 24, causal=True), None, threads=(1,))
    yield compare("small", Shape(1, 1, 4, d=16), None, threads=(1,))
