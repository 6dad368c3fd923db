"""`flex_attention`: torch's FlexAttention on the CPU, with gradients."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard._util.checks import check_dense, check_device, check_number
from regard._util.text import format_bytes, pluralize, type_name
from regard.errors import ArgumentError, DTypeError, MaskError, ShapeError
from regard.mechanism import dispatch, operator
from regard.mechanism.autocast import autocast_off, autocasts
from regard.mechanism.flex import tiles
from regard.mechanism.flex.blocks import Blocks, find_intervals
from regard.mechanism.flex.expressions import Constant, Index, ScoreForm
from regard.mechanism.flex.intervals import MAX_TERMS, Intervals, Sizes
from regard.mechanism.flex.plan import Plan, make_plan
from regard.mechanism.flex.route_cache import RouteCache
from regard.mechanism.flex.symbolic_trace import Trace, trace_functions
from regard.mechanism.scores import ScaledDot
from regard.mechanism.torch_state import plain_cpu

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, FlexKernelOptions

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_NO_BLOCKS = 1 << 30  # block size of a BlockMask that is valid for any length


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: "BlockMask | None" = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: "FlexKernelOptions | None" = None,
    *,
    return_aux: "AuxRequest | None" = None,
) -> "Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]":
    """Drop-in replacement for torch's `flex_attention` that also computes gradients on the CPU.

    query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_aux: see torch's
        documentation.
    kernel_options: ignored, because torch's options select and tune GPU kernels.

    Memory is linear in the number of tokens. Tensors that score_mod captures, such as a table of biases,
    receive gradients. Score functions with a known formula (a factor, a softcap, biases that depend on the
    head, the query, the key or their distance) and masks with up to four intervals of keys per query run on
    the kernels. Others are evaluated tile by tile, with `torch.vmap`. `explain` shows which case applies.

    >>> import torch, regard
    >>> slopes = torch.nn.Parameter(torch.tensor([0.5, 0.25]))
    >>> def alibi(score, b, h, q_idx, kv_idx):
    ...     return score - slopes[h] * (q_idx - kv_idx).abs()
    >>> x = torch.randn(1, 2, 5, 4)
    >>> regard.flex_attention(x, x, x, score_mod=alibi).sum().backward()
    >>> slopes.grad.shape
    torch.Size([2])
    """
    if return_lse and return_aux is not None:
        raise ArgumentError(
            "flex_attention got return_lse=True and return_aux; pass only return_aux=AuxRequest(lse=True)."
        )
    want_lse = return_lse or (return_aux is not None and return_aux.lse)
    want_max = return_aux is not None and return_aux.max_scores
    run = torch.compiler.disable(_run) if torch.compiler.is_compiling() else _run
    call = FlexCall(query, key, value, score_mod, block_mask, scale, enable_gqa)
    result = run(call, want_lse, want_max)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return result.output, AuxOutput(
            lse=result.lse if want_lse else None, max_scores=result.max_scores if want_max else None
        )
    return (result.output, result.lse) if return_lse else result.output


class FlexCall(NamedTuple):
    """The arguments of a `flex_attention` call that determine its output."""

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: ScoreMod | None = None
    block_mask: Any = None
    scale: float | None = None
    enable_gqa: bool = False


def explain(*args: Any, **options: Any) -> dispatch.Explanation:
    """Explain how `flex_attention` computes a call. The functions are traced, and the mask is evaluated.

    args, options: the fields of `FlexCall`.
    """
    call = FlexCall(*args, **options)
    _check_inputs(call)
    route = choose_route(call)
    query, key, value = call[:3]
    if route.plan is not None:
        explanation = dispatch.explain(query, key, value, **_options(route.plan, route.mask))
        why = "score_mod and mask_mod have known formulas"
        if route.mask is not None:
            why += f", with {pluralize(len(route.mask.parts), 'interval')} of keys per query"
        return dispatch.Explanation(explanation.implementation, (*explanation.reasons, why))
    dense = format_bytes(math.prod(query.shape[:3]) * key.shape[2] * max(query.element_size(), 4))
    reasons = (
        f"blocks of query rows, in linear memory, because {route.reason}",
        f"the dense weights would take {dense}",
    )
    return dispatch.Explanation("tiled", reasons)


class _Route(NamedTuple):
    """How a call is computed, and why: by `attention`, with a plan and a mask, or tile by tile."""

    plan: Plan | None
    mask: Intervals | None
    reason: str
    functions: tiles.Functions
    captured: tuple[Tensor, ...]


def _run(call: FlexCall, want_lse: bool, want_max: bool) -> tiles.Result:
    _check_inputs(call)
    query, key, value = call[:3]
    device, dtype = query.device.type, query.dtype
    if autocasts(device):
        dtype = torch.get_autocast_dtype(device) if dtype is not torch.float64 else dtype
        query, key, value = (x.to(dtype) for x in (query, key, value))
    with autocast_off(device):
        statistics = want_lse or want_max
        route = choose_route(call._replace(query=query, key=key, value=value), need_functions=statistics)
        if route.plan is not None and not statistics:
            output = _attend(query, key, value, route.plan, route.mask)
            return tiles.Result(output.to(dtype), output, output)
        working = dtype if dtype is torch.float64 else torch.float32
        query, key, value = (x.to(working) for x in (query, key, value))
        result = tiles.attention(query, key, value, route.functions, route.captured)
        return result._replace(output=result.output.to(dtype))


def _attend(query: Tensor, key: Tensor, value: Tensor, plan: Plan, mask: Intervals | None) -> Tensor:
    """Run a plan with `attention`."""
    if plan.query_factor is not None or plan.key_factor is not None:
        dtype = query.dtype if query.dtype is torch.float64 else torch.float32
        query, key, value = (x.to(dtype) for x in (query, key, value))
    if plan.query_factor is not None:
        query = query * plan.query_factor
    if plan.key_factor is not None:
        key = key * plan.key_factor
    return operator.attention(query, key, value, **_options(plan, mask))


def _options(plan: Plan, mask: Intervals | None) -> operator.Options:
    """Return a plan as the keyword arguments of `attention`."""
    score = ScaledDot(plan.scale, softcap=plan.softcap)
    return {"score": score, "mask": mask, "bias": plan.biases or None}


_CACHE: RouteCache[_Route] = RouteCache()


def choose_route(call: FlexCall, *, need_functions: bool = False) -> _Route:
    """Decide how a call is computed; reuse the decision of an earlier call with the same functions.

    need_functions: whether the caller evaluates the functions of the route, even if it has a plan.
    """
    _scale(call.scale, call.query)  # raises if the scale is not a number
    if call.block_mask is not None:
        _check_block_mask(call.block_mask, _sizes(call), call.query.device)
    # a plan created under export, tracing or a fake mode has tensors that other calls cannot use
    cache_key = _CACHE.key(call, tensors=not need_functions) if plain_cpu(*call[:3]) else None
    route = None if cache_key is None else _CACHE.get(cache_key, call.block_mask)
    if route is None:
        route = _trace_route(call)
        if cache_key is not None and route.plan is not None:
            if route.captured:  # these tensors may change later; the key contains their current values
                mask = None if route.mask is None else route.mask.copy()
                route = route._replace(plan=route.plan.copy(), mask=mask)
            _CACHE.put(cache_key, call.block_mask, route)
    return route


def _sizes(call: FlexCall) -> Sizes:
    batch, heads, queries, _ = call.query.shape
    return Sizes(batch, heads, queries, call.key.shape[2])


def _trace_route(call: FlexCall) -> _Route:
    """Trace the functions of a call and decide how it is computed."""
    query, key, _, score_mod, block_mask, _, _ = call
    scale = _scale(call.scale, query)
    sizes = _sizes(call)
    dtype = query.dtype if query.dtype is torch.float64 else torch.float32
    blocks = mask_mod = None
    if block_mask is not None:
        blocks, mask_mod = Blocks.of(block_mask, sizes), block_mask.mask_mod
    traces = trace_functions(score_mod, mask_mod, dtype, sizes, query.device)
    score_trace, mask_trace = traces
    captured = {id(tensor): tensor for tensor in (*score_trace.captured, *mask_trace.captured)}
    functions = tiles.Functions(score_mod, mask_mod, blocks, scale, traces)
    route = _Route(None, None, "", functions, tuple(captured.values()))
    if 0 in (*sizes, query.shape[-1]):
        return route._replace(reason="a size is 0")
    if not isinstance(score_trace.result, ScoreForm):
        reason = score_trace.reason or "its result does not depend on the score"
        return route._replace(reason=f"score_mod has no known formula: {reason}")
    like = torch.empty((), dtype=dtype, device=query.device)
    plan = make_plan(score_trace.result, sizes, key.shape[1], scale, like)
    if isinstance(plan, str):
        return route._replace(reason=plan)
    mask = _find_mask(score_trace.result, mask_trace, mask_mod, blocks, sizes, query.device)
    if isinstance(mask, str):
        return route._replace(reason=mask)
    return route._replace(plan=plan, mask=mask)


def _find_mask(
    form: ScoreForm, trace: Trace, mask_mod: Any, blocks: Blocks | None, sizes: Sizes, device: torch.device
) -> Intervals | str | None:
    """Return the key intervals of a call's masks, None without masks, or the reason why they are unknown."""
    masks: list[Intervals | None] = []
    if blocks is not None:
        condition = trace.result if isinstance(trace.result, Constant | Index) else mask_mod
        masks.append(find_intervals(blocks, condition, sizes))
    masks += [find_intervals(Blocks.partial(sizes, device), mask, sizes) for mask in form.masks]
    result: Intervals | None = None
    for mask in masks:
        result = mask if result is None or mask is None else result.intersect(mask)
        if result is None:
            return f"a query attends to more than {MAX_TERMS} intervals of keys, or the intervals are unknown"
    return result


def _scale(scale: float | None, query: Tensor) -> float:
    if scale is None:
        return 1 / math.sqrt(max(query.shape[-1], 1))
    check_number("flex_attention got scale", scale)
    return float(scale)


def _check_inputs(call: FlexCall) -> None:
    query, key, value = call[:3]
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise DTypeError(f"{name} is {type_name(x)}; pass a tensor.")
        check_dense(name, x)
        if x.dim() != 4:
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}; flex_attention needs four axes, (batch, heads, tokens, "
                "features)."
            )
        if x.dtype not in _DTYPES or x.dtype != query.dtype:
            raise DTypeError(
                f"query has dtype {query.dtype} and {name} has {x.dtype}; use float32, float64, bfloat16 or "
                "float16 for all three."
            )
        check_device(name, x, query.device)
    if key.shape[:3] != value.shape[:3]:
        raise ShapeError(
            f"key has shape {tuple(key.shape)} and value {tuple(value.shape)}; the first three axes must be "
            "equal."
        )
    if query.shape[-1] != key.shape[-1]:
        raise ShapeError(
            f"query has {pluralize(query.shape[-1], 'feature')} and key has {int(key.shape[-1]):,}; a dot "
            "product needs equal widths."
        )
    if key.shape[0] not in (1, query.shape[0]):
        raise ShapeError(
            f"query has batch size {query.shape[0]} and key has {key.shape[0]}; they must be equal, or the "
            "batch size of key must be 1."
        )
    _check_heads(query.shape[1], key.shape[1], call.enable_gqa)


def _check_heads(heads: int, groups: int, enable_gqa: bool) -> None:
    if heads == groups:
        return
    if not enable_gqa:
        raise ShapeError(
            f"query has {pluralize(heads, 'head')} and key has {groups}; pass enable_gqa=True for "
            "grouped-query attention, in which each key head serves several query heads."
        )
    if groups == 0 or heads % groups:
        raise ShapeError(
            f"query has {pluralize(heads, 'head')} and key has {groups}; the number of query heads must be a "
            "multiple of the number of key heads."
        )


def _check_block_mask(block_mask: Any, sizes: Sizes, device: torch.device) -> None:
    if not all(hasattr(block_mask, name) for name in ("kv_num_blocks", "kv_indices", "mask_mod")):
        raise DTypeError(
            f"block_mask is {type_name(block_mask)}; pass a BlockMask: create_block_mask(mask_mod, …)."
        )
    if not callable(block_mask.mask_mod):
        raise DTypeError(
            f"block_mask.mask_mod is {type_name(block_mask.mask_mod)}; it must be a function of "
            "(b, h, q_idx, kv_idx) that returns a bool tensor. For no mask, pass block_mask=None."
        )
    check_device("block_mask", block_mask.kv_num_blocks, device)
    lengths = tuple(block_mask.seq_lengths)
    if tuple(block_mask.BLOCK_SIZE) != (_NO_BLOCKS, _NO_BLOCKS) and lengths != tuple(sizes[2:]):
        raise MaskError(
            f"block_mask was created for {pluralize(lengths[0], 'query')} and "
            f"{pluralize(lengths[1], 'key')}, and the call has {sizes.queries} and {sizes.keys}; create it "
            "with create_block_mask for these lengths."
        )
