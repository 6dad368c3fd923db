"""Sentences of different lengths in one batch: packed one after the other, or padded to the longest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.mechanism.mask_algebra import Mask
from regard.mechanism.masks import Causal, Documents, Padding, Rule
from regard.mechanism.torch_state import concrete


@dataclass(frozen=True, eq=False)  # tensors do not compare to one truth
class Packed:
    """Sentences one after the other, without padding: `tokens` (n), and the `lengths` (b) of the sentences.

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
        _whole("Packed", tokens=self.tokens, lengths=self.lengths)
        if self.tokens.dim() != 1 or self.lengths.dim() != 1:
            raise ShapeError(
                f"Packed got tokens of shape {tuple(self.tokens.shape)} and lengths of shape "
                f"{tuple(self.lengths.shape)}; it needs one axis each. Packed.of([[5, 6], [7]]) packs lists."
            )
        if not concrete(self.lengths):
            return
        if len(self.lengths) and int(self.lengths.min()) < 0:
            raise ArgumentError(f"Packed got a length of {int(self.lengths.min())}; a length is at least 0.")
        if int(self.lengths.sum()) != len(self.tokens):
            raise ShapeError(
                f"Packed got {len(self.tokens)} tokens and lengths that add up to {int(self.lengths.sum())}; "
                "every token belongs to one sentence."
            )

    @classmethod
    def of(cls, sentences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> "Packed":
        """Pack lists of token numbers."""
        try:
            tokens = torch.tensor([token for sentence in sentences for token in sentence])
            lengths = torch.tensor([len(sentence) for sentence in sentences], dtype=torch.long)
            if len(tokens):  # without tokens there is no dtype to tell
                _whole("Packed.of", tokens=tokens)
        except (TypeError, ValueError, RuntimeError):
            raise DTypeError(
                f"Packed.of got a {type(sentences).__name__} whose parts are no lists of token numbers; it "
                "packs a list of lists of whole numbers: Packed.of([[5, 6], [7]])."
            ) from None
        return cls(tokens.long().to(device), lengths.to(device))

    @property
    def positions(self) -> Tensor:
        """The place of each token in its own sentence, counted from 0: (n)."""
        starts = self.lengths.cumsum(0) - self.lengths
        return torch.arange(len(self.tokens), device=self.tokens.device) - self.per_token(starts)

    @property
    def sentences(self) -> Tensor:
        """The number of the sentence that each token belongs to: (n)."""
        return self.per_token(torch.arange(len(self.lengths), device=self.lengths.device))

    def per_token(self, x: Tensor) -> Tensor:
        """What is said of each sentence, said of each of its tokens: b … -> n …."""
        return torch.repeat_interleave(x, self.lengths, dim=0, output_size=len(self.tokens))

    def mask(self, within: Rule | None = None) -> Documents:
        """Each token sees those of its own sentence, by this rule inside it."""
        return Documents(self.lengths, within=within)

    def __len__(self) -> int:
        return len(self.lengths)

    def pad(self, x: Tensor, value: float = 0) -> Tensor:
        """Rows of packed tokens as a padded batch: n … -> b l …."""
        longest = int(self.lengths.max()) if len(self) else 0
        padded = x.new_full((len(self), longest, *x.shape[1:]), value)
        padded[self.sentences, self.positions] = x
        return padded

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Rows of packed tokens, as one tensor per sentence."""
        return x.split(self.lengths.tolist())

    def ends(self) -> Tensor:
        """The row of the last token of each sentence: (b)."""
        return self.lengths.cumsum(0) - 1

    def inputs(self) -> "Packed":
        """What a decoder reads: every sentence without its last token."""
        return self._shorter(first=0)

    def outputs(self) -> "Packed":
        """What a decoder should answer: every sentence without its first token."""
        return self._shorter(first=1)

    def _shorter(self, first: int) -> "Packed":
        """All but one token of each sentence, from the token `first` on."""
        if concrete(self.lengths) and len(self) and int(self.lengths.min()) == 0:
            empty = int((self.lengths == 0).nonzero()[0])
            raise ArgumentError(
                f"sentence {empty} has no tokens, so that there is none to take away; give every sentence "
                "a start and an end mark."
            )
        n, lengths = len(self.tokens) - len(self), self.lengths - 1
        number = torch.arange(len(self), device=self.lengths.device)
        before = torch.repeat_interleave(number, lengths, output_size=n)  # tokens taken away, one a sentence
        rows = torch.arange(n, device=self.tokens.device) + before + first
        return Packed(self.tokens[rows], lengths)


def pack(tokens: Tensor, lengths: Tensor) -> Packed:
    """A padded batch (b, l), packed.

    tokens, lengths: the batch, and how many tokens of each row are real, (b).

    >>> import torch, regard.models
    >>> regard.models.pack(torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([3, 2])).tokens
    tensor([5, 6, 7, 8, 9])
    """
    check_lengths(tokens, lengths)
    return Packed(tokens[real(tokens, lengths)], lengths)


def real(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Which places of a padded batch hold a token, and no padding: (b, l)."""
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None].to(tokens.device)


def as_packed(tokens: Tensor | Packed, lengths: Tensor | None = None) -> Packed:
    """Either kind of batch, packed."""
    check_batch(tokens, lengths)
    return tokens if isinstance(tokens, Packed) else pack(tokens, all_lengths(tokens, lengths))


def as_padded(tokens: Tensor | Packed, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Either kind of batch, padded (b, l), and its lengths (b)."""
    check_batch(tokens, lengths)
    if isinstance(tokens, Packed):
        return tokens.pad(tokens.tokens), tokens.lengths
    return tokens, all_lengths(tokens, lengths)


def all_lengths(tokens: Tensor, lengths: Tensor | None) -> Tensor:
    """The lengths (b) of a padded batch (b, l) or (b, l, m); if none are given, every place is real."""
    if lengths is not None:
        return lengths
    return torch.full(tokens.shape[:1], tokens.shape[1], device=tokens.device)


def reversed_places(tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
    """For each place the one whose token stands there when every sentence is turned around: (b, l).

    Padding stays where it is, so that the same order turns the sentences back.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    if lengths is None:
        return places.flip(1)
    return torch.where(real(tokens, lengths), lengths[:, None].to(tokens.device) - 1 - places, places)


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """x (…, l, m) with its places in another order (…, l)."""
    return x.gather(-2, order[..., None].expand_as(x))


class ModelInput(NamedTuple):
    """Tokens laid out for attention: their numbers, their positions, and who may look at whom."""

    tokens: Tensor
    positions: Tensor
    mask: Mask | None

    @classmethod
    def out(
        cls,
        tokens: Tensor | Packed,
        lengths: Tensor | None = None,
        *,
        causal: bool = False,
        start: int = 0,
        name: str = "tokens",
    ) -> "ModelInput":
        """Packed (n) or padded (b, l); `start` is the position of the first token of a padded batch."""
        check_batch(tokens, lengths, name)
        if isinstance(tokens, Packed):
            return cls(tokens.tokens, tokens.positions, tokens.mask(Causal() if causal else None))
        mask: Mask | None = None if lengths is None else Padding(lengths)
        if causal:
            mask = Causal() if mask is None else Causal() & mask
        return cls(tokens, torch.arange(start, start + tokens.shape[1], device=tokens.device), mask)


def check_batch(tokens: Tensor | Packed, lengths: Tensor | None = None, name: str = "tokens") -> None:
    """What every model reads: a Packed, or a padded batch (b, l) with or without its lengths.

    name: what the caller gave it as, "tokens", "source" or "target".
    """
    many = name == "tokens"
    if isinstance(tokens, Packed):
        if lengths is not None:
            raise ArgumentError(
                f"the {name} {'are' if many else 'is'} Packed, and a Packed batch knows its {len(tokens)} "
                f"lengths; leave {'lengths' if many else f'{name}_lengths'} away, for padded batches only."
            )
        return
    if not isinstance(tokens, Tensor):
        raise DTypeError(
            f"the {name} {'are' if many else 'is'} a {type(tokens).__name__}; give a tensor (b, l), or lists "
            "of numbers as Packed.of(lists)."
        )
    if tokens.dim() != 2:
        raise ShapeError(
            f"the {name} {'have' if many else 'has'} the shape {tuple(tokens.shape)}; a padded batch is "
            "(b, l), a single sentence tokens[None], and Packed.of packs sentences of different lengths."
        )
    if lengths is not None:
        check_lengths(tokens, lengths)


def check_lengths(tokens: Tensor, lengths: Tensor) -> None:
    """One length for each row of a padded batch, no longer than the row."""
    _whole("a padded batch", lengths=lengths)
    if tokens.dim() != 2 or lengths.shape != tokens.shape[:1]:
        raise ShapeError(
            f"the tokens have the shape {tuple(tokens.shape)} and the lengths {tuple(lengths.shape)}; a "
            "padded batch is (b, l) with lengths (b). Packed.of packs sentences without padding."
        )
    if not concrete(lengths) or not lengths.numel():
        return
    least, most = (int(bound) for bound in lengths.aminmax())
    if least < 0 or most > tokens.shape[1]:
        raise ShapeError(
            f"a length is {least if least < 0 else most} and the batch has {tokens.shape[1]} places for each "
            "sentence; a length counts the real tokens of a row."
        )


def _whole(where: str, **tensors: Tensor) -> None:
    """Tensors of whole numbers."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise DTypeError(
                f"{where} got {name} that are a {type(tensor).__name__}; give a tensor of whole numbers. "
                "Packed.of([[5, 6], [7]]) packs lists."
            )
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
            raise DTypeError(f"{where} got {name} of {tensor.dtype}; they are whole numbers: {name}.long().")
