"""Which word came from which: word alignments, read off a model's attention to the source.

weights of tokens → merged into words → soft: `weights`; hard: `links`; both directions: `symmetrize`
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard._util.checks import check_number
from regard._util.text import format_bytes
from regard.errors import ArgumentError, ShapeError
from regard.models.seq2seq import Seq2Seq
from regard.translation.alignment.aer import ErrorRates, GoldAlignment, rates
from regard.translation.alignment.cross_attention import (
    AlignmentHead,
    Shift,
    cross_attention_layers,
    cross_weights,
    drop_special_tokens,
    watch_forced_decoding,
)
from regard.translation.alignment.lexical_aligner import LexicalAligner
from regard.translation.data.links import Links, pharaoh
from regard.translation.data.pairs import as_pair, listed
from regard.translation.tokens import Cut, TokenizerPair

DECIMALS = 4  # of weights in JSON
_MOST = 400_000_000  # weights of an alignment


@dataclass(frozen=True, eq=False)  # tensors do not compare to one truth
class Alignment:
    """Which target word came from which source word: `weights` (target words × source words).

    source_words, target_words: the words of both sentences, in order.

    A row sums to at most 1; the rest went to the end mark, which is no word. Rows are not scaled up to 1, as
    a word that looked at the end mark has no certain source.

    >>> import torch
    >>> from regard.translation.alignment.alignment import Alignment
    >>> alignment = Alignment(("ein", "Hund"), ("a", "dog"), torch.tensor([[0.9, 0.1], [0.2, 0.7]]))
    >>> alignment.pharaoh()
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
        if self.weights.shape != (len(self.target_words), len(self.source_words)):
            raise ShapeError(
                f"the weights have the shape {tuple(self.weights.shape)}; {len(self.target_words)} target "
                f"words × {len(self.source_words)} source words need a row for each target word."
            )

    @classmethod
    def of(cls, source: Cut, target: Cut, weights: Tensor) -> "Alignment":
        """Of words, from the weights of their pieces: summed over source pieces, mean over target pieces."""
        return cls(tuple(source.words), tuple(target.words), merge(source, target, weights))

    def links(self, threshold: float | None = None) -> Links:
        """(source word, target word): for each target word its best source; or all that reach a threshold."""
        if threshold is not None:
            check_number("links got threshold", threshold, above=0, max=1)
            rows, columns = (self.weights >= threshold).nonzero(as_tuple=True)
            return frozenset(zip(columns.tolist(), rows.tolist(), strict=True))
        return frozenset((source, row) for row, source in enumerate(self.best()) if source is not None)

    def best(self) -> list[int | None]:
        """For each target word the source word with the largest weight; None if all of them are 0."""
        if not self.source_words:
            return [None] * len(self.target_words)
        values, places = self.weights.max(-1)
        return [p if v > 0 else None for v, p in zip(values.tolist(), places.tolist(), strict=True)]

    def pharaoh(self, threshold: float | None = None) -> str:
        """The links in the format of Pharaoh and Moses, source-target from 0: "0-0 1-2"."""
        return pharaoh(self.links(threshold))

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold: the words, the links, and weights between 0 and 1, rounded.

        >>> import torch
        >>> from regard.translation.alignment.alignment import Alignment
        >>> Alignment(("ein", "Hund"), ("dog",), torch.tensor([[0.125, 0.75]])).to_dict()
        {'source_words': ['ein', 'Hund'], 'target_words': ['dog'], 'links': '1-0', 'weights': [[0.125, 0.75]]}
        """
        numbers = self.weights.detach().double().nan_to_num(0, 0, 0).clamp(0, 1)
        return {
            "source_words": list(self.source_words),
            "target_words": list(self.target_words),
            "links": self.pharaoh(),
            "weights": [[round(number, DECIMALS) for number in row] for row in numbers.tolist()],
        }

    def __repr__(self) -> str:
        sizes = f"{len(self.source_words)} source × {len(self.target_words)} target words"
        return f"Alignment({sizes}: {self.pharaoh() or 'no links'})"

    def __str__(self) -> str:
        """A table, a column for each source word: weights in per cent, nothing below 1."""
        first = max((len(word) for word in self.target_words), default=0)
        widths = [max(len(word), 3) for word in self.source_words]
        lines = [[f"{word:>{width}}" for word, width in zip(self.source_words, widths, strict=True)]]
        for row in self.weights.tolist():
            cells = (f"{100 * weight:.0f}" if weight >= 0.01 else "" for weight in row)
            lines.append([f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)])
        names = ["", *self.target_words]
        return "\n".join(
            "  ".join([f"{name:<{first}}", *line]).rstrip() for name, line in zip(names, lines, strict=True)
        )


def merge(source: Cut, target: Cut, weights: Tensor) -> Tensor:
    """Weights of pieces (…, target, source) → of words: summed over source pieces, mean over target pieces.

    >>> import torch
    >>> from regard.translation.alignment.alignment import merge
    >>> from regard.translation.tokens import Cut
    >>> source = Cut(["Hunde"], [5, 6], ["▁Hund", "e"], [0, 0], {})
    >>> target = Cut(["the", "dogs"], [7, 8, 9], ["▁the", "▁dog", "s"], [0, 1, 1], {})
    >>> merge(source, target, torch.tensor([[0.1, 0.2], [0.4, 0.4], [0.1, 0.3]]))
    tensor([[0.3000],
            [0.6000]])
    """
    rows = _belongs(target).to(weights.dtype)
    rows = rows / rows.sum(-1, keepdim=True).clamp(min=1)  # a word may have no piece at all
    return rows @ weights @ _belongs(source).to(weights.dtype).T


def align(
    model: Seq2Seq,
    tokens: TokenizerPair,
    pairs: Sequence[tuple[str, str]],
    choice: AlignmentHead = AlignmentHead(),  # noqa: B008 (a frozen value)
) -> list[Alignment]:
    """The words of given sentence pairs, aligned by the model's attention.

    model, tokens: a model and its vocabularies; `Translator.align` has both.
    pairs: (source, target), whose words stand between white space.
    choice: which layer, heads and step the weights are read from; `select_alignment_head` finds the best.

    >>> import torch
    >>> from regard.models import TransformerConfig, Transformer
    >>> from regard.translation import Tokens, TokenizerPair
    >>> from regard.translation.alignment.alignment import align
    >>> tokens = Tokens.learn(["ein Hund bellt", "a dog barks"] * 9, kind="words")
    >>> model = Transformer(len(tokens), TransformerConfig(width=16, heads=2))
    >>> align(model, TokenizerPair(tokens, tokens), [("ein Hund bellt", "a dog")])[0].weights.shape
    torch.Size([2, 3])
    """
    cuts = cut_pairs(tokens, pairs)
    found = cross_weights(
        model, [source.ids for source, _ in cuts], [target.ids for _, target in cuts], choice
    )
    return [Alignment.of(*cut, weights) for cut, weights in zip(cuts, found, strict=True)]


def cut_pairs(tokens: TokenizerPair, pairs: Sequence[tuple[str, str]]) -> list[tuple[Cut, Cut]]:
    """Both sides of each pair, cut into pieces."""
    found = []
    for number_, given in enumerate(listed(pairs)):
        pair = as_pair(given, number_)
        source, target = tokens.source.cut(pair.source), tokens.target.cut(pair.target)
        check_size(f"pair {number_}", "pieces", len(source.ids), len(target.ids))
        found.append((source, target))
    return found


def check_size(what: str, unit: str, source: int, target: int) -> None:
    """A matrix that fits into memory."""
    if source * target > _MOST:
        raise ArgumentError(
            f"{what} has {source:,} {unit} in its source and {target:,} in its target; their alignment would "
            f"take {format_bytes(4 * source * target)}. Give it sentence by sentence."
        )


def select_alignment_head(
    model: Seq2Seq,
    tokens: TokenizerPair,
    pairs: Sequence[tuple[str, str]],
    gold: Sequence[GoldAlignment | Links] | None = None,
) -> AlignmentHead:
    """The layer, head and shift that align best: with the lowest error rate, see `rate_alignment_heads`.

    model, tokens: a model and its vocabularies.
    pairs: (source, target), to try them on.
    gold: the right links of the pairs; by default the confident ones of `LexicalAligner`.

    >>> import torch
    >>> from regard.models import TransformerConfig, Transformer
    >>> from regard.translation import Tokens, TokenizerPair
    >>> from regard.translation.alignment.alignment import select_alignment_head
    >>> tokens = Tokens.learn(["ein Hund bellt", "a dog barks"] * 9, kind="words")
    >>> model = Transformer(len(tokens), TransformerConfig(width=16, heads=2, layers=2))
    >>> select_alignment_head(model, TokenizerPair(tokens, tokens), [("ein Hund bellt", "a dog barks")]).layer in (0, 1)
    True
    """
    gold = _anchored(pairs) if gold is None else gold
    if not any(_as_gold(links).sure for links in gold):
        return AlignmentHead()  # nothing says which is better
    rated = rate_alignment_heads(model, tokens, pairs, gold)
    return min(rated, key=lambda choice: rated[choice].aer)  # the first of several that are equal


@torch.no_grad()
def rate_alignment_heads(
    model: Seq2Seq,
    tokens: TokenizerPair,
    pairs: Sequence[tuple[str, str]],
    gold: Sequence[GoldAlignment | Links] | None = None,
) -> dict[AlignmentHead, ErrorRates]:
    """How well each layer, each head and the mean of a layer's heads align, read with either shift.

    gold: of each pair the links of its words, which stand between white space. Without it, confident links of
    `LexicalAligner` stand for it, learned from these pairs: they tell which attention is best, not how good it is.

    >>> from regard.models import TransformerConfig, Transformer
    >>> from regard.translation import Tokens, TokenizerPair
    >>> from regard.translation.alignment.alignment import rate_alignment_heads
    >>> tokens = Tokens.learn(["ein Hund", "a dog"] * 9, kind="words")
    >>> model = Transformer(len(tokens), TransformerConfig(width=16, heads=2, layers=2))
    >>> rated = rate_alignment_heads(model, TokenizerPair(tokens, tokens), [("ein Hund", "a dog")])
    >>> len(rated)  # 2 layers × (2 heads + their mean) × 2 shifts
    12
    """
    cuts = cut_pairs(tokens, pairs)
    true = [_as_gold(links) for links in (_anchored(pairs) if gold is None else gold)]
    _check_gold(pairs, true)
    layers = list(cross_attention_layers(model))
    shifts: tuple[Shift, ...] = ("input", "output")
    counts: dict[tuple[int, Shift], Tensor] = {}  # (heads + 1) × (links, hits, possible hits)
    sources, targets = [source.ids for source, _ in cuts], [target.ids for _, target in cuts]
    for some, seen in watch_forced_decoding(model, sources, targets, layers):
        for layer, name in enumerate(layers):
            weights = torch.cat([one.dense() for one in seen[name]], -2).float().cpu()  # b h t s
            # the mean first: of equals it is chosen
            weights = torch.cat([weights.mean(1, keepdim=True), weights], 1)
            for i, part in zip(some, weights, strict=True):
                for shift in shifts:
                    pieces = drop_special_tokens(part, len(targets[i]), len(sources[i]), shift)
                    found = _hits(merge(*cuts[i], pieces), true[i])
                    counts[layer, shift] = counts.get((layer, shift), 0) + found
    sure = sum(len(one.sure) for one in true)
    return {
        AlignmentHead(layer, None if head == 0 else (head - 1,), shift): rates(links, sure, hits, possible)
        for (layer, shift), heads in counts.items()
        for head, (links, hits, possible) in enumerate(heads.tolist())
    }


def _hits(weights: Tensor, gold: GoldAlignment) -> Tensor:
    """Of each head (h, target, source): how many links it draws, how many are sure, and how many possible."""
    h, t, s = weights.shape
    if not t * s:
        return torch.zeros(h, 3, dtype=torch.long)
    values, best = weights.max(-1)
    drawn, found = values > 0, [values > 0]
    for links in (gold.sure, gold.sure | gold.possible):
        table = torch.zeros(t, s, dtype=torch.bool)
        if links:
            source, target = torch.tensor(sorted(links)).T
            table[target, source] = True
        found.append(drawn & table[torch.arange(t), best])
    return torch.stack([one.sum(-1) for one in found], -1)


def _anchored(pairs: Sequence[tuple[str, str]]) -> list[Links]:
    """Confident links, found in the pairs themselves; none where there are no words."""
    if not any(source.split() and target.split() for source, target in pairs):
        return [frozenset()] * len(pairs)
    return LexicalAligner.learn(pairs).links(pairs)


def _as_gold(links: GoldAlignment | Links) -> GoldAlignment:
    return links if isinstance(links, GoldAlignment) else GoldAlignment(links)


def _check_gold(pairs: Sequence[tuple[str, str]], gold: Sequence[GoldAlignment]) -> None:
    """Links of each pair, between words that are there."""
    if len(pairs) != len(gold):
        raise ArgumentError(
            f"there are {len(pairs)} sentence pairs and gold links of {len(gold)}; give one line of links "
            "for each pair, an empty one where there are none."
        )
    for pair, ((source, target), (sure, possible)) in enumerate(zip(pairs, gold, strict=True)):
        sizes = len(source.split()), len(target.split())
        for link in sure | possible:
            if not (0 <= link[0] < sizes[0] and 0 <= link[1] < sizes[1]):
                raise ArgumentError(
                    f"the gold links word {link[0]} to word {link[1]} in pair {pair}, which has {sizes[0]} "
                    f"and {sizes[1]} words; they are counted from 0, and stand between white space. A file "
                    "that counts from 1 is read with base=1 (--base 1)."
                )


def _belongs(cut: Cut) -> Tensor:
    """Whether a word has a piece: (words, pieces)."""
    return torch.arange(len(cut.words))[:, None] == torch.tensor(cut.word_of, dtype=torch.long)
