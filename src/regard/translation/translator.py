"""Translator: text in, text out, with scores, alternatives and word alignments."""

import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy

from regard._util.checks import check_sentences, check_type
from regard._util.text import shorten
from regard.errors import ArgumentError, DTypeError
from regard.models.configs import Precision, check_precision
from regard.translation.alignment.alignment import Alignment, Array, check_size, to_array
from regard.translation.alignment.alignment_head import AlignmentHead
from regard.translation.decoding.hypothesis import Hypothesis
from regard.translation.decoding.kernel_search import split_by_length
from regard.translation.decoding.strategies import Beam, Sample, Strategy, check_batch_size
from regard.translation.long_lines import max_translation_tokens
from regard.translation.model_folder import CALIBRATION, is_pretrained
from regard.translation.saved_model import SavedModel, read_saved_model
from regard.translation.streaming import batch_lines
from regard.translation.text.candidate import TOO_LONG, Candidate, join_parts, rank_candidates
from regard.translation.text.domain import Domain
from regard.translation.text.memory import Match, TranslationMemory, missing_pairs
from regard.translation.text.profile import TextProfile, load_profile
from regard.translation.text.source import SourceReader
from regard.translation.text.source_part import SourceLine, SourcePart, cut_spans
from regard.translation.text.tags import place_tags, write_tags
from regard.translation.text.target import DecodedPart, TargetPart, lost_spans, write_part
from regard.translation.text.terms import Terms, encode_terms
from regard.translation.tokens import TokenizerPair
from regard.translation.translation import Translation

if TYPE_CHECKING:
    import torch

    from regard.models.seq2seq import Seq2Seq

MAX_TOKENS = 256  # default for corpus.max_tokens: maximum number of source tokens to translate at once
_SORTED_BATCHES = 8  # number of batches whose sentences are sorted by length together
_NOTHING = Hypothesis([], 0.0, 0.0, finished=True)  # for a part without text
_BUILD_LOCK = threading.Lock()  # held while a saved model is built in torch


class Translator:
    """A model with its vocabularies. `load_translator` loads one from a model folder.

    model, tokens: a trained model, and its source and target vocabularies.
    alignment_head: the layer and heads from which alignments are read.
    config: the contents of the model folder's config.json.
    dtype: precision of the computation: "float32", "bfloat16" or "int8" (see `regard.models.quantize`); None
        keeps the model unchanged.
    profile: statistics of the training text. Default: unknown; each line is split into sentences.
    memory: a function that loads the training pairs, for `matches`.

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
        model: "Seq2Seq | SavedModel",
        tokens: TokenizerPair,
        *,
        alignment_head: AlignmentHead | None = None,
        config: Mapping[str, Any] | None = None,
        dtype: Precision | None = None,
        profile: TextProfile | None = None,
        memory: Callable[[], TranslationMemory] | None = None,
    ) -> None:
        self._saved = model if isinstance(model, SavedModel) else None
        self._model = None if isinstance(model, SavedModel) else _quantize(model, dtype)
        self.tokens = tokens
        self.alignment_head, self.config = alignment_head or AlignmentHead(), config or {}
        settings = self.config.get("settings", {})
        limited = model.transformer if isinstance(model, SavedModel) else model
        self._max_positions = limited.max_length or sys.maxsize
        max_tokens = settings.get("corpus", {}).get("max_tokens", MAX_TOKENS)
        around = len(tokens.special.source([]))  # positions taken by the end token and a language token
        self.max_tokens: int = min(max_tokens, self._max_positions - around)
        self.profile = profile or TextProfile()
        copies = bool(settings.get("training", {}).get("unknown_rate"))
        self.reader = SourceReader(tokens.source, self.profile, max_tokens=self.max_tokens, copies=copies)
        self._load_memory = memory

    @property
    def model(self) -> "Seq2Seq":
        """The model, built in torch on first use if it was loaded without torch."""
        if self._model is None:
            with _BUILD_LOCK:
                if self._model is None:
                    assert self._saved is not None
                    self._model = self._saved.to_torch()
                    self._saved = None  # frees its memory
        return self._model

    @model.setter
    def model(self, model: "Seq2Seq") -> None:
        self._model, self._saved = model, None
        self.__dict__.pop("_attends", None)

    @cached_property
    def domain(self) -> Domain | None:
        """The expected words and scores; None for a translator that does not come from a model folder."""
        return Domain.of(self.profile, self.config.get(CALIBRATION)) if self.config else None

    @cached_property
    def memory(self) -> TranslationMemory:
        """The training pairs, indexed for `matches` on first use."""
        if self._load_memory is None:
            raise missing_pairs()
        return self._load_memory()

    def matches(self, text: str, n: int = 3) -> list[Match]:
        """Return the n training pairs whose source is most similar to a text; see `TranslationMemory`."""
        return self.memory.matches(text, n)

    def translate(
        self,
        texts: str | Sequence[str],
        *,
        strategy: Strategy = Beam(),  # noqa: B008 (a frozen value)
        batch_size: int = 64,
        alignment: bool = False,
        confidence: bool = False,
        terms: Mapping[str, str] | Terms | None = None,
    ) -> list[Translation]:
        """Translate sentences; return the translations in the same order.

        strategy: `Beam(5)`, `Greedy()` or `Sample()`. `Beam(5, n_best=3)` adds two alternatives per sentence.
        batch_size: number of sentences to decode together.
        alignment, confidence: compute all alignments or word confidences now, in batches. This is faster than
            computing each on first use.
        terms: target terms by source term. Where a source term occurs, in any letter case, the translation
            contains the target term.

        A line that is longer or has more sentences than the training lines is translated in parts; its `note`
        says so. Numbers, URLs, e-mail addresses, identifiers, tags, placeholders, emoji and unknown words are
        copied.
        """
        check_batch_size(batch_size)
        if alignment:
            self._check_attention()  # before decoding
        if terms is not None and not isinstance(terms, Terms):
            terms = Terms(terms)
        if terms is not None and isinstance(strategy, Sample) and not self.reader.copies:
            raise ArgumentError(
                "This model cannot sample with terms, because it was not trained to copy. Use beam search: "
                "remove --sample; in Python, strategy=Beam()."
            )
        lines = [self.reader.read(text, terms) for text in check_sentences(texts)]
        candidates = self._search(lines, strategy, batch_size, alignment)
        for line, ranked in zip(lines, candidates, strict=True):
            if not ranked:
                raise ArgumentError(
                    f"The model gives every translation of {shorten(line.text)!r} zero probability. Check "
                    "its parameters."
                )
        unknown = self.tokens.special.unknown
        weights = self._weigh(
            [
                part
                for line, ranked in zip(lines, candidates, strict=True)
                for candidate in ranked
                for part in candidate.parts
                if part.part.ids and (alignment or line.tags or part.needs_weights(unknown))
            ]
        )
        parts = [part for ranked in candidates for candidate in ranked for part in candidate.parts]
        rates = self._rate(parts) if confidence else None
        translations = []
        for line, ranked in zip(lines, candidates, strict=True):
            finished = [self._finish(line, candidate, weights, rates) for candidate in ranked]
            best, *others = finished
            if isinstance(strategy, Sample):  # a low probability is normal for samples
                for translation in finished:
                    translation.note = translation.note.removesuffix(translation.warning).removesuffix("; ")
                    translation.warning = ""
            if alignment:
                for translation in finished:
                    translation.alignment = translation._align()
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
        **options: Any,
    ) -> Iterator[Translation]:
        """Translate lines as they arrive, in order. Lines that arrive together form a batch.

        strategy, batch_size, alignment, and other options: see `translate`.

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
            yield from self.translate(
                texts, strategy=strategy, batch_size=batch_size, alignment=alignment, **options
            )

    def align(
        self, pairs: Sequence[tuple[str, str]], alignment_head: AlignmentHead | None = None
    ) -> list[Alignment]:
        """Align the words of existing translations by forced decoding.

        pairs: (source, target).
        alignment_head: layer, heads and shift to read; default: the translator's `alignment_head`.
        """
        from regard.translation.alignment.attention_aligner import align

        head = self.alignment_head if alignment_head is None else alignment_head
        check_type("align got an alignment_head", head, AlignmentHead, "AlignmentHead(layer=-1)")
        return align(self.model, self.tokens, pairs, head)

    def __repr__(self) -> str:
        name = "Transformer" if self._model is None else type(self._model).__name__
        return f"Translator({name}, {self.tokens!r})"

    def _search(
        self, lines: Sequence[SourceLine], strategy: Strategy, batch_size: int, alignment: bool
    ) -> list[list[Candidate]]:
        """Decode each line; return its candidates, best first. Parts of similar lengths share a batch."""
        parts = [part for line in lines for part in line.parts]
        record = alignment or any(line.tags or any(p.may_need_weights for p in line.parts) for line in lines)
        layer = self.alignment_head.layer if record else None
        hypotheses = self._decode(parts, strategy, batch_size, layer)
        lost = [
            number
            for number, part in enumerate(parts)
            if part.copies
            and not self.reader.copies
            and lost_spans(part, self.tokens.target.decode(hypotheses[number][0].tokens).text)
        ]
        for number in lost:
            parts[number] = cut_spans(parts[number], self.tokens.source)
        replacements = self._decode([parts[number] for number in lost], strategy, batch_size, layer)
        for number, ranked in zip(lost, replacements, strict=True):
            hypotheses[number] = ranked
        decoded = iter(zip(parts, hypotheses, strict=True))
        return [rank_candidates([next(decoded) for _ in line.parts]) for line in lines]

    def _decode(
        self, parts: Sequence[SourcePart], strategy: Strategy, batch_size: int, layer: int | None
    ) -> list[list[Hypothesis]]:
        """Decode parts in batches of similar lengths; a part with nothing to translate is not decoded.

        layer: the decoder layer whose cross-attention to record, if any.
        """
        decoded = {i: [_NOTHING] for i, part in enumerate(parts) if not part.has_text}
        indices = [i for i in range(len(parts)) if i not in decoded]
        sources = [parts[i].ids for i in indices]
        phrases = [encode_terms(parts[i].terms, self.tokens.target) for i in indices]
        by_token = self.tokens.target.kind == "words"  # unknown words are then copied by alignment
        special, source_unknown = self.tokens.special, self.tokens.source.special.unknown
        for batch in split_by_length(sources, batch_size):
            limits = [
                min(self.max_new_tokens(len(sources[i])) + sum(map(len, phrases[i])), self._max_positions)
                for i in batch
            ]
            unknown = None if by_token else [sources[i].count(source_unknown) for i in batch]
            hypotheses = self._search_batch(
                [special.source(sources[i]) for i in batch],
                strategy,
                limits,
                [phrases[i] for i in batch],
                unknown,
                layer,
            )
            decoded.update((indices[i], ranked) for i, ranked in zip(batch, hypotheses, strict=True))
        return [decoded[i] for i in range(len(parts))]

    def _search_batch(
        self,
        sources: Sequence[list[int]],
        strategy: Strategy,
        limits: Sequence[int],
        phrases: Sequence[Sequence[Sequence[int]]],
        max_unknown: Sequence[int] | None,
        layer: int | None,
    ) -> list[list[Hypothesis]]:
        """Decode a batch, without torch if possible.

        sources: token ids with special tokens. phrases, max_unknown: see `Constraints`.
        """
        saved = self._saved  # read once: another thread may build the model
        if saved is not None and not any(phrases):
            hypotheses = saved.search(
                sources, strategy, limits, attention_layer=layer, max_unknown=max_unknown
            )
            if hypotheses is not None:
                return hypotheses
        from regard.models.packed import Packed
        from regard.translation.decoding.constraints import Constraints
        from regard.translation.decoding.search import search

        inner = self._inner_tokens if any(phrases) else ()
        return search(
            self.model,
            Packed.of(sources, self.model.output_weight.device),
            strategy,
            max_new_tokens=limits,
            attention_layer=layer,
            constraints=Constraints(phrases, max_unknown, inner),
        )

    def max_new_tokens(self, source_tokens: int) -> int:
        """Return the maximum length of a translation, including its end token."""
        limit = max_translation_tokens(source_tokens)
        decoding = None if self._model is None else self._model.decoding  # saved models have none
        return limit if decoding is None else decoding.max_new_tokens(default=limit)

    @cached_property
    def _attends(self) -> bool:
        if self._model is None:  # a saved model, which is a Transformer
            return True
        from regard.translation.alignment.cross_attention import has_cross_attention

        return has_cross_attention(self._model)

    def _check_attention(self) -> None:
        """Raise an error for a model without cross-attention."""
        if not self._attends:
            from regard.translation.alignment.cross_attention import cross_attention_layers

            cross_attention_layers(self.model)

    @cached_property
    def _inner_tokens(self) -> list[int]:
        return self.tokens.target.inner_tokens()

    def _weigh(self, parts: Sequence[DecodedPart]) -> dict[int, Array]:
        """Return weights (target tokens, source tokens) by id(part); {} if the model has no attention."""
        if not parts or not self._attends:
            return {}
        recorded = {
            id(part): part.recorded_weights(self.alignment_head, self.tokens.special) for part in parts
        }
        known = {part: matrix for part, matrix in recorded.items() if matrix is not None}
        parts = [part for part in parts if id(part) not in known]
        if not parts:
            return known
        from regard.translation.alignment.cross_attention import cross_weights

        sources = [part.source.ids for part in parts]
        targets = [part.hypothesis.tokens for part in parts]
        weights = cross_weights(self.model, sources, targets, self.alignment_head)
        return known | {id(part): to_array(matrix) for part, matrix in zip(parts, weights, strict=True)}

    def _finish(
        self,
        line: SourceLine,
        candidate: Candidate,
        weights: Mapping[int, Array],
        rates: Mapping[int, list[float]] | None,
    ) -> Translation:
        """Convert token ids to text, insert copied text, and join the parts."""
        turkish = self.profile.target_turkish
        texts = [
            write_part(part, weights.get(id(part)), self.tokens.target, turkish=turkish)
            for part in candidate.parts
        ]
        words = [word.text for text in texts for word in text.words]
        warning = self._warning(line, candidate)
        notes = [*candidate.notes(line, texts), *([warning] if warning else [])]
        translation = Translation(
            line.text,
            join_parts(texts, self._place(line, texts, words)),
            candidate.score(),
            [piece for text in texts for piece in text.segmentation.pieces],
            "; ".join(notes),
            words=words,
            confidence=math.exp(candidate.mean_log_probability()),
            warning=warning,
            _align=partial(self._align, line, texts),
            _word_confidences=partial(self._rate_words, texts),
            token_ids=[token for text in texts for token in text.segmentation.ids],
        )
        if rates is not None:
            translation.word_confidences = self._rate_words(texts, rates)
        return translation

    def _warning(self, line: SourceLine, candidate: Candidate) -> str:
        if not any(part.part.has_text for part in candidate.parts):
            return ""
        warning = ""
        if self.domain is not None:
            warning = self.domain.warning(" ".join(line.words), candidate.mean_log_probability()).rstrip(".")
        if not warning and self.profile.max_tokens and len(candidate.parts) > line.sentences:
            return TOO_LONG
        return warning

    def _place(self, line: SourceLine, texts: Sequence[TargetPart], words: list[str]) -> list[str]:
        """Insert the line's tags between the words."""
        if not line.tags:
            return words
        ready = all(text.weights is not None or not text.decoded.part.ids for text in texts)
        weights = self._align_words(line, texts) if ready and self._attends else None
        return write_tags(line.tags, place_tags(line.tags, line.ranges, len(words), weights), words)

    def _align(self, line: SourceLine, texts: Sequence[TargetPart]) -> Alignment:
        """Align a finished translation by attention; a copied word has weight 1 on its source word."""
        words = [word.text for text in texts for word in text.words]
        return Alignment(line.words, words, self._align_words(line, texts))

    def _align_words(self, line: SourceLine, texts: Sequence[TargetPart]) -> Array:
        """Return the weights of the alignment, (target words, source words)."""
        words = sum(len(text.words) for text in texts)
        check_size("The line", "words", len(line.words), words)
        if texts:
            self._check_attention()
        unread = [text.decoded for text in texts if text.weights is None and text.decoded.part.ids]
        computed = self._weigh(unread)
        if len(texts) == 1 and texts[0].weights is not None:  # one part: its weights are the line's
            part_weights = texts[0].word_weights(texts[0].weights)
            if part_weights.shape == (words, len(line.words)):
                return part_weights
        weights, row = numpy.zeros((words, len(line.words)), numpy.float32), 0
        for text in texts:
            part = text.decoded.part
            zeros = numpy.zeros((len(text.segmentation.ids), len(part.ids)), numpy.float32)
            token_weights = computed.get(id(text.decoded), zeros if text.weights is None else text.weights)
            block, column = text.word_weights(token_weights), part.first_word
            weights[row : row + len(block), column : column + block.shape[1]] = block
            row += len(block)
        return weights

    def _rate(self, parts: Sequence[DecodedPart]) -> dict[int, list[float]]:
        """Return the token log probabilities of each part, by id(part)."""
        from regard.translation.decoding.scoring import token_log_probabilities

        sources, targets = [part.part.ids for part in parts], [part.hypothesis.tokens for part in parts]
        values = token_log_probabilities(self.model, sources, targets)
        return {id(part): logs for part, logs in zip(parts, values, strict=True)}

    def _rate_words(
        self, texts: Sequence[TargetPart], rates: Mapping[int, list[float]] | None = None
    ) -> list[float]:
        """Return the confidence of each word."""
        if rates is None:
            rates = self._rate([text.decoded for text in texts])
        return [math.exp(value) for text in texts for value in text.mean_over_words(rates[id(text.decoded)])]


def _quantize(model: "Seq2Seq", dtype: Precision | None) -> "Seq2Seq":
    if dtype is None:
        return model
    from regard.models.inference.quantization import quantize

    return quantize(model, dtype)


def load_translator(
    folder: str | os.PathLike[str],
    *,
    source: str | None = None,
    target: str | None = None,
    device: "torch.device | str" = "cpu",
    dtype: Precision | None = None,
) -> Translator:
    """Load a translator from a folder written by `regard train` or in Hugging Face format.

    folder: model folder. Hugging Face models: Marian (OPUS-MT), M2M-100, NLLB, mBART, T5 or mT5, with
        config.json, safetensors and SentencePiece models or tokenizer.json. Nothing is
        downloaded, and no pickle is read.
    source, target: languages of a multilingual model, such as "de" and "en".
    device: for example "cuda". dtype: "int8" is fastest on a CPU; default: as trained. See `Translator`.

    >>> import regard
    >>> regard.load_translator("no/such/folder")
    Traceback (most recent call last):
    regard.errors.ArgumentError: 'no/such/folder' does not exist. ...
    """
    if dtype is not None:
        check_precision(dtype)
    if is_pretrained(folder):
        from regard.translation.pretrained.loader import read_pretrained
        from regard.translation.pretrained.translator import PretrainedTranslator  # imports this module

        contents = read_pretrained(folder, source, target)
        return PretrainedTranslator(contents.load().to(device), contents, dtype=dtype)
    if source is not None or target is not None:
        from regard.translation.pretrained.loader import check_no_languages

        check_no_languages(folder, source, target)
    saved = read_saved_model(folder, dtype) if str(device) == "cpu" else None
    if saved is not None:
        model: SavedModel | Seq2Seq = saved.model
        tokens, config = saved.model.tokens, saved.config
    else:
        from regard.translation.training.checkpoint import load_model

        model, tokens, config = load_model(folder)
        model.to(device)
    head = config.get("alignment")
    return Translator(
        model,
        tokens,
        alignment_head=AlignmentHead.from_dict(head) if head else None,
        config=config,
        dtype=dtype,
        profile=load_profile(folder, tokens),
        memory=partial(TranslationMemory.open, folder, tokens),
    )
