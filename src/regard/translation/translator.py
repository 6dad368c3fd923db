"""Text in, text out: translations with their scores, alternatives and word alignments."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.mechanism.checks import count
from regard.models.packed import Packed
from regard.models.seq2seq import Seq2Seq
from regard.models.words import checked, shorten
from regard.translation.alignment import Alignment, Choice, align, cross_weights, merge
from regard.translation.arriving import in_groups
from regard.translation.checkpoint import load_model
from regard.translation.copying import Placed, left_out, letters, place
from regard.translation.crossing import crossing
from regard.translation.lines import Line, Run
from regard.translation.search import Beam, How, Hypothesis, search
from regard.translation.tokens import END, UNKNOWN, Cut, TwoSides

LONGEST = 256  # pieces of a line that are translated at once, if the model's settings do not say
_GROUP = 8  # batches that are sorted by length together when lines arrive


@dataclass(eq=False)
class Translation:
    """A sentence and what a model made of it.

    score: what hypotheses are ranked by; for beam search the mean log probability of a piece. tokens: the
    pieces that the model wrote. alternatives: the next best ones, if they were asked for. note: what happened
    on the way that one might want to know, or nothing.
    """

    source: str
    text: str
    score: float
    tokens: list[str]
    note: str = ""
    alternatives: list["Translation"] = field(default_factory=list)
    _read: Callable[[], Alignment] = field(kw_only=True, repr=False)

    @cached_property
    def alignment(self) -> Alignment:
        """Which words came from which: the model reads its own translation once more, when first asked."""
        return self._read()

    def __str__(self) -> str:
        return self.text


class Translator:
    """A model with its vocabularies, ready to translate; `load_translator` makes one of a model folder.

    choice: which layer and heads alignments are read from. settings: the config of the model folder.

    >>> import torch
    >>> from regard.models import Recipe, Transformer
    >>> from regard.translation.tokens import Tokens, TwoSides
    >>> from regard.translation.translator import Translator
    >>> tokens = Tokens.learn(["ein Hund bellt", "a dog barks"] * 10, kind="characters", size=40)
    >>> model = Transformer(len(tokens), Recipe(width=16, heads=2, layers=1), share=True)
    >>> translator = Translator(model, TwoSides(tokens, tokens))
    >>> found = translator.translate(["ein Hund bellt", ""])
    >>> found[0].source, found[1].text
    ('ein Hund bellt', '')
    >>> found[0].alignment.weights.shape[1]  # target words × source words
    3
    """

    def __init__(
        self,
        model: Seq2Seq,
        tokens: TwoSides,
        *,
        choice: Choice | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.tokens = model, tokens
        self.choice, self.settings = choice or Choice(), settings or {}
        self.longest: int = self.settings.get("plan", {}).get("corpus", {}).get("longest", LONGEST)

    def translate(
        self,
        texts: str | Sequence[str],
        *,
        how: How = Beam(),  # noqa: B008 (a frozen value)
        batch: int = 64,
        alignment: bool = False,
    ) -> list[Translation]:
        """Translate sentences; the translations come in their order.

        how: `Beam(5)`, `Greedy()` or `Sample()`; with best=3 there are two alternatives to each translation.
        batch: how many sentences are searched together. alignment: read all alignments now, in batches, which
        is faster than each when it is asked for.

        A sentence of more pieces than the model was trained with is translated in parts; its `note` says so.
        """
        count("translate got batch", batch, least=1)
        if alignment:
            crossing(self.model)  # refuses a model without attention, before the work
        lines = [Line.of(text, self.tokens.source.cut(text), self.longest) for text in checked(texts)]
        drafts = self._search(lines, how, batch)
        every = [draft for some in drafts for draft in some]
        needed = [draft for draft in every if alignment or draft.has_unknown]
        weights = dict(zip(map(id, needed), self._weigh(needed), strict=True))
        found = []
        for some in drafts:
            best, *others = (self._finish(draft, weights.get(id(draft)), alignment) for draft in some)
            best.alternatives.extend(others)
            found.append(best)
        return found

    def stream(
        self,
        lines: Iterable[str],
        *,
        how: How = Beam(),  # noqa: B008
        batch: int = 64,
        alignment: bool = False,
    ) -> Iterator[Translation]:
        """Translate lines as they arrive, in their order: those that are there together, and one at once.

        >>> import sys
        >>> from regard.translation.translator import Translator
        >>> def talk(translator: Translator) -> None:
        ...     for translation in translator.stream(sys.stdin):
        ...         print(translation.text, flush=True)
        """
        count("stream got batch", batch, least=1)
        for group in in_groups(lines, batch * _GROUP):
            stripped = [line.rstrip("\r\n") for line in group]
            yield from self.translate(stripped, how=how, batch=batch, alignment=alignment)

    def align(self, pairs: Sequence[tuple[str, str]]) -> list[Alignment]:
        """Which words of given translations came from which: the model reads each pair."""
        return align(self.model, self.tokens, pairs, self.choice)

    def __repr__(self) -> str:
        return f"Translator({type(self.model).__name__}, {self.tokens!r})"

    def _search(self, lines: Sequence[Line], how: How, batch: int) -> list[list["_Draft"]]:
        """The best drafts of each line, best first; lines of like lengths are searched together."""
        jobs = [(number, run) for number, line in enumerate(lines) for run in line.runs]
        jobs.sort(key=lambda job: job[1][1] - job[1][0])
        device = self.model.output_weight.device
        found: dict[tuple[int, Run], list[Hypothesis]] = {}
        for first in range(0, len(jobs), batch):
            some = jobs[first : first + batch]
            sources = [lines[number].cut.ids[slice(*run)] for number, run in some]
            packed = Packed.of([[*source, END] for source in sources], device)
            most = [2 * len(source) + 10 for source in sources]
            found.update(zip(some, search(self.model, packed, how, most=most), strict=True))
        return [_drafts(line, [found[number, run] for run in line.runs]) for number, line in enumerate(lines)]

    def _weigh(self, drafts: Sequence["_Draft"]) -> list[Tensor | None]:
        """The weights of each draft, (target tokens, source tokens); None of a model without attention."""
        if not self._attends:
            return [None] * len(drafts)
        weights = [torch.zeros(len(draft.ids), len(draft.line.cut.ids)) for draft in drafts]
        blocks = [block for draft, all_ in zip(drafts, weights, strict=True) for block in draft.blocks(all_)]
        sources, targets = [block.source for block in blocks], [block.target for block in blocks]
        for block, read in zip(blocks, cross_weights(self.model, sources, targets, self.choice), strict=True):
            block.weights.copy_(read)
        return list(weights)

    @cached_property
    def _attends(self) -> bool:
        try:
            return bool(crossing(self.model))
        except ArgumentError:
            return False

    def _finish(self, draft: "_Draft", weights: Tensor | None, aligned: bool) -> Translation:
        """Ids become text, and what the model does not know is copied."""
        source = draft.line.cut
        known = letters(draft.ids, source, weights, self.tokens.target.kind)
        cut = self._join(draft, known.at)
        missing = left_out(source, known.used)
        words = [Placed(word, own=number) for number, word in enumerate(cut.words)]
        if missing:
            read = None if weights is None else merge(source, cut, weights)
            words = place(cut.words, source, missing, read)
        notes = [*draft.notes(), *_copied(words)]
        translation = Translation(
            draft.line.text,
            " ".join(word.text for word in words),
            draft.score,
            cut.pieces,
            "; ".join(notes),
            _read=partial(self._align, draft, cut, words, weights),
        )
        if aligned:
            translation.alignment = translation._read()
        return translation

    def _join(self, draft: "_Draft", unknown: Mapping[int, str]) -> Cut:
        """What was written in all runs, as text; no word goes on in the next run."""
        joined, before = Cut([], [], [], [], {}), 0
        for hypothesis in draft.hypotheses:
            own = {at - before: shown for at, shown in unknown.items() if at >= before}
            part = self.tokens.target.join(hypothesis.tokens, own)
            joined.word_of.extend(len(joined.words) + word for word in part.word_of)
            joined.words.extend(part.words)
            joined.pieces.extend(part.pieces)
            joined.ids.extend(part.ids)
            before += len(hypothesis.tokens)
        return joined

    def _align(self, draft: "_Draft", cut: Cut, words: Sequence[Placed], weights: Tensor | None) -> Alignment:
        """The alignment of a finished translation: its words' weights, and a link for each copy."""
        if weights is None:
            (weights,) = self._weigh([draft])
        if weights is None:
            crossing(self.model)  # says why
        assert weights is not None
        source = draft.line.cut
        own = merge(source, cut, weights)
        rows = torch.zeros(len(words), len(source.words))
        for row, word in enumerate(words):
            if word.own is not None:
                rows[row] = own[word.own]
            elif word.copied is not None:
                rows[row, word.copied] = 1
        return Alignment(tuple(source.words), tuple(word.text for word in words), rows)


class _Block(NamedTuple):
    """A run of a source, what was written for it, and the part of the weights that belongs to both."""

    source: list[int]
    target: list[int]
    weights: Tensor


class _Draft(NamedTuple):
    """A line and what was written for each of its runs."""

    line: Line
    hypotheses: list[Hypothesis]

    @property
    def ids(self) -> list[int]:
        """All that was written."""
        return [one for hypothesis in self.hypotheses for one in hypothesis.tokens]

    @property
    def has_unknown(self) -> bool:
        """Whether there is something that is not in the vocabulary, read or written."""
        return bool(self.line.cut.unknown) or UNKNOWN in self.ids

    @property
    def score(self) -> float:
        """That of the hypothesis; of several runs the mean, the longer one counting more."""
        scores = [hypothesis.score for hypothesis in self.hypotheses]
        if len(scores) == 1:
            return scores[0]
        lengths = [len(hypothesis.tokens) + 1 for hypothesis in self.hypotheses]
        return sum(score * n for score, n in zip(scores, lengths, strict=True)) / max(sum(lengths), 1)

    def blocks(self, weights: Tensor) -> Iterator[_Block]:
        """The runs, each with its part of the draft's weights."""
        row = 0
        for (first, stop), hypothesis in zip(self.line.runs, self.hypotheses, strict=True):
            last = row + len(hypothesis.tokens)
            yield _Block(self.line.cut.ids[first:stop], hypothesis.tokens, weights[row:last, first:stop])
            row = last

    def notes(self) -> Iterator[str]:
        """What is out of the ordinary."""
        if len(self.line.runs) > 1:
            longest = max(stop - first for first, stop in self.line.runs)
            yield (
                f"translated in {len(self.line.runs)} parts of {longest} pieces at most, as it has "
                f"{len(self.line.cut.ids)}"
            )
        if not all(hypothesis.finished for hypothesis in self.hypotheses):
            yield "cut off, as the model found no end"


def _drafts(line: Line, found: Sequence[Sequence[Hypothesis]]) -> list[_Draft]:
    """A draft of the best hypotheses of all runs, one of the second best, and so on; one of an empty line."""
    return [_Draft(line, list(chosen)) for chosen in zip(*found, strict=False)] or [_Draft(line, [])]


def load_translator(folder: str | os.PathLike[str]) -> Translator:
    """The translator of a model folder, which `regard train` wrote.

    >>> import regard
    >>> regard.load_translator("no/such/folder")
    Traceback (most recent call last):
    regard.errors.ArgumentError: 'no/such/folder' does not exist; ...
    """
    model, tokens, config = load_model(folder)
    choice = config.get("alignment")
    return Translator(model, tokens, choice=Choice.from_dict(choice) if choice else None, settings=config)


def _copied(words: Sequence[Placed]) -> list[str]:
    """What to say of source words that were copied."""
    copied = [repr(shorten(word.text)) for word in words if word.copied is not None]
    return [f"copied what the model does not know: {', '.join(copied)}"] if copied else []
