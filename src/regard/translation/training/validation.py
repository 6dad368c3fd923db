"""Validation during training: token loss, BLEU, a sample; warnings of overfitting and divergence."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from regard.models.layers.dropout import eval_mode
from regard.models.seq2seq import Seq2Seq
from regard.translation.alignment.alignment_head import AlignmentHead
from regard.translation.alignment.attention_aligner import align
from regard.translation.alignment.cross_attention import cross_attention_layers, has_cross_attention
from regard.translation.config import TranslationConfig
from regard.translation.data.batches import Batch, Batches, InMemoryPairs
from regard.translation.data.pairs import Pair
from regard.translation.decoding.search import batch_by_length, search
from regard.translation.decoding.strategies import Greedy
from regard.translation.evaluation import evaluate
from regard.translation.long_lines import max_translation_tokens
from regard.translation.tokens import TokenizerPair
from regard.translation.training.callbacks import SampleTranslation, ValidationResult

_BATCH_TOKENS = 4096
_BATCH_SENTENCES = 100  # sentences translated together
_MAX_TRANSLATED = 1000  # maximum number of validation sentences to translate
# the model is overfitting if all three hold
_WORSE = 3  # validations in a row without a lower loss
_RISE = 0.02  # minimum relative increase in validation loss
_FALL = 1.0  # minimum decrease in BLEU
_DIVERGED = 2.0  # training has diverged if its loss exceeds its minimum by this factor, and by 1


class DevSet(NamedTuple):
    """Encoded validation set: batches of all pairs, and the source sentences to translate, in order."""

    pairs: Sequence[Pair]
    batches: list[Batch]
    sources: list[list[int]]

    @classmethod
    def from_pairs(cls, pairs: Sequence[Pair], tokens: TokenizerPair) -> "DevSet":
        """Encode sentence pairs."""
        sources = tokens.source.encode_batch([pair.source for pair in pairs])
        targets = tokens.target.encode_batch([pair.target for pair in pairs])
        encoded_pairs = InMemoryPairs(list(zip(sources, targets, strict=True)))
        batches = Batches(encoded_pairs, _BATCH_TOKENS, special=tokens.special)
        encoded = [batches.get(indices, 0) for indices in batches.epoch(0)]
        return cls(pairs, encoded, sources[:_MAX_TRANSLATED])


def validate(model: Seq2Seq, tokens: TokenizerPair, dev: DevSet, step: int) -> ValidationResult:
    """Compute the token loss, and BLEU and exact match of greedy translations, after update `step`."""
    loss = dev_loss(model, dev.batches)
    # if the loss is not finite, the search would fail
    texts = translate_greedy(model, tokens, dev.sources) if math.isfinite(loss) else [""] * len(dev.sources)
    scores = evaluate(texts, [pair.target for pair in dev.pairs[: len(texts)]])
    index = max(range(min(8, len(texts))), key=lambda i: len(dev.pairs[i].source))  # a long sentence
    pair, text = dev.pairs[index], texts[index]
    sample = SampleTranslation(pair.source, text, pair.target, _align(model, tokens, pair.source, text))
    return ValidationResult(step, loss, scores.bleu, scores.exact, sample)


def _align(model: Seq2Seq, tokens: TokenizerPair, source: str, text: str) -> dict[str, Any] | None:
    """Return the alignment of a translation; None for a model without cross-attention."""
    if not has_cross_attention(model):
        return None
    # The best head is selected at the end of training. It is usually in layer 1, with shift "output".
    head = AlignmentHead(layer=min(1, len(cross_attention_layers(model)) - 1), shift="output")
    return align(model, tokens, [(source, text)], head)[0].to_dict()


@torch.no_grad()
def dev_loss(model: Seq2Seq, batches: Sequence[Batch]) -> float:
    """Return the mean cross-entropy per token."""
    device = model.output_weight.device
    with eval_mode(model):
        moved = (batch.to(device) for batch in batches)
        losses = [float(model.loss(batch.source, batch.target)) * batch.labels for batch in moved]
    return sum(losses) / sum(batch.labels for batch in batches)


def translate_greedy(model: Seq2Seq, tokens: TokenizerPair, sources: Sequence[Sequence[int]]) -> list[str]:
    """Translate greedily, in batches of similar lengths."""
    texts = [""] * len(sources)
    device, special = model.output_weight.device, tokens.special
    for indices, packed in batch_by_length(sources, _BATCH_SENTENCES, device, special):
        limit = max_translation_tokens(max(len(sources[i]) for i in indices))
        results = search(model, packed, Greedy(), max_new_tokens=limit)
        for i, (best, *_) in zip(indices, results, strict=True):
            texts[i] = tokens.target.decode(best.tokens).text
    return texts


class OverfittingMonitor:
    """Detects overfitting from the validation results of a training run.

    >>> from regard.translation import TranslationConfig
    >>> from regard.translation.training.validation import OverfittingMonitor
    >>> from regard.translation.training.callbacks import ValidationResult
    >>> monitor = OverfittingMonitor(TranslationConfig.preset("tiny"))
    >>> for step, loss, bleu in [(50, 2.0, 9.0), (100, 2.1, 8.5), (150, 2.2, 8.2), (200, 2.3, 7.9)]:
    ...     advice = monitor.check(ValidationResult(step, loss, bleu, 0.0, None))
    >>> print(advice)
    The model is overfitting: since update 50, the validation loss has risen from 2.000 to 2.300 and BLEU has
    fallen from 9.0 to 7.9. The best model is kept, so you can stop now (Ctrl-C). To improve it, add text, or
    train a new model with more dropout (model.dropout=0.2 instead of 0.1) or fewer updates.
    """

    def __init__(self, config: TranslationConfig) -> None:
        self._config, self._done = config, False
        self._lowest: ValidationResult | None = None  # the validation with the lowest loss
        self._highest = 0.0  # the highest BLEU
        self._worse = 0

    def check(self, result: ValidationResult) -> str | None:
        """Return a warning when overfitting is first detected; None otherwise."""
        best = self._lowest
        if best is None or result.loss < best.loss:
            self._lowest, self._worse = result, 0
        else:
            self._worse += 1
        falling = result.bleu <= self._highest - _FALL
        self._highest = max(self._highest, result.bleu)
        if best is None or self._done or self._worse < _WORSE:
            return None
        # with label smoothing, BLEU often improves while the loss rises slightly: both must be worse
        if not falling or result.loss < best.loss * (1 + _RISE):
            return None
        self._done = True
        return self._text(best, result)

    def _text(self, best: ValidationResult, result: ValidationResult) -> str:
        dropout = self._config.model.dropout
        more = min(round(dropout + 0.1, 2), 0.5)
        cure = f"more dropout (model.dropout={more:g} instead of {dropout:g}) or " if more > dropout else ""
        return (
            f"The model is overfitting: since update {best.step:,}, the validation loss has risen from "
            f"{best.loss:.3f} to {result.loss:.3f} and BLEU has\nfallen from {self._highest:.1f} to "
            f"{result.bleu:.1f}. The best model is kept, so you can stop now (Ctrl-C). To improve it, add "
            f"text, or\ntrain a new model with {cure}fewer updates."
        )


class DivergenceMonitor:
    """Detects a training run that has diverged, from the training losses of its reports.

    >>> from regard.translation import TranslationConfig
    >>> from regard.translation.training.validation import DivergenceMonitor
    >>> monitor = DivergenceMonitor(TranslationConfig.preset("tiny"))
    >>> for step, loss in [(50, 6.5), (100, 3.3), (150, 20.2)]:
    ...     advice = monitor.check(step, loss)
    >>> print(advice)
    Training has diverged: since update 100, the loss has risen from 3.300 to 20.200. The best model is kept.
    Stop now (Ctrl-C) and train again with training.learning_rate=0.001 instead of 0.002.
    """

    def __init__(self, config: TranslationConfig) -> None:
        self._config, self._done = config, False
        self._step, self._lowest = 0, math.inf

    def check(self, step: int, loss: float) -> str | None:
        """Return a warning when divergence is first detected; None otherwise."""
        if loss < self._lowest:
            self._step, self._lowest = step, loss
        if self._done or loss < max(_DIVERGED * self._lowest, self._lowest + 1):
            return None
        self._done = True
        rate = self._config.training.learning_rate
        return (
            f"Training has diverged: since update {self._step:,}, the loss has risen from {self._lowest:.3f} "
            f"to {loss:.3f}. The best model is kept.\nStop now (Ctrl-C) and train again with "
            f"training.learning_rate={rate / 2:g} instead of {rate:g}."
        )
