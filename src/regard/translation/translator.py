"""Text in, text out: translations with their scores, alternatives and word alignments."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._util.checks import check_int, check_type
from regard._util.text import shorten
from regard.errors import DTypeError
from regard.models.encoders.words import check_sentences
from regard.models.seq2seq import Seq2Seq
from regard.translation.alignment.alignment import Alignment, align, check_size, merge
from regard.translation.alignment.cross_attention import (
    AlignmentHead,
    cross_attention_layers,
    cross_weights,
    has_cross_attention,
)
from regard.translation.data.batches import by_length
from regard.translation.decoding.search import Beam, Hypothesis, Strategy, search
from regard.translation.sentence_splitter import Line, Part, max_translation_tokens
from regard.translation.streaming import batch_lines
from regard.translation.tokens import UNKNOWN, Cut, TokenizerPair
from regard.translation.training.checkpoint import load_model
from regard.translation.unknown_words import Placed, left_out, letters, place

LONGEST = 256  # pieces of a line that are translated at once, if the model's settings do not say
_GROUP = 8  # batches that are sorted by length together when lines arrive
_SHOWN = 5  # copied words that a note tells


@dataclass(eq=False)
class Translation:
    """A sentence and what a model made of it.

    source, text: the sentence, and its translation.
    score: what hypotheses are ranked by; for beam search the mean log probability of a piece.
    tokens: the pieces that the model wrote.
    alternatives: the next best ones, if they were asked for.
    note: what happened on the way that one might want to know, or nothing.

    >>> import torch
    >>> from regard.models import TransformerConfig, Transformer
    >>> from regard.translation import Beam, Tokens, Translator, TokenizerPair
    >>> tokens = Tokens.learn(["ein Hund bellt", "a dog barks"] * 10, kind="words")
    >>> model = Transformer(len(tokens), TransformerConfig(width=16, heads=2, layers=1), share=True)
    >>> (found,) = Translator(model, TokenizerPair(tokens, tokens)).translate("ein Hund", how=Beam(3, best=2))
    >>> found.source, len(found.alternatives), str(found) == found.text
    ('ein Hund', 1, True)
    """

    source: str
    text: str
    score: float
    tokens: list[str]
    note: str = ""
    alternatives: list["Translation"] = field(default_factory=list)
    _read: Callable[[], Alignment] = field(kw_only=True, repr=False)
    _ids: list[int] = field(default_factory=list, kw_only=True, repr=False)  # of the tokens

    @cached_property
    def alignment(self) -> Alignment:
        """Which words came from which: the model reads its own translation once more, when first asked."""
        return self._read()

    def __str__(self) -> str:
        return self.text


class Translator:
    """A model with its vocabularies, ready to translate; `load_translator` makes one of a model folder.

    model, tokens: what was trained, and the vocabularies of source and target.
    choice: which layer and heads alignments are read from.
    settings: the config of the model folder.

    >>> import torch
    >>> from regard.models import TransformerConfig, Transformer
    >>> from regard.translation.tokens import Tokens, TokenizerPair
    >>> from regard.translation.translator import Translator
    >>> tokens = Tokens.learn(["ein Hund bellt", "a dog barks"] * 10, kind="characters", size=40)
    >>> model = Transformer(len(tokens), TransformerConfig(width=16, heads=2, layers=1), share=True)
    >>> translator = Translator(model, TokenizerPair(tokens, tokens))
    >>> found = translator.translate(["ein Hund bellt", ""])
    >>> found[0].source, found[1].text
    ('ein Hund bellt', '')
    >>> found[0].alignment.weights.shape[1]  # target words × source words
    3
    """

    def __init__(
        self,
        model: Seq2Seq,
        tokens: TokenizerPair,
        *,
        choice: AlignmentHead | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.tokens = model, tokens
        self.choice, self.settings = choice or AlignmentHead(), settings or {}
        plan = self.settings.get("settings", {})
        match plan.get("model"):
            case {"kind": "transformer", "positions": "learned", "max_positions": int(places)}:
                self._places = places  # that were learned, for pieces and a mark
            case _:
                self._places = sys.maxsize
        self.longest: int = min(plan.get("corpus", {}).get("longest", LONGEST), self._places - 1)

    def translate(
        self,
        texts: str | Sequence[str],
        *,
        how: Strategy = Beam(),  # noqa: B008 (a frozen value)
        batch: int = 64,
        alignment: bool = False,
    ) -> list[Translation]:
        """Translate sentences; the translations come in their order.

        how: `Beam(5)`, `Greedy()` or `Sample()`; with best=3 there are two alternatives to each translation.
        batch: how many sentences are searched together.
        alignment: read all alignments now, in batches, which is faster than each when it is asked for.

        A sentence of more pieces than the model was trained with is translated in parts; its `note` says so.
        """
        check_int("translate got batch", batch, min=1)
        if alignment:
            cross_attention_layers(self.model)  # refuses a model without attention, before the work
        lines = [Line.of(text, self.tokens.source.cut(text), self.longest) for text in check_sentences(texts)]
        drafts = self._search(lines, how, batch)
        passages = [passage for some in drafts for draft in some for passage in draft]
        weights = self._weigh([passage for passage in passages if alignment or passage.has_unknown])
        found = []
        for line, some in zip(lines, drafts, strict=True):
            best, *others = (self._finish(line, draft, weights, alignment) for draft in some)
            best.alternatives.extend(others)
            found.append(best)
        return found

    def stream(
        self,
        lines: Iterable[str],
        *,
        how: Strategy = Beam(),  # noqa: B008
        batch: int = 64,
        alignment: bool = False,
    ) -> Iterator[Translation]:
        """Translate lines as they arrive, in their order: those that are there together, and one at once.

        how, batch, alignment: as in `translate`.

        >>> import sys
        >>> from regard.translation.translator import Translator
        >>> def talk(translator: Translator) -> None:
        ...     for translation in translator.stream(sys.stdin):
        ...         print(translation.text, flush=True)
        """
        check_int("stream got batch", batch, min=1)
        if isinstance(lines, str):
            raise DTypeError("stream got one string; give lines: a list, or a file that is open.")
        for group in batch_lines(lines, batch * _GROUP):
            stripped = [line.rstrip("\r\n") for line in group]
            yield from self.translate(stripped, how=how, batch=batch, alignment=alignment)

    def align(self, pairs: Sequence[tuple[str, str]], choice: AlignmentHead | None = None) -> list[Alignment]:
        """Which words of given translations came from which: the model reads each pair.

        choice: the layer, heads and shift to read them from, if not the translator's own.
        """
        choice = self.choice if choice is None else choice
        check_type("align got a choice", choice, AlignmentHead, 'AlignmentHead(layer=-1, shift="output")')
        return align(self.model, self.tokens, pairs, choice)

    def __repr__(self) -> str:
        return f"Translator({type(self.model).__name__}, {self.tokens!r})"

    def _search(self, lines: Sequence[Line], how: Strategy, batch: int) -> list[list[list["_Passage"]]]:
        """The best drafts of each line, best first; parts of like lengths are searched together."""
        parts = [part for line in lines for part in line.parts]
        sources = [part.cut.ids for part in parts]
        found: dict[int, list[Hypothesis]] = {}
        for some, packed in by_length(sources, batch, self.model.output_weight.device):
            most = [min(max_translation_tokens(len(sources[number])), self._places) for number in some]
            found.update(zip(some, search(self.model, packed, how, most=most), strict=True))
        numbers = iter(range(len(parts)))
        return [_drafts(line, [found[next(numbers)] for _ in line.parts]) for line in lines]

    def _weigh(self, passages: Sequence["_Passage"]) -> dict[int, Tensor]:
        """What was looked at in passages, (target tokens, source tokens); of no attention, nothing."""
        if not passages or not has_cross_attention(self.model):
            return {}
        sources = [passage.part.cut.ids for passage in passages]
        targets = [passage.hypothesis.tokens for passage in passages]
        read = cross_weights(self.model, sources, targets, self.choice)
        return {id(passage): weights for passage, weights in zip(passages, read, strict=True)}

    def _finish(
        self, line: Line, draft: Sequence["_Passage"], weights: Mapping[int, Tensor], aligned: bool
    ) -> Translation:
        """Ids become text, and what the model does not know is copied."""
        finished = [self._written(passage, weights.get(id(passage))) for passage in draft]
        words = [word for written in finished for word in written.words]
        translation = Translation(
            line.text,
            " ".join(word.text for word in words),
            _score(draft),
            [piece for written in finished for piece in written.cut.pieces],
            "; ".join(_notes(draft, words)),
            _read=partial(self._align, line, finished),
            _ids=[number for written in finished for number in written.cut.ids],
        )
        if aligned:
            translation.alignment = translation._read()
        return translation

    def _written(self, passage: "_Passage", weights: Tensor | None) -> "_Written":
        source, ids = passage.part.cut, passage.hypothesis.tokens
        known = letters(ids, source, weights, self.tokens.target.kind)
        cut = self.tokens.target.join(ids, known.at)
        missing = left_out(source, known.used)
        read = merge(source, cut, weights) if missing and weights is not None else None
        return _Written(passage, cut, place(cut.words, source, missing, read), weights)

    def _align(self, line: Line, finished: Sequence["_Written"]) -> Alignment:
        """The alignment of a finished translation: its words' weights, and a link for each copy."""
        words = [word.text for written in finished for word in written.words]
        check_size("the line", "words", len(line.words), len(words))
        if finished:
            cross_attention_layers(self.model)  # says what is wrong, if it does not attend
        needed = [written.passage for written in finished if written.weights is None]
        weights = self._weigh(needed)
        rows, first = torch.zeros(len(words), len(line.words)), 0
        for written in finished:
            found = weights.get(id(written.passage), written.weights)
            assert found is not None
            block = written.block(found)
            start = written.passage.part.word
            rows[first : first + len(block), start : start + block.shape[1]] = block
            first += len(block)
        return Alignment(tuple(line.words), tuple(words), rows)


class _Passage(NamedTuple):
    """A part of a line, and what was found for it."""

    part: Part
    hypothesis: Hypothesis

    @property
    def has_unknown(self) -> bool:
        """Whether there is something that is not in the vocabulary, read or written."""
        return bool(self.part.cut.unknown) or UNKNOWN in self.hypothesis.tokens


class _Written(NamedTuple):
    """A passage as text: what the model wrote, the words with those that were copied, and where it looked."""

    passage: _Passage
    cut: Cut
    words: list[Placed]
    weights: Tensor | None

    def block(self, weights: Tensor) -> Tensor:
        """(target words, source words): from where each word came."""
        source = self.passage.part.cut
        own = merge(source, self.cut, weights)
        block = torch.zeros(len(self.words), len(source.words))
        for row, word in enumerate(self.words):
            if word.own is not None:
                block[row] = own[word.own]
            elif word.copied is not None:
                block[row, word.copied] = 1
        return block


def _drafts(line: Line, found: Sequence[Sequence[Hypothesis]]) -> list[list[_Passage]]:
    """A draft of the best hypotheses of all parts, one of the second best, …; of an empty line, one."""
    ranked = zip(*found, strict=False)
    return [list(map(_Passage, line.parts, chosen)) for chosen in ranked] or [[]]


def _score(draft: Sequence[_Passage]) -> float:
    """That of the hypothesis; of several parts the mean, the longer one counting more."""
    scores = [passage.hypothesis.score for passage in draft]
    if len(scores) == 1:
        return scores[0]
    lengths = [len(passage.hypothesis.tokens) + 1 for passage in draft]
    return sum(score * n for score, n in zip(scores, lengths, strict=True)) / max(sum(lengths), 1)


def _notes(draft: Sequence[_Passage], words: Sequence[Placed]) -> Iterator[str]:
    """What is out of the ordinary."""
    if len(draft) > 1:
        lengths = [len(passage.part.cut.ids) for passage in draft]
        yield f"translated in {len(draft)} parts of {max(lengths)} pieces at most, as it has {sum(lengths)}"
    if not all(passage.hypothesis.finished for passage in draft):
        yield "cut off, as the model found no end"
    copied = [repr(shorten(word.text)) for word in words if word.copied is not None]
    if copied:
        more = " …" if len(copied) > _SHOWN else ""
        yield f"copied what the model does not know: {', '.join(copied[:_SHOWN])}{more}"


def load_translator(folder: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Translator:
    """The translator of a model folder, which `regard train` wrote; on a device, "cuda" for example.

    >>> import regard
    >>> regard.load_translator("no/such/folder")
    Traceback (most recent call last):
    regard.errors.ArgumentError: 'no/such/folder' does not exist; ...
    """
    model, tokens, config = load_model(folder)
    model.to(device)
    choice = config.get("alignment")
    return Translator(
        model, tokens, choice=AlignmentHead.from_dict(choice) if choice else None, settings=config
    )
