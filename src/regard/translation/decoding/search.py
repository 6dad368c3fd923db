"""Greedy decoding, beam search and sampling.

All sentences in a batch are extended together, one token per step. Finished sentences leave the batch.

beam:    every hypothesis is extended by every token and the best extensions are kept. A finished hypothesis
         keeps its slot, so the beam of its sentence shrinks.
score:   log probability / length ** length_penalty (Wu et al. 2016, eq. 14, omitting the constant 5)
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from regard._util import interrupt
from regard._util.checks import check_int, check_type
from regard._util.text import pluralize
from regard.errors import DTypeError, ShapeError
from regard.models.generation import SpecialTokens
from regard.models.layers.dropout import eval_mode
from regard.models.packed import Packed
from regard.models.seq2seq import Seq2Seq, State
from regard.translation.decoding.compiled_search import search_compiled
from regard.translation.decoding.constraints import Constraints
from regard.translation.decoding.extenders import Array, Extender, LiveHypotheses, make_extender
from regard.translation.decoding.hypothesis import Hypothesis, rank
from regard.translation.decoding.kernel_search import split_by_length
from regard.translation.decoding.refilled_beam import force_end, resolve_beam, search_refilled
from regard.translation.decoding.strategies import Beam, Greedy, Strategy


def search(
    model: Seq2Seq,
    source: Packed,
    strategy: Strategy = Beam(),  # noqa: B008 (a frozen value)
    *,
    max_new_tokens: int | Sequence[int],
    attention_layer: int | None = None,
    constraints: Constraints | None = None,
) -> list[list[Hypothesis]]:
    """Decode each sentence; return its hypotheses, finished before unfinished, then by score.

    max_new_tokens: maximum length including the end token: one value, or one per sentence.
    attention_layer: return the cross-attention weights of this decoder layer with each hypothesis. The
        weights are None if the model's state cannot record its queries.
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
                return _search_separately(model, source, strategy, limits, attention_layer, constraints)
    with torch.inference_mode(), eval_mode(model):
        if isinstance(strategy, Beam | Greedy):
            beam = strategy if isinstance(strategy, Beam) else Beam(1)
            compiled = search_compiled(
                model, source, beam, limits, attention_layer=attention_layer, constraints=constraints
            )
            if compiled is not None:
                return rank(compiled, beam.n_best)
        device = model.output_weight.device
        special = model.special_tokens
        extender = make_extender(strategy, source, special, constraints, limits)
        live, state = LiveHypotheses.start(len(source), extender.rows, special), model.start(source)
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


def _search_separately(
    model: Seq2Seq,
    source: Packed,
    strategy: Beam,
    limits: Sequence[int],
    attention_layer: int | None,
    constraints: Constraints,
) -> list[list[Hypothesis]]:
    """Decode sentences with and without phrases separately, so phrases do not affect other sentences."""
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
    """Feed the tokens that start every target, and ignore the logits."""
    for token in tokens:
        model.step(torch.full((rows,), token, device=model.output_weight.device), state)


def batch_by_length(
    sources: Sequence[Sequence[int]],
    size: int,
    device: torch.device,
    special: SpecialTokens = SpecialTokens(),  # noqa: B008 (a frozen value)
) -> Iterator[tuple[list[int], Packed]]:
    """Yield indices and packed sources with special tokens, in batches of similar lengths, shortest first."""
    for indices in split_by_length(sources, size):
        yield indices, Packed.of([special.source(sources[i]) for i in indices], device)


class _Results:
    """Completed hypotheses of each sentence, and the score that a new one must exceed to be returned."""

    def __init__(
        self, extender: Extender, limits: Array, recorder: State | None, special: SpecialTokens
    ) -> None:
        self.extender, self.limits, self.recorder = extender, limits, recorder
        self.end, self.first = special.end, len(special.target_start)
        self.hypotheses: list[list[Hypothesis]] = [[] for _ in range(len(limits))]
        self.threshold = numpy.full(limits.shape, -math.inf)

    def collect(self, live: LiveHypotheses, rows: Array) -> Array:
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

    def _store(self, live: LiveHypotheses, rows: Array, length: int, finished: bool) -> None:
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
        best = rank(self.hypotheses, self.extender.n_best)
        return best if self.recorder is None else _with_weights(best, self.recorder)


def _with_weights(best: list[list[Hypothesis]], state: State) -> list[list[Hypothesis]]:
    """Replace the recorded queries of all hypotheses with their weights, in one call."""
    recorded: list[tuple[int, Any]] = [
        (i, h.weights) for i, ranked in enumerate(best) for h in ranked if h.weights is not None
    ]
    if not recorded:
        return best
    queries = torch.nn.utils.rnn.pad_sequence([query for _, query in recorded], batch_first=True)
    weights = iter(state.weights(torch.tensor([i for i, _ in recorded]), queries).float().cpu().numpy())
    return [
        [h if h.weights is None else h._replace(weights=next(weights)[:, : len(h.weights)]) for h in ranked]
        for ranked in best
    ]


def _check_logits(logits: Tensor, vocabulary: int) -> None:
    if logits.shape[1] != vocabulary:
        raise ShapeError(
            f"model.step returned {logits.shape[1]} logits per row, but output_weight has {vocabulary} rows; "
            "the numbers must be equal."
        )


def _limits(max_new_tokens: int | Sequence[int], sentences: int) -> list[int]:
    limits = list(max_new_tokens) if isinstance(max_new_tokens, Sequence) else [max_new_tokens] * sentences
    if len(limits) != sentences:
        raise ShapeError(
            f"search got {pluralize(sentences, 'sentence')} and {pluralize(len(limits), 'value')} for "
            "max_new_tokens; pass one value, or one per sentence."
        )
    for limit in limits:
        check_int("search got max_new_tokens", limit)
    return limits
