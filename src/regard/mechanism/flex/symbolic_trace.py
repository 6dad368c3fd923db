"""Trace a `score_mod` or `mask_mod` to find the formula that it computes.

The function runs on zero-dimensional example tensors, under a mode that intercepts its torch calls. The
formula is derived from these calls, not from the source text or from sampled values, so it holds for all
scores and indices. Functions with unsupported calls have no known formula and are evaluated tile by tile.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard._util.text import type_name
from regard.errors import ArgumentError, DTypeError, StaleError
from regard.mechanism.flex.expressions import Constant, Index, ScoreForm, as_double, index, lookup, operate
from regard.mechanism.flex.functions import Substitution

Value = Constant | Index | ScoreForm
Function = Callable[..., Tensor]


class Trace(NamedTuple):
    """The formula of a function, and the tensors that it captures.

    result: the formula of the returned value; None if unknown.
    reason: why the formula is unknown.
    captured: tensors that the function uses but does not create.
    calls: the function's torch calls; empty if they differ between runs.
    """

    result: Value | None
    reason: str
    captured: tuple[Tensor, ...]
    calls: tuple[Any, ...] = ()

    def check_unchanged(self, name: str, later: "Trace") -> None:
        """Raise if a later trace of the same function has different calls, numbers or captured tensors."""
        same = self.calls == later.calls and [*map(id, self.captured)] == [*map(id, later.captured)]
        if not same and self.calls:
            raise StaleError(
                f"{name} changed between the forward and the backward pass: a number or a tensor that it "
                "uses was replaced. Bind this value when the function is defined, e.g. with "
                f"functools.partial({name}, table=table)."
            )


def trace_functions(
    score_mod: Function | None,
    mask_mod: Function | None,
    dtype: torch.dtype,
    sizes: Sequence[int],
    device: Any,
) -> tuple[Trace, Trace]:
    """Trace score_mod(score, b, h, q, k) and mask_mod(b, h, q, k).

    sizes: the number of batches, heads, queries and keys.
    """
    unchanged = Trace(ScoreForm(), "", ())
    return (
        unchanged if score_mod is None else _trace("score_mod", score_mod, dtype, sizes, device),
        unchanged if mask_mod is None else _trace("mask_mod", mask_mod, None, sizes, device),
    )


def _trace(
    name: str, function: Function, dtype: torch.dtype | None, sizes: Sequence[int], device: Any
) -> Trace:
    if 0 in sizes:
        return Trace(None, "a size is 0", ())
    recorders: list[_Recorder] = []
    for indices in ([0] * len(sizes), [size - 1 for size in sizes]):
        recorder = _Recorder()
        inputs = [torch.tensor(i, device=device) for i in indices]
        values: list[Value] = [index(letter) for letter in "bhqk"]
        if dtype is not None:
            inputs.insert(0, torch.tensor(0.5 + len(recorders), dtype=dtype, device=device))
            values.insert(0, ScoreForm())
        for tensor, value in zip(inputs, values, strict=True):
            recorder.register(tensor, value)
        recorder.run(function, inputs)
        if not recorder.raised and not isinstance(recorder.output, Tensor):
            raise DTypeError(f"{name} returned {type_name(recorder.output)}; it must return a tensor.")
        if dtype is None and getattr(recorder.output, "dtype", None) is not torch.bool:
            recorder.unknown = recorder.unknown or "its result is not boolean"
        if isinstance(recorder.output, Tensor) and recorder.output.dim():
            recorder.unknown = recorder.unknown or "its result is not a scalar"
        recorders.append(recorder)
    first, second = recorders
    # a tensor that is a different object in each run was created by a call that the mode did not intercept
    captured = [a for a, b in zip(first.captured, second.captured, strict=False) if a is b]
    reason = first.unknown or second.unknown
    if not reason and (first.calls != second.calls or len(captured) != len(first.captured)):
        reason = f"{name} does not make the same torch calls every time"
    if isinstance(second.output, Tensor) and second.output.requires_grad:
        _check_gradients(name, function, inputs, captured)
    calls = tuple(first.calls) if first.calls == second.calls else ()
    return Trace(None if reason else first.result, reason, tuple(captured), calls)


class _Recorder(TorchFunctionMode):
    """Record the torch calls of a function and derive the value of each result."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[int, Value | None] = {}
        self.alive: list[Tensor] = []  # keeps the ids in `values` unique
        self.captured: list[Tensor] = []
        self.calls: list[Any] = []
        self.unknown = ""
        self.raised = False
        self.output: Any = None
        self.result: Value | None = None

    def register(self, tensor: Tensor, value: Value | None) -> None:
        self.values[id(tensor)] = value
        self.alive.append(tensor)

    def run(self, function: Function, inputs: list[Tensor]) -> None:
        try:
            with self:
                self.output = function(*inputs)
        except Exception as error:  # unless tracing caused the error, evaluation tile by tile raises it again
            self.raised = True
            self.unknown = self.unknown or f"it raised {type(error).__name__} when it was traced"
            return
        value = self._value(self.output)
        self.result = value if isinstance(value, Constant | Index | ScoreForm) else None
        if self.result is None:
            self.unknown = self.unknown or "its result is not a known tensor"

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        values = [self._value(arg) for arg in args]
        options = {name: self._value(option) for name, option in options.items()}
        result = func(*args, **(kwargs or {}))
        if func in _GETTERS:
            return result
        self.calls.append((func, _signature(values, self), _signature(options, self)))
        if isinstance(result, Tensor) and id(result) in self.values:
            if not _same(self.values[id(result)], values, func):
                self._give_up(func)
            return result
        value = None if self.unknown else _derive(func, values, options)
        if value is None:
            self._give_up(func)
        if isinstance(value, Index):
            value = replace(value, integer=_is_integer(result.dtype), boolean=result.dtype is torch.bool)
        for tensor in _leaves(result):
            if isinstance(tensor, Tensor):
                self.register(tensor, value)
        return result

    def _value(self, arg: Any) -> Any:
        """Replace the tensors in an argument with their values."""
        if isinstance(arg, list | tuple):
            return tuple(self._value(item) for item in arg)
        if not isinstance(arg, Tensor):
            return arg
        if id(arg) not in self.values:
            self.captured.append(arg)
            self.register(arg, Constant(arg))
        return self.values[id(arg)]

    def _give_up(self, func: Callable[..., Any]) -> None:
        self.unknown = self.unknown or f"{getattr(func, '__name__', func)} is not supported"


def _leaves(tree: Any) -> list[Any]:
    """Return the items of nested lists, tuples and dictionaries."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [leaf for item in tree for leaf in _leaves(item)] if isinstance(tree, list | tuple) else [tree]


def _same(value: Value | None, values: list[Any], func: Callable[..., Any]) -> bool:
    """Whether a call returned its first argument unchanged, as `score.float()` does."""
    return func in _CASTS and bool(values) and values[0] is value


def _signature(values: Any, recorder: _Recorder) -> str:
    """Describe arguments so that two runs of the same function give equal descriptions."""
    numbers = {id(value): n for n, value in enumerate(recorder.values.values())}
    leaves = _leaves(values)
    return str([numbers[id(x)] if isinstance(x, Constant | Index | ScoreForm) else repr(x) for x in leaves])


def _check_gradients(name: str, function: Function, inputs: list[Tensor], captured: list[Tensor]) -> None:
    """Raise if a tensor that requires grad affects the result through calls that are not traced."""
    with Substitution({id(tensor): tensor.detach() for tensor in captured}):
        output = function(*inputs)
    if output.requires_grad:
        raise ArgumentError(
            f"{name} uses a tensor that requires grad, but not through torch functions, so its gradient "
            "cannot be computed. Use torch functions instead of a custom autograd function, or detach the "
            "tensor."
        )


def _rules() -> dict[Any, Callable[..., Any]]:
    """Map functions, methods and operators of torch to the elementwise function that they compute."""
    rules: dict[Any, Callable[..., Any]] = {}
    names = (
        "add sub mul div neg abs pow exp exp2 log log2 sqrt rsqrt sin cos tanh sigmoid sign floor ceil round "
        "trunc maximum minimum clamp clamp_min clamp_max floor_divide remainder fmod reciprocal square relu "
        "where eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or "
        "bitwise_not bitwise_xor masked_fill zeros_like ones_like full_like"
    )
    for name in names.split():
        for owner in (torch, Tensor):
            if hasattr(owner, name) and hasattr(torch, name):
                rules[getattr(owner, name)] = getattr(torch, name)
    for alias, target in (("multiply", torch.mul), ("subtract", torch.sub), ("divide", torch.div)):
        rules |= {getattr(torch, alias): target, getattr(Tensor, alias): target}
    dunders: dict[str, Callable[..., Any]] = {
        "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div, "pow": torch.pow,
        "floordiv": torch.floor_divide, "mod": torch.remainder, "and": torch.bitwise_and,
        "or": torch.bitwise_or, "xor": torch.bitwise_xor, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt,
        "le": torch.le, "gt": torch.gt, "ge": torch.ge, "neg": torch.neg, "abs": torch.abs,
        "invert": torch.bitwise_not,
    }  # fmt: skip
    for name, function in dunders.items():
        rules[getattr(Tensor, f"__{name}__")] = function
        reflected = getattr(Tensor, f"__r{name}__", None)
        if reflected is not None:
            commutes = function in _COMMUTATIVE
            rules[reflected] = function if commutes else _reflect(function)
    rules[Tensor.__rdiv__] = _reflect(torch.div)
    return rules


def _reflect(function: Callable[..., Any]) -> Callable[..., Any]:
    return _REFLECTED.setdefault(function, lambda a, b: function(b, a))


_COMMUTATIVE = {torch.add, torch.mul, torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor}
_REFLECTED: dict[Any, Callable[..., Any]] = {}
_ELEMENTWISE = _rules()
_UNREFLECTED = {reflected: function for function, reflected in _REFLECTED.items()}
_CASTS = {Tensor.to, Tensor.float, Tensor.double, Tensor.type, Tensor.long, Tensor.int, Tensor.bool}
_GETTERS = {Tensor.dtype.__get__, Tensor.device.__get__}  # type: ignore[attr-defined]
_EXTREMA = {
    torch.min: torch.minimum,
    torch.max: torch.maximum,
    Tensor.min: torch.minimum,
    Tensor.max: torch.maximum,
}
_FACTORIES = {torch.tensor, Tensor.new_ones, Tensor.new_zeros, Tensor.new_full, Tensor.new_tensor}


def _derive(func: Callable[..., Any], values: list[Any], options: dict[str, Any]) -> Value | None:
    """Return the value of a call's result, or None if no rule covers the call."""
    tensors = [x for x in _leaves([values, options]) if isinstance(x, Constant | Index | ScoreForm)]
    if func is Tensor.__getitem__:
        return _derive_lookup(values)
    if func in _FACTORIES:
        return _derive_factory(func, values, options)
    if func in _CASTS:
        return _derive_cast(func, values, options)
    function = _ELEMENTWISE.get(func)
    if func in _EXTREMA and len(values) == len(tensors) == 2:
        function = _EXTREMA[func]
    if function is None or None in values:
        return None
    if function in _UNREFLECTED:
        function, values = _UNREFLECTED[function], values[::-1]
    if any(isinstance(x, ScoreForm) for x in tensors):
        return None if options else _derive_score(function, values)
    if any(isinstance(x, Constant | Index) for x in options.values()):
        return None
    if any(isinstance(x, Index) for x in tensors) and any(
        isinstance(x, Constant) and x.tensor.dim() for x in tensors
    ):
        return None  # the call broadcasts over the axes of a captured tensor
    return operate(function, *values, **options)


def _derive_lookup(values: list[Any]) -> Value | None:
    table, at = values
    at = at if isinstance(at, tuple) else (at,)
    if not isinstance(table, Constant) or len(at) != table.tensor.dim() or not at:
        return None
    for item in at:
        if isinstance(item, Constant) and (item.tensor.dim() or not _is_integer(item.tensor.dtype)):
            return None
        if not isinstance(item, Constant | Index) and type(item) is not int:
            return None
    return operate(lookup, table, *at)


def _is_integer(dtype: torch.dtype) -> bool:
    return dtype in (torch.int64, torch.int32, torch.int16, torch.int8)


def _derive_factory(func: Any, values: list[Any], options: dict[str, Any]) -> Value | None:
    data = values if func is torch.tensor else values[1:]
    leaves = _leaves([data, options])
    if any(isinstance(x, Constant | Index | ScoreForm) for x in leaves):
        return None
    if func is torch.tensor:
        return Constant(torch.tensor(*data, **options))
    # dtype and device are the same for all indices, so one example tensor suffices
    source = values[0]
    if not isinstance(source, Constant) and "dtype" not in options:
        return None
    example = source.tensor if isinstance(source, Constant) else torch.empty((), dtype=options["dtype"])
    return Constant(func(example, *data, **options))


def _derive_cast(func: Any, values: list[Any], options: dict[str, Any]) -> Value | None:
    value = values[0]
    if isinstance(value, Constant):
        others = _leaves([values[1:], options])
        if any(isinstance(x, Constant | Index | ScoreForm) for x in others):
            return None
        return Constant(func(value.tensor, *values[1:], **options))
    if isinstance(value, Index) and not any(isinstance(x, Constant | Index | ScoreForm) for x in values[1:]):
        return operate(func, *values, **options)
    return None  # casting a score to another dtype would round it


def _derive_score(function: Callable[..., Any], values: list[Any]) -> Value | None:
    """Return the result of an operation on a score as a `ScoreForm`, or None if it has no such form."""
    if function in (torch.where, torch.masked_fill):
        return _derive_where(function, values)
    if function is torch.tanh:
        return values[0].tanh()
    if function is torch.neg:
        return values[0].scaled(-1.0)
    if len(values) != 2 or all(isinstance(x, ScoreForm) for x in values):
        return None
    if any(isinstance(x, Constant) and x.tensor.dim() for x in values):
        return None
    score, other = values if isinstance(values[0], ScoreForm) else values[::-1]
    if isinstance(other, bool) or not isinstance(other, Constant | Index | int | float):
        return None
    if function is torch.add:
        return score.plus(other)
    if function is torch.mul:
        return score.scaled(other)
    if function is torch.sub:
        if score is values[0]:
            return score.plus(_negate(other))
        negated = score.scaled(-1.0)
        return None if negated is None else negated.plus(other)
    if function is torch.div and score is values[0]:
        if isinstance(other, int | float):
            return None if other == 0 else score.scaled(1 / other)
        return score.scaled(operate(torch.reciprocal, as_double(other)))
    return None


def _negate(x: Any) -> Any:
    return -x if isinstance(x, int | float) else operate(torch.neg, as_double(x))


def _derive_where(function: Callable[..., Any], values: list[Any]) -> Value | None:
    if len(values) != 3:
        return None
    if function is torch.masked_fill:
        otherwise, condition, chosen = values
    else:
        condition, chosen, otherwise = values
    if not isinstance(condition, Constant | Index) or (
        isinstance(condition, Constant) and condition.tensor.dim()
    ):
        return None
    if _is_minus_inf(otherwise) and isinstance(chosen, ScoreForm):
        return chosen.masked(condition)
    if _is_minus_inf(chosen) and isinstance(otherwise, ScoreForm):
        return otherwise.masked(operate(torch.logical_not, condition))
    if isinstance(chosen, ScoreForm) and isinstance(otherwise, ScoreForm) and chosen.same_scores(otherwise):
        sums = [_sum(form.terms) for form in (chosen, otherwise)]
        return ScoreForm(chosen.gain, chosen.factors, chosen.inner_gain).plus(
            operate(torch.where, condition, *sums)
        )
    return None


def _sum(terms: Sequence[Any]) -> Any:
    total: Any = Constant(torch.zeros((), dtype=torch.float64))  # Python numbers keep their precision
    for term in terms:
        total = operate(torch.add, total, term)
    return total


def _is_minus_inf(x: Any) -> bool:
    if isinstance(x, Constant):
        return x.tensor.dim() == 0 and not x.tensor.requires_grad and x.tensor.item() == -math.inf
    return isinstance(x, int | float) and x == -math.inf
