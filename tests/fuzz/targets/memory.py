"""Calls under a memory limit return a result or raise an exception; the process never crashes."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import regard
from tests.fuzz.case import Case, Failure

MEGABYTE = 2**20
REFUSALS = (MemoryError, RuntimeError, regard.RegardError)  # torch raises a RuntimeError


def run(case: Case) -> None:
    random = case.random
    q, k, d = random.choice(
        (
            (64, 400_000, 4),
            (8, 2, 5_000_000),
            (3, 2_000_000, 2),
            (400_000, 64, 4),
            (2000, 2000, 64),
            (1, 8, 300_000),
        )
    )
    normalize = random.choice(
        (
            regard.Softmax(),
            regard.Sparsemax(),
            regard.Entmax(1.3),
            regard.Entmax15(),
            regard.Sigmoid(),
            regard.Hard(),
        )
    )
    mask: Any = random.choice((None, regard.Causal(), regard.Window(100), regard.Padding(k - 1)))
    name = random.choice((None, None, "fused", "tiled"))
    limit = random.choice((1, 4, 16, 50, 100, 200, 400)) * MEGABYTE
    step = random.choice(("forward", "backward", "top", "entropy", "product", "pool", "row"))
    case.note(f"query {(q, d)}, key {(k, d)}, {normalize}, {mask!r}, implementation {name}, {step}")
    case.note(f"{limit // MEGABYTE} MB left")
    x = torch.zeros(8, 4)
    regard.attention(x, x, x)  # starts the threads and loads the kernels before the limit
    query, key = torch.full((q, d), 0.01), torch.full((k, d), 0.01)
    value = torch.ones(k, 1).expand(k, 2)
    query.requires_grad_(step == "backward")
    with memory(limit):
        try:
            output, weights = regard.attend(
                query, key, value, mask=mask, normalize=normalize, implementation=name
            )
            _continue(step, output, weights)
        except REFUSALS:
            return
    sums = isinstance(normalize, regard.Softmax) and mask is None
    if sums and not torch.allclose(output.detach(), torch.ones(()), atol=1e-2):
        raise Failure("the output is wrong under a limit of memory", f"{float(output.min()):.4g}, not 1")


def _continue(step: str, output: torch.Tensor, weights: regard.Weights) -> None:
    match step:
        case "backward":
            output.sum().backward()
        case "top":
            weights.topk(3)
        case "entropy":
            weights.entropy()
        case "product":
            weights.T @ torch.ones(weights.shape[-2])
        case "pool":
            weights.pool(4, 4)
        case "row":
            weights[0]


@contextmanager
def memory(more: int) -> Iterator[None]:
    """Limit the process to this many additional bytes."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
