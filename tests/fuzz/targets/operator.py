"""Compare every implementation's output and gradients with the oracle; compare extreme inputs pairwise."""

import math
from typing import Any

import torch
from torch import Tensor

import regard
from regard.mechanism import fused
from tests.cases import leaves
from tests.fuzz import compare
from tests.fuzz.case import Case, Failure
from tests.fuzz.draw import Call, lay_out

IMPLEMENTATIONS: list[str | None] = ["reference", "tiled", None, *(["fused"] if fused.available() else [])]


def run(case: Case) -> None:
    torch.set_num_threads(case.random.choice((1, 1, 1, 2)))
    if case.chance(0.2):
        extreme(case)
    else:
        ordinary(case)


def ordinary(case: Case) -> None:
    """Compare random numbers of moderate size with the oracle."""
    call = Call(case)
    differentiated = case.chance(0.6)
    grad = case.randn(*call.shape.lead, call.shape.queries, call.shape.value[-1], dtype=call.dtype)
    if case.chance(0.2):
        grad = grad.flatten()[:1].sum().expand(grad.shape)  # one expanded number, as after sum()
    exact = compare.expected(call, grad.double() if differentiated else None)
    for name in IMPLEMENTATIONS:
        result, gradients = _attend(case, call, name, grad if differentiated else None)
        kind = f"{name or 'default'}, {call.dtype}"
        if result.dtype != call.dtype:
            raise Failure(f"{kind}: the output is of another dtype", f"{result.dtype}")
        compare.check("output", result, exact.output, exact.output_error, kind)
        if exact.gradient_errors is None:
            continue
        names = ("query", "key", "value", *["a parameter"] * len(gradients))
        for what, found, wanted, error in zip(
            names, gradients, exact.gradients, exact.gradient_errors, strict=False
        ):
            compare.check(f"the gradient of {what}", found, wanted, error, kind)


def _attend(case: Case, call: Call, name: str | None, grad: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    inputs, options = call.inputs(), call.options()
    if grad is None:
        laid = [lay_out(case.random, x) for x in inputs]
        with torch.set_grad_enabled(case.chance(0.5)):
            return regard.attention(*laid, **options, mask=call.mask, implementation=name).detach(), []
    inputs = [x.requires_grad_() for x in inputs]
    laid = [lay_out(case.random, x) for x in inputs]
    output = regard.attention(*laid, **options, mask=call.mask, implementation=name)
    above = lay_out(case.random, grad)
    return output.detach(), compare.differentiate(output, [*inputs, *leaves(options)], above)


# Extreme numbers


def extreme(case: Case) -> None:
    """Check overflow, NaN and infinities: every number has the same class in all implementations."""
    call = Call(
        case,
        dtypes=[torch.float32],
        scores=["scaled dot", "dot", "scale"],
        normalizers=["softmax", "softmax1", "sparsemax", "entmax15", "entmax 1.3", "hard", "mean", "relu"],
        magnitudes=[1],
        zero=0.0,
        biases=False,
    )
    inputs, options = call.inputs(), call.options()
    disturbed = _disturb(case, call, inputs, options)
    case.note(disturbed)
    results = {}
    for name in IMPLEMENTATIONS:
        with torch.no_grad():
            output = regard.attention(*inputs, **options, mask=call.mask, implementation=name)
            results[name or "default"] = output
    for name, output in results.items():
        compare_classes(name, output, results["reference"])


def _disturb(case: Case, call: Call, inputs: list[Tensor], options: dict[str, Any]) -> str:
    """Put extreme values into the inputs; return a description."""
    query, key, value = inputs
    random = case.random

    def somewhere(x: Tensor) -> tuple[int, ...]:
        return tuple(random.randrange(size) for size in x.shape)

    match random.choice(("scores", "nan", "value", "bias", "sink")):
        case "scores":  # one huge coordinate: products are far below or far above the largest float
            at = random.randrange(query.shape[-1])
            query[..., at] = random.choice((1e38, -1e38, 3e38))
            factors = torch.tensor(
                random.choice(([1e-3, -1e-3], [1e6, -1e6], [1e38, -1e38], [1e-3, 1e9, -1e9]))
            )
            chosen = torch.randint(len(factors), key.shape[:-1], generator=_generator(case))
            key[..., at] = factors[chosen]
            return (
                f"query[..., {at}] = {float(query.flatten()[at]):g}, key[..., {at}] from {factors.tolist()}"
            )
        case "nan":
            number = random.choice((math.nan, math.inf, -math.inf))
            x, name = random.choice(((query, "query"), (key, "key")))
            place = somewhere(x)
            x[place] = number
            return f"{name}{list(place)} = {number}"
        case "value":
            number = random.choice((math.nan, math.inf, -math.inf, 3e38))
            place = somewhere(value)
            value[place] = number
            return f"value{list(place)} = {number}"
    number = random.choice((math.inf, -math.inf, math.nan, 1e38, -1e38))
    bias = case.randn(*call.shape.lead[-1:], call.shape.queries, call.shape.keys)
    place = somewhere(bias)
    bias[place] = number
    if case.chance(0.3):
        bias[..., place[-2], :] = number  # a whole row
    options["bias"] = bias
    return f"bias{list(place)} = {number}"


def _generator(case: Case) -> torch.Generator:
    return torch.Generator().manual_seed(case.random.getrandbits(40))


def compare_classes(name: str, output: Tensor, reference: Tensor) -> None:
    """Check that NaN, +inf and −inf are at the same positions, and finite numbers are nearly equal."""
    for what, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        found, wanted = test(output), test(reference)
        if not torch.equal(found, wanted):
            at = tuple(int(i) for i in (found != wanted).nonzero()[0])
            raise Failure(
                f"{name} and reference differ in what is {what}",
                f"{float(output[at]):g} and {float(reference[at]):g} at {at}",
            )
    if not reference.numel():
        return
    finite = reference.isfinite() & (reference.abs() < 1e30)
    largest = reference.abs().where(reference.isfinite(), 0.0).amax(-1, keepdim=True)
    allowed = 1e-3 + 1e-3 * reference.abs() + 1e-6 * largest  # rounding error of large terms that cancel
    off = (output - reference).abs()[finite]
    if (off > allowed[finite]).any():
        raise Failure(f"{name} and reference differ where both are finite", f"by {float(off.max()):.3g}")
