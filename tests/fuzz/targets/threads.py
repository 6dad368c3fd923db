"""Concurrent threads: each gets its own results, whatever the others do."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import regard
from tests.fuzz.case import Case, Failure, signature

SECONDS = 0.7  # per case


def run(case: Case) -> None:
    case.random.choice((operator, hooks))(case)


def run_concurrently(case: Case, works: list[Callable[[], None]], seconds: float = SECONDS) -> None:
    """Run each of these repeatedly in its own thread, and report the first exception."""
    problems: list[BaseException] = []
    end = time.monotonic() + seconds
    ready = threading.Barrier(len(works))

    def repeat(work: Callable[[], None]) -> None:
        ready.wait()
        try:
            while time.monotonic() < end and not problems:
                work()
        except BaseException as error:
            problems.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # switch threads as often as possible, to expose races
    try:
        threads = [threading.Thread(target=repeat, args=(work,), daemon=True) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            if thread.is_alive():
                raise Failure("a thread does not end")
    finally:
        sys.setswitchinterval(before)
    if problems:
        if isinstance(problems[0], Failure):
            raise problems[0]
        raise Failure(f"a thread raised {signature(problems[0])}", str(problems[0])[:300]) from problems[0]


def expect(what: str, found: Tensor, wanted: Tensor) -> None:
    if not torch.allclose(found, wanted, atol=1e-4, rtol=1e-3):
        raise Failure(
            f"{what} differs with other threads",
            f"by {float((found - wanted).detach().abs().max()):.3g}",
        )


# The operator


def operator(case: Case) -> None:
    """Call with different masks of equal sizes, in small calls whose preparation is cached."""
    tokens = case.random.choice((5, 30))
    count = case.random.choice((2, 3, 4))
    case.note(f"{count} threads, 2 × 2 × {tokens} × 8")
    run_concurrently(case, [_work(case, tokens) for _ in range(count)])


def _work(case: Case, tokens: int) -> Callable[[], None]:
    masks: list[Any] = [_mask(case, tokens) for _ in range(3)]
    inputs = [case.randn(2, 2, tokens, 8).requires_grad_() for _ in range(3)]
    normalize = case.random.choice((regard.Softmax(), regard.Sparsemax(), regard.Entmax(1.3)))
    expected = []
    for mask in masks:
        output, weights = regard.attend(*inputs, mask=mask, normalize=normalize, implementation="reference")
        gradient = torch.autograd.grad(output.sum(), inputs)
        expected.append((output.detach(), weights.dense().detach(), gradient))
    shared = regard.attend(*inputs, mask=masks[0], normalize=normalize)[1].detach()

    def work() -> None:
        for mask, (wanted, dense, gradients) in zip(masks, expected, strict=True):
            output, weights = regard.attend(*inputs, mask=mask, normalize=normalize)
            expect("an output", output, wanted)
            expect("dense()", weights.detach().dense(), dense)
            for found, gradient in zip(torch.autograd.grad(output.sum(), inputs), gradients, strict=True):
                expect("a gradient", found, gradient)
        expect("a row", shared[..., 1, :], expected[0][1][..., 1, :])
        expect("received()", shared.received(), expected[0][1].sum(-2))

    return work


def _mask(case: Case, tokens: int) -> Any:
    lengths = [case.random.randint(1, tokens) for _ in range(2)]
    return case.random.choice(
        (
            regard.Padding(torch.tensor(lengths)),
            regard.Padding(lengths, side="left"),
            regard.Documents([lengths[0], tokens - lengths[0]], within=regard.Causal()),
            regard.Window(left=lengths[0], right=lengths[1]),
            regard.Causal(),
        )
    )


# Hooks into torch


def hooks(case: Case) -> None:
    """Watch or patch in one thread; the others call plain torch modules."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = case.randn(2, 5, 8)
    grad_enabled = case.chance(0.5)
    query = case.randn(1, 2, 5, 8)
    with torch.set_grad_enabled(grad_enabled):
        wanted = (
            model(x, x, x, need_weights=False)[0].detach(),
            layer(x).detach(),
            nn.functional.scaled_dot_product_attention(query, query, query),
        )

    def plain() -> None:
        with torch.set_grad_enabled(grad_enabled):
            expect("nn.MultiheadAttention", model(x, x, x, need_weights=False)[0], wanted[0])
            expect("nn.TransformerEncoderLayer", layer(x), wanted[1])
            found = nn.functional.scaled_dot_product_attention(query, query, query)
            expect("scaled_dot_product_attention", found, wanted[2])

    def watch() -> None:
        with torch.set_grad_enabled(grad_enabled), regard.watch(layer) as seen:
            layer(x)
        if len(seen) != 1:
            raise Failure("watch records calls of other threads, or misses some", f"{len(seen)} instead of 1")

    def patch() -> None:
        with regard.patched():
            found = nn.functional.scaled_dot_product_attention(query, query, query)
        expect("patched scaled_dot_product_attention", found, wanted[2])

    chosen = case.random.choice(((watch,), (patch,), (watch, patch), (watch, watch)))
    case.note(f"{[work.__name__ for work in chosen]} next to two threads of plain torch, grad {grad_enabled}")
    before = torch.backends.mha.get_fastpath_enabled(), nn.functional.scaled_dot_product_attention
    run_concurrently(case, [*chosen, plain, plain])
    if before != (torch.backends.mha.get_fastpath_enabled(), nn.functional.scaled_dot_product_attention):
        raise Failure("torch is not as it was before watch and patch")
