"""Select the implementation for a call and explain the choice.

The operator and `explain` use the same ordered list, `RULES`. The first rule that returns a reason selects
its implementation. The last rule checks the limits of the kernels; if no rule applies, the kernels run.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Never, Unpack

import torch
from torch import Tensor, nn

from regard._util.text import format_bytes
from regard.errors import ArgumentError
from regard.mechanism import fused
from regard.mechanism.call import keyword_hints, quantized_call
from regard.mechanism.call.arguments import (
    Call,
    Layout,
    Options,
    as_biases,
    as_normalizer,
    check_arguments,
    prepare,
)
from regard.mechanism.call.problem import Problem, ProblemConfig
from regard.mechanism.normalizers import BUILT_IN_TYPES, Normalizer
from regard.mechanism.quantized import Quantized
from regard.mechanism.scores import Score
from regard.mechanism.torch_state import fake_mode, forward_mode, subclassed

IMPLEMENTATIONS = ("reference", "tiled", "fused")
FROM_ENVIRONMENT = os.environ.get("REGARD_IMPLEMENTATION") or None
if FROM_ENVIRONMENT not in (None, *IMPLEMENTATIONS):
    raise ArgumentError(
        f"the environment variable REGARD_IMPLEMENTATION is {FROM_ENVIRONMENT!r}; "
        f"use one of {', '.join(IMPLEMENTATIONS)}."
    )

Rule = Callable[[Problem, str | None], str | None]  # problem, requested implementation → reason


def _forward_mode(problem: Problem, requested: str | None) -> str | None:
    return "forward-mode AD needs the dense formula" if forward_mode() else None


def _subclass(problem: Problem, requested: str | None) -> str | None:
    if subclassed(*problem.tensors.values()):
        return "tensor subclasses run on the dense reference"
    return None


def _requested(implementation: str) -> Rule:
    return lambda problem, requested: "requested by name" if requested == implementation else None


def _compiled_custom_normalizer(problem: Problem, requested: str | None) -> str | None:
    normalize = problem.config.normalize
    if torch.compiler.is_compiling() and type(normalize) not in BUILT_IN_TYPES:
        return f"{type(normalize).__name__} is not built in, so torch.compile uses the dense formula"
    return None


def _normalizer_with_tensors(problem: Problem, requested: str | None) -> str | None:
    normalize = problem.config.normalize
    if type(normalize) not in BUILT_IN_TYPES and _holds_tensors(normalize):
        return f"{type(normalize).__name__} has parameters, which need the dense formula"
    return None


def _kernels(problem: Problem, requested: str | None) -> str | None:
    reason = fused.unsupported(problem)
    if reason is None:
        return None
    although = "although fused was requested, " if requested == "fused" else ""
    return f"blocks of query rows, in linear memory, {although}because {reason}"


RULES: tuple[tuple[str, Rule], ...] = (
    ("reference", _forward_mode),
    ("reference", _subclass),
    ("reference", _requested("reference")),
    ("tiled", _requested("tiled")),
    ("reference", _compiled_custom_normalizer),
    ("reference", _normalizer_with_tensors),
    ("tiled", _kernels),
)


def choose(problem: Problem, requested: str | None = None) -> tuple[str, str]:
    """Choose the implementation for a call; return its name and the reason for the choice.

    requested: the `implementation` argument; default: REGARD_IMPLEMENTATION, or the best implementation.

    >>> import torch
    >>> from regard.mechanism.call.arguments import Call, Layout, prepare
    >>> from regard.mechanism.dispatch import choose
    >>> from regard import Hard
    >>> x = torch.zeros(2, 3, 4)
    >>> choose(prepare(x, x, x, Layout.of(x, x, x), Call(normalize=Hard())))[0]
    'tiled'
    """
    requested = FROM_ENVIRONMENT if requested is None else requested
    if requested is not None and requested not in IMPLEMENTATIONS:
        raise ArgumentError(f"implementation is {requested!r}; use one of {', '.join(IMPLEMENTATIONS)}.")
    if requested == "fused" and not fused.available():
        raise ArgumentError(f"implementation is 'fused', but {fused.DESCRIPTION}, or omit implementation=.")
    for implementation, rule in RULES:
        reason = rule(problem, requested)
        if reason is not None:
            return implementation, reason
    return "fused", f"{fused.DESCRIPTION}, which compute the scores tile by tile"


@dataclass(frozen=True)
class Explanation:
    """The implementation that a call uses, and the reasons for the choice.

    implementation: "fused", "tiled" or "reference".
    reasons: sentences about the choice and the memory that the call needs.

    >>> import torch, regard
    >>> x = torch.randn(2, 8, 5, 16)
    >>> regard.explain(x, x, x, implementation="tiled").implementation
    'tiled'
    """

    implementation: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([self.implementation, *(f"  {reason}" for reason in self.reasons)])

    __repr__ = __str__


def explain(
    query: Tensor,
    key: Tensor | Quantized,
    value: Tensor | Quantized,
    *positional: Never,
    **options: Unpack[Options],
) -> Explanation:
    """Explain which implementation `attention` would use for the given arguments. Nothing is computed.

    query, key, value: only shape, dtype and device matter; `torch.empty(1).expand(…)` takes no memory.
    options: keyword arguments of `attention` or, with score_mod or block_mask, of `flex_attention`.

    >>> import torch, regard
    >>> x = torch.empty(1).expand(8, 65536, 64)
    >>> regard.explain(x, x, x, normalize=regard.Hard())
    tiled
      blocks of query rows, in linear memory, because ...
      the dense weights would take 137.4 GB
    """
    if options.keys() & {"score_mod", "block_mask"}:
        from regard.mechanism.flex.attention import explain as explain_flex  # avoids a circular import

        return explain_flex(query, key, value, *positional, **options)
    unknown = {name: None for name in options if name not in Options.__annotations__}
    if positional or unknown:
        keyword_hints.raise_unexpected("explain", positional, unknown)
    implementation = options.pop("implementation", None)
    call = Call(**options)  # type: ignore[misc]
    check_arguments(query, key, value, call)
    if isinstance(key, Quantized) or isinstance(value, Quantized):
        return _explain_quantized(query, key, value, call, implementation)
    return _explain(query, key, value, call, implementation)


def _explain_quantized(
    query: Tensor, key: Tensor | Quantized, value: Tensor | Quantized, call: Call, requested: str | None
) -> Explanation:
    """Explain that the kernels read int8 directly, or why key and value are dequantized first."""
    requested = FROM_ENVIRONMENT if requested is None else requested
    reason = quantized_call.unsupported(query, key, value, call)
    if requested not in (None, "fused"):
        reason = f"{requested} was requested by name"
    elif reason is None:
        reason = fused.unsupported(quantized_call.build_problem(query, key, value, call)[0])
    plain = [
        torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape) if isinstance(x, Quantized) else x
        for x in (key, value)
    ]
    explanation = _explain(query, plain[0], plain[1], call, requested)
    if reason is None:
        why = f"{fused.DESCRIPTION}, which read int8 keys and values in place"
        return Explanation("fused", (why, *explanation.reasons[1:]))
    size = format_bytes(sum(x.numel() * x.element_size() for x in plain))
    copied = f"int8 keys and values are dequantized to {size} first, because {reason}"
    return Explanation(explanation.implementation, (*explanation.reasons, copied))


def _explain(
    query: Tensor, key: Tensor, value: Tensor, call: Call, implementation: str | None
) -> Explanation:
    chosen, why = choose(_prepare_without_computing(query, key, value, call), implementation)
    pairs = math.prod(Layout.of(query, key, value).lead) * query.shape[-2] * key.shape[-2]
    size = format_bytes(pairs * max(query.element_size(), 4))
    reasons = [why, f"the dense weights {'' if chosen == 'reference' else 'would '}take {size}"]
    if chosen == "fused":
        reasons.append("if the result is not finite, the tiled implementation recomputes it")
    if not isinstance(call.score, Score):
        name = getattr(call.score, "__name__", type(call.score).__name__)
        reasons.append(f"the score is the function {name}: its scores are a dense matrix of {size}")
    for name, tensor in [("mask", call.mask), *(("bias", bias) for bias in as_biases(call.bias))]:
        if isinstance(tensor, Tensor):
            dense_size = format_bytes(tensor.numel() * tensor.element_size())
            reasons.append(f"the {name} is a dense tensor of {dense_size}")
    return Explanation(chosen, tuple(reasons))


def _holds_tensors(normalize: Normalizer) -> bool:
    if isinstance(normalize, nn.Module) and any(True for _ in normalize.parameters()):
        return True
    return any(isinstance(attribute, Tensor) for attribute in vars(normalize).values())


def _prepare_without_computing(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Problem:
    """Prepare a call with fake tensors, which have shapes, dtypes and devices but no values.

    If a custom score or mask needs the values, the call is prepared with the real tensors instead.
    """
    layout = Layout.of(query, key, value)
    others = [x for x in (call.mask, *as_biases(call.bias)) if isinstance(x, Tensor)]
    if subclassed(query, key, value, *others):
        tensors = {"query": query, "key": key, "value": value}
        tensors |= {f"other {i}": tensor for i, tensor in enumerate(others)}
        return Problem(ProblemConfig(as_normalizer(call.normalize)), tensors)
    try:
        with torch.no_grad(), fake_mode() as fake:
            inputs = [fake.from_tensor(tensor) for tensor in (query, key, value)]
            return prepare(inputs[0], inputs[1], inputs[2], layout, call)
    except RuntimeError:  # raised by torch if an operation needs values; regard's errors have other types
        with torch.no_grad():  # dropout does not matter here and would advance the generator
            return prepare(query, key, value, layout, call._replace(dropout=0.0, generator=None))
