"""Looks at the dev data during a training: the loss of each token, BLEU, exact match and a sample."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from regard.models.layers.dropout import eval_mode
from regard.models.seq2seq import Seq2Seq
from regard.translation.alignment.alignment import align
from regard.translation.alignment.cross_attention import (
    AlignmentHead,
    cross_attention_layers,
    has_cross_attention,
)
from regard.translation.config import Metric
from regard.translation.data.batches import Batch, Batches, InMemoryPairs, by_length
from regard.translation.data.pairs import Pair
from regard.translation.evaluation import evaluate
from regard.translation.sentence_splitter import max_translation_tokens
from regard.translation.tokens import END, START, TokenizerPair
from regard.translation.training.progress import SampleTranslation, ValidationResult, selection_score

_TOKENS = 4096  # of a batch
_SENTENCES = 100  # that are translated together
_TRANSLATED = 1000  # at most, of the dev data


class DevSet(NamedTuple):
    """Dev data, ready to be looked at many times: batches with all pairs, and sources in order."""

    pairs: Sequence[Pair]
    batches: list[Batch]
    sources: list[list[int]]

    @classmethod
    def from_pairs(cls, pairs: Sequence[Pair], tokens: TokenizerPair) -> "DevSet":
        """Pairs of sentences, cut into pieces."""
        sources = tokens.source.encode_batch([pair.source for pair in pairs])
        targets = tokens.target.encode_batch([pair.target for pair in pairs])
        batches = Batches(InMemoryPairs(list(zip(sources, targets, strict=True))), _TOKENS)
        return cls(pairs, [batches.get(some, 0) for some in batches.epoch(0)], sources[:_TRANSLATED])


class DevScores(NamedTuple):
    """What the dev data say; `value` is what has improved if it is larger."""

    value: float
    loss: float
    bleu: float
    exact: float
    sample: SampleTranslation

    def judgement(self, step: int, best: bool) -> ValidationResult:
        """For those who listen."""
        return ValidationResult(step, self.loss, self.bleu, self.exact, self.sample, best)


def validate(model: Seq2Seq, tokens: TokenizerPair, dev: DevSet, criterion: Metric) -> DevScores:
    """Look at the dev data: the loss of every token, and translations by the likeliest token each time."""
    loss = dev_loss(model, dev.batches)
    written = translations(model, tokens, dev.sources)
    references = [pair.target for pair in dev.pairs[: len(written)]]
    scores = evaluate(written, references)
    # the longest of the first ones: there is something to see in it
    shown = max(range(min(8, len(written))), key=lambda i: len(dev.pairs[i].source))
    pair, text = dev.pairs[shown], written[shown]
    sample = SampleTranslation(pair.source, text, pair.target, _aligned(model, tokens, pair.source, text))
    value = -loss if criterion == "loss" else selection_score(scores.bleu, loss)
    return DevScores(value, loss, scores.bleu, scores.exact, sample)


def _aligned(model: Seq2Seq, tokens: TokenizerPair, source: str, text: str) -> dict[str, Any] | None:
    """Which words of a translation came from which; None if the model does not attend to the source."""
    if not has_cross_attention(model):
        return None
    # which attention aligns best is chosen at the end of a training; mostly it is the second layer from the
    # source, at the step that writes a word
    choice = AlignmentHead(layer=min(1, len(cross_attention_layers(model)) - 1), shift="output")
    return align(model, tokens, [(source, text)], choice)[0].to_dict()


@torch.no_grad()
def dev_loss(model: Seq2Seq, batches: Sequence[Batch]) -> float:
    """The mean cross entropy of a token."""
    device = model.output_weight.device
    with eval_mode(model):
        moved = (batch.to(device) for batch in batches)
        losses = [float(model.loss(batch.source, batch.target)) * batch.labels for batch in moved]
    return sum(losses) / sum(batch.labels for batch in batches)


def translations(model: Seq2Seq, tokens: TokenizerPair, sources: Sequence[Sequence[int]]) -> list[str]:
    """The likeliest token each time; sentences of like lengths together."""
    found = [""] * len(sources)
    for some, packed in by_length(sources, _SENTENCES, model.output_weight.device):
        most = max_translation_tokens(max(len(sources[i]) for i in some))
        for i, ids in zip(some, model.greedy(packed, start=START, end=END, max_new_tokens=most), strict=True):
            found[i] = tokens.target.join(ids).text
    return found
