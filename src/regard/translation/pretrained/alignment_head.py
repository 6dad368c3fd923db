"""Guess the alignment head of a model without sentence pairs.

The model translates sentences made of random words from its vocabulary. A head that aligns words attends to
few tokens (low entropy), to different tokens for different target words (coverage), and mostly from left to
right.
"""

import numpy
import torch
from torch import Tensor

from regard.models.seq2seq import Seq2Seq
from regard.translation.alignment.alignment_head import AlignmentHead, Shift, drop_special_tokens
from regard.translation.alignment.cross_attention import cross_attention_layers, watch_forced_decoding
from regard.translation.decoding.search import batch_by_length
from regard.translation.tokens import SPACE, TokenizerPair

_SENTENCES, _WORDS = 8, 8
_MAX_NEW_TOKENS = 24


def guess_alignment_head(model: Seq2Seq, tokens: TokenizerPair) -> AlignmentHead:
    """Return the layer and head whose weights look most like a word alignment.

    The result depends only on the model. With sentence pairs, `select_alignment_head` is more accurate.
    """
    sources = _random_sentences(tokens)
    if not sources:
        return AlignmentHead()
    targets = _translate(model, tokens, sources)
    layers = list(cross_attention_layers(model))
    shifts: tuple[Shift, ...] = ("input", "output")
    totals: dict[tuple[int, Shift], Tensor] = {}
    for batch, recorded in watch_forced_decoding(model, sources, targets, layers):
        for layer, name in enumerate(layers):
            weights = torch.cat([call.dense() for call in recorded[name]], -2).float().cpu()  # b h t s
            for i, heads in zip(batch, weights, strict=True):
                for shift in shifts:
                    lengths = len(targets[i]), len(sources[i])
                    word_weights = drop_special_tokens(heads, *lengths, shift, model.special_tokens)
                    if word_weights.shape[1] > 1:
                        total = totals.get((layer, shift), torch.zeros(()))
                        totals[layer, shift] = total + _score(word_weights)
    ranked = [
        (float(score), layer, head, shift)
        for (layer, shift), scores in totals.items()
        for head, score in enumerate(scores.reshape(-1))
    ]
    if not ranked:
        return AlignmentHead()
    _, layer, head, shift = max(ranked, key=lambda item: item[0])
    return AlignmentHead(layer, (head,), shift)


def _random_sentences(tokens: TokenizerPair) -> list[list[int]]:
    """Return sentences of random words, as token ids; they are the same in every run."""
    random = numpy.random.default_rng(0)
    words = [
        i
        for i, piece in enumerate(tokens.source.pieces())
        if piece.startswith(SPACE) and len(piece) > 3 and piece[1:].isalpha()
    ]
    if len(words) < _WORDS:
        return []
    return [random.choice(words, _WORDS, replace=False).tolist() for _ in range(_SENTENCES)]


def _translate(model: Seq2Seq, tokens: TokenizerPair, sources: list[list[int]]) -> list[list[int]]:
    """Translate greedily."""
    special, device = tokens.special, model.output_weight.device
    ((indices, packed),) = batch_by_length(sources, len(sources), device, special)
    outputs = model.greedy(
        packed, start=special.target_start, end=special.end, max_new_tokens=_MAX_NEW_TOKENS
    )
    targets = dict(zip(indices, outputs, strict=True))
    return [targets[i] for i in range(len(sources))]


def _score(weights: Tensor) -> Tensor:
    """Return the product of sharpness, coverage and order of each head: (h, t, s) → (h)."""
    _, t, s = weights.shape
    rows = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
    entropy = -(rows * rows.clamp(min=1e-9).log()).sum(-1).mean(-1) / numpy.log(max(s, 2))
    # the second factor is the mean weight on words, as opposed to special tokens
    sharpness = (1 - entropy) * weights.sum(-1).mean(-1)
    coverage = rows.amax(1).mean(-1)
    centers = (rows * torch.arange(s)).sum(-1)  # h t
    order = torch.arange(t, dtype=torch.float32)
    centered, steps = centers - centers.mean(-1, keepdim=True), order - order.mean()
    scale = (centered.norm(dim=-1) * steps.norm()).clamp(min=1e-9)
    correlation = (centered @ steps) / scale
    return sharpness * coverage * (0.5 + correlation.clamp(min=0))
