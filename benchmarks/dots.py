"""Races of plain attention, softmax of a dot product: forward, backward, decode, other shapes, tiny calls."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import regard
from benchmarks import peers
from benchmarks.harness import Contender, Lineup, Race

BOTH = (2, 1)  # threads


@dataclass(frozen=True)
class Shape:
    """The sizes of a call, b h q d and b g k d; keys and key heads are as many as the others by default."""

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
        """Of a forward pass: two matrix products over the pairs that see each other."""
        pairs = self.q * (self.q + 1) / 2 if self.causal else self.q * (self.k or self.q)
        return 4 * self.b * self.h * pairs * self.d

    @property
    def bytes(self) -> float:
        """Of key and value."""
        return 2 * self.b * (self.g or self.h) * (self.k or self.q) * self.d * self.dtype.itemsize

    def tensors(self) -> list[Tensor]:
        """Query, key and value."""
        key = (self.b, self.g or self.h, self.k or self.q, self.d)
        return [x.to(self.dtype) for x in randoms((self.b, self.h, self.q, self.d), key, key)]


def randoms(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Normal numbers, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def differentiate(
    calls: Mapping[str, Contender], leaves: list[Tensor], grad: Tensor | None = None
) -> dict[str, Contender]:
    """Each call followed by the gradients of the leaves, given that of the output: like the first leaf's."""
    grad = torch.ones_like(leaves[0]) + leaves[0].detach().flip(0) if grad is None else grad

    def contender(call: Contender) -> Contender:
        return lambda: torch.autograd.grad(call(), leaves, grad)  # type: ignore[arg-type]

    return {name: contender(call) for name, call in calls.items()}


def contenders(shape: Shape, backward: bool, against: tuple[str, ...]) -> Lineup:
    """Regard and the peers named, at the same tensors."""
    leaves = [x.requires_grad_(backward) for x in shape.tensors()]
    mask = regard.Causal() if shape.causal else None
    calls: dict[str, Contender] = {
        "regard": partial(regard.attention, *leaves, mask=mask),
        "sdpa": partial(
            scaled_dot_product_attention, *leaves, is_causal=shape.causal, enable_gqa=bool(shape.g)
        ),
    }
    if "eager" in against:
        calls["eager"] = partial(peers.eager, *leaves, causal=shape.causal)
    if torch.get_num_threads() > 1:  # one compiled for two threads stays there, and jax cannot be told
        calls |= peers.flex(*leaves, shape.causal) if "flex" in against else {}
        calls |= peers.jax(*leaves, shape.causal) if "jax" in against else {}
    implementation = regard.explain(*leaves, mask=mask).implementation
    return Lineup(differentiate(calls, leaves) if backward else calls, implementation)


def plain(
    group: str,
    shape: Shape,
    target: float | None,
    *against: str,
    backward: bool = False,
    decode: bool = False,
    threads: tuple[int, ...] = (2,),
) -> Race:
    """A race of regard with SDPA and the other peers named."""
    name = f"{shape} + backward" if backward and group == "shapes" else str(shape)
    return Race(
        group,
        name,
        partial(contenders, shape, backward, against),
        backward=backward,
        flops=shape.flops
        * (3.5 if backward else 1),  # five more products: the scores once more, four gradients
        bytes=shape.bytes if decode else None,
        target=target,
        threads=threads,
    )


def forward() -> Iterator[Race]:
    for shape, target, *against in (
        (Shape(64, 8, 24), 3.5, "eager", "jax"),
        (Shape(64, 8, 32), 2.6, "eager", "jax"),
        (Shape(16, 8, 64), 2.2, "eager", "jax"),
        (Shape(1, 8, 128), 1.8, "eager", "jax"),
        (Shape(1, 8, 512), 1.5, "eager", "flex", "jax"),
        (Shape(1, 8, 2048), 1.3, "eager", "flex", "jax"),
        (Shape(1, 8, 2048, causal=True), 1.6, "eager", "flex", "jax"),
        (Shape(1, 8, 8192, causal=True), 1.45),
        (Shape(1, 8, 2048, d=128, causal=True), 1.5, "eager"),
    ):
        yield plain("forward", shape, target, *against, threads=BOTH)


def backward() -> Iterator[Race]:
    for shape, target in (
        (Shape(64, 8, 24), 2.8),
        (Shape(64, 8, 32), 2.2),
        (Shape(16, 8, 64), 2.2),
        (Shape(1, 8, 128), 1.5),
        (Shape(1, 8, 512), 1.6),
        (Shape(1, 8, 2048), 1.4),
        (Shape(1, 8, 2048, causal=True), 1.65),
    ):
        yield plain("backward", shape, target, "eager", backward=True, threads=BOTH)


def decode() -> Iterator[Race]:
    for shape, target in (
        (Shape(64, 8, 1, 32), 2.7),
        (Shape(16, 8, 1, 512), 2.0),
        (Shape(1, 8, 1, 8192), 2.0),
        (Shape(1, 32, 1, 8192, d=128), 3.0),
    ):
        yield plain("decode", shape, target, "eager", decode=True, threads=BOTH)


def shapes() -> Iterator[Race]:
    """Where nothing is promised but never to be slower than SDPA."""
    trained = [
        Shape(1, 8, 777),
        *(Shape(1, 8, 512, d=width) for width in (32, 40, 80, 96, 192, 256)),
        Shape(1, 32, 512, g=8),
        Shape(1, 8, 512, dtype=torch.bfloat16),
        Shape(1, 8, 512, dtype=torch.float16),
    ]
    for shape in (*trained, Shape(4, 32, 1, 2048, g=8), Shape(1, 8, 4, 16384)):
        yield plain("shapes", shape, 1.0)
    for shape in trained:
        yield plain("shapes", shape, 1.0, backward=True)


def small() -> Iterator[Race]:
    """One sentence, one thread: what a call costs."""
    yield plain("small", Shape(1, 8, 24, causal=True), None, threads=(1,))
    yield plain("small", Shape(1, 1, 4, d=16), None, threads=(1,))
