"""Translation: a source sentence, its translation, score, alternatives and word alignment."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from regard.translation.alignment.alignment import Alignment


@dataclass(eq=False)
class Translation:
    """A source sentence and its translation.

    source, text: the sentence, and its translation. words: the words in the translation, excluding tags.
    score: the ranking score: log probability / length ** length_penalty; for samples, log
        probability per token.
    tokens: the generated tokens.
    note: anything unusual, such as copied words; empty if there is nothing to report.
    warning: a reason why the translation may be wrong, such as unfamiliar words; included in `note`.
    confidence: the geometric mean of the token probabilities, including end tokens; between 0 and 1.
    word_confidences: for each word, the geometric mean of the probabilities of its tokens; 1 for a copy.
    alternatives: the next best translations, if more than one was requested.

    >>> import torch
    >>> from regard.models import TransformerConfig, Transformer
    >>> from regard.translation import Beam, Tokenizer, Translator, TokenizerPair
    >>> tokens = Tokenizer.learn(["ein Hund bellt", "a dog barks"] * 10, kind="words")
    >>> model = Transformer(len(tokens), TransformerConfig(width=16, heads=2, layers=1), share=True)
    >>> translator = Translator(model, TokenizerPair(tokens, tokens))
    >>> (translation,) = translator.translate("ein Hund", strategy=Beam(3, n_best=2))
    >>> translation.source, len(translation.alternatives), str(translation) == translation.text
    ('ein Hund', 1, True)
    """

    source: str
    text: str
    score: float
    tokens: list[str]
    note: str = ""
    alternatives: list["Translation"] = field(default_factory=list)
    _align: Callable[[], Alignment] = field(kw_only=True, repr=False)
    _word_confidences: Callable[[], list[float]] = field(default=list, kw_only=True, repr=False)
    token_ids: list[int] = field(default_factory=list, kw_only=True, repr=False)
    words: list[str] = field(default_factory=list, kw_only=True, repr=False)
    confidence: float = field(default=1.0, kw_only=True)
    warning: str = field(default="", kw_only=True, repr=False)

    @cached_property
    def alignment(self) -> Alignment:
        """The word alignment, computed on first use in a second pass over the sentence pair."""
        return self._align()

    @cached_property
    def word_confidences(self) -> list[float]:
        """The confidence of each word, computed on first use in a second pass over the sentence pair."""
        return self._word_confidences()

    def __str__(self) -> str:
        return self.text
