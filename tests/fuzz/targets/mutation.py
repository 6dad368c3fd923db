"""In-place changes between calls, and between forward and backward.

A result uses the values at the time of the call, or an error is raised; old and new values are never mixed.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import regard
from tests.fuzz.case import Case, Failure
from tests.fuzz.targets.operator import IMPLEMENTATIONS

REFUSALS = (
    regard.RegardError,
    RuntimeError,
    AttributeError,
    TypeError,
)  # including torch's and Python's own errors


def run(case: Case) -> None:
    case.random.choice((masks, masks, tensors, again))(case)


def attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, bias: Any = 0.0) -> Tensor:
    """Compute softmax attention in float64; rows without visible keys are zero."""
    query, key, value = (x.double() for x in (query, key, value))
    s = query @ key.mT / math.sqrt(query.shape[-1]) + (bias.double() if isinstance(bias, Tensor) else bias)
    seen = seen.expand(s.shape)
    s = s.masked_fill(~seen & seen.any(-1, keepdim=True), -math.inf)
    return torch.softmax(s, -1).masked_fill(~seen, 0.0) @ value


def expect(kind: str, found: Tensor, wanted: Tensor) -> None:
    error = (found.detach().double() - wanted.detach()).abs().max() if found.numel() else 0.0
    if not float(error) < 1e-3:
        raise Failure(kind, f"off by {float(error):.3g}")


def gradients(output: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output, inputs, grad.to(output.dtype)))


# Masks with lengths


class Lengths:
    """A mask whose lengths came from a tensor, and all ways to change them."""

    def __init__(self, case: Case, batch: int, tokens: int) -> None:
        self.case, self.tokens, self.batch = case, tokens, batch
        self.documents = case.chance(0.4)
        size = 2 if self.documents else batch
        self.array = np.array(self._numbers(size), dtype=np.int64)
        shared = case.chance(0.5)
        self.tensor = torch.from_numpy(self.array) if shared else torch.tensor(self.array)
        case.note(f"{'Documents' if self.documents else 'Padding'}({self.array.tolist()})")
        self.within = regard.Causal() if case.chance(0.3) else None
        self.side: Any = case.random.choice(("right", "left"))
        self.mask: Any = (
            regard.Documents(self.tensor, within=self.within)
            if self.documents
            else regard.Padding(self.tensor, side=self.side)
        )
        self.combined = case.chance(0.2)
        if self.combined:
            self.mask = self.mask & regard.Window(left=tokens, right=tokens)

    def _numbers(self, size: int) -> list[int]:
        if self.documents:
            first = self.case.random.randint(0, self.tokens)
            return [first, self.tokens - first]
        return [self.case.random.randint(0, self.tokens) for _ in range(size)]

    def seen(self) -> Tensor:
        """Return the mask as a dense tensor."""
        return self.mask.dense(self.tokens, self.tokens, (self.batch, 1))

    def change(self) -> None:
        """Change the lengths, or try to."""
        numbers = torch.tensor(self._numbers(len(self.array)))
        own = self.mask.first if self.combined else self.mask
        name = "queries" if self.documents else "lengths"
        ways: dict[str, Callable[[], object]] = {
            "tensor": lambda: self.tensor.copy_(numbers),
            "data": lambda: self.tensor.data.copy_(numbers),
            "numpy": lambda: self.array.__setitem__(slice(None), numbers.numpy()),
            "inference_mode": lambda: _in_inference_mode(lambda: self.tensor.copy_(numbers)),
            "attribute in place": lambda: getattr(own, name).copy_(numbers),
            "attribute": lambda: setattr(own, name, numbers),
            "both attributes": lambda: [setattr(own, side, numbers) for side in (name, "keys")],
            "side": lambda: setattr(own, "side", "left" if self.side == "right" else "right"),
            "within": lambda: setattr(own, "within", None if self.within else regard.Causal()),
        }
        way = self.case.random.choice(list(ways))
        self.case.note(f"changed by {way} to {numbers.tolist()}")
        try:
            ways[way]()
        except REFUSALS:
            self.case.note("refused")


def _in_inference_mode(change: Callable[[], object]) -> None:
    with torch.inference_mode():
        change()


def masks(case: Case) -> None:
    """Change lengths after a call, between forward and backward, and between two calls."""
    if case.chance(0.2):
        case.note("all in inference_mode")
        with torch.inference_mode():
            _masks(case, differentiated=False)
    else:
        _masks(case, differentiated=case.chance(0.7))


def _masks(case: Case, differentiated: bool) -> None:
    name = case.random.choice(IMPLEMENTATIONS)
    batch, tokens = 2, case.random.choice((4, 9, 30))
    inputs = [case.randn(batch, 2, tokens, 8).requires_grad_(differentiated) for _ in range(3)]
    grad = case.randn(batch, 2, tokens, 8)
    lengths = Lengths(case, batch, tokens)
    case.note(f"{batch} × 2 × {tokens} × 8, implementation {name}, backward {differentiated}")
    for _ in range(3):
        try:
            seen = lengths.seen()
        except regard.RegardError:
            return  # the lengths no longer add up
        try:
            output, weights = regard.attend(*inputs, mask=lengths.mask, implementation=name)
        except regard.RegardError:
            return
        wanted = attention(*inputs, seen)
        expect("the output is not that of the mask at the time of the call", output, wanted)
        lengths.change()
        if differentiated:
            try:
                found = gradients(output, inputs, grad)
            except REFUSALS:
                found = []
            for one, other in zip(found, gradients(wanted, inputs, grad), strict=False):
                expect("a gradient is not that of the mask at the time of the call", one, other)
        if case.chance(0.6):
            continue
        try:
            dense = weights.dense()
        except REFUSALS:
            continue
        identity = torch.eye(tokens, dtype=torch.float64).expand(batch, 2, tokens, tokens)
        expect(
            "weights are not those of the mask at the time of the call",
            dense,
            attention(*inputs[:2], identity, seen),
        )


# Tensors


def tensors(case: Case) -> None:
    """Change query, key, value, bias or a dense mask between forward and backward."""
    name = case.random.choice(IMPLEMENTATIONS)
    tokens = case.random.choice((4, 30))
    leaves = [case.randn(2, tokens, 8).requires_grad_() for _ in range(3)]
    inputs = [x * 1 for x in leaves]  # not leaves, because torch forbids in-place changes of leaves
    options: dict[str, Any] = {}
    seen, bias = torch.ones(tokens, tokens, dtype=torch.bool), None
    if case.chance(0.5):
        options["mask"] = case.randn(tokens, tokens) > 0
        seen = options["mask"].clone()
    if case.chance(0.5):
        options["bias"] = case.randn(tokens, tokens)
        bias = options["bias"].clone()
    changing = case.random.choice(("query", "key", "value", "output", *options))
    case.note(
        f"2 × {tokens} × 8, options {list(options)}, implementation {name}, {changing} changed in place"
    )
    wanted = attention(*inputs, seen, 0.0 if bias is None else bias)
    grad = case.randn(2, tokens, 8)
    exact = gradients(wanted, leaves, grad)
    inputs = [x * 1 for x in leaves]
    output = regard.attention(*inputs, **options, implementation=name)
    expect("the output is wrong", output, wanted)
    places = dict(zip(("query", "key", "value"), inputs, strict=True)) | options | {"output": output}
    with torch.no_grad():
        changed = places[changing]
        changed.logical_not_() if changed.dtype is torch.bool else changed.mul_(3).add_(1)
    try:
        found = gradients(output, leaves, grad)
    except REFUSALS:
        return
    for one, other in zip(found, exact, strict=True):
        expect(f"a gradient is wrong after a change of {changing}", one, other)


def again(case: Case) -> None:
    """Put new numbers into the same tensors, or new tensors into the same memory; no old values are used."""
    name = case.random.choice(IMPLEMENTATIONS)
    tokens = case.random.choice((4, 30))
    inputs = [case.randn(2, tokens, 8) for _ in range(3)]
    mask = case.randn(tokens, tokens) > 0
    case.note(f"2 × {tokens} × 8, implementation {name}, called again after changes through .data")
    for _ in range(3):
        found = regard.attention(*inputs, mask=mask, implementation=name)
        expect("a second call gives another result", found, attention(*inputs, mask))
        chosen = case.random.choice([*inputs, mask])
        if chosen is mask:
            mask.data.logical_not_()
        else:
            chosen.data.add_(1).mul_(case.random.choice((-1, 2)))
