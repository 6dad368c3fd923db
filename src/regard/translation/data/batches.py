"""Batches by token budget, in an order that depends on the seed alone, from any step on.

Each epoch shuffles all pairs, sorts them by length within buckets, so that a batch holds sentences of like
lengths, cuts them where the budget is spent, and shuffles the batches. Nothing is padded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard._util.checks import check_int, check_number
from regard.errors import ArgumentError
from regard.models.packed import Packed
from regard.translation.tokens import END, MARKS, START, UNKNOWN

Ids = Sequence[int] | NDArray[numpy.integer]
Places = NDArray[numpy.int64]  # of pairs, by number
_BUCKET = 50  # batches that are sorted together: enough for like lengths, few enough to stay random


class Pairs(Protocol):
    """Pairs of sentences as token numbers without marks: a `EncodedCorpus`, or a list with its sizes."""

    @property
    def sizes(self) -> NDArray[numpy.int64]:
        """The numbers of source and target tokens of each pair, (n, 2)."""

    def __getitem__(self, place: int, /) -> tuple[Ids, Ids]: ...


class InMemoryPairs:
    """Pairs of sentences as token numbers, held in memory.

    >>> from regard.translation.data.batches import InMemoryPairs
    >>> InMemoryPairs([([5, 6], [7]), ([8], [9, 10])]).sizes.tolist()
    [[2, 1], [1, 2]]
    """

    def __init__(self, pairs: Sequence[tuple[Ids, Ids]]) -> None:
        self._pairs = pairs
        self.sizes = numpy.array([[len(source), len(target)] for source, target in pairs]).reshape(-1, 2)

    def __getitem__(self, place: int, /) -> tuple[Ids, Ids]:
        return self._pairs[place]


class Batch(NamedTuple):
    """Sentences and their translations with their marks, packed; `labels` are the tokens to be foretold.

    links: of each pair, (n, 2): source token and target token, counted without marks; if somebody wants them.
    """

    source: Packed
    target: Packed
    links: tuple[Tensor, ...] = ()

    @property
    def labels(self) -> int:
        """How many tokens are to be foretold: all of the target but the start marks."""
        return len(self.target.tokens) - len(self.target)

    @property
    def size(self) -> int:
        """How many tokens are read, source and target."""
        return len(self.source.tokens) + self.labels

    def to(self, device: torch.device) -> "Batch":
        """On a device."""
        source, target = (
            Packed(side.tokens.to(device), side.lengths.to(device)) for side in (self.source, self.target)
        )
        return Batch(source, target, tuple(some.to(device) for some in self.links))

    @classmethod
    def of(cls, pairs: Sequence[tuple[Ids, Ids]]) -> "Batch":
        """Pack pairs of token numbers; the marks are added.

        >>> from regard.translation.data.batches import Batch
        >>> Batch.of([([5, 6], [7])])
        Batch(source=Packed(tokens=tensor([5, 6, 2]), ...), target=Packed(tokens=tensor([1, 7, 2]), ...))
        """
        return cls(
            _packed([[*source, END] for source, _ in pairs]),
            _packed([[START, *target, END] for _, target in pairs]),
        )


@dataclass(frozen=True)
class Batches:
    """The batches of one epoch after the other; each is known by its epoch and its place in it.

    tokens: of source and target together, with marks, that a batch holds at most; a pair that is longer is a
        batch of its own.
    seed: all that the order depends on.
    unknown: the share of pairs in which one piece is hidden on both sides, so that a model learns to write
        the unknown mark for what it does not know (Luong et al. 2015b); an alignment then tells what it was.
        Where no piece stands on both sides, an unknown one is added to both, beyond what `tokens` says.
    shared: whether a number is the same piece on both sides.
    links: of the tokens of each pair, those of the source and those of the target.

    >>> from regard.translation.data.batches import Batches, InMemoryPairs
    >>> batches = Batches(InMemoryPairs([([5] * n, [6] * n) for n in range(1, 9)]), tokens=24)
    >>> sorted(len(batch) for batch in batches.epoch(0))
    [1, 1, 1, 2, 3]
    >>> batches.get(batches.epoch(0)[0], epoch=0).size <= 24
    True
    """

    pairs: Pairs
    tokens: int = 4096
    seed: int = 0
    unknown: float = 0.0
    shared: bool = True
    links: Pairs | None = None

    def __post_init__(self) -> None:
        check_int("Batches got tokens", self.tokens, min=1)
        check_number("Batches got unknown", self.unknown, min=0, below=1)
        if not len(self.pairs.sizes):
            raise ArgumentError("Batches got no pairs; give one at least.")

    def epoch(self, epoch: int) -> list[Places]:
        """The pairs of each batch of an epoch, by number."""
        random = numpy.random.default_rng((self.seed, epoch))
        sizes = self.pairs.sizes
        order = random.permutation(len(sizes))
        total = sizes.sum(1) + 2  # an end mark each; the start mark is not counted
        mean = max(float(total.mean()), 1.0)
        bucket = max(1, int(_BUCKET * self.tokens / mean))
        batches: list[Places] = []
        for first in range(0, len(order), bucket):
            some = order[first : first + bucket]
            some = some[numpy.lexsort((sizes[some, 0], sizes[some, 1]))]
            batches.extend(_cut(some, total[some], self.tokens))
        return [batches[i] for i in random.permutation(len(batches))]

    def get(self, places: Sequence[int] | Places, epoch: int) -> Batch:
        """The pairs with these numbers as a batch; in each epoch other pieces are hidden."""
        pairs = [self._pair(int(place), epoch) for place in places]
        batch = Batch.of(pairs)
        if self.links is None:
            return batch
        return batch._replace(links=tuple(self._linked(int(place)) for place in places))

    def _linked(self, place: int) -> Tensor:
        """The links of a pair, (n, 2)."""
        assert self.links is not None
        (sources, targets), sizes = self.links[place], self.pairs.sizes[place]
        linked = numpy.empty((len(sources), 2), numpy.int64)
        if len(sources) == len(targets):
            linked[:, 0], linked[:, 1] = sources, targets
        if len(sources) != len(targets) or (linked >= sizes).any():
            raise ArgumentError(
                f"the links of pair {place:,} are damaged: they point outside of its {sizes[0]} source and "
                f"{sizes[1]} target tokens. Copy the folder again, or train in a new one."
            )
        return torch.from_numpy(linked)

    def from_step(self, step: int) -> Iterator[tuple[int, int, Places]]:
        """Epoch, place in it and pairs of each batch from a step on, without end; steps count from 0."""
        epoch = 0
        batches = self.epoch(epoch)
        while step >= len(batches):
            step -= len(batches)
            epoch += 1
            batches = self.epoch(epoch)
        while True:
            for place in range(step, len(batches)):
                yield epoch, place, batches[place]
            step, epoch = 0, epoch + 1
            batches = self.epoch(epoch)

    def _pair(self, place: int, epoch: int) -> tuple[Ids, Ids]:
        source, target = self.pairs[place]
        if self.unknown:
            random = numpy.random.default_rng((self.seed, epoch, place))
            if random.random() < self.unknown:
                return _hidden(list(source), list(target), random, self.shared)
        return source, target


def by_length(
    sources: Sequence[Sequence[int]], size: int, device: torch.device
) -> Iterator[tuple[list[int], Packed]]:
    """Sources of like lengths together, the shortest first: which they are, and packed with their end marks.

    >>> import torch
    >>> from regard.translation.data.batches import by_length
    >>> [some for some, _ in by_length([[5, 6, 7], [8], [9, 10]], 2, torch.device("cpu"))]
    [[1, 2], [0]]
    """
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    for first in range(0, len(order), size):
        some = order[first : first + size]
        yield some, Packed.of([[*sources[i], END] for i in some], device)


def _cut(order: Places, sizes: NDArray[numpy.int64], most: int) -> Iterator[Places]:
    """Parts of an order, each with at most so many tokens, or with one pair."""
    first, held = 0, 0
    for place, size in enumerate(sizes.tolist()):
        if held + size > most and place > first:
            yield order[first:place]
            first, held = place, 0
        held += size
    if first < len(order):
        yield order[first:]


def _hidden(
    source: list[int], target: list[int], random: numpy.random.Generator, shared: bool
) -> tuple[list[int], list[int]]:
    """One piece that stands once on both sides becomes unknown; if there is none, one is added to both."""
    both = [
        piece
        for piece in source
        if shared and piece >= MARKS and source.count(piece) == 1 and target.count(piece) == 1
    ]
    if both:
        piece = both[random.integers(len(both))]
        source[source.index(piece)] = target[target.index(piece)] = UNKNOWN
    else:
        source.append(UNKNOWN)
        target.append(UNKNOWN)
    return source, target


def _packed(sentences: Sequence[Sequence[int]]) -> Packed:
    lengths = torch.tensor([len(sentence) for sentence in sentences], dtype=torch.long)
    tokens = numpy.fromiter(chain.from_iterable(sentences), numpy.int64, int(lengths.sum()))
    return Packed(torch.from_numpy(tokens), lengths)
