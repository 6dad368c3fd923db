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
from regard.mechanism import fused
from regard.mechanism.kernels import layer_kernels
from regard.models.generation import SpecialTokens
from regard.models.layers.dropout import eval_mode
from regard.models.packed import Packed
from regard.models.seq2seq import Seq2Seq, State
from regard.translation.decoding.constraints import Constraints, extend_constrained
from regard.translation.decoding.hypothesis import Hypothesis
from regard.translation.decoding.refilled_beam import force_end, resolve_beam, search_refilled
from regard.translation.decoding.strategies import Beam, Greedy, Sample, Strategy

Array = numpy.ndarray[Any, Any]


def search(
    model: Seq2Seq,
    source: Packed,
    strategy: Strategy = Beam(),  # noqa: B008 (a frozen value)
    *,
    max_new_tokens: int | Sequence[int],
    attention_layer: int | None = None,
    constraints: Constraints | None = None,
) -> list[list[Hypothesis]]:
    """Decode each sentence; return its hypotheses, finished ones first, then by score.

    max_new_tokens: maximum length including the end token: one number, or one per sentence.
    attention_layer: decoder layer whose cross-attention weights to return with the hypotheses, if the model's
        state can record its queries; others return None.
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
        prefix = len(model.special_tokens.target_start) - 1
        constraints.check(strategy, [limit - prefix for limit in limits])
    if not len(source):
        return []
    if isinstance(strategy, Beam):
        strategy = resolve_beam(strategy, model)
        if strategy.early_stopping is not None:
            if not (constraints and any(constraints.phrases)):
                return search_refilled(model, source, strategy, limits)
            if not all(constraints.phrases):
                return _search_apart(model, source, strategy, limits, attention_layer, constraints)
    with torch.inference_mode(), eval_mode(model):
        device = model.output_weight.device
        special = model.special_tokens
        make = next(make for kind, make in _EXTENDERS.items() if isinstance(strategy, kind))
        extender = make(strategy, source, special, constraints)
        if constraints is not None and any(constraints.phrases):
            assert not isinstance(strategy, Sample)  # checked by constraints.check
            extender = _ConstrainedExtender(strategy, source, special, constraints, limits)
        live, state = _Live.start(len(source), extender.rows, special), model.start(source)
        recorded = attention_layer is not None and state.record_queries(attention_layer)
        results = _Results(extender, numpy.array(limits), state if recorded else None, special)
        feed_prefix(model, state, special.target_start[:-1], len(source))
        state_rows, rows = len(source), live.sentences  # rows: for each hypothesis, its row in the state
        while True:
            interrupt.check()
            active = results.collect(live, rows)
            if not active.all():
                live, rows = live.take(active), rows[active]
            if not len(rows):
                return results.ranked()
            if len(rows) != state_rows or not numpy.array_equal(rows, numpy.arange(state_rows)):
                state.select(torch.from_numpy(rows).to(device))
            logits = model.step(torch.from_numpy(live.tokens[:, -1].copy()).to(device), state)
            _check_logits(logits, vocabulary)
            if model.decoding is not None and model.decoding.forced_end:
                is_last = results.limits[live.sentences] == live.tokens.shape[1]
                logits = force_end(logits, special.end, is_last)
            state_rows, (live, rows) = len(rows), extender.extend(live, logits)


def _search_apart(
    model: Seq2Seq,
    source: Packed,
    strategy: Beam,
    limits: Sequence[int],
    attention_layer: int | None,
    constraints: Constraints,
) -> list[list[Hypothesis]]:
    """Decode sentences without phrases apart from the others, so that those do not change their results."""
    sentences = [tokens.tolist() for tokens in source.split(source.tokens)]
    results: dict[int, list[Hypothesis]] = {}
    for has_phrases in (False, True):
        rows = [row for row, phrases in enumerate(constraints.phrases) if bool(phrases) is has_phrases]
        hypotheses = search(
            model,
            Packed.of([sentences[row] for row in rows], source.tokens.device),
            strategy,
            max_new_tokens=[limits[row] for row in rows],
            attention_layer=attention_layer,
            constraints=constraints.take(rows),
        )
        results.update(zip(rows, hypotheses, strict=True))
    return [results[row] for row in range(len(source))]


def feed_prefix(model: Seq2Seq, state: State, tokens: Sequence[int], rows: int) -> None:
    """Feed the tokens with which every target begins, without reading the logits."""
    for token in tokens:
        model.step(torch.full((rows,), token, device=model.output_weight.device), state)


def batch_by_length(
    sources: Sequence[Sequence[int]],
    size: int,
    device: torch.device,
    special: SpecialTokens = SpecialTokens(),  # noqa: B008 (a frozen value)
) -> Iterator[tuple[list[int], Packed]]:
    """Yield indices and packed sources in batches of similar lengths, shortest first; adds special tokens."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    for first in range(0, len(order), size):
        indices = order[first : first + size]
        yield indices, Packed.of([special.source(sources[i]) for i in indices], device)


class _Live(NamedTuple):
    """The n unfinished hypotheses, grouped by sentence. NumPy is faster than torch for arrays this small."""

    sentences: Array  # n
    origins: Array  # n: the initial row of each hypothesis
    totals: Array  # n: log probabilities, in float64
    tokens: Array  # n t, with the start token

    @classmethod
    def start(cls, sentences: int, rows: int, special: SpecialTokens) -> "_Live":
        """Create `rows` hypotheses per sentence, each with only the tokens that start a target."""
        origins = numpy.arange(sentences * rows)
        first = numpy.tile(numpy.array(special.target_start), (len(origins), 1))
        return cls(origins // rows, origins, numpy.zeros(len(origins)), first)

    def take(self, rows: Array) -> "_Live":
        """Select rows."""
        return _Live(*(field[rows] for field in self))

    def extend(self, parents: Array, tokens: Array, totals: Array) -> "_Live":
        """Append one token to each of the `parents`."""
        tokens = numpy.concatenate([self.tokens[parents], tokens[:, None]], 1)
        return _Live(self.sentences[parents], self.origins[parents], totals, tokens)


class _Extender(Protocol):
    """Extends hypotheses by one token."""

    rows: int  # initial hypotheses per sentence
    n_best: int  # hypotheses returned per sentence
    length_penalty: float

    def extend(self, live: _Live, logits: Tensor) -> tuple[_Live, Array]:
        """Return the extended hypotheses, grouped by sentence, and the rows of their parents."""

    def finish(self, sentences: Array) -> None:
        """Called with the sentence of each hypothesis that has finished."""


class _BeamExtender(_Extender):
    """Keeps the best extensions of each sentence, one for each remaining beam slot."""

    rows = 1  # more would be identical

    def __init__(
        self,
        strategy: Greedy | Beam,
        source: Packed,
        special: SpecialTokens,
        constraints: Constraints | None,
    ) -> None:
        self.special, self.constraints = special, constraints
        beam = strategy if isinstance(strategy, Beam) else Beam(1)
        self.length_penalty, self.n_best = beam.length_penalty, beam.n_best
        self.prune_threshold = beam.prune_threshold
        self.slots = numpy.full(len(source), beam.size)

    def extend(self, live: _Live, logits: Tensor) -> tuple[_Live, Array]:
        first = _first_rows(live.sentences)
        slots = self.slots[live.sentences[first]]
        max_slots = int(slots.max())
        suppressed = self.special.never_generated
        full = _without_unknown(self.constraints, live, self.special)
        # one token more, because the unknown token may be among the best
        k = min(max_slots + (full is not None), logits.shape[1] - len(set(suppressed)))
        values, tokens = (x.cpu().numpy() for x in _best_tokens(logits, k, suppressed))
        if full is not None:
            values = numpy.where(full[:, None] & (tokens == self.special.unknown), -math.inf, values)
            order = (-values).argsort(axis=1, kind="stable")[:, :max_slots]
            values, tokens = (numpy.take_along_axis(x, order, 1) for x in (values, tokens))
        if not (values[:, :1] > -math.inf).all():  # also false for NaN
            raise _not_a_distribution()
        totals, parents, ranks = _best_extensions(live.totals, values, first, max_slots)
        kept = (numpy.arange(totals.shape[1]) < slots[:, None]) & (totals > -math.inf)
        if self.prune_threshold < math.inf:
            kept &= totals >= totals[:, :1] - self.prune_threshold
        parents = parents[kept]
        return live.extend(parents, tokens[parents, ranks[kept]], totals[kept]), parents

    def finish(self, sentences: Array) -> None:
        numpy.subtract.at(self.slots, sentences, 1)


class _ConstrainedExtender(_BeamExtender):
    """Beam search in which the sentences with phrases share their beam among banks; see `constraints`."""

    def __init__(
        self,
        strategy: Greedy | Beam,
        source: Packed,
        special: SpecialTokens,
        constraints: Constraints,
        limits: Sequence[int],
    ) -> None:
        super().__init__(strategy, source, special, constraints)
        self.phrases, self.limits, self.inner = constraints.phrases, limits, constraints.inner
        self.slots = numpy.array(constraints.beam_sizes(strategy))

    def extend(self, live: _Live, logits: Tensor) -> tuple[_Live, Array]:
        extended, parents = super().extend(live, logits)
        log_probabilities = _log_probabilities(logits, self.special.never_generated).cpu()
        full = _without_unknown(self.constraints, live, self.special)
        if full is not None:
            log_probabilities[torch.from_numpy(full), self.special.unknown] = -math.inf
        first = len(self.special.target_start)
        blocks, block_parents = [], []
        for sentence in live.sentences[_first_rows(live.sentences)].tolist():
            if not self.phrases[sentence]:
                unconstrained = extended.sentences == sentence
                blocks.append(extended.take(unconstrained))
                block_parents.append(parents[unconstrained])
                continue
            rows = numpy.flatnonzero(live.sentences == sentence)
            chosen, tokens, totals = extend_constrained(
                live.tokens[rows, first:].tolist(),
                torch.from_numpy(live.totals[rows]),
                log_probabilities[torch.from_numpy(rows)],
                self.phrases[sentence],
                int(self.slots[sentence]),
                self.limits[sentence] + 1 - first,
                self.inner,
                end=self.special.end,
            )
            origin = rows[numpy.array(chosen, dtype=int)]
            blocks.append(live.extend(origin, numpy.array(tokens, dtype=int), numpy.array(totals)))
            block_parents.append(origin)
        joined = _Live(*(numpy.concatenate(column) for column in zip(*blocks, strict=True)))
        return joined, numpy.concatenate(block_parents)


class _Sampler(_Extender):
    """Extends each hypothesis by a sampled token; each has its own random generator."""

    length_penalty = 1.0  # the score is the mean log probability per token

    def __init__(
        self, strategy: Sample, source: Packed, special: SpecialTokens, constraints: Constraints | None
    ) -> None:
        self.special, self.constraints = special, constraints
        self.strategy, self.rows, self.n_best = strategy, strategy.n_samples, strategy.n_samples
        self.generators = [
            numpy.random.default_rng([strategy.seed, i, *sentence.tolist()])
            for sentence in source.split(source.tokens)
            for i in range(strategy.n_samples)
        ]

    def extend(self, live: _Live, logits: Tensor) -> tuple[_Live, Array]:
        log_probabilities = _log_probabilities(logits, self.special.never_generated)
        full = _without_unknown(self.constraints, live, self.special)
        if full is not None:
            log_probabilities[torch.from_numpy(full), self.special.unknown] = -math.inf
        if not bool((log_probabilities.amax(-1) > -math.inf).all()):  # also false for NaN
            raise _not_a_distribution()
        probabilities = (log_probabilities.double() / self.strategy.temperature).softmax(-1)
        order = None
        if self.strategy.top_p < 1:
            probabilities, order = probabilities.sort(descending=True, stable=True)
            outside_nucleus = probabilities.cumsum(-1) - probabilities >= self.strategy.top_p
            probabilities = probabilities.masked_fill(outside_nucleus, 0)
        cumulative = probabilities.cumsum(-1)
        # float32: the product with the float64 sum stays below the sum
        uniform = [float(self.generators[i].random(dtype=numpy.float32)) for i in live.origins]
        at = (
            cumulative[:, -1:] * torch.tensor(uniform, dtype=torch.float64, device=cumulative.device)[:, None]
        )
        tokens = torch.searchsorted(cumulative, at, right=True)  # n 1
        tokens = tokens if order is None else order.gather(1, tokens)
        totals = live.totals + log_probabilities.gather(1, tokens)[:, 0].cpu().numpy()
        rows = numpy.arange(len(totals))
        return live.extend(rows, tokens[:, 0].cpu().numpy(), totals), rows


_EXTENDERS: dict[type, Callable[[Any, Packed, SpecialTokens, Constraints | None], _Extender]] = {
    Greedy: _BeamExtender,
    Beam: _BeamExtender,
    Sample: _Sampler,
}


class _Results:
    """The ended hypotheses of each sentence, and the score that a new one must exceed to be returned."""

    def __init__(
        self, extender: _Extender, limits: Array, recorder: State | None, special: SpecialTokens
    ) -> None:
        self.extender, self.limits, self.recorder = extender, limits, recorder
        self.end, self.first = special.end, len(special.target_start)
        self.hypotheses: list[list[Hypothesis]] = [[] for _ in range(len(limits))]
        self.threshold = numpy.full(limits.shape, -math.inf)

    def collect(self, live: _Live, rows: Array) -> Array:
        """Store the hypotheses that ended or reached their limit; return a mask (n) of those still active.

        rows: for each hypothesis, its row in the state.
        """
        length = live.tokens.shape[1] - 1
        limits = self.limits[live.sentences]
        ended = (live.tokens[:, -1] == self.end) & (live.tokens.shape[1] > self.first)
        cut = ~ended & (limits <= length)
        if ended.any():
            self._store(live.take(ended), rows[ended], length, finished=True)
            self.extender.finish(live.sentences[ended])
        if cut.any():
            self._store(live.take(cut), rows[cut], length, finished=False)
        # Log probabilities only decrease, so this bounds the score of every continuation. Lower-ranked
        # hypotheses have lower bounds, so the slot of a dropped one need not be refilled.
        bound = live.totals / numpy.maximum(limits, 1).astype(float) ** self.extender.length_penalty
        active: Array = ~ended & ~cut & (bound > self.threshold[live.sentences])
        return active

    def _store(self, live: _Live, rows: Array, length: int, finished: bool) -> None:
        n_best = self.extender.n_best
        queries: Any = [None] * len(rows)
        if self.recorder is not None and length:
            queries = self.recorder.queries(torch.from_numpy(rows))
        scores = live.totals / max(length, 1) ** self.extender.length_penalty
        columns = (live.sentences, live.tokens, scores, live.totals)
        for sentence, tokens, score, total, query in zip(
            *(column.tolist() for column in columns), queries, strict=True
        ):
            hypotheses = self.hypotheses[sentence]
            tokens = tokens[self.first : -1 if finished else None]
            hypotheses.append(Hypothesis(tokens, score, total, finished, query))
            finished_scores = sorted((h.score for h in hypotheses if h.finished), reverse=True)
            if len(finished_scores) >= n_best:
                self.threshold[sentence] = finished_scores[n_best - 1]

    def ranked(self) -> list[list[Hypothesis]]:
        """Return the n best hypotheses of each sentence, best first."""
        best = [
            sorted(hypotheses, key=lambda h: (h.finished, h.score), reverse=True)[: self.extender.n_best]
            for hypotheses in self.hypotheses
        ]
        return best if self.recorder is None else _with_weights(best, self.recorder)


def _with_weights(best: list[list[Hypothesis]], state: State) -> list[list[Hypothesis]]:
    """Replace the recorded queries of hypotheses by their weights, in one call for all of them."""
    recorded = [(i, h.weights) for i, ranked in enumerate(best) for h in ranked if h.weights is not None]
    if not recorded:
        return best
    queries = torch.nn.utils.rnn.pad_sequence([query for _, query in recorded], batch_first=True)
    weights = iter(state.weights(torch.tensor([i for i, _ in recorded]), queries))
    return [
        [h if h.weights is None else h._replace(weights=next(weights)[:, : len(h.weights)]) for h in ranked]
        for ranked in best
    ]


def _without_unknown(constraints: Constraints | None, live: _Live, special: SpecialTokens) -> Array | None:
    """Return which hypotheses (n) may contain no further unknown token, or None if there is no limit."""
    if constraints is None or constraints.max_unknown is None:
        return None
    unknown = (live.tokens == special.unknown).sum(1)
    full: Array = unknown >= numpy.array(constraints.max_unknown)[live.sentences]
    return full


def _first_rows(sentences: Array) -> Array:
    """Return the first row of each distinct sentence; rows are grouped by sentence."""
    if sentences[0] == sentences[-1]:
        return numpy.zeros(1, dtype=int)
    return numpy.flatnonzero(numpy.concatenate([[True], sentences[1:] != sentences[:-1]]))


def _best_extensions(totals: Array, values: Array, first: Array, k: int) -> tuple[Array, Array, Array]:
    """Return the k best extensions of each sentence: log probabilities, parent rows and ranks, all (s, ≤ k).

    values: log probabilities of the best tokens of each row, (n, ·), best first. first: the first row of
    each sentence. If a sentence has fewer extensions than another, the rest have log probability −∞.
    """
    n, tokens = values.shape
    extended = totals[:, None] + values
    if len(first) > 1:
        rows = numpy.diff(first, append=n)  # of each sentence
        slot = numpy.arange(n) - numpy.repeat(first, rows)
        table = numpy.full((len(first), int(rows.max()), tokens), -math.inf)
        table[numpy.repeat(numpy.arange(len(first)), rows), slot] = extended
        extended = table
    extended = extended.reshape(len(first), -1)
    best = (-extended).argsort(axis=1, kind="stable")[:, :k]
    parents = numpy.minimum(first[:, None] + best // tokens, n - 1)
    return numpy.take_along_axis(extended, best, 1), parents, best % tokens


def _best_tokens(logits: Tensor, k: int, suppressed: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the log probabilities and ids of the k most probable tokens of each row, (n, k), best first."""
    first = len(suppressed)  # the kernel suppresses the first ids
    is_prefix = sorted(suppressed) == list(range(first))
    if is_prefix and fused.available() and logits.dtype is torch.float32 and logits.device.type == "cpu":
        return layer_kernels.best_tokens(logits, k, first=first)
    values, tokens = _log_probabilities(logits, suppressed).topk(k)
    return values, tokens


def _log_probabilities(logits: Tensor, suppressed: Sequence[int]) -> Tensor:
    """Return log probabilities (n, V), −∞ for suppressed tokens."""
    log_probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    log_probabilities[:, list(suppressed)] = -math.inf
    return log_probabilities


def _check_logits(logits: Tensor, vocabulary: int) -> None:
    if logits.shape[1] != vocabulary:
        raise ShapeError(
            f"model.step returned {logits.shape[1]} logits, but output_weight has {vocabulary} rows; "
            "they must be equal."
        )


def _not_a_distribution() -> ArgumentError:
    return ArgumentError(
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
