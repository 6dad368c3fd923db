"""Word alignments from attention weights. Does not import torch.

token weights → word weights (`merge`) → soft: `weights`; hard: `links`; both directions: `symmetrize`
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy

from regard._util.text import format_bytes, pluralize
from regard.errors import ArgumentError, ShapeError
from regard.translation.alignment.links import Links, check_threshold, to_pharaoh
from regard.translation.tokens import Segmentation

if TYPE_CHECKING:
    from torch import Tensor

Array = numpy.ndarray[Any, Any]
DECIMALS = 4  # decimal places of weights in JSON
_MAX_SIZE = 400_000_000  # maximum number of weights per alignment


class Alignment:
    """Word alignment of a sentence pair.

    source_words, target_words: the words of both sentences, in order.
    weights: (target words, source words), as a tensor or a NumPy array.

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

    def __init__(
        self, source_words: Sequence[str], target_words: Sequence[str], weights: "Tensor | Array"
    ) -> None:
        self.source_words, self.target_words = tuple(source_words), tuple(target_words)
        shape = len(self.target_words), len(self.source_words)
        if tuple(weights.shape) != shape:
            raise ShapeError(
                f"Alignment got weights of shape {tuple(weights.shape)}; "
                f"{pluralize(shape[0], 'target word')} and {pluralize(shape[1], 'source word')} need {shape}."
            )
        self._given = weights

    @classmethod
    def of(cls, source: Segmentation, target: Segmentation, weights: "Tensor | Array") -> "Alignment":
        """Create a word alignment from token weights with `merge`."""
        return cls(source.words, target.words, merge(source, target, to_array(weights)))

    @property
    def weights(self) -> "Tensor":
        """The weights as a tensor, (target words, source words)."""
        given = self._given
        if isinstance(given, numpy.ndarray):
            import torch

            if not given.dtype.isnative or not given.flags.writeable or min(given.strides) < 0:
                given = given.astype(given.dtype.newbyteorder("="), order="C")  # as torch requires
            self._given = given = torch.from_numpy(given)
        return given

    @property
    def _array(self) -> Array:
        return to_array(self._given)

    def links(self, threshold: float | None = None) -> Links:
        """Return (source word, target word) links; by default, the best source word for each target word.

        threshold: if given, return all links with at least this weight instead.
        """
        check_threshold(threshold)
        if threshold is not None:
            rows, columns = to_array(self._given >= threshold).nonzero()  # in the precision of the weights
            return frozenset(zip(columns.tolist(), rows.tolist(), strict=True))
        return frozenset((source, row) for row, source in enumerate(self.argmax()) if source is not None)

    def argmax(self) -> list[int | None]:
        """Return the source word with the largest weight for each target word; None if all weights are 0."""
        if not self.source_words:
            return [None] * len(self.target_words)
        values, indices = self._array.max(-1).tolist(), self._array.argmax(-1).tolist()
        return [i if value > 0 else None for value, i in zip(values, indices, strict=True)]

    def to_pharaoh(self, threshold: float | None = None) -> str:
        """Return the links in Pharaoh format (source-target), such as "0-0 1-2"."""
        return to_pharaoh(self.links(threshold))

    def to_dict(self, links: Links | None = None) -> dict[str, Any]:
        """Return JSON-serializable values: words, links, and rounded weights between 0 and 1.

        links: the links to include. Default: `links()`.
        """
        weights = numpy.nan_to_num(self._array.astype(float), posinf=0, neginf=0).clip(0, 1)
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
        rows += [[f"{100 * w:.0f}" if w >= 0.01 else "" for w in row] for row in self._array.tolist()]
        lines = []
        for name, row in zip(["", *self.target_words], rows, strict=True):
            cells = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join([f"{name:<{name_width}}", *cells]).rstrip())
        return "\n".join(lines)


def to_array(weights: "Tensor | Array") -> Array:
    """Convert weights to a float32 or float64 array; a tensor on the CPU shares its memory."""
    if isinstance(weights, numpy.ndarray):
        return weights
    exact = str(weights.dtype) in ("torch.float32", "torch.float64")
    weights = weights.detach().cpu()
    array: Array = (weights if exact else weights.float()).numpy()
    return array


def merge(source: Segmentation, target: Segmentation, weights: Array) -> Array:
    """Merge token weights (…, target, source) into word weights.

    Weights are summed over the tokens of a source word and averaged over the tokens of a target word.
    """
    words, starts = _words(target)
    sums = numpy.add.reduceat(weights, starts, -2) if starts else weights[..., :0, :]
    means = sums / numpy.diff([*starts, len(target.ids)])[:, None].astype(sums.dtype)
    columns, starts = _words(source)
    merged: Array = numpy.add.reduceat(means, starts, -1) if starts else means[..., :0]
    shape = len(target.words), len(source.words)
    if merged.shape[-2:] == shape:
        return merged
    result = numpy.zeros((*merged.shape[:-2], *shape), merged.dtype)  # some words have no tokens
    result[..., numpy.array(words, int)[:, None], numpy.array(columns, int)] = merged
    return result


def _words(side: Segmentation) -> tuple[list[int], list[int]]:
    """Return the words that have tokens, and the first token of each."""
    if not side.words:
        return [], []
    word_of = side.word_of
    starts = [at for at, word in enumerate(word_of) if not at or word != word_of[at - 1]]
    return [word_of[at] for at in starts], starts


def check_size(name: str, unit: str, source: int, target: int) -> None:
    """Raise if the alignment matrix would be too large."""
    if source * target > _MAX_SIZE:
        raise ArgumentError(
            f"{name} has {source:,} source {unit} and {target:,} target {unit}; its alignment would need "
            f"{format_bytes(4 * source * target)}. Split it into sentences."
        )
