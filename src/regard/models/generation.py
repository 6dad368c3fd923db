"""Special tokens and decoding defaults for sequence-to-sequence models. This module does not import torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens, and the ids added around a sentence.

    All models that regard trains from scratch use the defaults.

    padding, start, end, unknown: token ids.
    source_prefix, source_suffix: ids around a source sentence, such as a language token. The default suffix
        is the end token.
    target_prefix: ids between the start token and a target sentence.
    suppressed: ids that are never generated; default: padding and start.

    >>> from regard.models.generation import SpecialTokens
    >>> SpecialTokens().source([5, 6]), SpecialTokens().target([5, 6])
    ([5, 6, 2], [1, 5, 6, 2])
    >>> SpecialTokens(start=2, source_prefix=(9,), target_prefix=(8,)).target_inputs([5, 6])
    [2, 8, 5, 6]
    """

    padding: int = 0
    start: int = 1
    end: int = 2
    unknown: int = 3
    source_prefix: tuple[int, ...] = ()
    source_suffix: tuple[int, ...] | None = None
    target_prefix: tuple[int, ...] = ()
    suppressed: tuple[int, ...] | None = None

    @property
    def target_start(self) -> tuple[int, ...]:
        """The tokens at the start of every target."""
        return (self.start, *self.target_prefix)

    @property
    def never_generated(self) -> tuple[int, ...]:
        """`suppressed`, or its default if None."""
        return (self.padding, self.start) if self.suppressed is None else self.suppressed

    def source(self, ids: Iterable[int]) -> list[int]:
        """Return the encoder input for a sentence."""
        suffix = (self.end,) if self.source_suffix is None else self.source_suffix
        return [*self.source_prefix, *ids, *suffix]

    def target_inputs(self, ids: Iterable[int]) -> list[int]:
        """Return the decoder input for a sentence."""
        return [*self.target_start, *ids]

    def target(self, ids: Iterable[int]) -> list[int]:
        """Return the whole target for a sentence, from the start token to the end token."""
        return [*self.target_start, *ids, self.end]


@dataclass(frozen=True)
class DecodingDefaults:
    """Beam search defaults of a pretrained model, from its generation_config.json.

    early_stopping, length_penalty: see `regard.translation.Beam`.
    max_length: maximum length of a target, including the start token; None: use the caller's default.
    forced_end: whether the end token is forced, with probability 1, at the maximum length.

    >>> from regard.models.generation import DecodingDefaults
    >>> DecodingDefaults(max_length=200).max_new_tokens(default=30)
    199
    """

    early_stopping: EarlyStopping = False
    length_penalty: float = 1.0
    max_length: int | None = None
    forced_end: bool = False

    def max_new_tokens(self, default: int) -> int:
        """Return the maximum number of tokens after the start token, or `default` if max_length is None."""
        return default if self.max_length is None else self.max_length - 1
