"""Validation during training: token loss, BLEU, exact match and a sample translation."""

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
from regard.translation.data.batches import Batch, Batches, InMemoryPairs
from regard.translation.data.pairs import Pair
from regard.translation.decoding.search import batch_by_length
from regard.translation.evaluation import evaluate
from regard.translation.sentence_splitter import max_translation_tokens
from regard.translation.tokens import TokenizerPair
from regard.translation.training.callbacks import SampleTranslation, ValidationResult

_BATCH_TOKENS = 4096
_BATCH_SENTENCES = 100  # translated together
_MAX_TRANSLATED = 1000  # dev sentences


class DevSet(NamedTuple):
    """Encoded dev data: batches of all pairs, and the source sentences to translate, in order."""

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
    texts = translate_greedy(model, tokens, dev.sources)
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
        outputs = model.greedy(packed, start=special.target_start, end=special.end, max_new_tokens=limit)
        for i, ids in zip(indices, outputs, strict=True):
            texts[i] = tokens.target.decode(ids).text
    return texts
