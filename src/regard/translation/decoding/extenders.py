"""Extend the hypotheses of a search by one token: beam search, constrained beam search, sampling."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.mechanism import fused
from regard.mechanism.kernels import layer_kernels
from regard.models.generation import SpecialTokens
from regard.models.packed import Packed
from regard.translation.decoding.constraints import Constraints, extend_constrained
from regard.translation.decoding.strategies import Beam, Greedy, Sample, Strategy

Array = numpy.ndarray[Any, Any]


class LiveHypotheses(NamedTuple):
    """The n unfinished hypotheses, grouped by sentence. NumPy is faster than torch for arrays this small."""

    sentences: Array  # n
    origins: Array  # n: the initial row of each hypothesis
    totals: Array  # n: log probabilities, in float64
    tokens: Array  # n t, including the start token

    @classmethod
    def start(cls, sentences: int, rows: int, special: SpecialTokens) -> "LiveHypotheses":
        """Create `rows` hypotheses per sentence that contain only the target start tokens."""
        origins = numpy.arange(sentences * rows)
        first = numpy.tile(numpy.array(special.target_start), (len(origins), 1))
        return cls(origins // rows, origins, numpy.zeros(len(origins)), first)

    def take(self, rows: Array) -> "LiveHypotheses":
        """Select rows."""
        return LiveHypotheses(*(field[rows] for field in self))

    def extend(self, parents: Array, tokens: Array, totals: Array) -> "LiveHypotheses":
        """Append one token to each of the `parents`."""
        tokens = numpy.concatenate([self.tokens[parents], tokens[:, None]], 1)
        return LiveHypotheses(self.sentences[parents], self.origins[parents], totals, tokens)


class Extender(Protocol):
    """Extends hypotheses by one token."""

    rows: int  # initial hypotheses per sentence
    n_best: int  # hypotheses returned per sentence
    length_penalty: float

    def extend(self, live: LiveHypotheses, logits: Tensor) -> tuple[LiveHypotheses, Array]:
        """Return the extended hypotheses, grouped by sentence, and the rows of their parents."""

    def finish(self, sentences: Array) -> None:
        """Handle finished hypotheses; `sentences` contains the sentence index of each."""


class BeamExtender(Extender):
    """Keeps the best extensions for each sentence, one per remaining beam slot."""

    rows = 1  # additional hypotheses would be identical

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

    def extend(self, live: LiveHypotheses, logits: Tensor) -> tuple[LiveHypotheses, Array]:
        first = _first_rows(live.sentences)
        slots = self.slots[live.sentences[first]]
        max_slots = int(slots.max())
        suppressed = self.special.never_generated
        full = _without_unknown(self.constraints, live, self.special)
        # one extra token, because the unknown token may be among the best
        k = min(max_slots + (full is not None), logits.shape[1] - len(set(suppressed)))
        values, tokens = (x.cpu().numpy() for x in _best_tokens(logits, k, suppressed))
        if full is not None:
            values = numpy.where(full[:, None] & (tokens == self.special.unknown), -math.inf, values)
            order = (-values).argsort(axis=1, kind="stable")[:, :max_slots]
            values, tokens = (numpy.take_along_axis(x, order, 1) for x in (values, tokens))
        if not (values[:, :1] > -math.inf).all():  # NaN also fails this check
            raise _not_a_distribution()
        totals, parents, ranks = _best_extensions(live.totals, values, first, max_slots)
        kept = (numpy.arange(totals.shape[1]) < slots[:, None]) & (totals > -math.inf)
        if self.prune_threshold < math.inf:
            kept &= totals >= totals[:, :1] - self.prune_threshold
        parents = parents[kept]
        return live.extend(parents, tokens[parents, ranks[kept]], totals[kept]), parents

    def finish(self, sentences: Array) -> None:
        numpy.subtract.at(self.slots, sentences, 1)


class ConstrainedExtender(BeamExtender):
    """Beam search with required phrases: the beam is divided into banks; see `constraints`."""

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

    def extend(self, live: LiveHypotheses, logits: Tensor) -> tuple[LiveHypotheses, Array]:
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
        joined = LiveHypotheses(*(numpy.concatenate(column) for column in zip(*blocks, strict=True)))
        return joined, numpy.concatenate(block_parents)


class Sampler(Extender):
    """Extends each hypothesis by a sampled token, using one random generator per hypothesis."""

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

    def extend(self, live: LiveHypotheses, logits: Tensor) -> tuple[LiveHypotheses, Array]:
        log_probabilities = _log_probabilities(logits, self.special.never_generated)
        full = _without_unknown(self.constraints, live, self.special)
        if full is not None:
            log_probabilities[torch.from_numpy(full), self.special.unknown] = -math.inf
        if not bool((log_probabilities.amax(-1) > -math.inf).all()):  # NaN also fails this check
            raise _not_a_distribution()
        probabilities = (log_probabilities.double() / self.strategy.temperature).softmax(-1)
        order = None
        if self.strategy.top_p < 1:
            probabilities, order = probabilities.sort(descending=True, stable=True)
            outside_nucleus = probabilities.cumsum(-1) - probabilities >= self.strategy.top_p
            probabilities = probabilities.masked_fill(outside_nucleus, 0)
        cumulative = probabilities.cumsum(-1)
        # drawn in float32, because a float64 close to 1 times the sum could round to the sum
        uniform = [float(self.generators[i].random(dtype=numpy.float32)) for i in live.origins]
        at = (
            cumulative[:, -1:] * torch.tensor(uniform, dtype=torch.float64, device=cumulative.device)[:, None]
        )
        tokens = torch.searchsorted(cumulative, at, right=True)  # n 1
        tokens = tokens if order is None else order.gather(1, tokens)
        totals = live.totals + log_probabilities.gather(1, tokens)[:, 0].cpu().numpy()
        rows = numpy.arange(len(totals))
        return live.extend(rows, tokens[:, 0].cpu().numpy(), totals), rows


_EXTENDERS: dict[type, Callable[[Any, Packed, SpecialTokens, Constraints | None], Extender]] = {
    Greedy: BeamExtender,
    Beam: BeamExtender,
    Sample: Sampler,
}


def make_extender(
    strategy: Strategy,
    source: Packed,
    special: SpecialTokens,
    constraints: Constraints | None,
    limits: Sequence[int],
) -> Extender:
    """Return the extender for a strategy. limits: the maximum length of each translation."""
    if constraints is not None and any(constraints.phrases):
        assert not isinstance(strategy, Sample)  # checked by constraints.check
        return ConstrainedExtender(strategy, source, special, constraints, limits)
    make = next(make for kind, make in _EXTENDERS.items() if isinstance(strategy, kind))
    return make(strategy, source, special, constraints)


def _without_unknown(
    constraints: Constraints | None, live: LiveHypotheses, special: SpecialTokens
) -> Array | None:
    """Return a mask (n) of hypotheses that may not contain another unknown token; None if unlimited."""
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
    """Return the k best extensions for each sentence: log probabilities, parent rows and ranks, all (s, ≤ k).

    values: log probabilities of the best tokens for each row, (n, ·), best first. first: the first row of
    each sentence. If a sentence has fewer extensions than others, the remaining entries have log
    probability −∞.
    """
    n, tokens = values.shape
    extended = totals[:, None] + values
    if len(first) > 1:
        rows = numpy.diff(first, append=n)  # per sentence
        slot = numpy.arange(n) - numpy.repeat(first, rows)
        table = numpy.full((len(first), int(rows.max()), tokens), -math.inf)
        table[numpy.repeat(numpy.arange(len(first)), rows), slot] = extended
        extended = table
    extended = extended.reshape(len(first), -1)
    best = (-extended).argsort(axis=1, kind="stable")[:, :k]
    parents = numpy.minimum(first[:, None] + best // tokens, n - 1)
    return numpy.take_along_axis(extended, best, 1), parents, best % tokens


def _best_tokens(logits: Tensor, k: int, suppressed: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the log probabilities and ids of the k most probable tokens in each row, (n, k), best first."""
    first = len(suppressed)  # the kernel suppresses the ids below `first`
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


def _not_a_distribution() -> ArgumentError:
    return ArgumentError(
        "The model returned NaN, or zero probability for every allowed token. Check its parameters."
    )
