"""What torch must know of an implementation: its gradient, its batching rule, and how to compile it.

`run` calls an implementation so that gradients are computed over tiles again. In compiled graphs it
appears as one opaque operator. Second derivatives are taken of the formula for the gradients, on the
whole problem at once; forward-mode derivatives and other transformations that no rule here
covers go to the reference, whose every operation torch can differentiate.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from regard.mechanism import fused, reference, tiled
from regard.mechanism.call.problem import DIFFERENTIABLE, Problem, Rules, kind
from regard.mechanism.normalizers import spell, unspell
from regard.mechanism.precision import autocast_off
from regard.mechanism.torch_state import batched, forward_mode, subclassed, traced


def run(problem: Problem) -> tuple[Tensor, Tensor, bool]:
    """The output and τ over tiles, differentiable; and whether it is known that the kernels found τ."""
    tensors = list(problem.tensors.values())
    names = tuple(problem.tensors)
    # an exported graph may meet inputs that require gradients although those of the example did not
    every = torch.compiler.is_exporting()
    wanted = tuple(
        kind(name) in DIFFERENTIABLE and (every or t.requires_grad) for name, t in problem.tensors.items()
    )
    if torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active():
            return *reference.attention(problem), False
        return *_forward(tensors, _write(problem.rules, names), list(wanted)), False
    if not (torch.is_grad_enabled() and any(wanted)) and not torch._C._are_functorch_transforms_active():
        return _solve(problem)
    way = _Way()
    if torch._C._are_functorch_transforms_active():
        return *_Tiled.apply(problem.rules, names, way, *tensors), False  # type: ignore[no-untyped-call]
    # what `apply` calls in the end; it would look for default arguments first, which takes longer
    output, tau = super(torch.autograd.Function, _Tiled).apply(problem.rules, names, way, *tensors)  # type: ignore[no-untyped-call]
    return output, tau, way.fused


class _Way:
    """Which way a problem was solved: autograd hands back tensors alone."""

    fused = False


class _Tiled(torch.autograd.Function):
    """`tiled.forward` with its gradient and its batching rule, for eager torch and `torch.func`."""

    @staticmethod
    def forward(rules: Rules, names: tuple[str, ...], way: _Way, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        output, tau, way.fused = _solve(_problem(rules, names, tensors))
        return output, tau

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.rules, ctx.names, _, *tensors = inputs
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
        found = gradients(_problem(ctx.rules, ctx.names, tensors), tau, output, grad, wanted)
        return (None, None, None, *(found.get(name) for name in ctx.names))

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        rules: Rules,
        names: tuple[str, ...],
        way: _Way,
        *tensors: Tensor,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        stacked = [
            tensor.unsqueeze(0) if at is None else tensor.movedim(at, 0)
            for tensor, at in zip(tensors, in_dims[3:], strict=True)
        ]
        return _Tiled.apply(rules, names, way, *stacked), (0, 0)  # type: ignore[no-untyped-call]


def gradients(
    problem: Problem, tau: Tensor, output: Tensor, grad: Tensor, wanted: tuple[str, ...]
) -> dict[str, Tensor]:
    """The gradients of the wanted tensors, differentiable again."""
    if forward_mode() or batched(grad) or subclassed(grad):
        return _gradients(problem, grad, set(wanted))
    if not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        return _solve_backward(problem, tau, output, grad, set(wanted))
    names, tensors = tuple(problem.tensors), problem.tensors.values()
    parts = _Gradients.apply(problem.rules, names, wanted, tau, output, grad, *tensors)  # type: ignore[no-untyped-call]
    return dict(zip(wanted, parts, strict=True))


class _Gradients(torch.autograd.Function):
    """`tiled.backward` with a gradient of its own, for derivatives of derivatives.

    Linear in memory as long as nobody takes them; then the dense formula is differentiated.
    """

    @staticmethod
    def forward(
        rules: Rules,
        names: tuple[str, ...],
        wanted: tuple[str, ...],
        tau: Tensor,
        output: Tensor,
        grad: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        found = _solve_backward(_problem(rules, names, tensors), tau, output, grad, set(wanted))
        return tuple(found[name] for name in wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.rules, ctx.names, ctx.wanted, _, _, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        grad, *tensors = ctx.saved_tensors
        given = dict(zip(ctx.names, tensors, strict=True))
        learned = [name for name in ctx.names if given[name].is_floating_point()]

        def formula(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            problem = Problem(ctx.rules, {**given, **dict(zip(learned, inputs, strict=True))})
            found = _gradients(problem, grad, set(ctx.wanted))
            return tuple(found[name] for name in ctx.wanted)

        with autocast_off(grad.device.type):
            pull = torch.func.vjp(formula, grad, *(given[name] for name in learned))[1]
            of_grad, *of_inputs = pull(cotangents)
        found = dict(zip(learned, of_inputs, strict=True))
        return (None, None, None, None, None, of_grad, *(found.get(name) for name in ctx.names))

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        rules: Rules,
        names: tuple[str, ...],
        wanted: tuple[str, ...],
        *tensors: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        # each sample has a gradient of its own, also of what all samples share
        stacked = []
        for tensor, at in zip(tensors, in_dims[3:], strict=True):
            if at is not None:
                stacked.append(tensor.movedim(at, 0))
            else:
                samples = info.batch_size if tensor.is_floating_point() else 1
                stacked.append(tensor.expand(samples, *tensor.shape))
        return _Gradients.apply(rules, names, wanted, *stacked), (0,) * len(wanted)  # type: ignore[no-untyped-call]


def _solve(problem: Problem) -> tuple[Tensor, Tensor, bool]:
    """The output and τ, by the kernels if they can; and whether they could."""
    with autocast_off(problem["query"].device.type):
        if problem.rules.fused and _real(problem) and fused.fits(problem):
            found = fused.forward(problem)
            if found is not None:
                return *found, True
        return *tiled.forward(problem), False


def _solve_backward(
    problem: Problem, tau: Tensor, output: Tensor, grad: Tensor, wanted: set[str]
) -> dict[str, Tensor]:
    """The gradients of the wanted tensors, by the kernels if they can."""
    with autocast_off(problem["query"].device.type):
        if problem.rules.fused and _real(problem, tau, output, grad) and fused.fits(problem):
            found = fused.backward(problem, tau, output, grad, wanted)
            if found is not None:
                return found
        return tiled.backward(problem, tau, grad, wanted)


_TORCHS_OWN = {Tensor, nn.Parameter, nn.Buffer}


def _real(problem: Problem, *others: Tensor) -> bool:
    """Whether all tensors have memory that a kernel can read: they are torch's own, and no fakes."""
    for tensor in (*problem.tensors.values(), *others):
        strange = tensor.is_meta or tensor.is_neg() or tensor._is_zerotensor() or batched(tensor)
        if strange or type(tensor) not in _TORCHS_OWN:
            return False
    return not traced()


def _problem(rules: Rules, names: Sequence[str], tensors: Sequence[Tensor]) -> Problem:
    return Problem(rules, dict(zip(names, tensors, strict=True)))


def _gradients(problem: Problem, grad: Tensor, wanted: set[str]) -> dict[str, Tensor]:
    """The gradients in one piece, made of operations that can be differentiated again."""
    with autocast_off(problem["query"].device.type):
        problem = problem.checked()
        tau = reference.tau(problem, reference.scores(problem))
        found = tiled.gradients(problem, tau, grad, wanted)
        return {name: part.sum_to_size(problem[name].shape) for name, part in found.items()}


@torch.library.custom_op("regard::attention", mutates_args=())
def _forward(tensors: Sequence[Tensor], rules: str, wanted: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """`tiled.forward` as one node of a graph; the text says what the tensors are."""
    return _solve(_read(rules, tensors))[:2]


@_forward.register_fake
def _(tensors: Sequence[Tensor], rules: str, wanted: Sequence[bool]) -> tuple[Tensor, Tensor]:
    return tiled.empty(_read(rules, tensors))


@torch.library.custom_op("regard::attention_backward", mutates_args=())
def _backward(
    tensors: Sequence[Tensor], tau: Tensor, output: Tensor, grad: Tensor, rules: str, wanted: Sequence[bool]
) -> list[Tensor]:
    problem = _read(rules, tensors)
    names = [name for name, want in zip(problem.tensors, wanted, strict=True) if want]
    found = _solve_backward(problem, tau, output, grad, set(names))
    return [_laid_out_like(problem[name], found[name]) for name in names]


def _laid_out_like(tensor: Tensor, grad: Tensor) -> Tensor:
    """The gradient with the strides that the graph has been promised."""
    room = torch.empty_like(tensor)
    return grad if grad.stride() == room.stride() else room.copy_(grad)


@_backward.register_fake
def _(
    tensors: Sequence[Tensor], tau: Tensor, output: Tensor, grad: Tensor, rules: str, wanted: Sequence[bool]
) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor, want in zip(tensors, wanted, strict=True) if want]


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.rules, ctx.wanted = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward_of_forward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, None, None]:
    *tensors, output, tau = ctx.saved_tensors
    found = iter(_backward(tensors, tau, output, grad, ctx.rules, ctx.wanted))
    return [next(found) if want else None for want in ctx.wanted], None, None


_forward.register_autograd(_backward_of_forward, setup_context=_keep_for_backward)


def _write(rules: Rules, names: tuple[str, ...]) -> str:
    """Rules and names as text, which a compiled graph can carry."""
    softcap = "" if rules.softcap is None else float(rules.softcap).hex()
    numbers = f"{float(rules.scale).hex()}|{softcap}|{float(rules.dropout).hex()}|{rules.terms}"
    return f"{spell(rules.normalize)}|{rules.family}|{numbers}|{rules.fused:d}|{','.join(names)}"


@lru_cache(maxsize=256)
def _parse(text: str) -> tuple[Rules, tuple[str, ...]]:
    normalize, family, scale, softcap, dropout, terms, fused, names = text.split("|")
    cap = float.fromhex(softcap) if softcap else None
    rules = Rules(
        unspell(normalize),
        family,
        float.fromhex(scale),
        cap,
        float.fromhex(dropout),
        int(terms),
        fused=fused == "1",
    )
    return rules, tuple(names.split(","))


def _read(text: str, tensors: Sequence[Tensor]) -> Problem:
    rules, names = _parse(text)
    problem = _problem(rules, names, tensors)
    return problem.with_rules(queries=problem.queries)
