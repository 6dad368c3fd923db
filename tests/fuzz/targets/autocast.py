"""Forward, backward and reads, each inside or outside an autocast block.

Autocast rounds query, key and value to half precision; nothing else is rounded, inside or outside the block.
"""

import contextlib
from typing import Any

import torch

import regard
from tests.cases import MIXED_WIDTHS
from tests.fuzz import compare
from tests.fuzz.case import Case, Failure
from tests.fuzz.draw import Call
from tests.fuzz.targets.operator import IMPLEMENTATIONS

STEPS = ("forward", "backward", "dense", "scores", "row", "product", "received")


def run(case: Case) -> None:
    call = Call(case, dtypes=[torch.bfloat16, torch.float16], magnitudes=(1, 10), zero=0.0)
    half = call.dtype
    name = case.random.choice(IMPLEMENTATIONS)
    inside = {step: case.chance(0.5) for step in STEPS}
    if call.score in MIXED_WIDTHS:
        inside["backward"] = False  # torch multiplies by the parameters, and autocast rounds the products
    differentiated = case.chance(0.6)
    case.note(
        f"float32 tensors, implementation {name}, autocast in {[s for s in STEPS if inside[s]] or None}"
    )

    def block(step: str) -> Any:
        return torch.autocast("cpu", half) if inside[step] else contextlib.nullcontext()

    # the numbers are exact in half precision, so rounding does not change them
    grad = case.randn(*call.shape.lead, call.shape.queries, call.shape.value[-1], dtype=half)
    exact = compare.expected(call, grad.double() if differentiated else None)
    leaves = [x.requires_grad_(differentiated) for x in call.inputs(torch.float32)]
    with block("forward"):
        output, weights = regard.attend(*leaves, **call.options(), mask=call.mask, implementation=name)
    if output.dtype is not (half if inside["forward"] else torch.float32):
        raise Failure("the output is of another dtype", f"{output.dtype}")
    compare.check("the output", output, exact.output, exact.output_error, "forward")
    if differentiated:
        with block("backward"):
            found = compare.differentiate(output, leaves, grad)
        for gradient, wanted, error in zip(
            found, exact.gradients, exact.gradient_errors or [None] * 3, strict=False
        ):
            compare.check("a gradient", gradient, wanted, error, "backward")
    with block("dense"):
        compare.check("dense()", weights.dense(), exact.weights, exact.weights_error, "reads")
    with block("scores"):
        scores, seen = weights.scores().detach().double(), exact.scores != -torch.inf
        compare.check("scores()", scores[seen], exact.scores[seen], exact.scores_error, "reads")
    with block("row"):
        compare.check("a row", weights[..., -1, :], exact.weights[..., -1, :], exact.weights_error, "reads")
    error = exact.weights_error
    x = case.randn(weights.shape[-1], 2)
    with block("product"):
        wanted = exact.weights @ x.double()
        compare.check("W @ x", weights @ x, wanted, None if error is None else 4 * len(x) * error, "reads")
    with block("received"):
        times = 2 * weights.shape[-2]
        wanted = exact.weights.sum(-2)
        compare.check(
            "received()", weights.received(), wanted, None if error is None else times * error, "reads"
        )
