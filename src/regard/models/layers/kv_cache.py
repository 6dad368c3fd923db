"""Keys and values that are kept: of a source, which all steps read, and of the tokens written so far."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from regard._util.checks import check_int
from regard.errors import DTypeError, ShapeError


class RowMap:
    """Which row of a memory each row of a batch reads, so that many hypotheses read one sentence.

    >>> import torch
    >>> from regard.models.layers.kv_cache import RowMap
    >>> readers, _ = RowMap(2).select(torch.tensor([0, 0, 1]))
    >>> queries = torch.tensor([5.0, 6.0, 7.0])[:, None, None, None]  # three rows, one head, one query
    >>> readers.gather(queries).squeeze()
    tensor([[5., 6.],
            [7., 0.]])
    >>> torch.equal(readers.spread(readers.gather(queries)), queries)
    True
    """

    def __init__(self, memories: int, reads: Tensor | None = None) -> None:
        """reads (b): the number of the memory that each row reads; by default its own."""
        self.memories, self.reads, self.seats = memories, reads, 1
        if reads is None:
            return
        row = torch.arange(len(reads), device=reads.device)
        if len(reads) == memories and torch.equal(reads, row):
            self.reads = None
            return
        readers, order = reads.bincount(minlength=memories), reads.argsort(stable=True)
        first = readers.cumsum(0) - readers  # place of the first reader in that order
        seat = torch.empty_like(reads).scatter_(0, order, row - first[reads[order]])
        self.seats = int(readers.max())
        self._places = reads * self.seats + seat

    def select(self, rows: Tensor) -> "tuple[RowMap, Tensor | None]":
        """These rows of the batch; and the memories to keep, once a quarter of them is not read any more."""
        reads = rows.long() if self.reads is None else self.reads[rows]
        used, number = reads.unique(return_inverse=True)
        if 4 * len(used) <= 3 * self.memories:
            return RowMap(len(used), number), used
        return RowMap(self.memories, reads), None

    def gather(self, queries: Tensor) -> Tensor:
        """The queries of all who read a memory beside each other: b h q d -> memories h (seats q) d."""
        if self.reads is None:
            return queries
        room = queries.new_zeros(self.memories * self.seats, *queries.shape[1:])
        room = room.index_copy_(0, self._places, queries).unflatten(0, (self.memories, self.seats))
        return room.transpose(1, 2).flatten(2, 3)

    def spread(self, output: Tensor) -> Tensor:
        """Back to the rows of the batch: memories h (seats q) e -> b h q e."""
        if self.reads is None:
            return output
        output = output.unflatten(2, (self.seats, -1)).transpose(1, 2).flatten(0, 1)
        return output.index_select(0, self._places)

    def __len__(self) -> int:
        return self.memories if self.reads is None else len(self.reads)


class KeyValues(NamedTuple):
    """Keys and values that are projected once and read many times, both (…, g, k, ·).

    key, value: as `MultiHeadAttention.project_source` made them.
    readers: which row of the batch reads which row of the memory; None if each reads its own.

    >>> import torch, regard
    >>> layer, source = regard.models.MultiHeadAttention(16, 4), torch.randn(7, 16)
    >>> memory = layer.project_source(source)
    >>> memory.key.shape
    torch.Size([4, 7, 4])
    >>> x = torch.randn(3, 16)
    >>> torch.allclose(layer(x, memory), layer(x, source), atol=1e-6)
    True
    """

    key: Tensor
    value: Tensor
    readers: RowMap | None = None

    def select(self, rows: Tensor) -> "KeyValues":
        """These rows of the memory, each with one reader."""
        return KeyValues(self.key[rows], self.value[rows])

    def gather(self, queries: Tensor) -> Tensor:
        """Queries in the order of the memory: b h q d -> memories h (seats q) d."""
        return queries if self.readers is None else self.readers.gather(queries)

    def spread(self, output: Tensor) -> Tensor:
        """Their output in the order of the batch: memories h (seats q) e -> b h q e."""
        return output if self.readers is None else self.readers.spread(output)


class KVCache:
    """The keys and values of the tokens so far, for decoding step by step.

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
        # … k (g d + g e), with place for tokens to come. All of a row in one piece: searching copies rows.
        self._room: Tensor | None = None
        self._sizes = 0, 0, 0  # g, d, e

    def extend(self, key: Tensor, value: Tensor) -> KeyValues:
        """Append keys and values (…, g, k, ·); all that there are now."""
        self._check(key, value)
        self._sizes = key.shape[-3], key.shape[-1], value.shape[-1]
        before, self.length = self.length, self.length + key.shape[-2]
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            new = torch.cat([part.transpose(-3, -2).flatten(-2) for part in (key, value)], -1)
            self._room = new if self._room is None else torch.cat([self._room[..., :before, :], new], -2)
            return self._held(0)
        self._room = self._roomy(before, key)
        for place, new in zip(self._held(before)[:2], (key, value), strict=True):
            # data: nothing that was handed out changes, so it does not count as stale
            place.data.copy_(new.detach())
        return self._held(0)

    @contextmanager
    def extending(self, key: Tensor, value: Tensor) -> Iterator[KeyValues]:
        """`extend`, taken back if what is done with it fails."""
        before = self.length
        memory = self.extend(key, value)
        try:
            yield memory
        except BaseException:
            self.crop(before)
            raise

    def _check(self, key: Tensor, value: Tensor) -> None:
        if key.shape[:-1] != value.shape[:-1]:
            raise ShapeError(
                f"the cache got keys of shape {_shape(key)} and values of shape {_shape(value)}; each key "
                "has a value, so that they may differ in their last axis alone."
            )
        if self._room is None:
            return
        held = self._held(0)
        for name, old, new in (("keys", held.key, key), ("values", held.value, value)):
            if old.shape[:-2] != new.shape[:-2] or old.shape[-1] != new.shape[-1]:
                raise ShapeError(
                    f"the cache holds {name} of shape {_shape(old)} and these are of shape {_shape(new)}; a "
                    "cache serves one layer and one batch. Use a new KVCache()."
                )
            if old.dtype != new.dtype:
                raise DTypeError(
                    f"the cache holds {name} of {old.dtype} and these are of {new.dtype}; go on in the type "
                    "that the cache was begun in, or use a new KVCache()."
                )

    def _held(self, start: int) -> KeyValues:
        """Keys and values of the tokens from `start` on, where they are."""
        assert self._room is not None
        heads, width, value_width = self._sizes
        parts = self._room[..., start : self.length, :].split([heads * width, heads * value_width], -1)
        return KeyValues(*(part.unflatten(-1, (heads, -1)).transpose(-3, -2) for part in parts))

    def _roomy(self, before: int, key: Tensor) -> Tensor:
        """Room for `length` tokens, and what is there already."""
        if self._room is not None and self._room.shape[-2] >= self.length:
            return self._room
        heads, width, value_width = self._sizes
        size = max(16, 2 * before, self.length)
        room = key.new_empty(*key.shape[:-3], size, heads * (width + value_width))
        if self._room is not None:
            room[..., :before, :] = self._room[..., :before, :]
        return room

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order: what beam search does after each step."""
        if self._room is None:
            return
        if self._room.requires_grad:
            self._room = self._room.index_select(0, rows)
            return
        room = self._room.new_empty(len(rows), *self._room.shape[1:])
        held, taken = self._room[..., : self.length, :], room[..., : self.length, :]
        torch.index_select(held, 0, rows, out=taken)  # a new room, as others may hold what was handed out
        self._room = room

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        check_int("crop got length", length)
        if length < self.length and self._room is not None:
            self._room = self._room[..., :length, :].clone()
            self.length = length

    def __repr__(self) -> str:
        return f"KVCache(<{self.length} tokens>)"


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape))
