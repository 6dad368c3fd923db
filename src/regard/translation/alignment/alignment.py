"""Word alignments from cross-attention.

token weights → word weights (`merge`) → soft: `weights`; hard: `links`; both directions: `symmetrize`
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from regard._util.text import format_bytes, pluralize
from regard.errors import ArgumentError, ShapeError
from regard.models.seq2seq import Seq2Seq
from regard.translation.alignment.aer import ErrorRates, GoldAlignment
from regard.translation.alignment.cross_attention import (
    AlignmentHead,
    Shift,
    cross_attention_layers,
    cross_weights,
    drop_special_tokens,
    watch_forced_decoding,
)
from regard.translation.alignment.lexical_aligner import LexicalAligner
from regard.translation.alignment.links import Links, check_threshold, to_pharaoh
from regard.translation.data.pairs import check_pair, check_pairs
from regard.translation.tokens import Segmentation, TokenizerPair

DECIMALS = 4  # decimal places of weights in JSON
_MAX_SIZE = 400_000_000  # maximum number of weights per alignment


@dataclass(frozen=True, eq=False)  # == on tensors returns a tensor
class Alignment:
    """Word alignment of a sentence pair.

    source_words, target_words: the words of both sentences, in order.
    weights: (target words, source words).

    Each row sums to at most 1; the remainder is the weight on the end token. Rows are not renormalized,
    because a word that attends to the end token has no clear source.

    >>> import torch
    >>> from regard.translation.alignment.alignment import Alignment
    >>> alignment = Alignment(("ein", "Hund"), ("a", "dog"), torch.tensor([[0.9, 0.1], [0.2, 0.7]]))
    >>> alignment.to_pharaoh()
    '0-0 1-1'
    >>> print(alignment)
         ein  Hund
    a     90    10
    dog   20    70
    """

    source_words: tuple[str, ...]
    target_words: tuple[str, ...]
    weights: Tensor

    def __post_init__(self) -> None:
        shape = len(self.target_words), len(self.source_words)
        if self.weights.shape != shape:
            raise ShapeError(
                f"Alignment got weights of shape {tuple(self.weights.shape)}; "
                f"{pluralize(shape[0], 'target word')} and {pluralize(shape[1], 'source word')} need {shape}."
            )

    @classmethod
    def of(cls, source: Segmentation, target: Segmentation, weights: Tensor) -> "Alignment":
        """Create a word alignment from token weights with `merge`."""
        return cls(tuple(source.words), tuple(target.words), merge(source, target, weights))

    def links(self, threshold: float | None = None) -> Links:
        """Return (source word, target word) links; by default, the best source word for each target word.

        threshold: if given, return all links with at least this weight instead.
        """
        check_threshold(threshold)
        if threshold is not None:
            rows, columns = (self.weights >= threshold).nonzero(as_tuple=True)
            return frozenset(zip(columns.tolist(), rows.tolist(), strict=True))
        return frozenset((source, row) for row, source in enumerate(self.argmax()) if source is not None)

    def argmax(self) -> list[int | None]:
        """Return the source word with the largest weight for each target word; None if all weights are 0."""
        if not self.source_words:
            return [None] * len(self.target_words)
        values, indices = self.weights.max(-1)
        return [i if value > 0 else None for value, i in zip(values.tolist(), indices.tolist(), strict=True)]

    def to_pharaoh(self, threshold: float | None = None) -> str:
        """Return the links in Pharaoh format (source-target), such as "0-0 1-2"."""
        return to_pharaoh(self.links(threshold))

    def to_dict(self, links: Links | None = None) -> dict[str, Any]:
        """Return JSON-serializable values: words, links, and rounded weights between 0 and 1.

        links: the links to include. Default: `links()`.
        """
        weights = self.weights.detach().double().nan_to_num(0, 0, 0).clamp(0, 1)
        return {
            "source_words": list(self.source_words),
            "target_words": list(self.target_words),
            "links": to_pharaoh(self.links() if links is None else links),
            "weights": [[round(weight, DECIMALS) for weight in row] for row in weights.tolist()],
        }

    def __repr__(self) -> str:
        sizes = f"{len(self.source_words)} source × {len(self.target_words)} target words"
        return f"Alignment({sizes}: {self.to_pharaoh() or 'no links'})"

    def __str__(self) -> str:
        """Format a table with one column per source word: weights in percent, blank below 1%."""
        name_width = max((len(word) for word in self.target_words), default=0)
        widths = [max(len(word), 3) for word in self.source_words]
        rows = [list(self.source_words)]
        rows += [[f"{100 * w:.0f}" if w >= 0.01 else "" for w in row] for row in self.weights.tolist()]
        lines = []
        for name, row in zip(["", *self.target_words], rows, strict=True):
            cells = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join([f"{name:<{name_width}}", *cells]).rstrip())
        return "\n".join(lines)


def merge(source: Segmentation, target: Segmentation, weights: Tensor) -> Tensor:
    """Merge token weights (…, target, source) into word weights.

    Weights are summed over the tokens of a source word and averaged over the tokens of a target word.
    """
    words, starts = _words(target)
    exact = weights.dtype in (torch.float32, torch.float64)
    tokens = weights.detach().to("cpu", weights.dtype if exact else torch.float32).numpy()
    sums = numpy.add.reduceat(tokens, starts, -2) if starts else tokens[..., :0, :]
    means = sums / numpy.diff([*starts, len(target.ids)])[:, None].astype(sums.dtype)
    columns, starts = _words(source)
    merged = numpy.add.reduceat(means, starts, -1) if starts else means[..., :0]
    shape = len(target.words), len(source.words)
    if merged.shape[-2:] != shape:  # some words have no tokens
        result = numpy.zeros((*merged.shape[:-2], *shape), merged.dtype)
        result[..., numpy.array(words, int)[:, None], numpy.array(columns, int)] = merged
        merged = result
    return torch.from_numpy(merged)


def _words(side: Segmentation) -> tuple[list[int], list[int]]:
    """Return the words that have tokens, and the first token of each."""
    if not side.words:
        return [], []
    word_of = side.word_of
    starts = [at for at, word in enumerate(word_of) if not at or word != word_of[at - 1]]
    return [word_of[at] for at in starts], starts


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
    >>> from regard.translation.alignment.alignment import align
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


def check_size(name: str, unit: str, source: int, target: int) -> None:
    """Raise if the alignment matrix would be too large."""
    if source * target > _MAX_SIZE:
        raise ArgumentError(
            f"{name} has {source:,} source {unit} and {target:,} target {unit}; its alignment would need "
            f"{format_bytes(4 * source * target)}. Split it into sentences."
        )


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
    >>> from regard.translation.alignment.alignment import select_alignment_head
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
                    hits = _count_hits(merge(*segmented[i], token_weights), reference[i])
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
