"""Translator: text in, text out, with scores, alternatives and word alignments."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._util.checks import check_sentences, check_type
from regard._util.text import shorten
from regard.errors import DTypeError
from regard.models.configs import Precision
from regard.models.quantization import quantize
from regard.models.seq2seq import Seq2Seq
from regard.translation.alignment.alignment import Alignment, align, check_size, merge
from regard.translation.alignment.cross_attention import (
    AlignmentHead,
    cross_attention_layers,
    cross_weights,
    drop_special_tokens,
    has_cross_attention,
)
from regard.translation.decoding.search import Hypothesis, batch_by_length, search
from regard.translation.decoding.strategies import Beam, Strategy, check_batch_size
from regard.translation.sentence_splitter import Line, Part, max_translation_tokens
from regard.translation.streaming import batch_lines
from regard.translation.tokens import UNKNOWN, Segmentation, TokenizerPair
from regard.translation.training.checkpoint import load_model
from regard.translation.unknown_words import TargetWord, insert_words, replace_unknown, untranslated_words

MAX_TOKENS = 256  # source tokens translated at once, if the model's config has no corpus.max_tokens
_SORTED_BATCHES = 8  # batches sorted by length together
_MAX_LISTED = 5  # copied words listed in a note


@dataclass(eq=False)
class Translation:
    """A source sentence and its translation.

    source, text: the sentence, and its translation.
    score: the ranking score; for beam search, log probability / length ** length_penalty.
    tokens: the generated tokens.
    note: anything unusual, such as copied words; empty if there is nothing to report.
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
    token_ids: list[int] = field(default_factory=list, kw_only=True, repr=False)

    @cached_property
    def alignment(self) -> Alignment:
        """The word alignment, computed on first use in a second pass over the sentence pair."""
        return self._align()

    def __str__(self) -> str:
        return self.text


class Translator:
    """A model with its vocabularies. `load_translator` loads one from a model folder.

    model, tokens: a trained model, and the vocabularies of source and target.
    alignment_head: the layer and heads from which alignments are read.
    config: the contents of the model folder's config.json.
    dtype: precision of the computation: "float32", "bfloat16" or "int8" (see `regard.models.quantize`); None
        keeps the model as it is.

    >>> import torch
    >>> from regard.models import TransformerConfig, Transformer
    >>> from regard.translation.tokens import Tokenizer, TokenizerPair
    >>> from regard.translation.translator import Translator
    >>> tokens = Tokenizer.learn(["ein Hund bellt", "a dog barks"] * 10, kind="characters", size=40)
    >>> model = Transformer(len(tokens), TransformerConfig(width=16, heads=2, layers=1), share=True)
    >>> translator = Translator(model, TokenizerPair(tokens, tokens))
    >>> translations = translator.translate(["ein Hund bellt", ""])
    >>> translations[0].source, translations[1].text
    ('ein Hund bellt', '')
    >>> translations[0].alignment.weights.shape[1]  # target words × source words
    3
    """

    def __init__(
        self,
        model: Seq2Seq,
        tokens: TokenizerPair,
        *,
        alignment_head: AlignmentHead | None = None,
        config: Mapping[str, Any] | None = None,
        dtype: Precision | None = None,
    ) -> None:
        self.model, self.tokens = model if dtype is None else quantize(model, dtype), tokens
        self.alignment_head, self.config = alignment_head or AlignmentHead(), config or {}
        settings = self.config.get("settings", {})
        self._max_positions = model.max_length or sys.maxsize
        max_tokens = settings.get("corpus", {}).get("max_tokens", MAX_TOKENS)
        self.max_tokens: int = min(max_tokens, self._max_positions - 1)  # one position is for the end token

    def translate(
        self,
        texts: str | Sequence[str],
        *,
        strategy: Strategy = Beam(),  # noqa: B008 (a frozen value)
        batch_size: int = 64,
        alignment: bool = False,
    ) -> list[Translation]:
        """Translate sentences; return the translations in the same order.

        strategy: `Beam(5)`, `Greedy()` or `Sample()`. `Beam(5, n_best=3)` adds two alternatives per sentence.
        batch_size: sentences decoded together.
        alignment: compute all alignments now, in batches, which is faster than one by one on first use.

        A sentence longer than `max_tokens` is translated in parts; its `note` says so.
        """
        check_batch_size(batch_size)
        if alignment:
            cross_attention_layers(self.model)  # raises for a model without attention, before decoding
        lines = [
            Line.of(text, self.tokens.source.segment(text), self.max_tokens)
            for text in check_sentences(texts)
        ]
        candidates = self._search(lines, strategy, batch_size, alignment)
        parts = [part for ranked in candidates for candidate in ranked for part in candidate]
        weights = self._weigh([part for part in parts if alignment or part.has_unknown])
        translations = []
        for line, ranked in zip(lines, candidates, strict=True):
            best, *others = (self._finish(line, candidate, weights, alignment) for candidate in ranked)
            best.alternatives.extend(others)
            translations.append(best)
        return translations

    def stream(
        self,
        lines: Iterable[str],
        *,
        strategy: Strategy = Beam(),  # noqa: B008
        batch_size: int = 64,
        alignment: bool = False,
    ) -> Iterator[Translation]:
        """Translate lines as they arrive, in order. Lines that arrive together form a batch.

        strategy, batch_size, alignment: see `translate`.

        >>> import sys
        >>> from regard.translation.translator import Translator
        >>> def translate_stdin(translator: Translator) -> None:
        ...     for translation in translator.stream(sys.stdin):
        ...         print(translation.text, flush=True)
        """
        check_batch_size(batch_size)
        if isinstance(lines, str):
            raise DTypeError("stream got a string; pass an iterable of lines: a list or an open file.")
        for batch in batch_lines(lines, batch_size * _SORTED_BATCHES):
            texts = [line.rstrip("\r\n") for line in batch]
            yield from self.translate(texts, strategy=strategy, batch_size=batch_size, alignment=alignment)

    def align(
        self, pairs: Sequence[tuple[str, str]], alignment_head: AlignmentHead | None = None
    ) -> list[Alignment]:
        """Align the words of existing translations by forced decoding.

        pairs: (source, target).
        alignment_head: layer, heads and shift to read; default: the translator's own.
        """
        head = self.alignment_head if alignment_head is None else alignment_head
        check_type("align got an alignment_head", head, AlignmentHead, "AlignmentHead(layer=-1)")
        return align(self.model, self.tokens, pairs, head)

    def __repr__(self) -> str:
        return f"Translator({type(self.model).__name__}, {self.tokens!r})"

    def _search(
        self, lines: Sequence[Line], strategy: Strategy, batch_size: int, alignment: bool
    ) -> list[list["_Candidate"]]:
        """Decode each line; return its candidates, best first. Parts of similar lengths share a batch."""
        layer = self.alignment_head.layer if alignment else None
        parts = [part for line in lines for part in line.parts]
        sources = [part.segmentation.ids for part in parts]
        decoded: dict[int, list[Hypothesis]] = {}
        for indices, packed in batch_by_length(sources, batch_size, self.model.output_weight.device):
            limits = [min(max_translation_tokens(len(sources[i])), self._max_positions) for i in indices]
            hypotheses = search(self.model, packed, strategy, max_new_tokens=limits, attention_layer=layer)
            decoded.update(zip(indices, hypotheses, strict=True))
        numbers = iter(range(len(parts)))
        return [_candidates(line, [decoded[next(numbers)] for _ in line.parts]) for line in lines]

    def _weigh(self, parts: Sequence["_DecodedPart"]) -> dict[int, Tensor]:
        """Return weights (target tokens, source tokens) by id(part); {} if the model has no attention."""
        if not parts or not has_cross_attention(self.model):
            return {}
        recorded = {id(part): part.recorded_weights(self.alignment_head) for part in parts}
        known = {part: matrix for part, matrix in recorded.items() if matrix is not None}
        parts = [part for part in parts if id(part) not in known]
        sources = [part.source.ids for part in parts]
        targets = [part.hypothesis.tokens for part in parts]
        weights = cross_weights(self.model, sources, targets, self.alignment_head)
        return known | {id(part): matrix for part, matrix in zip(parts, weights, strict=True)}

    def _finish(
        self, line: Line, candidate: "_Candidate", weights: Mapping[int, Tensor], alignment: bool
    ) -> Translation:
        """Convert token ids to text and copy unknown words."""
        texts = [self._detokenize(part, weights.get(id(part))) for part in candidate]
        words = [word for text in texts for word in text.words]
        translation = Translation(
            line.text,
            " ".join(word.text for word in words),
            _score(candidate),
            [piece for text in texts for piece in text.segmentation.pieces],
            "; ".join(_notes(candidate, words)),
            _align=partial(self._align, line, texts),
            token_ids=[token for text in texts for token in text.segmentation.ids],
        )
        if alignment:
            translation.alignment = translation._align()
        return translation

    def _detokenize(self, part: "_DecodedPart", weights: Tensor | None) -> "_PartText":
        source, ids = part.source, part.hypothesis.tokens
        replacements = replace_unknown(ids, source, weights, self.tokens.target.kind)
        segmentation = self.tokens.target.decode(ids, replacements.texts)
        missing = untranslated_words(source, replacements.copied)
        word_weights = merge(source, segmentation, weights) if missing and weights is not None else None
        return _PartText(
            part, segmentation, insert_words(segmentation.words, source, missing, word_weights), weights
        )

    def _align(self, line: Line, texts: Sequence["_PartText"]) -> Alignment:
        """Align a finished translation: word weights, and weight 1 for each copied word."""
        words = [word.text for text in texts for word in text.words]
        check_size("the line", "words", len(line.words), len(words))
        if texts:
            cross_attention_layers(self.model)  # raises for a model without attention
        computed = self._weigh([text.part for text in texts if text.weights is None])
        weights, row = torch.zeros(len(words), len(line.words)), 0
        for text in texts:
            token_weights = computed.get(id(text.part), text.weights)
            assert token_weights is not None
            block, column = text.word_weights(token_weights), text.part.first_word
            weights[row : row + len(block), column : column + block.shape[1]] = block
            row += len(block)
        return Alignment(tuple(line.words), tuple(words), weights)


class _DecodedPart(NamedTuple):
    """A part of a line and its hypothesis."""

    source: Segmentation
    first_word: int
    hypothesis: Hypothesis

    @property
    def has_unknown(self) -> bool:
        """Whether source or target contains an unknown token."""
        return bool(self.source.unknown) or UNKNOWN in self.hypothesis.tokens

    def recorded_weights(self, head: AlignmentHead) -> Tensor | None:
        """Return the weights (target tokens, source tokens) that the search recorded, or None."""
        weights, finished = self.hypothesis.weights, self.hypothesis.finished
        if weights is None or not (finished or head.shift == "output"):
            return None
        selected = weights if head.heads is None else weights[list(head.heads)]
        target, source = len(self.hypothesis.tokens), len(self.source.ids)
        return drop_special_tokens(selected.mean(0), target, source, head.shift)


_Candidate = list[_DecodedPart]  # one translation of a line: a hypothesis for each of its parts


class _PartText(NamedTuple):
    """A decoded part as text: the generated tokens, the words including copies, and the token weights."""

    part: _DecodedPart
    segmentation: Segmentation
    words: list[TargetWord]
    weights: Tensor | None

    def word_weights(self, weights: Tensor) -> Tensor:
        """Convert token weights to (target words, source words)."""
        source = self.part.source
        generated = merge(source, self.segmentation, weights)
        result = torch.zeros(len(self.words), len(source.words))
        for row, word in enumerate(self.words):
            if word.own is not None:
                result[row] = generated[word.own]
            elif word.copied is not None:
                result[row, word.copied] = 1
        return result


def _candidates(line: Line, hypotheses: Sequence[Sequence[Hypothesis]]) -> list[_Candidate]:
    """Join the best hypotheses of all parts, then the second best, …; for an empty line, return [[]]."""

    def decoded(part: Part, hypothesis: Hypothesis) -> _DecodedPart:
        return _DecodedPart(part.segmentation, part.first_word, hypothesis)

    return [list(map(decoded, line.parts, ranked)) for ranked in zip(*hypotheses, strict=False)] or [[]]


def _score(candidate: _Candidate) -> float:
    """Return the score of the hypothesis; for several parts, the mean weighted by length."""
    scores = [part.hypothesis.score for part in candidate]
    if len(scores) == 1:
        return scores[0]
    lengths = [len(part.hypothesis.tokens) + 1 for part in candidate]
    return sum(score * n for score, n in zip(scores, lengths, strict=True)) / max(sum(lengths), 1)


def _notes(candidate: _Candidate, words: Sequence[TargetWord]) -> Iterator[str]:
    """Yield a note for anything unusual."""
    if len(candidate) > 1:
        lengths = [len(part.source.ids) for part in candidate]
        yield f"{sum(lengths)} tokens, translated in {len(candidate)} parts of up to {max(lengths)}"
    if not all(part.hypothesis.finished for part in candidate):
        yield "cut off at the maximum length"
    copied = [repr(shorten(word.text)) for word in words if word.copied is not None]
    if copied:
        more = " …" if len(copied) > _MAX_LISTED else ""
        yield f"unknown words copied: {', '.join(copied[:_MAX_LISTED])}{more}"


def load_translator(
    folder: str | os.PathLike[str], *, device: torch.device | str = "cpu", dtype: Precision | None = None
) -> Translator:
    """Load the translator from a model folder written by `regard train`.

    device: for example "cuda". dtype: "int8" is fastest on a CPU; default: as trained. See `Translator`.

    >>> import regard
    >>> regard.load_translator("no/such/folder")
    Traceback (most recent call last):
    regard.errors.ArgumentError: 'no/such/folder' does not exist. ...
    """
    model, tokens, config = load_model(folder)
    model.to(device)
    head = config.get("alignment")
    return Translator(
        model,
        tokens,
        alignment_head=AlignmentHead.from_dict(head) if head else None,
        config=config,
        dtype=dtype,
    )
