"""Greedy decoding, beam search and sampling.

All sentences of a batch are extended together, one token per step. Finished sentences leave the batch.

beam:    every hypothesis is extended by every token and the best extensions are kept. A finished hypothesis
         keeps its slot, so the beam of its sentence shrinks.
score:   log probability / length ** length_penalty (Wu et al. 2016, eq. 14, without the constant 5)
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from torch import Tensor

from regard._util import interrupt
from regard._util.checks import check_int, check_type
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.models.layers.dropout import eval_mode
from regard.models.packed import Packed
from regard.models.seq2seq import Seq2Seq
from regard.translation.decoding.constraints import Constraints, extend_constrained
from regard.translation.decoding.strategies import Beam, Greedy, Sample, Strategy
from regard.translation.tokens import END, PADDING, START

_BLOCK = 64  # tokens per block in the two-stage topk; 20 to 100 are fastest for a vocabulary of 8,000


class Hypothesis(NamedTuple):
    """A decoded target sentence.

    tokens: token ids without start and end token.
    score: the ranking score; for samples, the log probability.
    log_probability: sum over all tokens, including the end token.
    finished: whether the end token was generated.

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
    strategy: Strategy = Beam(),  # noqa: B008 (a frozen value)
    *,
    max_new_tokens: int | Sequence[int],
    constraints: Constraints | None = None,
) -> list[list[Hypothesis]]:
    """Decode each sentence; return its hypotheses, finished ones first, then by score.

    max_new_tokens: maximum length including the end token: one number, or one per sentence.
    constraints: phrases that each translation must contain, and limits on unknown tokens.

    Padding and start tokens are never generated; probabilities are not renormalized. A hypothesis is dropped
    when it can no longer become one of the n best; this never changes the result. A tight `max_new_tokens`
    therefore makes the search faster.

    >>> from regard.models import Packed, TransformerConfig, Transformer
    >>> from regard.translation.decoding.search import Beam, search
    >>> model = Transformer(100, TransformerConfig(width=16, heads=2, layers=1))
    >>> source = Packed.of([[5, 6, 2], [7, 2]])
    >>> [len(hypotheses) for hypotheses in search(model, source, Beam(4, n_best=2), max_new_tokens=[6, 4])]
    [2, 2]
    """
    check_type("search got a source", source, Packed, "Packed.of([[5, 6, 2]])")
    if not isinstance(strategy, Strategy):
        raise DTypeError(f"search got strategy={strategy!r}; pass Greedy(), Beam(5) or Sample().")
    vocabulary = len(model.output_weight)
    limits = _limits(max_new_tokens, len(source))
    if constraints is not None:
        constraints.check(strategy, limits)
    if not len(source):
        return []
    with torch.inference_mode(), eval_mode(model):
        device = model.output_weight.device
        suppressed = torch.tensor([PADDING, START], device=device)
        make = next(make for kind, make in _EXTENDERS.items() if isinstance(strategy, kind))
        extender = make(strategy, source, device)
        if constraints is not None and any(constraints.phrases) and not isinstance(strategy, Sample):
            extender = _ConstrainedExtender(strategy, source, device, constraints, limits)
        results = _Results(extender, torch.tensor(limits, device=device))
        live, state = _Live.start(len(source), extender.rows, device), model.start(source)
        state_rows, rows = len(source), live.sentences  # rows: for each hypothesis, its row in the state
        while True:
            interrupt.check()
            active = results.collect(live)
            live, rows = live.take(active), rows[active]
            if not len(rows):
                return results.ranked()
            if len(rows) != state_rows or not torch.equal(rows, torch.arange(state_rows, device=device)):
                state.select(rows)
            logits = model.step(live.tokens[:, -1], state)
            _check_logits(logits, vocabulary)
            log_probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            log_probabilities.index_fill_(1, suppressed, -math.inf)
            if constraints is not None:
                constraints.mask(live.sentences, live.tokens, log_probabilities)
            state_rows, (live, rows) = len(rows), extender.extend(live, log_probabilities)


def batch_by_length(
    sources: Sequence[Sequence[int]], size: int, device: torch.device
) -> Iterator[tuple[list[int], Packed]]:
    """Yield indices and packed sources in batches of similar lengths, shortest first; adds end tokens."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    for first in range(0, len(order), size):
        indices = order[first : first + size]
        yield indices, Packed.of([[*sources[i], END] for i in indices], device)


class _Live(NamedTuple):
    """The n unfinished hypotheses, grouped by sentence."""

    sentences: Tensor  # n
    origins: Tensor  # n: the initial row of each hypothesis
    totals: Tensor  # n: log probabilities
    tokens: Tensor  # n t, with the start token

    @classmethod
    def start(cls, sentences: int, rows: int, device: torch.device) -> "_Live":
        """Create `rows` hypotheses per sentence, each with only the start token."""
        origins = torch.arange(sentences * rows, device=device)
        totals = torch.zeros(len(origins), dtype=torch.float64, device=device)
        return cls(origins // rows, origins, totals, torch.full((len(origins), 1), START, device=device))

    def take(self, rows: Tensor) -> "_Live":
        """Select rows."""
        return _Live(*(field[rows] for field in self))

    def extend(self, parents: Tensor, tokens: Tensor, totals: Tensor) -> "_Live":
        """Append one token to each of the `parents`."""
        tokens = torch.cat([self.tokens[parents], tokens[:, None]], 1)
        return _Live(self.sentences[parents], self.origins[parents], totals, tokens)


class _Extender(Protocol):
    """Extends hypotheses by one token."""

    rows: int  # initial hypotheses per sentence
    n_best: int  # hypotheses returned per sentence
    length_penalty: float

    def extend(self, live: _Live, log_probabilities: Tensor) -> tuple[_Live, Tensor]:
        """Return the extended hypotheses, grouped by sentence, and the rows of their parents."""

    def finish(self, sentences: Tensor) -> None:
        """Called with the sentence of each hypothesis that has finished."""


class _BeamExtender(_Extender):
    """Keeps the best extensions of each sentence, one for each remaining beam slot."""

    rows = 1  # more would be identical

    def __init__(self, strategy: Greedy | Beam, source: Packed, device: torch.device) -> None:
        beam = strategy if isinstance(strategy, Beam) else Beam(1)
        self.length_penalty, self.n_best = beam.length_penalty, beam.n_best
        self.prune_threshold = beam.prune_threshold
        self.slots = torch.full((len(source),), beam.size, device=device)

    def extend(self, live: _Live, log_probabilities: Tensor) -> tuple[_Live, Tensor]:
        sentences, first = _first_rows(live.sentences)
        slots = self.slots[sentences, None]
        totals, parents, tokens = _best_extensions(live, log_probabilities, first, int(slots.max()))
        kept = torch.arange(totals.shape[1], device=totals.device) < slots
        kept &= (totals > -math.inf) & (totals >= totals[:, :1] - self.prune_threshold)
        return live.extend(parents[kept], tokens[kept], totals[kept]), parents[kept]

    def finish(self, sentences: Tensor) -> None:
        self.slots.index_add_(0, sentences, torch.ones_like(sentences), alpha=-1)


class _ConstrainedExtender(_BeamExtender):
    """Beam search in which the sentences with phrases share their beam among banks; see `constraints`."""

    def __init__(
        self,
        strategy: Greedy | Beam,
        source: Packed,
        device: torch.device,
        constraints: Constraints,
        limits: Sequence[int],
    ) -> None:
        super().__init__(strategy, source, device)
        self.phrases, self.limits, self.inner = constraints.phrases, limits, constraints.inner
        self.slots = torch.tensor(constraints.beam_sizes(strategy), device=device)

    def extend(self, live: _Live, log_probabilities: Tensor) -> tuple[_Live, Tensor]:
        extended, parents = super().extend(live, log_probabilities)
        blocks, block_parents = [], []
        for sentence in live.sentences.unique_consecutive().tolist():
            if not self.phrases[sentence]:
                own = extended.sentences == sentence
                blocks.append(extended.take(own))
                block_parents.append(parents[own])
                continue
            rows = (live.sentences == sentence).nonzero()[:, 0]
            own, tokens, totals = extend_constrained(
                live.tokens[rows, 1:].tolist(),
                live.totals[rows],
                log_probabilities[rows],
                self.phrases[sentence],
                int(self.slots[sentence]),
                self.limits[sentence],
                self.inner,
            )
            origin = rows[own]
            blocks.append(live.extend(origin, origin.new_tensor(tokens), live.totals.new_tensor(totals)))
            block_parents.append(origin)
        joined = _Live(*(torch.cat(column) for column in zip(*blocks, strict=True)))
        return joined, torch.cat(block_parents)


class _Sampler(_Extender):
    """Extends each hypothesis by a sampled token; each has its own random generator."""

    length_penalty = 0.0

    def __init__(self, strategy: Sample, source: Packed, device: torch.device) -> None:
        self.strategy, self.rows, self.n_best = strategy, strategy.n_samples, strategy.n_samples
        self.generators = [
            numpy.random.default_rng([strategy.seed, i, *sentence.tolist()])
            for sentence in source.split(source.tokens)
            for i in range(strategy.n_samples)
        ]

    def extend(self, live: _Live, log_probabilities: Tensor) -> tuple[_Live, Tensor]:
        _check_probabilities(log_probabilities)
        probabilities = (log_probabilities.double() / self.strategy.temperature).softmax(-1)
        order = None
        if self.strategy.top_p < 1:
            probabilities, order = probabilities.sort(descending=True, stable=True)
            outside_nucleus = probabilities.cumsum(-1) - probabilities >= self.strategy.top_p
            probabilities = probabilities.masked_fill(outside_nucleus, 0)
        cumulative = probabilities.cumsum(-1)
        # float32: the product with the float64 sum stays below the sum
        uniform = [float(self.generators[i].random(dtype=numpy.float32)) for i in live.origins.tolist()]
        at = (
            cumulative[:, -1:] * torch.tensor(uniform, dtype=torch.float64, device=cumulative.device)[:, None]
        )
        tokens = torch.searchsorted(cumulative, at, right=True)  # n 1
        tokens = tokens if order is None else order.gather(1, tokens)
        totals = live.totals + log_probabilities.gather(1, tokens)[:, 0]
        rows = torch.arange(len(totals), device=totals.device)
        return live.extend(rows, tokens[:, 0], totals), rows


_EXTENDERS: dict[type, Callable[[Any, Packed, torch.device], _Extender]] = {
    Greedy: _BeamExtender,
    Beam: _BeamExtender,
    Sample: _Sampler,
}


class _Results:
    """The ended hypotheses of each sentence, and the score that a new one must exceed to be returned."""

    def __init__(self, extender: _Extender, limits: Tensor) -> None:
        self.extender, self.limits = extender, limits
        self.hypotheses: list[list[Hypothesis]] = [[] for _ in range(len(limits))]
        self.threshold = torch.full(limits.shape, -math.inf, dtype=torch.float64, device=limits.device)

    def collect(self, live: _Live) -> Tensor:
        """Store the hypotheses that ended or reached their limit; return a mask (n) of those still active."""
        length = live.tokens.shape[1] - 1
        ended = live.tokens[:, -1] == END
        cut = ~ended & (self.limits[live.sentences] <= length)
        self._store(live.take(ended), length, finished=True)
        self._store(live.take(cut), length, finished=False)
        self.extender.finish(live.sentences[ended])
        # Log probabilities only decrease, so this bounds the score of every continuation. Lower-ranked
        # hypotheses have lower bounds, so the slot of a dropped one need not be refilled.
        bound = live.totals / self.limits[live.sentences].double() ** self.extender.length_penalty
        return ~ended & ~cut & (bound > self.threshold[live.sentences])

    def _store(self, live: _Live, length: int, finished: bool) -> None:
        n_best = self.extender.n_best
        scores = live.totals / max(length, 1) ** self.extender.length_penalty
        columns = (live.sentences, live.tokens, scores, live.totals)
        for sentence, tokens, score, total in zip(*(column.tolist() for column in columns), strict=True):
            hypotheses = self.hypotheses[sentence]
            hypotheses.append(Hypothesis(tokens[1:-1] if finished else tokens[1:], score, total, finished))
            finished_scores = sorted((h.score for h in hypotheses if h.finished), reverse=True)
            if len(finished_scores) >= n_best:
                self.threshold[sentence] = finished_scores[n_best - 1]

    def ranked(self) -> list[list[Hypothesis]]:
        """Return the n best hypotheses of each sentence, best first."""
        return [
            sorted(hypotheses, key=lambda h: (h.finished, h.score), reverse=True)[: self.extender.n_best]
            for hypotheses in self.hypotheses
        ]


def _first_rows(sentences: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct sentences and the first row of each."""
    distinct, rows = sentences.unique_consecutive(return_counts=True)
    return distinct, rows.cumsum(0) - rows


def _best_extensions(
    live: _Live, log_probabilities: Tensor, first: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k best extensions of each sentence: log probabilities, parent rows and tokens, all (s, k).

    This takes two stages, which is much faster than one topk: the k blocks of tokens with the largest maxima
    contain the k best tokens. If a sentence has fewer than k extensions, the rest have log probability −∞.
    """
    n, vocabulary = log_probabilities.shape
    row = torch.arange(n, device=first.device)
    sentence = torch.searchsorted(first, row, right=True) - 1
    slot = row - first[sentence]
    maxima = _block_maxima(log_probabilities)  # n blocks
    _check_probabilities(maxima)
    blocks = maxima.shape[1]
    table = live.totals.new_full((len(first), int(slot.max()) + 1, blocks), -math.inf)
    table[sentence, slot] = live.totals[:, None] + maxima
    values, at = table.flatten(1).topk(min(k, table[0].numel()))
    rows = (first[:, None] + at // blocks).clamp(max=n - 1)  # s k
    tokens = at[..., None] % blocks * _BLOCK + torch.arange(_BLOCK, device=at.device)  # s k block
    valid = (tokens < vocabulary) & (values[..., None] > -math.inf)
    candidates = log_probabilities[rows[..., None], tokens.clamp(max=vocabulary - 1)]
    candidates = (live.totals[rows][..., None] + candidates).masked_fill(~valid, -math.inf).flatten(1)
    totals, at = candidates.topk(min(k, candidates.shape[1]))
    return totals, rows.gather(1, at // _BLOCK), tokens.flatten(1).gather(1, at)


def _block_maxima(x: Tensor) -> Tensor:
    """Return the maximum of each block of columns; the last block may be shorter."""
    blocks = x.shape[1] // _BLOCK
    whole, rest = x[:, : blocks * _BLOCK], x[:, blocks * _BLOCK :]
    maxima = whole.unflatten(1, (blocks, _BLOCK)).amax(-1)
    return torch.cat([maxima, rest.amax(-1, keepdim=True)], 1) if rest.shape[1] else maxima


def _check_logits(logits: Tensor, vocabulary: int) -> None:
    if logits.shape[1] != vocabulary:
        raise ShapeError(
            f"model.step returned {logits.shape[1]} logits, but output_weight has {vocabulary} rows; "
            "they must be equal."
        )


def _check_probabilities(log_probabilities: Tensor) -> None:
    if not bool((log_probabilities.amax(-1) > -math.inf).all()):  # also false for NaN
        raise ArgumentError(
            "The model returned NaN, or zero probability for every allowed token. Check its parameters."
        )


def _limits(max_new_tokens: int | Sequence[int], sentences: int) -> list[int]:
    limits = list(max_new_tokens) if isinstance(max_new_tokens, Sequence) else [max_new_tokens] * sentences
    if len(limits) != sentences:
        raise ShapeError(
            f"search got {sentences} sentences and {len(limits)} values of max_new_tokens; pass one number, "
            "or one per sentence."
        )
    for limit in limits:
        check_int("search got max_new_tokens", limit)
    return limits
