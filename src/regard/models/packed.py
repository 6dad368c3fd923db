"""Batches of sentences with different lengths, packed end to end or padded to the longest sentence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard._util.text import pluralize, type_name
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.mechanism.masks.algebra import Mask
from regard.mechanism.masks.by_length import Documents, Padding
from regard.mechanism.masks.by_position import Causal, Rule
from regard.mechanism.torch_state import concrete


@dataclass(frozen=True, eq=False)  # comparing tensors gives no single truth value
class Packed:
    """Sentences packed end to end, without padding: `tokens` (n) and sentence `lengths` (b).

    >>> import regard.models
    >>> batch = regard.models.Packed.of([[5, 6, 7], [8, 9]])
    >>> batch.tokens, batch.lengths, batch.positions
    (tensor([5, 6, 7, 8, 9]), tensor([3, 2]), tensor([0, 1, 2, 0, 1]))
    >>> batch.pad(batch.tokens)
    tensor([[5, 6, 7],
            [8, 9, 0]])
    """

    tokens: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        _check_integers("Packed", tokens=self.tokens, lengths=self.lengths)
        if self.tokens.dim() != 1 or self.lengths.dim() != 1:
            raise ShapeError(
                f"Packed got tokens of shape {tuple(self.tokens.shape)} and lengths of shape "
                f"{tuple(self.lengths.shape)}; both must have one axis. For lists, use Packed.of([[5, 6], "
                "[7]])."
            )
        if not concrete(self.lengths):
            return
        if len(self.lengths) and int(self.lengths.min()) < 0:
            raise ArgumentError(
                f"Packed got a length of {int(self.lengths.min())}; lengths must be at least 0."
            )
        if int(self.lengths.sum()) != len(self.tokens):
            raise ShapeError(
                f"Packed got {pluralize(len(self.tokens), 'token')} and lengths that sum to "
                f"{int(self.lengths.sum()):,}; the lengths must sum to the number of tokens."
            )

    @classmethod
    def of(cls, sentences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> "Packed":
        """Pack lists of token ids."""
        try:
            tokens = torch.tensor([token for sentence in sentences for token in sentence])
            lengths = torch.tensor([len(sentence) for sentence in sentences], dtype=torch.long)
            if len(tokens):  # an empty list becomes a float tensor
                _check_integers("Packed.of", tokens=tokens)
        except (TypeError, ValueError, RuntimeError):
            raise DTypeError(
                f"Packed.of got {type_name(sentences)} whose items are not lists of token ids; pass "
                "lists of integers: Packed.of([[5, 6], [7]])."
            ) from None
        return cls(tokens.long().to(device), lengths.to(device))

    @property
    def positions(self) -> Tensor:
        """Position of each token in its sentence, starting from 0: (n)."""
        starts = self.lengths.cumsum(0) - self.lengths
        return torch.arange(len(self.tokens), device=self.tokens.device) - self.per_token(starts)

    @property
    def sentences(self) -> Tensor:
        """Index of each token's sentence: (n)."""
        return self.per_token(torch.arange(len(self.lengths), device=self.lengths.device))

    def per_token(self, x: Tensor) -> Tensor:
        """Repeat each sentence's value for all of its tokens: b … -> n …."""
        return torch.repeat_interleave(x, self.lengths, dim=0, output_size=len(self.tokens))

    def mask(self, within: Rule | None = None) -> Documents:
        """Return a mask that restricts attention to the same sentence and applies the rule `within` in it."""
        return Documents(self.lengths, within=within)

    def __len__(self) -> int:
        return len(self.lengths)

    def pad(self, x: Tensor, value: float = 0) -> Tensor:
        """Pad the values of packed tokens: n … -> b l …."""
        longest = int(self.lengths.max()) if len(self) else 0
        padded = x.new_full((len(self), longest, *x.shape[1:]), value)
        padded[self.sentences, self.positions] = x
        return padded

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split the values of packed tokens into one tensor per sentence."""
        return x.split(self.lengths.tolist())

    def ends(self) -> Tensor:
        """Return the index of the last token of each sentence: (b)."""
        return self.lengths.cumsum(0) - 1

    def inputs(self) -> "Packed":
        """Return decoder inputs: each sentence without its last token."""
        return self._drop_one(first=0)

    def labels(self) -> "Packed":
        """Return labels: each sentence without its first token."""
        return self._drop_one(first=1)

    def _drop_one(self, first: int) -> "Packed":
        """Drop the first token of each sentence if `first` is 1, or the last token if it is 0."""
        if concrete(self.lengths) and len(self) and int(self.lengths.min()) == 0:
            empty = int((self.lengths == 0).nonzero()[0])
            raise ArgumentError(
                f"Sentence {empty} has no tokens. Every sentence needs a start token and an end token."
            )
        n, lengths = len(self.tokens) - len(self), self.lengths - 1
        sentence = torch.arange(len(self), device=self.lengths.device)
        # number of tokens dropped before each remaining token
        dropped = torch.repeat_interleave(sentence, lengths, output_size=n)
        rows = torch.arange(n, device=self.tokens.device) + dropped + first
        return Packed(self.tokens[rows], lengths)


def pack(tokens: Tensor, lengths: Tensor) -> Packed:
    """Pack a padded batch.

    tokens: (b, l). lengths: number of tokens in each row, (b).

    >>> import torch, regard.models
    >>> regard.models.pack(torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([3, 2])).tokens
    tensor([5, 6, 7, 8, 9])
    """
    check_lengths(tokens, lengths)
    return Packed(tokens[token_mask(tokens, lengths)], lengths)


def token_mask(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Return a boolean mask (b, l), True for tokens and False for padding."""
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None].to(tokens.device)


def as_packed(tokens: Tensor | Packed, lengths: Tensor | None = None) -> Packed:
    """Convert a batch to Packed."""
    check_batch(tokens, lengths)
    return tokens if isinstance(tokens, Packed) else pack(tokens, full_lengths(tokens, lengths))


def as_padded(tokens: Tensor | Packed, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Convert a batch to padded tokens (b, l) and lengths (b)."""
    check_batch(tokens, lengths)
    if isinstance(tokens, Packed):
        return tokens.pad(tokens.tokens), tokens.lengths
    return tokens, full_lengths(tokens, lengths)


def full_lengths(tokens: Tensor, lengths: Tensor | None) -> Tensor:
    """Return `lengths`, or the full row length for each row of a batch (b, l, …) if `lengths` is None."""
    if lengths is not None:
        return lengths
    return torch.full(tokens.shape[:1], tokens.shape[1], device=tokens.device)


def reversed_order(tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return indices (b, l) that reverse each sentence but not its padding. They are their own inverse."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    if lengths is None:
        return positions.flip(1)
    return torch.where(
        token_mask(tokens, lengths), lengths[:, None].to(tokens.device) - 1 - positions, positions
    )


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """Reorder x (…, l, m) by indices (…, l)."""
    return x.gather(-2, order[..., None].expand_as(x))


class ModelInput(NamedTuple):
    """Token ids, their positions and their attention mask."""

    tokens: Tensor
    positions: Tensor
    mask: Mask | None

    @classmethod
    def of(
        cls,
        tokens: Tensor | Packed,
        lengths: Tensor | None = None,
        *,
        causal: bool = False,
        start: int = 0,
        name: str = "tokens",
    ) -> "ModelInput":
        """Create an input from Packed tokens, or from padded tokens (b, l) that start at position `start`."""
        check_batch(tokens, lengths, name)
        if isinstance(tokens, Packed):
            return cls(tokens.tokens, tokens.positions, tokens.mask(Causal() if causal else None))
        mask: Mask | None = None if lengths is None else Padding(lengths)
        if causal:
            mask = Causal() if mask is None else Causal() & mask
        return cls(tokens, torch.arange(start, start + tokens.shape[1], device=tokens.device), mask)


def check_batch(tokens: Tensor | Packed, lengths: Tensor | None = None, name: str = "tokens") -> None:
    """Raise an error unless `tokens` is a padded batch (b, l), or a Packed without separate lengths.

    name: name of the caller's argument: "tokens", "source" or "target".
    """
    plural = name == "tokens"
    if isinstance(tokens, Packed):
        if lengths is not None:
            raise ArgumentError(
                f"{name} {'are' if plural else 'is'} Packed, which already has {len(tokens)} lengths; omit "
                f"{'lengths' if plural else f'{name}_lengths'}, which is only for padded batches."
            )
        return
    if not isinstance(tokens, Tensor):
        text = " For text, use encoder.embed(text) or translator.translate(text)."
        raise DTypeError(
            f"{name} {'are' if plural else 'is'} {type_name(tokens)}; pass a tensor (b, l), or "
            f"Packed.of(lists).{text if isinstance(tokens, str) else ''}"
        )
    if tokens.dim() != 2:
        raise ShapeError(
            f"{name} {'have' if plural else 'has'} shape {tuple(tokens.shape)}; pass a padded batch (b, l), "
            "tokens[None] for one sentence, or a Packed."
        )
    if lengths is not None:
        check_lengths(tokens, lengths)


def check_lengths(tokens: Tensor, lengths: Tensor) -> None:
    """Raise an error unless each row of a padded batch has a length between 0 and the row's size."""
    _check_integers("a padded batch", lengths=lengths)
    if tokens.dim() != 2 or lengths.shape != tokens.shape[:1]:
        raise ShapeError(
            f"tokens have shape {tuple(tokens.shape)} and lengths {tuple(lengths.shape)}; a padded batch "
            "has shape (b, l), and lengths have shape (b)."
        )
    if not concrete(lengths) or not lengths.numel():
        return
    low, high = (int(bound) for bound in lengths.aminmax())
    if low < 0 or high > tokens.shape[1]:
        raise ShapeError(
            f"A length is {low if low < 0 else high}, but the rows have "
            f"{pluralize(tokens.shape[1], 'token')}; lengths must be between 0 and {tokens.shape[1]}."
        )


def _check_integers(owner: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise DTypeError(
                f"{owner} got {name} of type {type(tensor).__name__}; pass an integer tensor. For lists, use "
                "Packed.of([[5, 6], [7]])."
            )
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
            raise DTypeError(f"{owner} got {name} of dtype {tensor.dtype}; pass integers: {name}.long().")
