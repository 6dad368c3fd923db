"""The sequences of a padded batch without their padding, packed end to end."""

from typing import Any

from torch import Tensor

from regard.mechanism.masks.by_length import Documents
from regard.mechanism.masks.by_position import Rule


class Sequences:
    """Consecutive packed sequences, and their attention masks.

    >>> import torch
    >>> from regard.inspection.huggingface.packed_batch import Sequences
    >>> sequences = Sequences(torch.tensor([2, 3, 1, 4]))
    >>> sequences.attention_mask(None)
    Documents([2, 3, 1, 4])
    >>> [part.lengths.tolist() for part in sequences.chunks(5)]
    [[2, 3], [1, 4]]
    """

    def __init__(self, lengths: Tensor) -> None:
        self.lengths, self.tokens = lengths, int(lengths.sum())
        self._masks: dict[Rule | None, Documents] = {}
        self._chunks: dict[int, list[Sequences]] = {}

    def attention_mask(self, rule: Rule | None) -> Documents:
        """Return a mask that separates the sequences and applies a causal or window rule inside each."""
        if rule not in self._masks:
            self._masks[rule] = Documents(self.lengths, within=rule)
        return self._masks[rule]

    def chunks(self, tokens: int) -> "list[Sequences]":
        """Split the sequences into parts of about this many tokens each."""
        if tokens not in self._chunks:
            n = max(round(self.tokens / tokens), 1)
            middle = self.lengths.cumsum(0) - self.lengths / 2
            part = (middle * n / max(self.tokens, 1)).long().clamp(max=n - 1)
            sizes = part.bincount(minlength=n).tolist()
            parts = (Sequences(lengths) for lengths in self.lengths.split(sizes))
            self._chunks[tokens] = [sequences for sequences in parts if sequences.tokens]
        return self._chunks[tokens]


class Packing:
    """The tokens of a padded batch that are not padding.

    mask: (b, n), nonzero for tokens.

    >>> import torch
    >>> from regard.inspection.huggingface.packed_batch import Packing
    >>> packing = Packing(torch.tensor([[1, 1, 0], [1, 1, 1]]))
    >>> packing.pack(torch.tensor([[1, 2, 0], [3, 4, 5]]))
    tensor([[1, 2, 3, 4, 5]])
    >>> packing.unpack(torch.tensor([[1, 2, 3, 4, 5]]))
    tensor([[1, 2, 0],
            [3, 4, 5]])
    """

    def __init__(self, mask: Tensor) -> None:
        visible = mask != 0
        self.shape = tuple(visible.shape)
        self.index = visible.flatten().nonzero().squeeze(-1)
        self.sequences = Sequences(visible.sum(-1).cpu())
        # the padded output of a layer, its version, and the same output packed
        self._last: tuple[Tensor, int, Tensor] | None = None

    def pack(self, x: Tensor) -> Tensor:
        """Remove padding: (b, n, …) or (1, n, …) → (1, tokens, …)."""
        if self._last is not None and self._last[0] is x and self._last[1] == x._version:
            return self._last[2]
        if x.shape[0] != self.shape[0]:
            x = x.expand(self.shape[0], *x.shape[1:])
        return x.flatten(0, 1).index_select(0, self.index)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """Restore the padding as zeros: (1, tokens, …) → (b, n, …)."""
        batch, length = self.shape
        padded = x.new_zeros(batch * length, *x.shape[2:]).index_copy(0, self.index, x[0])
        padded = padded.unflatten(0, (batch, length))
        # inference tensors have no version counter, so an in-place change would go unnoticed
        self._last = None if padded.is_inference() else (padded, padded._version, x)
        return padded

    def is_padded(self, x: Any) -> bool:
        """Return whether a value is a tensor with one entry per position of the padded batch."""
        return (
            isinstance(x, Tensor)
            and x.dim() > 1
            and x.shape[1] == self.shape[1]
            and x.shape[0] in (1, self.shape[0])
        )

    def is_packed(self, x: Any) -> bool:
        """Return whether a value is a tensor with one entry per packed token."""
        return isinstance(x, Tensor) and x.dim() > 1 and tuple(x.shape[:2]) == (1, len(self.index))
