"""From a source to target sentences: the likeliest token each time, beam search, or tokens drawn by chance.

All sentences of a batch are extended together, one token a step; those that have ended leave the batch.

beam:    each hypothesis is extended by every token, and the best of all extensions stay. One that ends is
         finished and gives up its place, so that fewer are extended from then on.
score:   log probability / length ** exponent, the end mark counted (Wu et al. 2016, eq. 14, without their 5)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from regard._util import interrupt
from regard._util.checks import count, number, of_kind
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.models.layers.dropout import evaluating
from regard.models.layers.embedding import outside
from regard.models.packed import Packed
from regard.models.seq2seq import Seq2Seq
from regard.translation.tokens import END, PADDING, START

WIDEST = 10_000  # hypotheses of a sentence, and sentences that are drawn
COLDEST, HOTTEST = 1e-6, 1e6  # beyond them chances are 0 and 1, or all the same
_BLOCK = 64  # words of a vocabulary whose largest is found first; of 20 to 100 the fastest for 8,000 words


@dataclass(frozen=True)
class Greedy:
    """The likeliest token each time; the same as `Beam(1)`.

    >>> from regard.translation.decoding.search import Greedy
    >>> Greedy()
    Greedy()
    """


@dataclass(frozen=True)
class Beam:
    """The best of several hypotheses at a time.

    size: how many are followed. best: how many of them are given back.
    length: the exponent of a hypothesis' length, by which its log probability is divided; with 0 short
        sentences are preferred, with 1 the mean over the tokens counts.
    within: those whose log probability is lower than the best one's by more than this are given up (relative
        threshold pruning, Freitag and Al-Onaizan 2017). With 3 a translation seldom changes and takes a fifth
        less time; of several, fewer than `best` may come out.

    >>> from regard.translation.decoding.search import Beam
    >>> Beam(size=4, best=5)
    Traceback (most recent call last):
    regard.errors.ArgumentError: Beam got size=4 and best=5; ...
    """

    size: int = 5
    length: float = 1.0
    best: int = 1
    within: float = math.inf

    def __post_init__(self) -> None:
        count("Beam got size", self.size, least=1)
        number("Beam got size", self.size, most=WIDEST, cure="A few suffice: Beam(5).")
        count("Beam got best", self.best, least=1)
        number("Beam got length", self.length, least=0)
        if self.within != math.inf:
            number("Beam got within", self.within, least=0)
        if self.best > self.size:
            raise ArgumentError(
                f"Beam got size={self.size} and best={self.best}; no more come out than are followed. Give a "
                f"size of {self.best} at least."
            )


@dataclass(frozen=True)
class Sample:
    """Tokens drawn by their chances, the same for a source sentence and seed whatever else is in the batch.

    temperature: below 1 likely tokens get likelier, above it less so.
    top_p: draw of the likeliest tokens alone that have this probability together (Holtzman et al. 2020).
    best: how many are drawn for each sentence; they may be equal.

    >>> from regard.translation.decoding.search import Sample
    >>> Sample(top_p=0)
    Traceback (most recent call last):
    regard.errors.ArgumentError: Sample got top_p=0; it must be above 0 and at most 1. ...
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    best: int = 1

    def __post_init__(self) -> None:
        cure = "For the likeliest use Greedy()."
        number("Sample got temperature", self.temperature, least=COLDEST, most=HOTTEST, cure=cure)
        number("Sample got top_p", self.top_p, above=0, most=1, cure="With 1 any token is drawn.")
        count("Sample got seed", self.seed)
        count("Sample got best", self.best, least=1)
        number("Sample got best", self.best, most=WIDEST, cure="Draw fewer, and again with another seed.")


Strategy = Greedy | Beam | Sample


class Hypothesis(NamedTuple):
    """A target sentence without marks; `finished` if its end mark was written too.

    tokens: their numbers.
    score: what it is ranked by; for a sample its log probability.
    log_probability: the sum over the tokens, the end mark included.

    >>> from regard.translation.decoding.search import Hypothesis
    >>> Hypothesis([5, 6], score=-0.5, log_probability=-1.5, finished=True).tokens
    [5, 6]
    """

    tokens: list[int]
    score: float
    log_probability: float
    finished: bool


def search(
    model: Seq2Seq,
    source: Packed,
    how: Strategy = Beam(),  # noqa: B008 (a frozen value)
    *,
    start: int = START,
    end: int = END,
    most: int | Sequence[int],
    never: Sequence[int] = (PADDING,),
) -> list[list[Hypothesis]]:
    """The best hypotheses for each sentence, best first; those that are finished come before the others.

    most: tokens of a hypothesis, the end mark among them; for all sentences, or one number for each.
    never: tokens that are not written, nor is the start mark. Probabilities stay those of the model.

    A hypothesis is given up as soon as it cannot become one of the best any more, and no earlier: what comes
    out is what searching on would give. So a tight `most` makes searching faster.

    >>> from regard.models import Packed, TransformerConfig, Transformer
    >>> from regard.translation.decoding.search import Beam, search
    >>> model = Transformer(100, TransformerConfig(width=16, heads=2, layers=1))
    >>> found = search(model, Packed.of([[5, 6, 2], [7, 2]]), Beam(4, best=2), most=[6, 4])
    >>> [len(hypotheses) for hypotheses in found]
    [2, 2]
    """
    of_kind("search got a source", source, Packed, "Packed.of([[5, 6, 2]])")
    if not isinstance(how, Strategy):
        raise DTypeError(f"search got how={how!r}; give Greedy(), Beam(5) or Sample().")
    vocabulary = len(model.output_weight)
    forbidden = _forbidden(vocabulary, start, end, never)
    limits = _limits(most, len(source))
    if not len(source):
        return []
    with torch.inference_mode(), evaluating(model):
        device = model.output_weight.device
        picker = _Draws(how, source) if isinstance(how, Sample) else _Beams(how, len(source), device)
        found = _Found(picker, torch.tensor(limits, device=device), end)
        live, state = _Live.start(len(source), picker.rows, start, device), model.start(source)
        forbidden = forbidden.to(device)
        held, rows = len(source), live.sentences  # rows of the state, and those that hypotheses go on from
        while True:
            interrupt.check()
            going = found.settle(live)
            live, rows = live.take(going), rows[going]
            if not len(rows):
                return found.best()
            if len(rows) != held or not torch.equal(rows, torch.arange(held, device=device)):
                state.select(rows)
            logits = model.step(live.tokens[:, -1], state)
            _check_logits(logits, vocabulary)
            log_probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            log_probabilities.index_fill_(1, forbidden, -math.inf)
            held, (live, rows) = len(rows), picker.extend(live, log_probabilities)


class _Live(NamedTuple):
    """The hypotheses that go on, n of them, those of a sentence one after the other."""

    sentences: Tensor  # n
    origins: Tensor  # n: the row that each began in
    totals: Tensor  # n: log probabilities
    tokens: Tensor  # n t, with the start mark

    @classmethod
    def start(cls, sentences: int, rows: int, start: int, device: torch.device) -> "_Live":
        """So many rows of each sentence, with the start mark alone."""
        origins = torch.arange(sentences * rows, device=device)
        totals = torch.zeros(len(origins), dtype=torch.float64, device=device)
        return cls(origins // rows, origins, totals, torch.full((len(origins), 1), start, device=device))

    def take(self, rows: Tensor) -> "_Live":
        """These of them."""
        return _Live(*(each[rows] for each in self))

    def extend(self, parents: Tensor, tokens: Tensor, totals: Tensor) -> "_Live":
        """These of them, with one more token each."""
        tokens = torch.cat([self.tokens[parents], tokens[:, None]], 1)
        return _Live(self.sentences[parents], self.origins[parents], totals, tokens)


class _Beams:
    """Extends hypotheses by the best tokens, into as many as a sentence has places left."""

    rows = 1  # of each sentence at first: more would be equal

    def __init__(self, how: Greedy | Beam, sentences: int, device: torch.device) -> None:
        beam = how if isinstance(how, Beam) else Beam(1)
        self.length, self.best, self.within = beam.length, beam.best, beam.within
        self.places = torch.full((sentences,), beam.size, device=device)

    def extend(self, live: _Live, log_probabilities: Tensor) -> tuple[_Live, Tensor]:
        """The hypotheses one token later, the best of a sentence first, and the rows that they come from."""
        sentences, first = _firsts(live.sentences)
        places = self.places[sentences, None]
        totals, parents, tokens = _best(live, log_probabilities, first, int(places.max()))
        kept = torch.arange(totals.shape[1], device=totals.device) < places
        kept &= (totals > -math.inf) & (totals >= totals[:, :1] - self.within)
        return live.extend(parents[kept], tokens[kept], totals[kept]), parents[kept]

    def end(self, sentences: Tensor) -> None:
        """A hypothesis of each of these has ended, and gives up its place."""
        self.places.index_add_(0, sentences, torch.ones_like(sentences), alpha=-1)


class _Draws:
    """Extends each hypothesis by a token drawn by its chances, with random numbers of its own."""

    length = 0.0

    def __init__(self, how: Sample, source: Packed) -> None:
        self.how, self.rows, self.best = how, how.best, how.best
        self.random = [
            numpy.random.default_rng([how.seed, i, *part.tolist()])
            for part in source.split(source.tokens)
            for i in range(how.best)
        ]

    def extend(self, live: _Live, log_probabilities: Tensor) -> tuple[_Live, Tensor]:
        """The hypotheses one token later, and the rows that they come from: all of them."""
        _check(log_probabilities)
        chances = (log_probabilities.double() / self.how.temperature).softmax(-1)
        order = None
        if self.how.top_p < 1:
            chances, order = chances.sort(descending=True, stable=True)
            chances = chances.masked_fill(chances.cumsum(-1) - chances >= self.how.top_p, 0)
        below = chances.cumsum(-1)
        # float32, so that it stays below 1 when it is multiplied by the sum of all
        drawn = [float(self.random[i].random(dtype=numpy.float32)) for i in live.origins.tolist()]
        at = below[:, -1:] * torch.tensor(drawn, dtype=below.dtype, device=below.device)[:, None]
        tokens = torch.searchsorted(below, at, right=True)  # n 1
        tokens = tokens if order is None else order.gather(1, tokens)
        totals = live.totals + log_probabilities.gather(1, tokens)[:, 0]
        rows = torch.arange(len(totals), device=totals.device)
        return live.extend(rows, tokens[:, 0], totals), rows

    def end(self, sentences: Tensor) -> None:
        """Each has its own place."""


class _Found:
    """The hypotheses that have ended, for each sentence, and what one must reach to be among the best."""

    def __init__(self, picker: _Beams | _Draws, limits: Tensor, end: int) -> None:
        self.picker, self.limits, self.end = picker, limits, end
        self.hypotheses: list[list[Hypothesis]] = [[] for _ in range(len(limits))]
        self.bar = torch.full(limits.shape, -math.inf, dtype=torch.float64, device=limits.device)

    def settle(self, live: _Live) -> Tensor:
        """Take those that have ended or may not get longer; which of them all go on (n)."""
        size = live.tokens.shape[1] - 1
        ended = (live.tokens[:, -1] == self.end) & (size > 0)  # the start mark may be the end mark too
        cut = ~ended & (self.limits[live.sentences] <= size)
        self._take(live.take(ended), size, finished=True)
        self._take(live.take(cut), size, finished=False)
        self.picker.end(live.sentences[ended])
        # A log probability only falls, so that this is the most that any continuation can score. What ranks
        # below a hypothesis without hope has none either: its place may stay empty.
        reach = live.totals / self.limits[live.sentences].double() ** self.picker.length
        return ~ended & ~cut & (reach > self.bar[live.sentences])

    def _take(self, live: _Live, size: int, finished: bool) -> None:
        scores = live.totals / max(size, 1) ** self.picker.length
        rows = (live.sentences, live.tokens, scores, live.totals)
        for sentence, tokens, score, total in zip(*(each.tolist() for each in rows), strict=True):
            written = tokens[1:-1] if finished else tokens[1:]
            self.hypotheses[sentence].append(Hypothesis(written, score, total, finished))
            done = sorted((h.score for h in self.hypotheses[sentence] if h.finished), reverse=True)
            if len(done) >= self.picker.best:
                self.bar[sentence] = done[self.picker.best - 1]

    def best(self) -> list[list[Hypothesis]]:
        """For each sentence, best first."""
        ranked = (sorted(some, key=lambda h: (h.finished, h.score), reverse=True) for some in self.hypotheses)
        return [some[: self.picker.best] for some in ranked]


def _firsts(sentences: Tensor) -> tuple[Tensor, Tensor]:
    """The sentences, each once, and the first row of each."""
    numbers, rows = sentences.unique_consecutive(return_counts=True)
    return numbers, rows.cumsum(0) - rows


def _best(live: _Live, log_probabilities: Tensor, first: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k best extensions of each sentence, best first: log probabilities, rows and tokens, all (s, k).

    They are in those k blocks of tokens whose likeliest are the likeliest, which are found much faster. Where
    there are fewer than k, the log probability is −∞.
    """
    n, vocabulary = log_probabilities.shape
    row = torch.arange(n, device=first.device)
    sentence = torch.searchsorted(first, row, right=True) - 1
    place = row - first[sentence]
    likeliest = _of_blocks(log_probabilities)  # n blocks
    _check(likeliest)
    blocks = likeliest.shape[1]
    table = live.totals.new_full((len(first), int(place.max()) + 1, blocks), -math.inf)
    table[sentence, place] = live.totals[:, None] + likeliest
    values, at = table.flatten(1).topk(min(k, table[0].numel()))
    rows = (first[:, None] + at // blocks).clamp(max=n - 1)  # s k
    tokens = at[..., None] % blocks * _BLOCK + torch.arange(_BLOCK, device=at.device)  # s k block
    there = (tokens < vocabulary) & (values[..., None] > -math.inf)
    chosen = log_probabilities[rows[..., None], tokens.clamp(max=vocabulary - 1)]
    chosen = (live.totals[rows][..., None] + chosen).masked_fill(~there, -math.inf).flatten(1)
    totals, at = chosen.topk(min(k, chosen.shape[1]))
    return totals, rows.gather(1, at // _BLOCK), tokens.flatten(1).gather(1, at)


def _of_blocks(x: Tensor) -> Tensor:
    """The largest of each block of columns; the last block may be shorter."""
    blocks = x.shape[1] // _BLOCK
    whole, rest = x[:, : blocks * _BLOCK], x[:, blocks * _BLOCK :]
    found = whole.unflatten(1, (blocks, _BLOCK)).amax(-1)
    return torch.cat([found, rest.amax(-1, keepdim=True)], 1) if rest.shape[1] else found


def _check_logits(logits: Tensor, vocabulary: int) -> None:
    if logits.shape[1] != vocabulary:
        raise ShapeError(
            f"a step of the model gave {logits.shape[1]} logits, and its output_weight has {vocabulary} "
            "rows; a step gives one for each."
        )


def _check(likeliest: Tensor) -> None:
    """The largest log probabilities in each row: some token has a chance."""
    if not bool((likeliest.amax(-1) > -math.inf).all()):  # nor is NaN
        raise ArgumentError(
            "the model gave NaN, or no chance to any token that may be written; look at its weights, at what "
            "was trained last, and at never."
        )


def _limits(most: int | Sequence[int], sentences: int) -> list[int]:
    limits = list(most) if isinstance(most, Sequence) else [most] * sentences
    if len(limits) != sentences:
        raise ShapeError(
            f"search got {sentences} sentences and most with {len(limits)} numbers; give one for all, or one "
            "for each."
        )
    for limit in limits:
        count("search got most", limit)
    return limits


def _forbidden(vocabulary: int, start: int, end: int, never: Sequence[int]) -> Tensor:
    """The tokens that are not written."""
    for name, token in (("start", start), ("end", end), *(("never", token) for token in never)):
        count(f"search got {name}", token)
    tokens = torch.tensor([start, end, *never])
    if bool((tokens >= vocabulary).any()):
        raise ArgumentError(outside(tokens, vocabulary))
    if end in never:
        raise ArgumentError(
            f"search got end={end} and never={tuple(never)}; leave it out there, as no sentence ends without "
            "its end mark."
        )
    return torch.tensor([token for token in (start, *never) if token != end], dtype=torch.long)
