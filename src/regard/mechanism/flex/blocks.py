"""Key intervals of a torch `BlockMask`.

For each block of queries, a BlockMask lists the blocks of keys that are visible, either entirely ("full") or
where its mask_mod is True ("partial"). As in torch's compiled kernels, mask_mod applies only to partial
blocks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import MaskError
from regard.mechanism.flex.expressions import Constant, Index, evaluate
from regard.mechanism.flex.functions import map_mask_blocks
from regard.mechanism.flex.intervals import Interval, Intervals, Sizes, solve

_SKIPPED, _PARTIAL, _FULL = 0, 1, 2
_BLOCK = 128  # block size for masks without a BlockMask
_CHUNK = 2**20  # number of query-key pairs evaluated at a time


class Blocks(NamedTuple):
    """The kind of each block (skipped, partial or full) and the block size.

    kinds: (b, h, query blocks, key blocks).
    """

    kinds: Tensor
    rows: int
    columns: int

    @classmethod
    def of(cls, block_mask: Any, sizes: Sizes) -> "Blocks":
        """Read a BlockMask; a batch or head axis of size 1 is broadcast."""
        rows, columns = (
            min(block, max(size, 1)) for block, size in zip(block_mask.BLOCK_SIZE, sizes[2:], strict=True)
        )
        counts, indices = block_mask.kv_num_blocks, block_mask.kv_indices
        lead = tuple(counts.shape[:-1])
        if len(lead) != 2 or lead[0] not in (1, sizes.batch) or lead[1] not in (1, sizes.heads):
            raise MaskError(
                f"block_mask has (batch, heads) = {lead} and query has {tuple(sizes[:2])}; the sizes must be "
                "equal, or 1 in block_mask. Create it with create_block_mask(mask_mod, B, H, …), or with "
                "B=None, H=None."
            )
        shape = (*lead, -(-sizes.queries // rows), -(-sizes.keys // columns))
        kinds = torch.zeros(shape, dtype=torch.int8, device=counts.device)
        _mark(kinds, counts, indices, _PARTIAL)
        if block_mask.full_kv_num_blocks is not None:
            _mark(kinds, block_mask.full_kv_num_blocks, block_mask.full_kv_indices, _FULL)
        return cls(kinds, rows, columns)

    @classmethod
    def partial(cls, sizes: Sizes, device: torch.device) -> "Blocks":
        """Return partial blocks that cover all queries and keys."""
        shape = (1, 1, -(-sizes.queries // _BLOCK), -(-sizes.keys // _BLOCK))
        return cls(torch.full(shape, _PARTIAL, dtype=torch.int8, device=device), _BLOCK, _BLOCK)

    def tile(self, batch: slice, heads: slice, rows: slice) -> Tensor:
        """Return the kinds of the blocks that contain the given rows, (b, h, query blocks, key blocks)."""
        kinds = self.kinds[batch if self.kinds.shape[0] > 1 else slice(None)]
        kinds = kinds[:, heads if kinds.shape[1] > 1 else slice(None)]
        return kinds[:, :, rows.start // self.rows : -(-rows.stop // self.rows)]


def _mark(kinds: Tensor, counts: Tensor, indices: Tensor, kind: int) -> None:
    """Set the listed blocks to `kind`. Entries of `indices` beyond `counts` are unused and arbitrary."""
    rows, columns = kinds.shape[-2:]
    counts, indices = counts[..., :rows], indices[..., :rows, :columns].to(torch.int64)
    listed = torch.arange(indices.shape[-1], device=kinds.device) < counts[..., None]
    b, h, row, entry = listed.nonzero().unbind(-1)
    column = indices[b, h, row, entry]
    inside = column < columns
    kinds[b[inside], h[inside], row[inside], column[inside]] = kind


Condition = Constant | Index | Callable[..., Tensor]


def find_intervals(blocks: Blocks, condition: Condition, sizes: Sizes) -> Intervals | None:
    """Return the intervals of keys that each query may attend to, or None if they are unknown or too many.

    condition: determines the visible pairs in partial blocks; a traced expression or a mask_mod function.
    """
    if isinstance(condition, Constant | Index):
        solved = solve(condition, sizes, blocks.kinds.device)
        if solved is not None and _agree(solved, blocks, sizes):
            return solved
    return _evaluate_blocks(blocks, condition, sizes)


def _agree(mask: Intervals, blocks: Blocks, sizes: Sizes) -> bool:
    """Whether the mask hides all keys in skipped blocks and allows all keys in full blocks.

    This is not guaranteed, because a BlockMask may list blocks that contradict its mask_mod.
    """
    begin = torch.arange(blocks.kinds.shape[-1], device=blocks.kinds.device) * blocks.columns
    end = (begin + blocks.columns).clamp(max=sizes.keys)
    rows = torch.arange(sizes.queries, device=blocks.kinds.device) // blocks.rows
    kinds = blocks.kinds[:, :, rows]
    touched = covered = torch.zeros((), dtype=torch.bool, device=blocks.kinds.device)
    for start, stop in mask.parts:
        touched = touched | ((torch.maximum(start, begin)) < torch.minimum(stop, end))
        covered = covered | ((start <= begin) & (stop >= end))
    wrong = ((kinds == _SKIPPED) & touched) | ((kinds == _FULL) & ~covered)
    return not bool(wrong.any())


def _evaluate_blocks(blocks: Blocks, condition: Condition, sizes: Sizes) -> Intervals | None:
    """Evaluate the condition in partial blocks; return None if a query's keys are not one interval."""
    depends = _depends(condition)
    lead = [
        max(size, total if name in depends else 1)
        for name, size, total in zip("bh", blocks.kinds.shape[:2], sizes[:2], strict=True)
    ]
    kinds = blocks.kinds.expand(*lead, -1, -1)
    start, stop, count = _full_rows(kinds, blocks, sizes)
    for at, allowed in _partial_blocks(kinds, blocks, condition, sizes):
        keys = at["k"]
        first = torch.where(allowed, keys, sizes.keys).amin(-1)
        last = torch.where(allowed, keys + 1, 0).amax(-1)
        row = (((at["b"] * lead[1] + at["h"]) * sizes.queries) + at["q"])[..., 0].flatten()
        start.view(-1).scatter_reduce_(0, row, first.flatten(), "amin")
        stop.view(-1).scatter_reduce_(0, row, last.flatten(), "amax")
        count.view(-1).scatter_add_(0, row, allowed.sum(-1).flatten())
    if bool(((stop - start).clamp(min=0) != count).any()):
        return None
    return Intervals((Interval(start[..., None], stop[..., None]),))


def _depends(condition: Condition) -> frozenset[str]:
    if isinstance(condition, Constant):
        return frozenset()
    return condition.depends if isinstance(condition, Index) else frozenset("bh")


def _full_rows(kinds: Tensor, blocks: Blocks, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Return the start, stop and number of each query's keys in full blocks: (b, h, q)."""
    full = kinds == _FULL
    begin = torch.arange(kinds.shape[-1], device=kinds.device) * blocks.columns
    end = (begin + blocks.columns).clamp(max=sizes.keys)
    start = torch.where(full, begin, sizes.keys).amin(-1)
    stop = torch.where(full, end, 0).amax(-1)
    count = torch.where(full, end - begin, 0).sum(-1)
    rows = torch.arange(sizes.queries, device=kinds.device) // blocks.rows
    return start[..., rows], stop[..., rows], count[..., rows]


def _partial_blocks(kinds: Tensor, blocks: Blocks, condition: Condition, sizes: Sizes) -> Any:
    """Yield the indices and the visible pairs of partial blocks, a bounded number at a time."""
    positions = (kinds == _PARTIAL).nonzero()
    row = torch.arange(blocks.rows, device=kinds.device)[:, None]
    column = torch.arange(blocks.columns, device=kinds.device)
    for chunk in positions.split(max(_CHUNK // (blocks.rows * blocks.columns), 1)):
        b, h, row_block, column_block = (x[:, None, None] for x in chunk.unbind(-1))
        queries, keys = row_block * blocks.rows + row, column_block * blocks.columns + column
        inside = (queries < sizes.queries) & (keys < sizes.keys)
        # blocks may extend beyond the last token, which is then repeated; `inside` excludes the repetitions
        at = {"b": b, "h": h, "q": queries.clamp(max=sizes.queries - 1), "k": keys.clamp(max=sizes.keys - 1)}
        yield at, inside & _holds(condition, at)


def _holds(condition: Condition, at: dict[str, Tensor]) -> Tensor:
    if isinstance(condition, Constant | Index):
        return evaluate(condition, at).to(torch.bool)
    b, h, queries, keys = at.values()
    return map_mask_blocks(condition, b.flatten(), h.flatten(), queries[..., 0], keys[:, 0])
