"""The attention operator.

scores  = score(query, key)                    … h q k
weights = normalize(mask(scores + bias))       … h q k
output  = weights · value                      … h q e
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Never, TypedDict, Unpack

import torch
from torch import Tensor

from regard._util.text import format_bytes
from regard.mechanism import autograd, dispatch, fast_path, reference
from regard.mechanism.call import keyword_hints
from regard.mechanism.call.arguments import (
    Bias,
    Call,
    Layout,
    as_biases,
    as_normalizer,
    check_inputs,
    prepare,
)
from regard.mechanism.call.problem import Problem, ProblemConfig
from regard.mechanism.mask_algebra import Mask
from regard.mechanism.normalizers import Normalizer, Sink, Softmax
from regard.mechanism.precision import autocast_off, autocasts
from regard.mechanism.scores import ScaledDot, Score, ScoreFunction
from regard.mechanism.torch_state import fake_mode, subclassed
from regard.mechanism.weights.matrix import Weights


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
    """Compute attention: (…, h, q, d), (…, g, k, d), (…, g, k, e) → (…, h, q, e).

    Leading axes broadcast; the last leading axis is the heads axis. With grouped-query attention, h is a
    multiple of g, and consecutive query heads share a key head.

    query, key, value: floating-point tensors with the same dtype.
    score: a score, or any function (query, key) → (…, q, k). A function computes a dense matrix.
    mask: a mask, or a boolean tensor (True = may attend).
    bias: term added to the scores: a tensor that broadcasts to (…, h, q, k), a relative bias, or a list.
    normalize: normalizer that turns scores into weights.
    dropout: dropout probability for the weights, applied in every call; pass 0 for evaluation.
    generator: random number generator for dropout; default: torch's global generator.
    implementation: "reference", "tiled" or "fused"; default: chosen for each call; see `explain`. The
        environment variable REGARD_IMPLEMENTATION sets the default.

    >>> import torch, regard
    >>> query, key, value = torch.randn(2, 8, 5, 16), torch.randn(2, 4, 7, 16), torch.randn(2, 4, 7, 3)
    >>> regard.attention(query, key, value, mask=regard.Causal(), normalize=regard.Entmax(1.5)).shape
    torch.Size([2, 8, 5, 3])
    """
    if positional or unknown:
        keyword_hints.raise_unexpected("attention", positional, unknown)
    call = Call(score, mask, bias, normalize, dropout, generator)
    return _run(query, key, value, call, implementation, need_tau=False).output


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
    """Compute attention and return the output and the lazy weights after dropout, (…, h, q, k).

    Takes the same arguments as `attention`: query, key and value, and the keywords score, mask, bias,
    normalize, dropout, generator and implementation.

    >>> import torch, regard
    >>> x = torch.eye(3)
    >>> output, weights = regard.attend(x, x, x, mask=regard.Causal())
    >>> weights[2]
    tensor([0.2645, 0.2645, 0.4711])
    >>> torch.allclose(weights @ x, output)
    True
    """
    if positional or unknown:
        keyword_hints.raise_unexpected("attend", positional, unknown)
    call = Call(score, mask, bias, normalize, dropout, generator)
    output, tau, fused_tau, problem = _run(query, key, value, call, implementation, need_tau=True)
    lead = output.shape[:-2]
    if problem is not None:
        return output, Weights(problem.without("value"), tau, lead, tau_from_kernels=fused_tau)
    build = partial(_prepare_weights, query, key, value.shape, call, torch.is_grad_enabled())
    inputs = {"query": query, "key": key}  # masks on the fast path are immutable
    return output, Weights(build, tau, lead, inputs=inputs, tau_from_kernels=fused_tau)


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
    """Compute self-attention, with x as query, key and value.

    options: keyword arguments of `attention`.

    >>> import torch, regard
    >>> regard.self_attention(torch.randn(5, 4), mask=regard.Causal()).shape
    torch.Size([5, 4])
    """
    return attention(x, x, x, **options)


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
    query: Tensor, key: Tensor, value: Tensor, *positional: Never, **options: Unpack[Options]
) -> Explanation:
    """Explain which implementation `attention` would use for these arguments. Nothing is computed.

    query, key, value: only shape, dtype and device matter; `torch.empty(1).expand(…)` takes no memory.
    options: keyword arguments of `attention`. With score_mod or block_mask: arguments of `flex_attention`.

    >>> import torch, regard
    >>> x = torch.empty(1).expand(8, 65536, 64)
    >>> regard.explain(x, x, x, normalize=regard.Hard())
    tiled
      blocks of query rows, in linear memory, because ...
      the dense weights would take 137.4 GB
    """
    if options.keys() & {"score_mod", "block_mask"}:
        from regard.mechanism.flex.attention import explain as explain_flex  # imports this module

        return explain_flex(query, key, value, *positional, **options)  # type: ignore[misc]
    unknown = {name: None for name in options if name not in Options.__annotations__}
    if positional or unknown:
        keyword_hints.raise_unexpected("explain", positional, unknown)
    implementation = options.pop("implementation", None)
    call = Call(**options)  # type: ignore[misc]
    check_inputs(query, key, value)
    chosen, why = dispatch.choose(_prepare_without_computing(query, key, value, call), implementation)
    pairs = math.prod(Layout.of(query, key, value).lead) * query.shape[-2] * key.shape[-2]
    size = format_bytes(pairs * max(query.element_size(), 4))
    reasons = [why, f"the dense weights {'' if chosen == 'reference' else 'would '}take {size}"]
    if chosen == "fused":
        reasons.append("if the result is not finite, tiled recomputes it")
    if not isinstance(call.score, Score):
        name = getattr(call.score, "__name__", type(call.score).__name__)
        reasons.append(f"the score is the function {name}: its scores are a dense matrix of {size}")
    for name, tensor in [("mask", call.mask), *(("bias", bias) for bias in as_biases(call.bias))]:
        if isinstance(tensor, Tensor):
            dense_size = format_bytes(tensor.numel() * tensor.element_size())
            reasons.append(f"the {name} is a dense tensor of {dense_size}")
    return Explanation(chosen, tuple(reasons))


class _Result(NamedTuple):
    output: Tensor
    tau: Tensor | None
    fused_tau: bool  # the kernels computed τ
    problem: Problem | None  # None for a cached call


def _run(
    query: Tensor, key: Tensor, value: Tensor, call: Call, implementation: str | None, *, need_tau: bool
) -> _Result:
    """Run a cached call, or prepare the call, select an implementation and run it."""
    if implementation is None and dispatch.FROM_ENVIRONMENT in (None, "fused"):
        result = fast_path.attention(query, key, value, call, need_tau=need_tau)
        if result is not None:
            return _Result(*result, True, None)
    device = query.device.type if isinstance(query, Tensor) else "cpu"
    if autocasts(device):
        query, key, value = (_autocast(tensor) for tensor in (query, key, value))
    with autocast_off(device):
        check_inputs(query, key, value)
        layout = Layout.of(query, key, value)
        problem = prepare(query, key, value, layout, call)
        chosen, _ = dispatch.choose(problem, implementation)
        if chosen == "reference":
            output, tau = reference.attention(problem.nan_checked())
            fused_tau = False
        else:
            problem = problem.with_config(fused=chosen == "fused")
            output, tau, fused_tau = autograd.run(problem)
        return _Result(layout.merge(output).to(query.dtype), tau.detach(), fused_tau, problem)


def _prepare_without_computing(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Problem:
    """Prepare a call with fake tensors, which have shapes, dtypes and devices but no values.

    If a custom score or mask reads values, prepare the call with the real tensors instead.
    """
    layout = Layout.of(query, key, value)
    if subclassed(query, key, value):
        return Problem(
            ProblemConfig(as_normalizer(call.normalize)), {"query": query, "key": key, "value": value}
        )
    try:
        with torch.no_grad(), fake_mode() as fake:
            inputs = [fake.from_tensor(tensor) for tensor in (query, key, value)]
            return prepare(inputs[0], inputs[1], inputs[2], layout, call)
    except RuntimeError:  # raised by torch for operations that need values; regard's errors have other types
        with torch.no_grad():  # dropout does not matter here and would advance the generator
            return prepare(query, key, value, layout, call._replace(dropout=0.0, generator=None))


def _prepare_weights(
    query: Tensor, key: Tensor, value_shape: torch.Size, call: Call, grad_enabled: bool
) -> Problem:
    """Prepare the weights of a fast-path call, without value.

    value_shape: shape of value, which may have more heads or batch axes than query and key.
    grad_enabled: the grad mode of the forward pass, which may differ from the mode when weights are read.
    """
    with torch.inference_mode(False), torch.set_grad_enabled(grad_enabled):
        layout = Layout.of(query, key, torch.empty(value_shape, device="meta"))
        problem = prepare(query, key, key, layout, call)
    return problem.with_config(fused=True).without("value")


def _autocast(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))
