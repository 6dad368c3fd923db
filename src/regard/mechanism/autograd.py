"""Support for autograd, vmap and torch.compile in the tiled and fused implementations.

The backward pass also runs tile by tile. In compiled graphs, attention is one opaque operator. Second
derivatives are computed by differentiating the gradient formula without tiling. Forward-mode AD, and
transforms without a rule in this module, use the reference implementation.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.mechanism import fused, reference, tiled
from regard.mechanism.autocast import autocast_off
from regard.mechanism.call.problem import (
    DIFFERENTIABLE,
    Problem,
    ProblemConfig,
    deserialize,
    empty_results,
    kind,
    serialize,
)
from regard.mechanism.torch_state import batched, concrete, forward_mode, subclassed, transformed


def run(problem: Problem) -> tuple[Tensor, Tensor, bool]:
    """Return the differentiable output, τ, and whether τ is known to come from the kernels."""
    tensors = list(problem.tensors.values())
    names = tuple(problem.tensors)
    # inputs of an exported graph may require gradients even if the example inputs did not
    exporting = torch.compiler.is_exporting()
    wanted = tuple(
        kind(name) in DIFFERENTIABLE and (exporting or t.requires_grad) for name, t in problem.tensors.items()
    )
    if torch.compiler.is_compiling():
        if transformed():
            return *reference.attention(problem), False
        return *_forward(tensors, _serialize(problem.config, names), list(wanted)), False
    if not (torch.is_grad_enabled() and any(wanted)) and not transformed():
        return _run_forward(problem)
    forward_info = _ForwardInfo()
    if transformed():
        return *_Attention.apply(problem.config, names, forward_info, *tensors), False  # type: ignore[no-untyped-call]
    # avoids the overhead of `_Attention.apply`, which first binds default arguments
    output, tau = super(torch.autograd.Function, _Attention).apply(
        problem.config, names, forward_info, *tensors
    )  # type: ignore[no-untyped-call]
    return output, tau, forward_info.used_kernels


class _ForwardInfo:
    """Side channel for a non-tensor result, which an autograd function cannot return."""

    used_kernels = False


class _Attention(torch.autograd.Function):
    """Forward pass with a gradient and a vmap rule, for eager mode and `torch.func`."""

    @staticmethod
    def forward(
        config: ProblemConfig, names: tuple[str, ...], forward_info: _ForwardInfo, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        output, tau, forward_info.used_kernels = _run_forward(_problem(config, names, tensors))
        return output, tau

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.config, ctx.names, _, *tensors = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        *tensors, output, tau = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        wanted = tuple(name for name, need in zip(ctx.names, needed, strict=True) if need)
        if grad is None or not wanted:
            return (None,) * (3 + len(tensors))
        grads = gradients(_problem(ctx.config, ctx.names, tensors), tau, output, grad, wanted)
        return (None, None, None, *(grads.get(name) for name in ctx.names))

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        config: ProblemConfig,
        names: tuple[str, ...],
        forward_info: _ForwardInfo,
        *tensors: Tensor,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        stacked = [
            tensor.unsqueeze(0) if at is None else tensor.movedim(at, 0)
            for tensor, at in zip(tensors, in_dims[3:], strict=True)
        ]
        return _Attention.apply(config, names, forward_info, *stacked), (0, 0)  # type: ignore[no-untyped-call]


def gradients(
    problem: Problem, tau: Tensor, output: Tensor, grad: Tensor, wanted: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return differentiable gradients with respect to the tensors named in `wanted`."""
    if forward_mode() or batched(grad) or subclassed(grad):
        return _dense_gradients(problem, grad, set(wanted))
    if not torch.is_grad_enabled() and not transformed():
        return _run_backward(problem, tau, output, grad, set(wanted))
    names, tensors = tuple(problem.tensors), problem.tensors.values()
    parts = _AttentionBackward.apply(problem.config, names, wanted, tau, output, grad, *tensors)  # type: ignore[no-untyped-call]
    return dict(zip(wanted, parts, strict=True))


class _AttentionBackward(torch.autograd.Function):
    """Backward pass with its own gradient, for second derivatives.

    Memory is linear, except for second derivatives, which differentiate the dense formula.
    """

    @staticmethod
    def forward(
        config: ProblemConfig,
        names: tuple[str, ...],
        wanted: tuple[str, ...],
        tau: Tensor,
        output: Tensor,
        grad: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        grads = _run_backward(_problem(config, names, tensors), tau, output, grad, set(wanted))
        return tuple(grads[name] for name in wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.config, ctx.names, ctx.wanted, _, _, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        grad, *tensors = ctx.saved_tensors
        inputs = dict(zip(ctx.names, tensors, strict=True))
        float_names = [name for name in ctx.names if inputs[name].is_floating_point()]

        def formula(grad: Tensor, *floats: Tensor) -> tuple[Tensor, ...]:
            problem = Problem(ctx.config, {**inputs, **dict(zip(float_names, floats, strict=True))})
            grads = _dense_gradients(problem, grad, set(ctx.wanted))
            return tuple(grads[name] for name in ctx.wanted)

        with autocast_off(grad.device.type):
            vjp = torch.func.vjp(formula, grad, *(inputs[name] for name in float_names))[1]
            grad_grad, *input_grads = vjp(cotangents)
        second = dict(zip(float_names, input_grads, strict=True))
        return (None, None, None, None, None, grad_grad, *(second.get(name) for name in ctx.names))

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        config: ProblemConfig,
        names: tuple[str, ...],
        wanted: tuple[str, ...],
        *tensors: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        # return per-sample gradients, even for inputs that all samples share
        stacked = []
        for tensor, at in zip(tensors, in_dims[3:], strict=True):
            if at is not None:
                stacked.append(tensor.movedim(at, 0))
            else:
                samples = info.batch_size if tensor.is_floating_point() else 1
                stacked.append(tensor.expand(samples, *tensor.shape))
        return _AttentionBackward.apply(config, names, wanted, *stacked), (0,) * len(wanted)  # type: ignore[no-untyped-call]


def _run_forward(problem: Problem) -> tuple[Tensor, Tensor, bool]:
    """Return the output, τ, and whether the kernels computed them."""
    with autocast_off(problem["query"].device.type):
        if _kernels_run(problem):
            result = fused.forward(problem)
            if result is not None:
                return *result, True
        return *tiled.forward(problem), False


def _run_backward(
    problem: Problem, tau: Tensor, output: Tensor, grad: Tensor, wanted: set[str]
) -> dict[str, Tensor]:
    """Compute the gradients of the tensors named in `wanted`, with the kernels if they support the call."""
    with autocast_off(problem["query"].device.type):
        if _kernels_run(problem, tau, output, grad):
            grads = fused.backward(problem, tau, output, grad, wanted)
            if grads is not None:
                return grads
        return tiled.backward(problem, tau, grad, wanted, refit=problem.config.fused)


def _kernels_run(problem: Problem, *others: Tensor) -> bool:
    """Whether dispatch chose the kernels and they can read the memory of all tensors."""
    tensors = (*problem.tensors.values(), *others)
    if not problem.config.fused or not concrete(*tensors):
        return False
    lazy = any(t.is_neg() or t._is_zerotensor() for t in tensors)
    return not lazy and fused.unsupported(problem) is None


def _problem(config: ProblemConfig, names: Sequence[str], tensors: Sequence[Tensor]) -> Problem:
    return Problem(config, dict(zip(names, tensors, strict=True)))


def _dense_gradients(problem: Problem, grad: Tensor, wanted: set[str]) -> dict[str, Tensor]:
    """Compute the gradients with differentiable dense operations."""
    with autocast_off(problem["query"].device.type):
        problem = problem.nan_checked()
        grads = tiled.gradients(problem, None, grad, wanted)
        return {name: part.sum_to_size(problem[name].shape) for name, part in grads.items()}


@torch.library.custom_op("regard::attention", mutates_args=())
def _forward(tensors: Sequence[Tensor], config: str, wanted: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Run the forward pass as one graph node.

    config: the configuration and the tensor names, from `_serialize`.
    """
    return _run_forward(_deserialize(config, tensors))[:2]


@_forward.register_fake
def _(tensors: Sequence[Tensor], config: str, wanted: Sequence[bool]) -> tuple[Tensor, Tensor]:
    return empty_results(_deserialize(config, tensors))


@torch.library.custom_op("regard::attention_backward", mutates_args=())
def _backward(
    tensors: Sequence[Tensor], tau: Tensor, output: Tensor, grad: Tensor, config: str, wanted: Sequence[bool]
) -> list[Tensor]:
    problem = _deserialize(config, tensors)
    names = [name for name, want in zip(problem.tensors, wanted, strict=True) if want]
    grads = _run_backward(problem, tau, output, grad, set(names))
    return [_with_strides_of(problem[name], grads[name]) for name in names]


def _with_strides_of(tensor: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient with the strides declared by `register_fake`."""
    buffer = torch.empty_like(tensor)
    return grad if grad.stride() == buffer.stride() else buffer.copy_(grad)


@_backward.register_fake
def _(
    tensors: Sequence[Tensor], tau: Tensor, output: Tensor, grad: Tensor, config: str, wanted: Sequence[bool]
) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor, want in zip(tensors, wanted, strict=True) if want]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.config, ctx.wanted = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward_of_forward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, None, None]:
    *tensors, output, tau = ctx.saved_tensors
    grads = iter(_backward(tensors, tau, output, grad, ctx.config, ctx.wanted))
    return [next(grads) if want else None for want in ctx.wanted], None, None


_forward.register_autograd(_backward_of_forward, setup_context=_setup_context)


def _serialize(config: ProblemConfig, names: tuple[str, ...]) -> str:
    """Serialize the configuration and tensor names as text, which a compiled graph can contain."""
    return f"{config.fused:d}|{serialize(config, names)}"


def _deserialize(text: str, tensors: Sequence[Tensor]) -> Problem:
    use_kernels, _, call = text.partition("|")
    config, names = deserialize(call)
    problem = _problem(config, names, tensors)
    return problem.with_config(queries=problem.queries, fused=use_kernels == "1")
