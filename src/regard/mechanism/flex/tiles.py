"""FlexAttention for any `score_mod` and `mask_mod`: tiles of query rows, in linear memory, with gradients.

A tile contains all keys visible to its rows. The backward pass recomputes the scores of each tile and
differentiates through them, including the functions and the tensors that they capture.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.mechanism import reference
from regard.mechanism.autocast import autocast_off
from regard.mechanism.call.problem import Problem, ProblemConfig
from regard.mechanism.flex.blocks import Blocks
from regard.mechanism.flex.functions import NO_REPLACEMENTS, freeze, map_mask, map_scores
from regard.mechanism.flex.symbolic_trace import Trace, trace_functions
from regard.mechanism.normalizers import Softmax
from regard.mechanism.tiled import TILE


class Functions(NamedTuple):
    """The score_mod and mask_mod of a call, and their traces.

    blocks: the visible blocks; None if every query attends to every key.
    """

    score_mod: Callable[..., Tensor] | None
    mask_mod: Callable[..., Tensor] | None
    blocks: Blocks | None
    scale: float
    traces: tuple[Trace, Trace]

    def freeze(self) -> "Functions":
        """Return copies of the functions that keep the current values of their variables."""
        score_mod, mask_mod = freeze((self.score_mod, self.mask_mod))
        return self._replace(score_mod=score_mod, mask_mod=mask_mod)

    def check_unchanged(self, query: Tensor, key: Tensor) -> None:
        """Raise if a function has changed since it was traced."""
        sizes = (*query.shape[:3], key.shape[2])
        later = trace_functions(self.score_mod, self.mask_mod, query.dtype, sizes, query.device)
        for name, trace, new in zip(("score_mod", "mask_mod"), self.traces, later, strict=True):
            trace.check_unchanged(name, new)


class Result(NamedTuple):
    """Output (b, h, q, e), and the logsumexp and maximum of each row of scores, (b, h, q)."""

    output: Tensor
    lse: Tensor
    max_scores: Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    functions: Functions,
    captured: tuple[Tensor, ...],
) -> Result:
    """Compute attention from query (b, h, q, d) to key and value (b or 1, g, k, ·).

    captured: the tensors that the functions capture. They receive gradients if they require grad.
    """
    return Result(*_FlexAttention.apply(functions, captured, query, key, value, *captured))  # type: ignore[no-untyped-call]


class _FlexAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, functions: Functions, originals: tuple[Tensor, ...], *inputs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *captured = inputs
        ctx.functions, ctx.originals = functions.freeze(), originals
        # the functions already refer to the captured tensors; saving these lets torch detect in-place changes
        ctx.save_for_backward(query, key, value, *captured)
        ctx.set_materialize_grads(False)
        batch, heads, queries = query.shape[:3]
        output = query.new_empty(batch, heads, queries, value.shape[-1])
        lse, max_scores = query.new_empty(2, batch, heads, queries).unbind(0)
        for tile in _tiles(functions.blocks, query, key):
            results = _attend(functions, tile, *tile.take(query, key, value), NO_REPLACEMENTS)
            for target, part in zip((output, lse, max_scores), results, strict=True):
                target[tile.rows_index] = part
        ctx.mark_non_differentiable(max_scores)
        return output, lse, max_scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            grads = _FlexAttention._gradients(ctx, grad, grad_lse)
        if torch.is_grad_enabled():  # create_graph=True
            grads = tuple(None if x is None else _OnlyOnce.apply(x, *ctx.saved_tensors) for x in grads)  # type: ignore[no-untyped-call]
        return grads

    @staticmethod
    def _gradients(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors[:3]
        inputs = (query, key, value, *ctx.originals)
        needed = ctx.needs_input_grad[2:]
        if grad is None and grad_lse is None:
            return (None,) * (2 + len(inputs))
        ctx.functions.check_unchanged(query, key)
        grads = [torch.zeros_like(x) if need else None for x, need in zip(inputs, needed, strict=True)]
        for tile in _tiles(ctx.functions.blocks, query, key):
            _add_gradients(ctx.functions, tile, inputs, grads, (grad, grad_lse))
        return None, None, *grads


class _OnlyOnce(torch.autograd.Function):
    """Raise an error if a gradient is differentiated, because its derivative would silently be 0."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *inputs: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        raise ArgumentError(
            "flex_attention has no second derivative for a score_mod or mask_mod without a known formula; "
            "regard.explain gives the reason. Call backward without create_graph=True."
        )


def _add_gradients(
    functions: Functions,
    tile: "_Tile",
    inputs: tuple[Tensor, ...],
    grads: list[Tensor | None],
    output_grads: tuple[Tensor | None, Tensor | None],
) -> None:
    """Add the gradients of one tile to `grads`."""
    query, key, value, *captured = inputs
    parts = (*tile.take(query, key, value), *captured)
    # separate leaves, because a captured tensor may depend on another captured tensor or on the query
    leaves = [x.detach().requires_grad_(g is not None) for x, g in zip(parts, grads, strict=True)]
    replacements = {id(x): leaf for x, leaf in zip(captured, leaves[3:], strict=True)}
    wanted = [i for i, total in enumerate(grads) if total is not None]
    with torch.enable_grad(), autocast_off(query.device.type):
        results = _attend(functions, tile, leaves[0], leaves[1], leaves[2], replacements)[:2]
        pairs = [
            (result, grad[tile.rows_index])
            for result, grad in zip(results, output_grads, strict=True)
            if grad is not None and result.requires_grad
        ]
        if not pairs:
            return
        outputs, tile_grads = zip(*pairs, strict=True)
        input_grads = torch.autograd.grad(outputs, [leaves[i] for i in wanted], tile_grads, allow_unused=True)
    for i, part in zip(wanted, input_grads, strict=True):
        total = grads[i]
        if part is not None and total is not None:
            tile.add(total, part, axis=i)


class _Tile(NamedTuple):
    """Batches, key heads, query heads, query rows and keys (a slice, or indices) of a tile."""

    batch: slice
    groups: slice
    heads: slice
    rows: slice
    keys: slice | Tensor
    shared_batch: bool  # whether all batch entries share one key and value

    @property
    def rows_index(self) -> tuple[slice, ...]:
        return self.batch, self.heads, self.rows

    @property
    def keys_index(self) -> tuple[Any, ...]:
        return slice(None) if self.shared_batch else self.batch, self.groups, self.keys

    def take(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query[self.rows_index], key[self.keys_index], value[self.keys_index]

    def add(self, total: Tensor, part: Tensor, axis: int) -> None:
        """Add a gradient of query (axis 0), key (1), value (2) or a captured tensor."""
        if axis == 0:
            total[self.rows_index] += part
        elif axis > 2:
            total += part
        elif isinstance(self.keys, slice):
            total[self.keys_index] += part
        else:
            total[self.keys_index[:2]].index_add_(2, self.keys, part)

    def key_indices(self, device: torch.device) -> Tensor:
        if isinstance(self.keys, Tensor):
            return self.keys
        return torch.arange(self.keys.start, self.keys.stop, device=device)


def _tiles(blocks: Blocks | None, query: Tensor, key: Tensor) -> Iterator[_Tile]:
    """Divide a call into tiles of about `TILE` scores, with many rows of a few heads."""
    batch, heads, queries = query.shape[:3]
    groups, keys = key.shape[1:3]
    per_group, width = heads // max(groups, 1), max(keys, 1)
    step = min(max(TILE // (width * per_group), 1), max(queries, 1))
    if blocks is not None and step > blocks.rows:
        step -= step % blocks.rows
    group_step = max(TILE // (width * per_group * step), 1)
    batch_step = max(group_step // max(groups, 1), 1)
    for batch_part in _slices(batch, batch_step):
        for group_part in _slices(groups, group_step):
            head_part = slice(group_part.start * per_group, group_part.stop * per_group)
            for rows in _slices(queries, step):
                visible = _visible_keys(blocks, batch_part, head_part, rows, keys)
                yield _Tile(batch_part, group_part, head_part, rows, visible, key.shape[0] < batch)


def _slices(size: int, step: int) -> Iterator[slice]:
    for begin in range(0, size, step):
        yield slice(begin, min(begin + step, size))


def _visible_keys(
    blocks: Blocks | None, batch: slice, heads: slice, rows: slice, keys: int
) -> slice | Tensor:
    """Return the keys in the blocks visible to the given rows, as a slice if they are contiguous."""
    if blocks is None:
        return slice(0, keys)
    listed = (blocks.tile(batch, heads, rows) != 0).flatten(0, 2).any(0).nonzero().flatten()
    if not len(listed):
        return slice(0, 0)
    first, last = int(listed[0]), int(listed[-1]) + 1
    if len(listed) == last - first:
        return slice(first * blocks.columns, min(last * blocks.columns, keys))
    indices = listed[:, None] * blocks.columns + torch.arange(blocks.columns, device=listed.device)
    return indices[indices < keys]


def _attend(
    functions: Functions,
    tile: _Tile,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    replacements: Mapping[int, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, logsumexp and maximum of one tile.

    replacements: see `Substitution`.
    """
    nan_safe = not all(math.isfinite(x.detach().sum().item()) for x in (query, key, value))
    groups = key.shape[1]
    problem = Problem(
        ProblemConfig(Softmax(), scale=functions.scale, nan_safe=nan_safe),
        {"query": query.unflatten(1, (groups, -1)), "key": key.unsqueeze(2)},  # b g r q d, b g 1 k d
    )
    scores = _modify(functions, tile, reference.raw_scores(problem).flatten(1, 2), replacements)
    largest = scores.new_full(scores.shape[:-1], -math.inf)
    if scores.shape[-1]:
        largest = scores.detach().amax(-1)
    empty = largest == -math.inf
    shift = torch.where(empty, 0.0, largest)
    weights = torch.exp(scores - shift[..., None])
    total = torch.where(empty, 1.0, weights.sum(-1))
    # the derivative at a masked key is zero, even if its value is not finite
    weights = torch.where(scores == -math.inf, 0.0, weights / total[..., None]).unflatten(1, (groups, -1))
    output = reference.product(weights, value.unsqueeze(2), nan_safe=nan_safe).flatten(1, 2)
    return output, torch.where(empty, -math.inf, shift + torch.log(total)), largest


def _modify(functions: Functions, tile: _Tile, scores: Tensor, replacements: Mapping[int, Tensor]) -> Tensor:
    """Apply mask_mod and score_mod to the scores (b, h, q, k) of a tile."""
    device = scores.device
    b, h, q = (
        torch.arange(part.start, part.stop, device=device) for part in (tile.batch, tile.heads, tile.rows)
    )
    k = tile.key_indices(device)
    if not scores.numel():
        return scores
    allowed = None
    if functions.blocks is not None:
        kinds = functions.blocks.tile(tile.batch, tile.heads, tile.rows)
        rows = q // functions.blocks.rows - tile.rows.start // functions.blocks.rows
        kinds = kinds[:, :, rows[:, None], k // functions.blocks.columns]
        allowed = kinds == 2
        if functions.mask_mod is not None:
            allowed = allowed | ((kinds == 1) & map_mask(functions.mask_mod, b, h, q, k))
    if allowed is not None and functions.score_mod is not None:
        # otherwise, NaN scores of masked pairs would reach the gradients
        scores = torch.where(allowed | scores.isfinite(), scores, 0.0)
    if functions.score_mod is not None:
        scores = map_scores(functions.score_mod, scores, b, h, q, k, replacements=replacements).to(
            scores.dtype
        )
    return scores if allowed is None else torch.where(allowed, scores, -math.inf)
