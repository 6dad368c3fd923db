"""Align words by a model's cross-attention, and select the attention heads that align best."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard._util.text import pluralize
from regard.errors import ArgumentError
from regard.models.seq2seq import Seq2Seq
from regard.translation.alignment.aer import ErrorRates, GoldAlignment
from regard.translation.alignment.alignment import Alignment, check_size, merge, to_array
from regard.translation.alignment.alignment_head import AlignmentHead, Shift, drop_special_tokens
from regard.translation.alignment.cross_attention import (
    cross_attention_layers,
    cross_weights,
    watch_forced_decoding,
)
from regard.translation.alignment.lexical_aligner import LexicalAligner
from regard.translation.alignment.links import Links
from regard.translation.data.pairs import check_pair, check_pairs
from regard.translation.tokens import Segmentation, TokenizerPair


def align(
    model: Seq2Seq,
    tokens: TokenizerPair,
    pairs: Sequence[tuple[str, str]],
    alignment_head: AlignmentHead = AlignmentHead(),  # noqa: B008 (a frozen value)
) -> list[Alignment]:
    """Align the words of sentence pairs with the model's cross-attention.

    model, tokens: a model and its tokenizers. A `Translator` has both; see `Translator.align`.
    pairs: (source, target), with words separated by whitespace.
    alignment_head: layer, heads and decoding step to read the weights from; see `select_alignment_head`.

    >>> import torch
    >>> from regard.models import TransformerConfig, Transformer
    >>> from regard.translation import Tokenizer, TokenizerPair
    >>> from regard.translation.alignment.attention_aligner import align
    >>> tokens = Tokenizer.learn(["ein Hund bellt", "a dog barks"] * 9, kind="words")
    >>> model = Transformer(len(tokens), TransformerConfig(width=16, heads=2))
    >>> align(model, TokenizerPair(tokens, tokens), [("ein Hund bellt", "a dog")])[0].weights.shape
    torch.Size([2, 3])
    """
    segmented = segment_pairs(tokens, pairs)
    sources, targets = [source.ids for source, _ in segmented], [target.ids for _, target in segmented]
    weights = cross_weights(model, sources, targets, alignment_head)
    return [Alignment.of(*pair, matrix) for pair, matrix in zip(segmented, weights, strict=True)]


def segment_pairs(
    tokens: TokenizerPair, pairs: Sequence[tuple[str, str]]
) -> list[tuple[Segmentation, Segmentation]]:
    """Tokenize both sides of each pair."""
    segmented = []
    for i, pair in enumerate(check_pairs(pairs)):
        source_text, target_text = check_pair(pair, i)
        source, target = tokens.source.segment(source_text), tokens.target.segment(target_text)
        check_size(f"Pair {i}", "tokens", len(source.ids), len(target.ids))
        segmented.append((source, target))
    return segmented


def select_alignment_head(
    model: Seq2Seq,
    tokens: TokenizerPair,
    pairs: Sequence[tuple[str, str]],
    gold: Sequence[GoldAlignment | Links] | None = None,
) -> AlignmentHead:
    """Select the layer, head and shift with the lowest alignment error rate; see `rate_alignment_heads`.

    model, tokens: a model and its tokenizers. pairs: (source, target) pairs to evaluate on.
    gold: reference links for the pairs. Default: the confident links of a `LexicalAligner` trained on these
        pairs. They can rank heads, but not measure their accuracy.

    >>> import torch
    >>> from regard.models import TransformerConfig, Transformer
    >>> from regard.translation import Tokenizer, TokenizerPair
    >>> from regard.translation.alignment.attention_aligner import select_alignment_head
    >>> tokens = Tokenizer.learn(["ein Hund bellt", "a dog barks"] * 9, kind="words")
    >>> model = Transformer(len(tokens), TransformerConfig(width=16, heads=2, layers=2))
    >>> pairs = [("ein Hund bellt", "a dog barks"), ("ein Hund", "a dog"), ("ein", "a")]
    >>> head = select_alignment_head(model, TokenizerPair(tokens, tokens), pairs)
    >>> head.layer in (0, 1)
    True
    """
    if gold is None and any(source.split() and target.split() for source, target in pairs):
        gold = LexicalAligner.learn(pairs).links(pairs)
    if gold is None or not any(GoldAlignment.of(links).sure for links in gold):
        return AlignmentHead()  # no sure links to compare with
    rates = rate_alignment_heads(model, tokens, pairs, gold)
    return min(rates, key=lambda head: rates[head].aer)  # the first one if there is a tie


@torch.no_grad()
def rate_alignment_heads(
    model: Seq2Seq,
    tokens: TokenizerPair,
    pairs: Sequence[tuple[str, str]],
    gold: Sequence[GoldAlignment | Links],
) -> dict[AlignmentHead, ErrorRates]:
    """Compute the alignment error rate of each head and of the mean head, for every layer and both shifts.

    gold: links between the whitespace-separated words of each pair.
    """
    segmented = segment_pairs(tokens, pairs)
    reference = [GoldAlignment.of(links) for links in gold]
    _check_gold(pairs, reference)
    layers = list(cross_attention_layers(model))
    shifts: tuple[Shift, ...] = ("input", "output")
    counts: dict[tuple[int, Shift], Tensor] = {}  # (heads + 1) × (links, hits, possible hits)
    sources, targets = [source.ids for source, _ in segmented], [target.ids for _, target in segmented]
    for batch, recorded in watch_forced_decoding(model, sources, targets, layers):
        for layer, name in enumerate(layers):
            weights = torch.cat([call.dense() for call in recorded[name]], -2).float().cpu()  # b h t s
            # the mean comes first so that it wins ties
            weights = torch.cat([weights.mean(1, keepdim=True), weights], 1)
            for i, heads in zip(batch, weights, strict=True):
                for shift in shifts:
                    lengths = len(targets[i]), len(sources[i])
                    token_weights = drop_special_tokens(heads, *lengths, shift, model.special_tokens)
                    words = torch.from_numpy(merge(*segmented[i], to_array(token_weights)))
                    hits = _count_hits(words, reference[i])
                    counts[layer, shift] = counts.get((layer, shift), 0) + hits
    sure = sum(len(links.sure) for links in reference)
    return {
        AlignmentHead(layer, None if head == 0 else (head - 1,), shift): ErrorRates.from_counts(
            links, sure, hits, possible
        )
        for (layer, shift), heads in counts.items()
        for head, (links, hits, possible) in enumerate(heads.tolist())
    }


def _count_hits(weights: Tensor, gold: GoldAlignment) -> Tensor:
    """Count the links, sure hits and possible hits of each head: (h, target, source) → (h, 3)."""
    h, t, s = weights.shape
    if not t * s:
        return torch.zeros(h, 3, dtype=torch.long)
    values, best = weights.max(-1)
    linked = values > 0
    counts = [linked.sum(-1)]
    for links in (gold.sure, gold.sure | gold.possible):
        table = torch.zeros(t, s, dtype=torch.bool)
        if links:
            source, target = torch.tensor(sorted(links)).T
            table[target, source] = True
        counts.append((linked & table[torch.arange(t), best]).sum(-1))
    return torch.stack(counts, -1)


def _check_gold(pairs: Sequence[tuple[str, str]], gold: Sequence[GoldAlignment]) -> None:
    """Raise unless there is one set of gold links per pair, and all links are between existing words."""
    if len(pairs) != len(gold):
        raise ArgumentError(
            f"Got {pluralize(len(pairs), 'sentence pair')} and gold links for {len(gold):,}; pass one entry "
            "per pair, empty if the pair has no links."
        )
    for number, ((source, target), (sure, possible)) in enumerate(zip(pairs, gold, strict=True)):
        lengths = len(source.split()), len(target.split())
        for link in sure | possible:
            if not (0 <= link[0] < lengths[0] and 0 <= link[1] < lengths[1]):
                raise ArgumentError(
                    f"Gold link {link[0]}-{link[1]} of pair {number} is out of range: the pair has "
                    f"{lengths[0]} source and {lengths[1]} target words (separated by whitespace, counted "
                    "from 0). If the file counts from 1, read it with index_base=1 (--index-base 1)."
                )
