"""regard's and torch's `scaled_dot_product_attention` both reject a call, or they agree."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import regard
from tests.fuzz.case import Case, Failure
from tests.fuzz.draw import lay_out

_torch = functional.scaled_dot_product_attention


def run(case: Case) -> None:
    """Compare the two for random valid and invalid arguments."""
    random = case.random
    lead = random.choice(((), (3,), (2, 3), (2, 4), (1, 2, 2)))
    q, k, d, e = (random.choice((1, 2, 5, 17, 33)) for _ in range(4))
    dtype = random.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16))
    shapes = [(*lead, q, d), (*lead, k, d), (*lead, k, e)]
    options: dict[str, Any] = {}
    if case.chance(0.4):
        options["attn_mask"] = _mask(case, lead, q, k, dtype)
    options |= {"is_causal": True} if case.chance(0.3) else {}
    options |= {"scale": random.choice((0.5, 2, 1.0, -1.0))} if case.chance(0.3) else {}
    if case.chance(0.2) and len(lead) > 1:
        options["enable_gqa"] = True
        shapes[0] = (*lead[:-1], lead[-1] * 2, q, d)
    _spoil(case, shapes, options)
    inputs = [lay_out(random, case.randn(*shape, dtype=dtype)) for shape in shapes]
    if case.chance(0.05):
        i = random.randrange(3)
        inputs[i] = inputs[i].to(random.choice((torch.float64, torch.bfloat16, torch.int64)))
    differentiated = case.chance(0.5) and all(x.is_floating_point() for x in inputs)
    mask = options.get("attn_mask")
    about = {name: tuple(x.shape) if isinstance(x, Tensor) else x for name, x in options.items()}
    told = [f"{tuple(x.shape)} {str(x.dtype)[6:]}" for x in inputs]
    case.note(f"{told}, {about}, mask {getattr(mask, 'dtype', None)}, backward {differentiated}")
    ours = _outcome(regard.scaled_dot_product_attention, inputs, options, differentiated)
    if _reads_beyond(inputs, options):  # torch's kernel does not check this and reads out of bounds
        if not isinstance(ours, Exception):
            raise Failure("accepts keys without values or heads that are not there")
        return
    theirs = _outcome(_torch, inputs, options, differentiated)
    if isinstance(ours, Exception) != isinstance(theirs, Exception):
        refusal = ours if isinstance(ours, Exception) else theirs
        who = "regard refuses what torch accepts" if refusal is ours else "torch refuses what regard accepts"
        raise Failure(who, f"{type(refusal).__name__}: {str(refusal)[:200]}")
    if isinstance(ours, Exception) or isinstance(theirs, Exception):
        return
    error = 2e-2 if dtype.itemsize == 2 else 1e-4
    for found, wanted in zip(ours, theirs, strict=True):
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            raise Failure(
                "another shape or dtype", f"{found.shape} {found.dtype}, {wanted.shape} {wanted.dtype}"
            )
        scale = float(wanted.nan_to_num().abs().max()) if wanted.numel() else 0.0
        # rows without visible keys are zero in regard; torch's kernels return zeros or NaN
        both = ~wanted.isnan()
        if not torch.allclose(found[both], wanted[both], rtol=error, atol=error * max(scale, 1.0)):
            off = (found - wanted)[both].abs().max()
            raise Failure("regard and torch differ", f"by {float(off):.3g}, in {dtype}")


def _outcome(function: Any, inputs: list[Tensor], options: dict[str, Any], differentiated: bool) -> Any:
    """Return output and gradients, or the exception."""
    inputs = [x.detach().requires_grad_(differentiated) for x in inputs]
    try:
        output = function(*inputs, **options)
        if not differentiated:
            return [output]
        return [output.detach(), *torch.autograd.grad(output.float().square().sum(), inputs)]
    except RecursionError:
        raise
    except Exception as error:
        return error


def _mask(case: Case, lead: tuple[int, ...], q: int, k: int, dtype: torch.dtype) -> Tensor:
    shape = [case.random.choice((size, size, 1)) for size in (*lead, q, k)]
    numbers = case.randn(*shape)
    if case.chance(0.5):
        return (numbers > -0.5) | (torch.arange(shape[-1]) == 0)  # every row has a visible key
    return numbers.to(dtype)


def _spoil(case: Case, shapes: list[tuple[int, ...]], options: dict[str, Any]) -> None:
    """Sometimes make one argument invalid."""
    if not case.chance(0.25):
        return
    random = case.random
    i = random.randrange(3)
    shape = list(shapes[i])
    match random.choice(("size", "zero", "axis", "option")):
        case "size":
            shape[random.randrange(len(shape))] += 1
        case "zero":
            shape[random.randrange(len(shape))] = 0
        case "axis":
            shape = shape[1:]
        case "option":
            name, value = random.choice(
                (
                    ("scale", "x"),
                    ("is_causal", 1),
                    ("is_causal", None),
                    ("attn_mask", torch.ones(2, dtype=torch.int64)),
                    ("attn_mask", "causal"),
                    ("enable_gqa", "yes"),
                    ("dropout_p", -1.0),
                    ("dropout_p", "half"),
                    ("scale", float("nan")),
                )
            )
            options[name] = value
    shapes[i] = tuple(shape)


def _reads_beyond(inputs: list[Tensor], options: dict[str, Any]) -> bool:
    _, key, value = inputs
    if not all(x.dim() >= 3 for x in inputs):
        return False
    shared = options.get("enable_gqa") is True and 0 in (key.shape[-3], value.shape[-3])
    return shared or (all(x.dim() == 4 for x in inputs) and key.shape[-2] != value.shape[-2])
