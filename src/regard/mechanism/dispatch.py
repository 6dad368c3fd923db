"""Select the implementation of a call and explain the choice.

The operator and `explain` use the same ordered list, `RULES`. The first rule that returns a reason selects
its implementation. The last rule checks the limits of the kernels; if no rule applies, the kernels run.
"""

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.mechanism import fused
from regard.mechanism.call.problem import Problem
from regard.mechanism.normalizers import Normalizer, to_text
from regard.mechanism.torch_state import forward_mode, subclassed

IMPLEMENTATIONS = ("reference", "tiled", "fused")
FROM_ENVIRONMENT = os.environ.get("REGARD_IMPLEMENTATION") or None
if FROM_ENVIRONMENT not in (None, *IMPLEMENTATIONS):
    raise ArgumentError(
        f"the environment variable REGARD_IMPLEMENTATION is {FROM_ENVIRONMENT!r}; "
        f"use {', '.join(IMPLEMENTATIONS)}."
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
    if torch.compiler.is_compiling() and to_text(normalize) is None:
        return f"{type(normalize).__name__} is not built in, so torch.compile uses the dense formula"
    return None


def _normalizer_with_tensors(problem: Problem, requested: str | None) -> str | None:
    normalize = problem.config.normalize
    if to_text(normalize) is None and _holds_tensors(normalize):
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
    """Choose the implementation of a call; return its name and the reason for the choice.

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
        raise ArgumentError(f"implementation is {requested!r}; use {', '.join(IMPLEMENTATIONS)}.")
    if requested == "fused" and not fused.available():
        raise ArgumentError(f"implementation is 'fused', but {fused.DESCRIPTION}. Or omit implementation=.")
    for implementation, rule in RULES:
        reason = rule(problem, requested)
        if reason is not None:
            return implementation, reason
    return "fused", f"{fused.DESCRIPTION}, which hold one tile of scores at a time"


def _holds_tensors(normalize: Normalizer) -> bool:
    if isinstance(normalize, nn.Module) and any(True for _ in normalize.parameters()):
        return True
    return any(isinstance(attribute, Tensor) for attribute in vars(normalize).values())
