"""Batches limited by token count. Their order depends only on the seed; iteration can start at any step.

Each epoch shuffles all pairs, sorts them by length within buckets, splits the buckets into batches of similar
lengths, and shuffles the batches. No padding is added.
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
from regard.models.generation import SpecialTokens
from regard.models.packed import Packed
from regard.translation.data.copied_words import COPY_FACTOR, Copyable, hide_words
from regard.translation.data.subword_sampling import SubwordSampler
from regard.translation.tokens import SPECIAL_TOKENS, UNKNOWN

Ids = Sequence[int] | NDArray[numpy.integer]
Indices = NDArray[numpy.int64]
_BUCKET = 50  # batches per bucket: enough for similar lengths, few enough to keep the order random


class EncodedPairs(Protocol):
    """Sentence pairs as token ids without start and end tokens: an `EncodedCorpus` or `InMemoryPairs`."""

    @property
    def sizes(self) -> NDArray[numpy.int64]:
        """Source and target length of each pair, (n, 2)."""

    def __getitem__(self, index: int, /) -> tuple[Ids, Ids]: ...


class InMemoryPairs:
    """Sentence pairs as token ids, in memory."""

    def __init__(self, pairs: Sequence[tuple[Ids, Ids]]) -> None:
        self._pairs = pairs
        self.sizes = numpy.array([[len(source), len(target)] for source, target in pairs]).reshape(-1, 2)

    def __getitem__(self, index: int, /) -> tuple[Ids, Ids]:
        return self._pairs[index]


class Batch(NamedTuple):
    """Packed sentence pairs with start and end tokens.

    links: alignment links of each pair, (n, 2): source and target token indices, not counting start tokens.
        Empty unless guided alignment is used.
    """

    source: Packed
    target: Packed
    links: tuple[Tensor, ...] = ()

    @property
    def labels(self) -> int:
        """Number of tokens to predict: all target tokens except the start tokens."""
        return len(self.target.tokens) - len(self.target)

    @property
    def size(self) -> int:
        """Number of source tokens and labels."""
        return len(self.source.tokens) + self.labels

    def to(self, device: torch.device) -> "Batch":
        """Move the batch to a device."""
        source, target = (
            Packed(side.tokens.to(device), side.lengths.to(device)) for side in (self.source, self.target)
        )
        return Batch(source, target, tuple(links.to(device) for links in self.links))

    @classmethod
    def of(
        cls,
        pairs: Sequence[tuple[Ids, Ids]],
        special: SpecialTokens = SpecialTokens(),  # noqa: B008 (a frozen value)
    ) -> "Batch":
        """Pack pairs of token ids, adding start and end tokens."""
        return cls(
            _pack([special.source(source) for source, _ in pairs]),
            _pack([special.target(target) for _, target in pairs]),
        )


@dataclass(frozen=True)
class Batches:
    """Batches of all epochs, addressed by epoch and index.

    batch_tokens: maximum batch size in tokens, source plus target with end tokens. A longer pair forms a
        batch of its own.
    seed: determines the order.
    unknown_rate: fraction of pairs in which a token that occurs once on each side is replaced by the unknown
        token. The model learns to predict this token for unknown words; the alignment then determines which
        word to copy (Luong et al. 2015b). If there is no such token, or the vocabularies are separate, the
        unknown token is appended to both sides; the batch may then exceed `batch_tokens`.
    shared: whether source and target share a vocabulary.
    copyable: words with the same letters in both languages; see `find_copyable`. In pairs that
        contain such words, the unknown token replaces one or two; these pairs are chosen five times as
        often. In other pairs, an unknown token is appended to both sides.
    links: alignment links of each pair, as source and target token indices.
    samplers: source and target samplers, which split some words into different subwords; a batch may then
        exceed `batch_tokens`.
    special: the special tokens around each sentence.

    >>> from regard.translation.data.batches import Batches, InMemoryPairs
    >>> batches = Batches(InMemoryPairs([([5] * n, [6] * n) for n in range(1, 9)]), batch_tokens=24)
    >>> sorted(len(batch) for batch in batches.epoch(0))
    [1, 1, 1, 2, 3]
    >>> batches.get(batches.epoch(0)[0], epoch=0).size <= 24
    True
    """

    pairs: EncodedPairs
    batch_tokens: int = 4096
    seed: int = 0
    unknown_rate: float = 0.0
    shared: bool = True
    links: EncodedPairs | None = None
    samplers: tuple[SubwordSampler, SubwordSampler] | None = None
    special: SpecialTokens = SpecialTokens()  # noqa: RUF009 (a frozen value)
    copyable: Copyable | None = None

    def __post_init__(self) -> None:
        check_int("Batches got batch_tokens", self.batch_tokens, min=1)
        check_number("Batches got unknown_rate", self.unknown_rate, min=0, below=1)
        if not len(self.pairs.sizes):
            raise ArgumentError("Batches requires at least one pair, got 0.")

    def epoch(self, epoch: int) -> list[Indices]:
        """Return the pair indices of each batch in an epoch."""
        random = numpy.random.default_rng((self.seed, epoch))
        sizes = self.pairs.sizes
        order = random.permutation(len(sizes))
        total = sizes.sum(1) + 2  # + 2: end tokens; the start token does not count
        mean = max(float(total.mean()), 1.0)
        bucket = max(1, int(_BUCKET * self.batch_tokens / mean))
        batches: list[Indices] = []
        for first in range(0, len(order), bucket):
            indices = order[first : first + bucket]
            indices = indices[numpy.lexsort((sizes[indices, 0], sizes[indices, 1]))]
            batches.extend(_split(indices, total[indices], self.batch_tokens))
        return [batches[i] for i in random.permutation(len(batches))]

    def get(self, indices: Sequence[int] | Indices, epoch: int) -> Batch:
        """Return the pairs at the given indices as a batch.

        The sampled subwords, and the words replaced by the unknown token, differ between epochs.
        """
        examples = [self._example(int(index), epoch) for index in indices]
        batch = Batch.of([pair for pair, _ in examples], self.special)
        links = tuple(links for _, links in examples if links is not None)
        return batch._replace(links=links) if links else batch

    def _example(self, index: int, epoch: int) -> tuple[tuple[Ids, Ids], Tensor | None]:
        """Return a pair and its links."""
        pair: tuple[Ids, Ids] = self.pairs[index]
        links = None if self.links is None else self._links(index)
        if self.samplers is not None:
            pair, links = self._resegment(pair, links, numpy.random.default_rng((self.seed, epoch, index, 1)))
        if self.unknown_rate:
            pair = self._insert_unknown(pair, numpy.random.default_rng((self.seed, epoch, index)))
        return pair, links

    def _resegment(
        self, pair: tuple[Ids, Ids], links: Tensor | None, random: numpy.random.Generator
    ) -> tuple[tuple[Ids, Ids], Tensor | None]:
        """Resample the subwords of a pair, keeping the links between words."""
        assert self.samplers is not None
        words = [sampler.words(ids) for sampler, ids in zip(self.samplers, pair, strict=True)]
        sampled = [
            sampler.sample_words(side, random) for sampler, side in zip(self.samplers, words, strict=True)
        ]
        source, target = (list(chain.from_iterable(side)) for side in sampled)
        if links is not None:
            links = _move_links(links, words, sampled)
        return (source, target), links

    def _links(self, index: int) -> Tensor:
        """Return the links of a pair, (n, 2)."""
        assert self.links is not None
        (sources, targets), sizes = self.links[index], self.pairs.sizes[index]
        links = numpy.empty((len(sources), 2), numpy.int64)
        if len(sources) == len(targets):
            links[:, 0], links[:, 1] = sources, targets
        if len(sources) != len(targets) or (links >= sizes).any():
            reason = (
                f"they refer to tokens beyond its {sizes[0]} source and {sizes[1]} target tokens"
                if len(sources) == len(targets)
                else f"{len(sources)} source and {len(targets)} target positions"
            )
            raise ArgumentError(
                f"The alignment links of pair {index:,} are corrupted: {reason}. Copy the folder again, or "
                "train in a new one."
            )
        return torch.from_numpy(links)

    def from_step(self, step: int) -> Iterator[tuple[int, Indices]]:
        """Yield the epoch number and pair indices of each batch, starting at the given step; never ends."""
        epoch = 0
        batches = self.epoch(epoch)
        while step >= len(batches):
            step -= len(batches)
            epoch += 1
            batches = self.epoch(epoch)
        while True:
            for indices in batches[step:]:
                yield epoch, indices
            step, epoch = 0, epoch + 1
            batches = self.epoch(epoch)

    def _insert_unknown(self, pair: tuple[Ids, Ids], random: numpy.random.Generator) -> tuple[Ids, Ids]:
        """In some pairs, replace words that occur on both sides with the unknown token, or append it."""
        source, target = pair
        chance, unknown = random.random(), self.special.unknown
        if self.copyable is not None and chance < min(COPY_FACTOR * self.unknown_rate, 0.5):
            words = self.copyable.common(source, target)
            if words:
                return hide_words(list(source), list(target), words, random, unknown)
        if chance < self.unknown_rate:
            by_token = self.shared and self.copyable is None
            return _replace_by_unknown(list(source), list(target), random, by_token, unknown)
        return pair


def _move_links(
    links: Tensor, words: Sequence[Sequence[list[int]]], sampled: Sequence[Sequence[list[int]]]
) -> Tensor:
    """Convert links between tokens of `words` to links between tokens of `sampled`.

    Both contain source words and target words. If two tokens are linked in `words`, all tokens of their words
    are linked in the result.
    """
    word_of = [numpy.repeat(numpy.arange(len(side)), [len(word) for word in side]) for side in words]
    last = [numpy.cumsum([0, *map(len, side)]) for side in sampled]
    linked = {(word_of[0][i], word_of[1][j]) for i, j in links.tolist()}
    moved = [
        (i, j)
        for source, target in sorted(linked)
        for i in range(last[0][source], last[0][source + 1])
        for j in range(last[1][target], last[1][target + 1])
    ]
    return torch.tensor(moved, dtype=torch.long).reshape(-1, 2)


def _split(order: Indices, sizes: NDArray[numpy.int64], max_tokens: int) -> Iterator[Indices]:
    """Split pair indices into batches of up to `max_tokens` tokens; a longer pair forms its own batch."""
    first, total = 0, 0
    for index, size in enumerate(sizes.tolist()):
        if total + size > max_tokens and index > first:
            yield order[first:index]
            first, total = index, 0
        total += size
    if first < len(order):
        yield order[first:]


def _replace_by_unknown(
    source: list[int],
    target: list[int],
    random: numpy.random.Generator,
    by_token: bool,
    unknown: int = UNKNOWN,
) -> tuple[list[int], list[int]]:
    """Replace one token that occurs exactly once on each side with the unknown token.

    If there is no such token, or `by_token` is False, append the unknown token to both sides.
    """
    common = [
        token
        for token in source
        if by_token and token >= SPECIAL_TOKENS and source.count(token) == 1 and target.count(token) == 1
    ]
    if common:
        token = common[random.integers(len(common))]
        source[source.index(token)] = target[target.index(token)] = unknown
    else:
        source.append(unknown)
        target.append(unknown)
    return source, target


def _pack(sentences: Sequence[Sequence[int]]) -> Packed:
    lengths = torch.tensor([len(sentence) for sentence in sentences], dtype=torch.long)
    tokens = numpy.fromiter(chain.from_iterable(sentences), numpy.int64, int(lengths.sum()))
    return Packed(torch.from_numpy(tokens), lengths)
