"""Keys and values kept between decoding steps, for the source (`KeyValues`) and the target (`KVCache`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from regard._util.checks import check_int
from regard.errors import DTypeError, ShapeError


class RowMap:
    """A mapping from batch rows to source rows, so that all hypotheses of a beam share one source.

    sources: number of source rows. source_of_row: (b), source row of each batch row; default: 0, 1, 2, …

    >>> import torch
    >>> from regard.models.layers.kv_cache import RowMap
    >>> rows, _ = RowMap(2).select(torch.tensor([0, 0, 1]))
    >>> queries = torch.tensor([5.0, 6.0, 7.0])[:, None, None, None]  # three rows, one head, one query
    >>> rows.group(queries).squeeze()
    tensor([[5., 6.],
            [7., 0.]])
    >>> torch.equal(rows.ungroup(rows.group(queries)), queries)
    True
    """

    def __init__(self, sources: int, source_of_row: Tensor | None = None) -> None:
        self.sources, self.source_of_row, self.slots = sources, source_of_row, 1
        self._full = True  # every source has `slots` rows, in order
        self.index: Tensor | None = None  # index of each row after `spread`; None if no row moves
        if source_of_row is None:
            return
        row = torch.arange(len(source_of_row), device=source_of_row.device)
        if len(source_of_row) == sources and torch.equal(source_of_row, row):
            self.source_of_row = None
            return
        counts, order = source_of_row.bincount(minlength=sources), source_of_row.argsort(stable=True)
        first = counts.cumsum(0) - counts  # index in `order` of each source's first row
        slot = torch.empty_like(source_of_row).scatter_(0, order, row - first[source_of_row[order]])
        self.slots = int(counts.max())
        self._index = source_of_row * self.slots + slot
        self._full = len(row) == sources * self.slots and torch.equal(self._index, row)
        self.index = None if self._full else self._index

    def select(self, rows: Tensor) -> "tuple[RowMap, Tensor | None]":
        """Select batch rows; return a new map and the source rows to keep, or None to keep all of them."""
        selected = rows.long() if self.source_of_row is None else self.source_of_row[rows]
        if self.source_of_row is not None and torch.equal(selected, self.source_of_row):
            return self, None
        used, renumbered = selected.unique(return_inverse=True)
        if 4 * len(used) <= 3 * self.sources:
            return RowMap(len(used), renumbered), used
        return RowMap(self.sources, selected), None

    def group(self, queries: Tensor) -> Tensor:
        """Place all queries for a source next to each other: b h q d -> sources h (slots q) d."""
        if self.source_of_row is None:
            return queries
        grouped = queries.new_zeros(self.sources * self.slots, *queries.shape[1:])
        grouped = grouped.index_copy_(0, self._index, queries).unflatten(0, (self.sources, self.slots))
        return grouped.transpose(1, 2).flatten(2, 3)

    def ungroup(self, output: Tensor) -> Tensor:
        """Undo `group`: sources h (slots q) e -> b h q e."""
        if self.source_of_row is None:
            return output
        output = output.unflatten(2, (self.slots, -1)).transpose(1, 2).flatten(0, 1)
        return output.index_select(0, self._index)

    def spread(self, x: Tensor) -> Tensor:
        """Place the rows of each source next to each other: b m -> (sources slots) m; empty slots are 0."""
        if self._full:
            return x
        return x.new_zeros(self.sources * self.slots, x.shape[1]).index_copy_(0, self._index, x)

    def collect(self, x: Tensor) -> Tensor:
        """Undo `spread`: (sources slots) m -> b m."""
        return x if self._full else x.index_select(0, self._index)

    def __len__(self) -> int:
        return self.sources if self.source_of_row is None else len(self.source_of_row)


class KeyValues(NamedTuple):
    """Projected keys and values (…, g, k, ·) of a source, computed once for all decoding steps.

    key, value: from `MultiHeadAttention.project_source`.
    row_map: mapping from batch rows to source rows, or None if they are the same.

    >>> import torch, regard
    >>> layer, source = regard.models.MultiHeadAttention(16, 4), torch.randn(7, 16)
    >>> projected = layer.project_source(source)
    >>> projected.key.shape
    torch.Size([4, 7, 4])
    >>> x = torch.randn(3, 16)
    >>> torch.allclose(layer(x, projected), layer(x, source), atol=1e-6)
    True
    """

    key: Tensor
    value: Tensor
    row_map: RowMap | None = None

    def select(self, rows: Tensor) -> "KeyValues":
        """Select source rows."""
        return KeyValues(self.key[rows], self.value[rows])

    def group(self, queries: Tensor) -> Tensor:
        """Group queries by source: b h q d -> sources h (slots q) d."""
        return queries if self.row_map is None else self.row_map.group(queries)

    def ungroup(self, output: Tensor) -> Tensor:
        """Undo `group`: sources h (slots q) e -> b h q e."""
        return output if self.row_map is None else self.row_map.ungroup(output)


class KVCache:
    """Keys and values of the previous tokens, for step-by-step decoding.

    >>> import torch, regard
    >>> layer, cache, x = (
    ...     regard.models.MultiHeadAttention(16, 4),
    ...     regard.models.KVCache(),
    ...     torch.randn(1, 3, 16),
    ... )
    >>> with torch.no_grad():
    ...     at_once = layer(x, mask=regard.Causal())
    ...     steps = [layer(x[:, i : i + 1], mask=regard.Causal(), cache=cache) for i in range(3)]
    >>> torch.allclose(torch.cat(steps, 1), at_once, atol=1e-6)
    True
    """

    def __init__(self) -> None:
        self.length = 0
        # … k (g d + g e), with spare capacity; one tensor, because beam search copies whole rows
        self._buffer: Tensor | None = None
        self._sizes = 0, 0, 0  # g, d, e
        self._spare: Tensor | None = None  # the buffer before the last `select`, if no views of it exist
        self._recycles = False  # True if no views of the buffer exist, because only `append` filled it

    def extend(self, key: Tensor, value: Tensor) -> KeyValues:
        """Append keys and values (…, g, k, ·) and return all of them."""
        self._check(key, value)
        self._spare, self._recycles = None, False  # the caller may keep views of the buffer
        self._sizes = key.shape[-3], key.shape[-1], value.shape[-1]
        previous, self.length = self.length, self.length + key.shape[-2]
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            new = torch.cat([part.transpose(-3, -2).flatten(-2) for part in (key, value)], -1)
            old = self._buffer
            self._buffer = new if old is None else torch.cat([old[..., :previous, :], new], -2)
            return self._view(0)
        self._buffer = self._grow(previous, key)
        for slot, new in zip(self._view(previous)[:2], (key, value), strict=True):
            # .data: earlier slices do not change, so their version counters must not change either
            slot.data.copy_(new.detach())
        return self._view(0)

    def append(self, row: Tensor, sizes: tuple[int, int, int]) -> Tensor:
        """Append the keys and values of one token per row, (b, g d + g e), without checks or gradients.

        Returns the buffer (b, capacity, g d + g e). It is valid until the next method call, because `select`
        recycles it.
        """
        buffer = self.reserve(row, sizes)
        buffer[:, self.length] = row
        self.length += 1
        return buffer

    def reserve(self, like: Tensor, sizes: tuple[int, int, int]) -> Tensor:
        """Return the buffer (b, capacity, g d + g e) with room for one more token; see `append`.

        like: a tensor with b rows. sizes: g, d, e.
        """
        self._sizes, length, (heads, width, value_width) = sizes, self.length, sizes
        if self._buffer is None or self._buffer.shape[1] <= length:
            buffer = like.new_empty(len(like), max(16, 2 * length), heads * (width + value_width))
            if self._buffer is not None:
                buffer[:, :length] = self._buffer[:, :length]
            self._buffer, self._spare = buffer, None
        self._recycles = True
        return self._buffer

    def rows(self, rows: Tensor) -> Tensor:
        """Return a copy of the keys and values in the given rows: (rows, tokens, g d + g e)."""
        assert self._buffer is not None
        return self._buffer[:, : self.length].index_select(0, rows)

    @contextmanager
    def extending(self, key: Tensor, value: Tensor) -> Iterator[KeyValues]:
        """Extend the cache as in `extend`, but undo the change if the `with` block raises an exception."""
        previous = self.length
        extended = self.extend(key, value)
        try:
            yield extended
        except BaseException:
            self.crop(previous)
            raise

    def _check(self, key: Tensor, value: Tensor) -> None:
        if key.shape[:-1] != value.shape[:-1]:
            raise ShapeError(
                f"KVCache got keys of shape {tuple(key.shape)} and values of shape {tuple(value.shape)}; "
                "only the last axis may differ."
            )
        if self._buffer is None:
            return
        cached = self._view(0)
        for name, old, new in (("keys", cached.key, key), ("values", cached.value, value)):
            if old.shape[:-2] != new.shape[:-2] or old.shape[-1] != new.shape[-1]:
                raise ShapeError(
                    f"KVCache holds {name} of shape {tuple(old.shape)} and got {name} of shape "
                    f"{tuple(new.shape)}; use a new KVCache() for each layer and each batch."
                )
            if old.dtype != new.dtype:
                raise DTypeError(
                    f"KVCache holds {name} of dtype {old.dtype}, but got {name} of dtype {new.dtype}; "
                    f"continue in {old.dtype}, or use a new KVCache()."
                )

    def _view(self, start: int) -> KeyValues:
        """Return keys and values, starting at token `start`, as views of the buffer."""
        assert self._buffer is not None
        heads, width, value_width = self._sizes
        parts = self._buffer[..., start : self.length, :].split([heads * width, heads * value_width], -1)
        return KeyValues(*(part.unflatten(-1, (heads, -1)).transpose(-3, -2) for part in parts))

    def _grow(self, previous: int, key: Tensor) -> Tensor:
        """Return a buffer with capacity for `length` tokens: the current one, or a larger copy."""
        if self._buffer is not None and self._buffer.shape[-2] >= self.length:
            return self._buffer
        heads, width, value_width = self._sizes
        capacity = max(16, 2 * previous, self.length)
        buffer = key.new_empty(*key.shape[:-3], capacity, heads * (width + value_width))
        if self._buffer is not None:
            buffer[..., :previous, :] = self._buffer[..., :previous, :]
        return buffer

    def select(self, rows: Tensor) -> None:
        """Keep only the given batch rows, in the given order (for beam search)."""
        if self._buffer is None:
            return
        if self._buffer.requires_grad:
            self._buffer = self._buffer.index_select(0, rows)
            return
        # a different buffer, because the caller of `extend` may still have views of the old one
        buffer = self._other(len(rows))
        source, target = self._buffer[..., : self.length, :], buffer[..., : self.length, :]
        torch.index_select(source, 0, rows, out=target)
        self._spare = self._buffer if self._recycles else None
        self._buffer = buffer

    def _other(self, rows: int) -> Tensor:
        """Return an uninitialized buffer with this number of rows, recycled if possible."""
        assert self._buffer is not None
        spare, shape = self._spare, self._buffer.shape[1:]
        if spare is not None and spare.shape[1:] == shape and len(spare) >= rows:
            return spare[:rows]
        return self._buffer.new_empty(rows, *shape)

    def crop(self, length: int) -> None:
        """Keep only the first `length` tokens."""
        check_int("crop got length", length)
        if length < self.length and self._buffer is not None:
            self._buffer = self._buffer[..., :length, :].clone()
            self.length = length

    def __repr__(self) -> str:
        return f"KVCache(<{self.length} tokens>)"
