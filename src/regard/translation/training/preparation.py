"""From pairs of sentences to what a training reads: vocabularies, ids on disk, dev pairs.

It happens once. What a training that is cut off has prepared, it finds again.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, tee
from pathlib import Path
from typing import NamedTuple

from regard._util.files import remove_partial_files, verify_checksums, write_checksums
from regard.errors import ArgumentError, RegardError
from regard.translation.alignment.guided_loss import token_links
from regard.translation.alignment.lexical_aligner import LexicalAligner
from regard.translation.config import CorpusConfig, TokensConfig, TranslationConfig
from regard.translation.data.cleaning import CleanedPairs, LengthFilter, clean_pairs
from regard.translation.data.encoded import EncodedCorpus
from regard.translation.data.formats import read_pairs, write_pairs
from regard.translation.data.pairs import Pair, split_pairs
from regard.translation.tokens import Tokenizer, TokenizerPair
from regard.translation.training.checkpoint import (
    SHARED,
    SOURCE,
    TARGET,
    read_config,
    read_tokens,
    write_tokens,
)
from regard.translation.training.rendezvous import brief

_TEXT, _IDS, _LINKS, _DEV, _READY = "text.tsv", "train.ids", "links.ids", "dev.tsv", "ready"
_ANCHORED = 50_000  # pairs from which it is learned which words belong together
_LINES = 1000  # cut into pieces at once
_TRIED, _TELLING = 100, 50  # dev sentences that are looked at, and the letters of a good one
_SLACK = 10  # pieces by which short sentences may differ, whatever the ratio
_LETTERS = 16  # of a piece, at most: to drop sentences that are much too long before they are cut


class Prepared(NamedTuple):
    """All that a training reads."""

    tokens: TokenizerPair
    pairs: EncodedCorpus
    dev: list[Pair]
    links: EncodedCorpus | None = None


def is_prepared(folder: Path) -> bool:
    """Whether `prepare` came to its end in a folder."""
    return (folder / "data" / _READY).exists()


def prepared(folder: Path) -> Prepared | None:
    """What `prepare` has put into a folder; None if it did not come to its end."""
    if not is_prepared(folder):
        return None
    folder_config, data = read_config(folder), folder / "data"
    try:
        verify_checksums(data / _READY, _summed(TranslationConfig.from_dict(folder_config["settings"])))
        found = Prepared(
            read_tokens(folder, folder_config),
            EncodedCorpus.open(data / _IDS),
            list(read_pairs(data / _DEV)),
            EncodedCorpus.open(data / _LINKS)
            if TranslationConfig.from_dict(folder_config["settings"]).training.guided_alignment_weight
            else None,
        )
        _check_whole(found)
    except (RegardError, OSError, ValueError) as error:
        raise ArgumentError(
            f"the data of {str(folder)!r} are damaged ({brief(error)}); copy the folder again, or train in a "
            "new one."
        ) from None
    return found


def _summed(config: TranslationConfig) -> list[str]:
    """The files of which `ready` has checksums."""
    sides = (SHARED,) if config.tokens.shared else (SOURCE, TARGET)
    return [_DEV, *(f"../{name}" for name in sides)]


def _check_whole(found: Prepared) -> None:
    """What can be seen at once: parts that belong together."""
    most = max(len(side) for side in found.tokens)
    if found.pairs.vocabulary != most:
        raise ArgumentError(
            f"{_IDS} has numbers for {found.pairs.vocabulary:,} pieces and the vocabulary has {most:,}"
        )
    if not len(found.pairs) or not found.dev:
        raise ArgumentError(f"{_IDS} has {len(found.pairs):,} pairs and {_DEV} {len(found.dev):,}")
    if found.links is not None and len(found.links) != len(found.pairs):
        raise ArgumentError(
            f"{_LINKS} has links of {len(found.links):,} pairs and {_IDS} {len(found.pairs):,} pairs"
        )
    if found.links is not None and (found.links.sizes[:, 0] != found.links.sizes[:, 1]).any():
        raise ArgumentError(f"{_LINKS} has links without a source or a target")


def sample_source(folder: Path) -> str:
    """A source sentence of the dev data, neither very short nor long, to try a model with."""
    pairs = islice(read_pairs(folder / "data" / _DEV), _TRIED)
    return min((pair.source for pair in pairs), key=lambda text: abs(len(text) - _TELLING), default="")


def prepare(
    folder: Path,
    config: TranslationConfig,
    pairs: Iterable[Pair],
    dev: Iterable[Pair] | None = None,
    say: Callable[[str], None] = print,
) -> Prepared:
    """Clean and split pairs of sentences, learn vocabularies, and write all into a model folder.

    dev: pairs to judge by; without them, some of `pairs` are held back. say: is told what was dropped.
    """
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    remove_partial_files(data)  # of a preparation that was killed
    for name in (_IDS, _LINKS, _DEV):
        (data / name).unlink(missing_ok=True)
    # once to the disk, as standard input cannot be read twice
    kept = _clean(pairs, config.corpus)
    written = write_pairs(data / _TEXT, kept)
    say(str(kept.dropped))
    if not written:
        raise ArgumentError(f"no pairs are left to train on: {kept.dropped}. Give others.")
    held, train = _hold_back(data, config, dev, say)
    tokens = _learn(config.tokens, train, config.training.seed)
    write_tokens(folder, tokens)
    say(_told(tokens, config.tokens))
    dropped = _limits(config.corpus)
    most = max(len(side) for side in tokens)
    pairs_ = EncodedCorpus.write(data / _IDS, _kept(_encoded(tokens, train), dropped), vocabulary=most)
    if dropped.total:
        say(str(dropped))
    if not len(pairs_):
        raise ArgumentError(f"no pairs are left to train on: {dropped}. Raise corpus.max_tokens or ratio.")
    held = _short_enough(held, tokens, config.corpus, say)
    write_pairs(data / _DEV, held)
    links = None
    if config.training.guided_alignment_weight:
        say("looking for words that belong together")
        links = EncodedCorpus.write(
            data / _LINKS, _linked(tokens, train, config.corpus), vocabulary=config.corpus.max_tokens
        )
    (data / _TEXT).unlink()
    write_checksums(data / _READY, _summed(config))  # train.ids and links.ids have checksums of their own
    return Prepared(tokens, pairs_, held, links)


def _clean(pairs: Iterable[Pair], config: CorpusConfig) -> CleanedPairs:
    return clean_pairs(pairs, longest=_LETTERS * config.longest, ratio=config.ratio)


def _hold_back(
    data: Path, config: TranslationConfig, dev: Iterable[Pair] | None, say: Callable[[str], None]
) -> tuple[list[Pair], Iterable[Pair]]:
    """The pairs to judge by, and those to train on, which are read anew whenever they are iterated."""

    def read() -> Iterable[Pair]:
        return read_pairs(data / _TEXT, form="tsv")

    if dev is None:
        parts = split_pairs(read, dev=config.corpus.dev_size, seed=config.training.seed)
        if not parts.dev:
            raise ArgumentError(
                "there are fewer than 10 different source sentences, too few to hold some back to judge by; "
                "give more, or dev pairs of their own."
            )
        return parts.dev, parts.train
    given = _clean(dev, config.corpus)
    held = list(given)
    if given.dropped.total:
        say(f"dev: {given.dropped}")
    if not held:
        raise ArgumentError(f"no dev pairs are left: {given.dropped}. Give others.")
    return held, _Again(read)


class _Again(Iterable[Pair]):
    """Pairs that are read anew whenever they are iterated."""

    def __init__(self, read: Callable[[], Iterable[Pair]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._read())


def _short_enough(
    held: list[Pair], tokens: TokenizerPair, config: CorpusConfig, say: Callable[[str], None]
) -> list[Pair]:
    """The pairs to judge by that a model of this config is meant for."""
    dropped = _limits(config)
    kept = [
        pair
        for pair, ids in zip(held, _encoded(tokens, held), strict=True)
        if dropped.keeps(len(ids[0]), len(ids[1]))
    ]
    if dropped.total:
        say(f"dev: {dropped}")
    if not kept:
        raise ArgumentError(f"no dev pairs are left: {dropped}. Raise corpus.max_tokens or ratio.")
    say(f"{len(kept):,} pairs to judge by")
    return kept


def _limits(config: CorpusConfig) -> LengthFilter:
    return LengthFilter(config.longest, config.ratio, _SLACK, "pieces")


def _learn(config: TokensConfig, train: Iterable[Pair], seed: int) -> TokenizerPair:
    def learn(lines: Iterable[str]) -> Tokenizer:
        return Tokenizer.learn(lines, kind=config.kind, size=config.size, coverage=config.coverage, seed=seed)

    if config.shared:
        shared = learn(chain.from_iterable(train))
        return TokenizerPair(shared, shared)
    return TokenizerPair(learn(pair.source for pair in train), learn(pair.target for pair in train))


def _told(tokens: TokenizerPair, config: TokensConfig) -> str:
    """How large the vocabularies are, and whether that is less than was asked for."""
    sizes = [len(side) for side in dict.fromkeys(tokens)]
    said = f"a vocabulary of {' and '.join(f'{size:,}' for size in sizes)}"
    if min(sizes) < config.size:
        said += f"; {config.size:,} were asked for (tokens.size), and the text has no more"
    return said


def _encoded(tokens: TokenizerPair, pairs: Iterable[Pair]) -> Iterator[tuple[list[int], list[int]]]:
    coming = iter(pairs)
    while some := list(islice(coming, _LINES)):
        sides = zip(tokens, zip(*some, strict=True), strict=True)
        yield from zip(*(side.encode_batch(lines) for side, lines in sides), strict=True)


def _linked(
    tokens: TokenizerPair, train: Iterable[Pair], config: CorpusConfig
) -> Iterator[tuple[list[int], list[int]]]:
    """Of each pair that is kept, the source and the target tokens that are linked, one to one."""

    def kept() -> Iterator[Pair]:
        limits, (first, second) = _limits(config), tee(train)
        sizes = ((len(source), len(target)) for source, target in _encoded(tokens, second))
        return (pair for pair, size in zip(first, sizes, strict=True) if limits.keeps(*size))

    anchors = LexicalAligner.learn(list(islice(kept(), _ANCHORED)))
    coming = kept()
    while some := list(islice(coming, _LINES)):
        for pair, links in zip(some, anchors.links(some, "grow-diag-final-and"), strict=True):
            found = token_links(tokens.source.segment(pair.source), tokens.target.segment(pair.target), links)
            yield found[:, 0].tolist(), found[:, 1].tolist()


def _kept(
    pairs: Iterable[tuple[list[int], list[int]]], dropped: LengthFilter
) -> Iterator[tuple[list[int], list[int]]]:
    return (pair for pair in pairs if dropped.keeps(len(pair[0]), len(pair[1])))
