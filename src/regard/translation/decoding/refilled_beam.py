"""Beam search as in `transformers`: the slot of a finished hypothesis is refilled.

Each step takes the 2 · size best extensions of a sentence. If any of the best `size` end, they become
results; the best `size` that do not end are extended further. `Beam.early_stopping` decides when a sentence
is finished.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard._util import interrupt
from regard.models.generation import DecodingDefaults
from regard.models.layers.dropout import eval_mode
from regard.models.packed import Packed
from regard.models.seq2seq import Seq2Seq
from regard.translation.decoding.hypothesis import Hypothesis
from regard.translation.decoding.strategies import Beam


def resolve_beam(beam: Beam, model: Seq2Seq) -> Beam:
    """Replace options left at their default with the defaults of a pretrained model.

    >>> from regard.models import Transformer, TransformerConfig
    >>> from regard.models.generation import DecodingDefaults
    >>> from regard.translation.decoding.refilled_beam import resolve_beam
    >>> from regard.translation.decoding.strategies import Beam
    >>> model = Transformer(9, TransformerConfig(width=4, heads=1, layers=1))
    >>> model.decoding = DecodingDefaults(early_stopping=True)
    >>> resolve_beam(Beam(4), model).early_stopping
    True
    """
    defaults = model.decoding
    if defaults is None:
        return beam
    options: dict[str, object] = {}
    if beam.early_stopping is None:
        options["early_stopping"] = defaults.early_stopping
    if beam.length_penalty == Beam.length_penalty:
        options["length_penalty"] = defaults.length_penalty
    return replace(beam, **options) if options else beam  # type: ignore[arg-type]


class _Sentence:
    """The best `size` finished hypotheses of a sentence."""

    def __init__(self, beam: Beam, limit: int) -> None:
        self.beam, self.limit = beam, limit
        self.results: list[Hypothesis] = []

    def add(self, tokens: list[int], total: float, length: int, finished: bool) -> None:
        """Add a finished hypothesis and drop the worst if there are more than `size`."""
        score = total / length**self.beam.length_penalty
        self.results.append(Hypothesis(tokens, score, total, finished))
        self.results.sort(key=lambda hypothesis: hypothesis.score, reverse=True)
        del self.results[self.beam.size :]

    def is_finished(self, best_total: float, length: int) -> bool:
        """Return whether the search for this sentence is over.

        best_total: log probability of the best unfinished hypothesis.
        """
        if length >= self.limit:
            return True
        if len(self.results) < self.beam.size:
            return False
        if self.beam.early_stopping is True:
            return True
        penalty = self.beam.length_penalty
        longest = self.limit if self.beam.early_stopping == "never" and penalty > 0 else length
        return best_total / longest**penalty <= self.results[-1].score


def search_refilled(
    model: Seq2Seq, source: Packed, beam: Beam, limits: Sequence[int]
) -> list[list[Hypothesis]]:
    """Decode each sentence; return its hypotheses, best first.

    limits: maximum number of tokens after the start token, for each sentence.
    """
    special, device = model.special_tokens, model.output_weight.device
    decoding = model.decoding or DecodingDefaults()
    suppressed = torch.tensor(special.never_generated, dtype=torch.long, device=device)
    prefix = len(special.target_start)
    sentences = [_Sentence(beam, max(limit, prefix)) for limit in limits]
    with torch.inference_mode(), eval_mode(model):
        state = model.start(source)
        for token in special.target_start[:-1]:
            model.step(torch.full((len(source),), token, device=device), state)
        active = list(range(len(source)))
        tokens = torch.tensor(special.target_start, device=device).expand(len(source), 1, -1)  # b slots t
        totals = torch.zeros(len(source), 1, dtype=torch.float64, device=device)
        while active:
            interrupt.check()
            length = tokens.shape[2]  # number of tokens after extension, excluding the start token
            logits = model.step(tokens[:, :, -1].flatten(), state).float()
            scores = logits.log_softmax(-1).index_fill_(1, suppressed, -math.inf)
            scores = scores.unflatten(0, (len(active), -1))
            if decoding.forced_end:
                scores = force_end(scores, special.end, [sentences[i].limit == length for i in active])
            totals, parents, new = _best(totals[:, :, None] + scores, 2 * beam.size)
            slots = tokens.shape[1]
            tokens = torch.cat([tokens.take_along_dim(parents[..., None], 1), new[..., None]], 2)
            ended = new == special.end
            at_limit = torch.tensor([length >= sentences[i].limit for i in active], device=device)
            _collect(sentences, active, tokens, totals, ended, at_limit, prefix)
            running = totals.masked_fill(ended | at_limit[:, None], -math.inf)
            totals, at = running.topk(min(beam.size, running.shape[1]))
            tokens, parents = tokens.take_along_dim(at[..., None], 1), parents.gather(1, at)
            best = totals[:, 0].tolist()
            kept = [row for row, i in enumerate(active) if not sentences[i].is_finished(best[row], length)]
            rows = torch.arange(len(active), device=device)[:, None] * slots + parents
            index = torch.tensor(kept, dtype=torch.long, device=device)
            state.select(rows[index].flatten())
            tokens, totals, active = tokens[index], totals[index], [active[row] for row in kept]
    return [sentence.results[: beam.n_best] for sentence in sentences]


def force_end(scores: Tensor, end: int, is_last: Sequence[bool] | NDArray[numpy.bool_]) -> Tensor:
    """Allow only the end token, with log probability 0, in the last step of a sentence.

    scores: (b, …, V). is_last: for each sentence, whether this is its last step.

    >>> import torch
    >>> from regard.translation.decoding.refilled_beam import force_end
    >>> force_end(torch.ones(2, 3), 2, [False, True]).tolist()
    [[1.0, 1.0, 1.0], [-inf, -inf, 0.0]]
    """
    if not any(is_last):
        return scores
    forced = torch.full_like(scores, -math.inf)
    forced[..., end] = 0
    rows = torch.as_tensor(is_last, device=scores.device)
    return torch.where(rows.view(-1, *[1] * (scores.dim() - 1)), forced, scores)


def _best(totals: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log probabilities, slots and tokens of the k best extensions: (b, slots, V) → (b, k)."""
    vocabulary = totals.shape[2]
    values, at = totals.flatten(1).topk(min(k, totals[0].numel()))
    return values, at // vocabulary, at % vocabulary


def _collect(
    sentences: Sequence[_Sentence],
    active: Sequence[int],
    tokens: Tensor,
    totals: Tensor,
    ended: Tensor,
    at_limit: Tensor,
    prefix: int,
) -> None:
    """Among the best `size` hypotheses, store those that ended or reached their limit."""
    length = tokens.shape[2] - 1
    size = sentences[active[0]].beam.size
    stops = (ended | at_limit[:, None]) & (totals > -math.inf)
    stops[:, size:] = False
    for row, slot in stops.nonzero().tolist():
        finished = bool(ended[row, slot])
        ids = tokens[row, slot, prefix:].tolist()
        total = float(totals[row, slot])
        sentences[active[row]].add(ids[:-1] if finished else ids, total, length, finished)
