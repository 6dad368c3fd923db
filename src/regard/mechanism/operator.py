"""The operator: one formula for every attention.

scores  = score(query, key)                    … h q k
weights = normalize(mask(scores + bias))       … h q k
output  = weights · value                      … h q e
"""

import math
import os
from dataclasses import dataclass
from functools import partial
from typing import Never, TypedDict, Unpack

import torch
from torch import Tensor, nn

from regard._util.checks import check_dense
from regard._util.text import format_bytes
from regard.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from regard.mechanism import autograd, fast_path, fused, reference
from regard.mechanism.call import keyword_hints
from regard.mechanism.call.arguments import Bias, Call, check_score, prepare
from regard.mechanism.call.layout import Layout
from regard.mechanism.call.problem import Problem
from regard.mechanism.mask_algebra import Mask
from regard.mechanism.normalizers import Normalizer, Sink, Softmax, spell
from regard.mechanism.precision import autocast_off, autocasts
from regard.mechanism.scores import ScaledDot, Score, ScoreFunction
from regard.mechanism.torch_state import forward_mode, subclassed
from regard.mechanism.weights.matrix import Weights

IMPLEMENTATIONS = ("reference", "tiled", "fused")
_FROM_ENVIRONMENT = os.environ.get("REGARD_IMPLEMENTATION") or None
if _FROM_ENVIRONMENT not in (None, *IMPLEMENTATIONS):
    raise ArgumentError(
        f"the environment variable REGARD_IMPLEMENTATION is {_FROM_ENVIRONMENT!r}; "
        f"there are {', '.join(IMPLEMENTATIONS)}."
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *positional: Never,
    score: Score | ScoreFunction = ScaledDot(),  # noqa: B008 (a frozen value)
    mask: Mask | Tensor | None = None,
    bias: Bias | None = None,
    normalize: Normalizer | Sink = Softmax(),  # noqa: B008
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
    implementation: str | None = None,
    **unknown: Never,
) -> Tensor:
    """The weighted sum of the values, (…, h, q, d), (…, g, k, d), (…, g, k, e) → (…, h, q, e).

    Leading axes broadcast; the last of them counts the heads, of which the query may have more than key
    and value (h divisible by g: consecutive query heads share a key head).

    query, key, value: who asks, what is compared, and what is summed up; floating point, of one dtype.
    score: a regard score, or any function (query, key) → (…, q, k), which is computed as a dense matrix.
    mask: who may look at whom; a regard mask or a boolean tensor, True = may look.
    bias: added to the scores; a tensor that broadcasts to (…, h, q, k), a relative bias, or several.
    normalize: from scores to weights.
    dropout: the share of weights to drop, in every call; pass 0 in evaluation.
    generator: what the dropout is drawn from; torch's own by default.
    implementation: "reference", "tiled" or "fused"; by default `explain` says which. The environment
        variable REGARD_IMPLEMENTATION sets it for the whole process.

    >>> import torch, regard
    >>> query, key, value = torch.randn(2, 8, 5, 16), torch.randn(2, 4, 7, 16), torch.randn(2, 4, 7, 3)
    >>> regard.attention(query, key, value, mask=regard.Causal(), normalize=regard.Entmax(1.5)).shape
    torch.Size([2, 8, 5, 3])
    """
    if positional or unknown:
        keyword_hints.refuse("attention", positional, unknown)
    call = Call(score, mask, bias, _normalizer(normalize), dropout, generator)
    if implementation is None and _FROM_ENVIRONMENT in (None, "fused"):
        found = fast_path.attention(query, key, value, call, weighed=False)
        if found is not None:
            return found[0]
    return _run(query, key, value, call, implementation)[0]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *positional: Never,
    score: Score | ScoreFunction = ScaledDot(),  # noqa: B008
    mask: Mask | Tensor | None = None,
    bias: Bias | None = None,
    normalize: Normalizer | Sink = Softmax(),  # noqa: B008
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
    implementation: str | None = None,
    **unknown: Never,
) -> tuple[Tensor, Weights]:
    """`attention`, and beside the output the weights it was made with, as a lazy matrix (…, h, q, k).

    The arguments are those of `attention`: query, key and value, and the keywords score, mask, bias,
    normalize, dropout, generator and implementation. The weights are those after the dropout.

    >>> import torch, regard
    >>> x = torch.eye(3)
    >>> output, weights = regard.attend(x, x, x, mask=regard.Causal())
    >>> weights[2]
    tensor([0.2645, 0.2645, 0.4711])
    >>> torch.allclose(weights @ x, output)
    True
    """
    if positional or unknown:
        keyword_hints.refuse("attend", positional, unknown)
    call = Call(score, mask, bias, _normalizer(normalize), dropout, generator)
    if implementation is None and _FROM_ENVIRONMENT in (None, "fused"):
        found = fast_path.attention(query, key, value, call, weighed=True)
        if found is not None:
            output, tau = found
            build = partial(_problem, query, key, call, torch.is_grad_enabled())
            inputs = {"query": query, "key": key}  # masks of the fast path are immutable
            return output, Weights(build, tau, output.shape[:-2], inputs=inputs, fitted=True)
    output, problem, tau, fitted = _run(query, key, value, call, implementation)
    return output, Weights(problem.without("value"), tau, output.shape[:-2], fitted=fitted)


class Options(TypedDict, total=False):
    """The keyword arguments of `attention` and `attend`."""

    score: Score | ScoreFunction
    mask: Mask | Tensor | None
    bias: Bias | None
    normalize: Normalizer | Sink
    dropout: float
    generator: torch.Generator | None
    implementation: str | None


def self_attention(x: Tensor, **options: Unpack[Options]) -> Tensor:
    """`attention` of a sequence to itself: query, key and value are all x.

    options: the keywords of `attention`.

    >>> import torch, regard
    >>> regard.self_attention(torch.randn(5, 4), mask=regard.Causal()).shape
    torch.Size([5, 4])
    """
    return attention(x, x, x, **options)


@dataclass(frozen=True)
class Explanation:
    """Which implementation a call takes, why, and what it would hold in memory.

    implementation: "fused", "tiled" or "reference".
    reasons: a sentence each.

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
    query: Tensor, key: Tensor, value: Tensor, *positional: Never, **options: Unpack[Options]
) -> Explanation:
    """Which implementation `attention` would take with the same arguments, and why. Nothing is computed.

    query, key, value: only their shapes, dtypes and device count; `torch.empty(1).expand(…)` has no memory.
    options: the keywords of `attention`.

    >>> import torch, regard
    >>> x = torch.empty(1).expand(8, 65536, 64)
    >>> regard.explain(x, x, x, normalize=regard.Hard())
    tiled
      blocks of query rows with the keys that they see, in linear memory, as ...
      the dense weights would take 137.4 GB
    """
    unknown = {name: None for name in options if name not in Options.__annotations__}
    if positional or unknown:
        keyword_hints.refuse("explain", positional, unknown)
    _check_inputs(query, key, value)
    layout = Layout.of(query, key, value)
    normalize = _normalizer(options.get("normalize", Softmax()))
    chosen, why = _choose(normalize, query, options.get("implementation"), subclassed(query, key, value))
    pairs = math.prod(layout.lead) * query.shape[-2] * key.shape[-2]
    size = format_bytes(pairs * max(query.element_size(), 4))
    reasons = [why, f"the dense weights {'' if chosen == 'reference' else 'would '}take {size}"]
    score = options.get("score", ScaledDot())
    check_score(score)
    if not isinstance(score, Score):
        name = getattr(score, "__name__", type(score).__name__)
        reasons.append(f"the score is a function, {name}, so its scores are a dense matrix of {size}")
    bias = options.get("bias")
    given = [("bias", one) for one in (bias if isinstance(bias, list | tuple) else [bias])]
    for name, tensor in [("mask", options.get("mask")), *given]:
        if isinstance(tensor, Tensor):
            held = format_bytes(tensor.numel() * tensor.element_size())
            reasons.append(f"the {name} is a tensor, a dense matrix of {held}")
    return Explanation(chosen, tuple(reasons))


def _choose(normalize: Normalizer, query: Tensor, asked: str | None, subclass: bool) -> tuple[str, str]:
    """The implementation, and the reason."""
    asked = _FROM_ENVIRONMENT if asked is None else asked
    if asked is not None and asked not in IMPLEMENTATIONS:
        raise ArgumentError(f"implementation is {asked!r}; there are {', '.join(IMPLEMENTATIONS)}.")
    if forward_mode():
        return "reference", "forward-mode derivatives are taken of the dense formula"
    if subclass:
        return "reference", "the tensors are of a subclass, which plain operations leave in peace"
    if asked == "fused" and not fused.available():
        raise ArgumentError(f"implementation is 'fused', but {fused.ABOUT}. Or leave the choice to regard.")
    if asked in ("reference", "tiled"):
        return asked, "asked for by name"
    if torch.compiler.is_compiling() and spell(normalize) is None:
        return (
            "reference",
            f"{type(normalize).__name__} is not built in, so torch.compile reads the dense formula",
        )
    if spell(normalize) is None and _holds_tensors(normalize):
        return "reference", f"{type(normalize).__name__} learns, which the dense formula differentiates"
    refusal = fused.refusal(normalize, query.dtype, query.device)
    if refusal is None:
        return "fused", f"{fused.ABOUT}, which hold no more than a tile of scores at a time"
    missed = "although fused was asked for, as" if asked == "fused" else "as"
    return "tiled", f"blocks of query rows with the keys that they see, in linear memory, {missed} {refusal}"


def _holds_tensors(normalize: Normalizer) -> bool:
    if isinstance(normalize, nn.Module) and any(True for _ in normalize.parameters()):
        return True
    return any(isinstance(held, Tensor) for held in vars(normalize).values())


def _run(
    query: Tensor, key: Tensor, value: Tensor, call: Call, implementation: str | None
) -> tuple[Tensor, Problem, Tensor, bool]:
    """Prepare the call, choose an implementation and run it.

    Returns the output, the problem, its τ, and whether the kernels found τ.
    """
    device = query.device.type if isinstance(query, Tensor) else "cpu"
    if autocasts(device):
        query, key, value = (_autocast(tensor) for tensor in (query, key, value))
    with autocast_off(device):
        _check_inputs(query, key, value)
        layout = Layout.of(query, key, value)
        problem = prepare(query, key, value, layout, call)
        chosen, _ = _choose(call.normalize, query, implementation, subclassed(*problem.tensors.values()))
        if chosen == "reference":
            output, tau = reference.attention(problem.checked())
            fitted = False
        else:
            problem = problem.with_rules(fused=chosen == "fused")
            output, tau, fitted = autograd.run(problem)
        return layout.merge(output).to(query.dtype), problem, tau.detach(), fitted


def _problem(query: Tensor, key: Tensor, call: Call, graded: bool) -> Problem:
    """The problem of a call that took the short way, for its weights: without value, which they do not need.

    graded: whether derivatives were recorded when the attention ran, in whatever mode the weights are read.
    """
    with torch.inference_mode(False), torch.set_grad_enabled(graded):
        problem = prepare(query, key, key, Layout.of(query, key, key), call)
    return problem.with_rules(fused=True).without("value")


def _autocast(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _normalizer(normalize: Normalizer | Sink) -> Normalizer:
    if isinstance(normalize, Sink):
        made = normalize()
        if not isinstance(made, Normalizer):
            raise DTypeError(
                f"{type(normalize).__name__}.forward returned a {type(made).__name__}; it must return a "
                "normalizer: Softmax1(self.score)."
            )
        return made
    if isinstance(normalize, Normalizer):
        return normalize
    if isinstance(normalize, type) and issubclass(normalize, Normalizer | Sink):
        name = normalize.__name__
        raise DTypeError(f"normalize is the class {name}; pass an instance: normalize={name}().")
    name = f"{type(normalize).__module__}.{type(normalize).__qualname__}"
    raise DTypeError(
        f"normalize is {normalize!r} of type {name}, which is no normalizer; "
        f"pass one of regard's, normalize={keyword_hints.normalizer(normalize)}, or derive from Normalizer."
    )


def _check_inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise DTypeError(
                f"{name} is a {type(tensor).__name__}; pass a torch.Tensor, torch.as_tensor({name})."
            )
        check_dense(name, tensor)
        if tensor.dim() < 2:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}; it needs at least 2 axes, (tokens, features). "
                f"For a single vector use {name}[None]."
            )
        if not tensor.is_floating_point():
            raise DTypeError(f"{name} is of {tensor.dtype}; attention needs floating point: {name}.float().")
        if tensor.dtype != query.dtype:
            raise DTypeError(
                f"query is of {query.dtype} and {name} of {tensor.dtype}; they need one dtype: "
                f"{name}.to(query.dtype)."
            )
        if tensor.device != query.device:
            raise DeviceError(
                f"query is on {query.device} and {name} on {tensor.device}; bring them together: "
                f"{name}.to(query.device)."
            )
    if key.shape[-2] != value.shape[-2]:
        raise ShapeError(
            f"key has {key.shape[-2]} tokens and value has {value.shape[-2]}; each key needs its value, "
            "so the second axes from the right must be equal."
        )
