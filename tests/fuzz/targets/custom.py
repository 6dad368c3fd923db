"""Custom scores, masks, normalizers and biases that return nonsense.

Either every implementation rejects the value with a RegardError, or all return the same result, which is also
correct if the returned value has a meaning.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import regard
from regard.mechanism.masks.algebra import MaskTerm
from regard.mechanism.scores import Prepared
from tests.fuzz.case import Case, Failure, signature
from tests.fuzz.targets.operator import IMPLEMENTATIONS

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
)
OBJECTS: tuple[Any, ...] = (None, 3, 2.5, math.nan, "causal", [1, 2], (), {}, object(), torch.ones(()))
# torch's own operations run in normalizers and raise their own errors for sizes that do not match
REFUSALS = {"normalizer": (regard.RegardError, RuntimeError)}
MEANINGFUL = "meaningful"  # the returned value has a meaning although its type is unusual


def run(case: Case) -> None:
    kind = case.random.choice(list(KINDS))
    query, key, value = _inputs(case)
    options = KINDS[kind](case, query, key)
    meaning = options.pop(MEANINGFUL, None)
    outcomes = {name: _outcome(query, key, value, name, options) for name in IMPLEMENTATIONS}
    _compare(kind, outcomes)
    result = outcomes[None]
    if meaning is not None and isinstance(result, Tensor):
        wanted = _outcome(query, key, value, "reference", meaning)
        assert isinstance(wanted, Tensor)
        if not torch.allclose(result, wanted, rtol=1e-3, atol=1e-3):
            off = (result - wanted).abs().max()
            raise Failure(f"{kind}: accepted, and the result is wrong", f"off by {float(off):.3g}")


def _inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return small tensors; sometimes many rows, so reading beyond the end of a short tensor is detected."""
    random = case.random
    many = case.chance(0.1)
    q, k, d = (
        (200_000, 3, 1) if many else (random.choice((1, 5, 30, 70, 400)), random.choice((1, 5, 33, 70)), 16)
    )
    lead = () if many else random.choice(((), (2,), (2, 3)))
    case.note(f"query {(*lead, q, d)}, {k} keys")
    inputs = [case.randn(*lead, rows, d) for rows in (q, k, k)]
    for x in inputs:
        x.requires_grad_(case.chance(0.3))
    return inputs[0], inputs[1], inputs[2]


def _outcome(
    query: Tensor, key: Tensor, value: Tensor, name: str | None, options: dict[str, Any]
) -> Tensor | Exception:
    """Return the output and the weights as one tensor, or the error."""
    try:
        output, weights = regard.attend(query, key, value, **options, implementation=name)
        if output.requires_grad:
            output.sum().backward()
        row = weights[..., 0, :].detach()
        return torch.cat([output.detach().flatten(), row.flatten()])
    except Exception as error:
        return error


def _compare(kind: str, outcomes: dict[str | None, Tensor | Exception]) -> None:
    for name, outcome in outcomes.items():
        if isinstance(outcome, Exception) and not isinstance(outcome, REFUSALS.get(kind, regard.RegardError)):
            detail = f"{name or 'default'}: {signature(outcome)}: {str(outcome)[:200]}"
            raise Failure(f"{kind}: {type(outcome).__name__} instead of a RegardError", detail)
        if isinstance(outcome, Tensor) and outcome.is_meta:
            raise Failure(f"{kind}: accepts tensors without values", f"{name or 'default'}")
    results = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Tensor)}
    refusals = [name for name in outcomes if name not in results]
    if results and refusals:
        told = f"{refusals[0] or 'default'} refuses what {next(iter(results)) or 'default'} accepts"
        raise Failure(f"{kind}: one implementation refuses what another accepts", told)
    for name, result in results.items():
        for other, reference in results.items():
            if not torch.allclose(result, reference, rtol=1e-3, atol=1e-3, equal_nan=True):
                off = (result - reference).abs().nan_to_num(math.inf).max()
                raise Failure(
                    f"{kind}: two implementations differ", f"{name} and {other} by {float(off):.3g}"
                )


# Wrong return values


def disturb(case: Case, x: Tensor) -> Any:
    """Return a value that is not the expected tensor."""
    random = case.random
    match random.choice(("dtype", "dtype", "shape", "shape", "object", "device", "values")):
        case "dtype":
            dtype = random.choice(DTYPES)
            case.note(f"as {dtype}")
            return x.to(dtype)
        case "shape":
            name, change = random.choice(SHAPES)
            case.note(name)
            return change(x)
        case "object":
            thing = random.choice(OBJECTS)
            case.note(f"{thing!r:.40}")
            return thing
        case "device":
            case.note("on meta")
            return x.to("meta")
    numbers: tuple[float, ...] = (
        (math.nan, math.inf, -math.inf, 0.0) if x.is_floating_point() else (2**62, -(2**62))
    )
    number = random.choice(numbers)
    case.note(f"filled with {number}")
    return torch.full_like(x, number)


SHAPES: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("one row less", lambda x: x[..., :-1, :] if x.dim() > 1 else x[:-1]),
    ("only two rows", lambda x: x[..., :2, :] if x.dim() > 1 else x[:2]),
    ("one row more", lambda x: torch.cat([x, x[..., :1, :]], -2) if x.dim() > 1 else torch.cat([x, x[:1]])),
    ("one column less", lambda x: x[..., :-1]),
    ("one column more", lambda x: torch.cat([x, x[..., :1]], -1)),
    ("without the last axis", lambda x: x[..., 0] if x.shape[-1] else x.flatten()),
    ("one axis more", lambda x: x[None].expand(2, *x.shape)),
    ("flat", lambda x: x.flatten()),
    ("empty", lambda x: x.flatten()[:0]),
    ("transposed", lambda x: x.mT if x.dim() > 1 else x[None]),
    ("strided", lambda x: torch.stack([x, x], -1)[..., 0]),
    ("expanded", lambda x: x[..., :1].expand(x.shape)),
]


# Custom classes


def score(case: Case, query: Tensor, key: Tensor) -> dict[str, Any]:
    """Return a score whose `prepare` returns a wrong value."""
    random = case.random
    field = random.choice(
        ("query", "key", "query", "key", "vector", "scale", "softcap", "family", "biases", "all")
    )
    case.note(f"Score.prepare with another {field}")
    choice = random.getrandbits(40)

    class Own(regard.Score):
        def prepare(self, query: Tensor, key: Tensor) -> Any:
            case.random.seed(choice)  # the same wrong value in every call
            right = regard.ScaledDot().prepare(query, key)
            if field == "all":
                return case.random.choice(
                    (None, (query, key), query, Prepared(None, None), Prepared(query, 3))
                )
            if field in ("query", "key"):
                return right._replace(**{field: disturb(case, getattr(right, field))})
            if field == "vector":
                family = case.random.choice(("tanh", "relu", "dot"))
                vector = disturb(case, torch.ones(query.shape[-1]))
                return right._replace(family=family, vector=vector)
            if field == "biases":
                bias = disturb(case, torch.ones(*query.shape[:-1], 1))
                return right._replace(biases=case.random.choice(((bias,), [bias], bias)))
            thing: Any = case.random.choice((*OBJECTS, -1.0, 0.0, math.inf, "tanh", "xyz", torch.ones(3)))
            case.note(repr(thing)[:40])
            return right._replace(**{field: thing})

    return {"score": Own()}


def rule(case: Case, query: Tensor, key: Tensor) -> dict[str, Any]:
    """Return a rule whose `ranges` returns a wrong value."""
    choice, side = case.random.getrandbits(40), case.random.choice(("start", "stop", "both", "all"))
    case.note(f"Rule.ranges with another {side}")
    meaningful = case.chance(0.4)  # only the dtype is unusual
    dtype = case.random.choice(DTYPES[6:])
    rows = query.shape[-2]
    if meaningful:
        meaningful = rows <= 100  # all of the dtypes can count to 100
        case.note(f"causal, as {dtype}")

    class Own(regard.Rule):
        def ranges(self, position: Tensor, keys: int | Tensor) -> Any:
            case.random.seed(choice)
            start, stop = torch.zeros_like(position), position + 1
            if meaningful:
                return None, stop.clamp(min=0).to(dtype)
            if side == "all":
                return case.random.choice(
                    (None, 3, (1, 2), stop, (start, stop, stop), (stop,), [start, stop])
                )
            return (
                disturb(case, start) if side in ("start", "both") else start,
                disturb(case, stop) if side in ("stop", "both") else stop,
            )

    mask: Any = Own()
    if not meaningful and case.chance(0.2):
        mask = regard.Documents([rows - rows // 2, rows // 2], _halves(key.shape[-2]), within=mask)
    return {"mask": mask, **({MEANINGFUL: {"mask": regard.Causal()}} if meaningful else {})}


def _halves(size: int) -> list[int]:
    return [size - size // 2, size // 2]


def mask(case: Case, query: Tensor, key: Tensor) -> dict[str, Any]:
    """Return a mask whose `terms` returns a wrong value."""
    choice, field = case.random.getrandbits(40), case.random.choice(("allowed", "start", "stop", "all"))
    case.note(f"Mask.terms with another {field}")
    whole = (query.shape[-2], key.shape[-2])

    class Own(regard.Mask):
        def terms(self, call_shape: Any) -> Any:
            case.random.seed(choice)
            rows = torch.arange(whole[0])[:, None]
            right = MaskTerm(rows * 0, rows + 1, torch.ones(whole, dtype=torch.bool))
            if field == "all":
                return case.random.choice((None, right, [right], (), (right, None), ((None, None, None),), 3))
            return (right._replace(**{field: disturb(case, getattr(right, field))}),)

    own: Any = Own()
    return {"mask": case.random.choice((own, own, own & regard.Causal(), regard.Causal() | own))}


def bias(case: Case, query: Tensor, key: Tensor) -> dict[str, Any]:
    """Return a bias of a wrong type, alone or from a relative bias."""
    choice = case.random.getrandbits(40)
    if case.chance(0.4):
        case.note("dense bias")
        dense = case.randn(query.shape[-2] if query.shape[-2] < 1000 else 1, key.shape[-2])
        return {"bias": disturb(case, dense)}
    case.note("RelativeBias.forward")

    class Own(regard.RelativeBias):
        def forward(self, distance: Tensor) -> Any:
            case.random.seed(choice)
            return disturb(case, 0.1 * distance.abs().float())

    return {"bias": Own()}


def normalizer(case: Case, query: Tensor, key: Tensor) -> dict[str, Any]:
    """Return a normalizer with one method that returns a wrong value."""
    choice = case.random.getrandbits(40)
    broken = case.random.choice(("tau", "phi", "slope", "divisor", "sink", "sums_to_one"))
    case.note(f"Normalizer with another {broken}")

    class Own(regard.Normalizer):
        sums_to_one: Any = False if broken != "sums_to_one" else case.random.choice((True, None, "no", 2))

        def _maybe(self, name: str, x: Tensor) -> Any:
            if name != broken:
                return x
            case.random.seed(choice)
            return disturb(case, x)

        def tau(self, scores: Tensor) -> Any:
            return self._maybe("tau", torch.zeros_like(scores[..., :1]))

        def phi(self, x: Tensor) -> Any:
            return self._maybe("phi", x.clamp(min=0))

        def slope(self, x: Tensor) -> Any:
            return self._maybe("slope", (x > 0).to(x.dtype))

        def divisor(self, x: Tensor, visible: Tensor) -> Any:
            return self._maybe("divisor", torch.ones_like(x[..., :1])) if broken == "divisor" else None

        def sink(self) -> Any:
            return self._maybe("sink", torch.zeros(1)) if broken == "sink" else None

    return {"normalize": Own()}


KINDS: dict[str, Callable[[Case, Tensor, Tensor], dict[str, Any]]] = {
    "score": score,
    "rule": rule,
    "mask": mask,
    "bias": bias,
    "normalizer": normalizer,
}
