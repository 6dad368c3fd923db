"""Prepare training data: clean and split the pairs, learn vocabularies, encode the corpus.

This happens once per model folder; a resumed run reads the result.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, tee
from pathlib import Path
from typing import NamedTuple

from regard._util.files import remove_partial_files, verify_checksums, write_checksums
from regard.errors import ArgumentError, MissingExtraError, RegardError
from regard.translation.alignment.guided_loss import token_links
from regard.translation.alignment.lexical_aligner import LexicalAligner
from regard.translation.config import CorpusConfig, TokensConfig, TranslationConfig
from regard.translation.data.cleaning import CleanedPairs, LengthFilter, clean_pairs
from regard.translation.data.encoded import EncodedCorpus
from regard.translation.data.formats import read_pairs, write_pairs
from regard.translation.data.pairs import Pair, split_pairs
from regard.translation.model_folder import DATA, DEV, IDS, LINKS, READY, TEXT
from regard.translation.tokens import Tokenizer, TokenizerPair
from regard.translation.training.checkpoint import read_tokens, token_files, write_tokens
from regard.translation.training.rendezvous import first_sentence

_LEXICON_PAIRS = 50_000  # training pairs for the lexical aligner
_LINES = 1000  # tokenized at once
_SAMPLED, _SAMPLE_LENGTH = 100, 50  # dev sentences to choose an example from, and its ideal length
_SLACK = 10  # tokens by which short sentences may differ, whatever the ratio
_MAX_CHARACTERS = 16  # per token: drops sentences that are far too long before they are tokenized


class TrainingData(NamedTuple):
    """Everything that a training run reads."""

    tokens: TokenizerPair
    pairs: EncodedCorpus
    dev: list[Pair]
    links: EncodedCorpus | None = None

    def example(self) -> str:
        """Return a dev source sentence of medium length, to try the model on."""
        sources = (pair.source for pair in self.dev[:_SAMPLED])
        return min(sources, key=lambda text: abs(len(text) - _SAMPLE_LENGTH))


def load_data(folder: Path, config: TranslationConfig) -> TrainingData:
    """Load the data written by `prepare`."""
    try:
        verify_checksums(folder / READY, _checksummed(config))
        data = TrainingData(
            read_tokens(folder, config.tokens),
            EncodedCorpus(folder / IDS),
            list(read_pairs(folder / DEV)),
            EncodedCorpus(folder / LINKS) if config.training.guided_alignment_weight else None,
        )
        _check_consistent(data)
    except MissingExtraError:
        raise
    except (RegardError, OSError, ValueError) as error:
        raise ArgumentError(
            f"The training data in {str(folder)!r} is damaged ({first_sentence(error)}). Copy the folder "
            "again, or train in a new one."
        ) from None
    return data


def _checksummed(config: TranslationConfig) -> list[str]:
    """Return the files whose checksums are in `ready`; train.ids and links.ids contain their own."""
    tokens = dict.fromkeys(token_files(config.tokens.shared))
    return [Path(DEV).name, *(f"../{name}" for name in tokens)]


def _check_consistent(data: TrainingData) -> None:
    """Raise ArgumentError if the parts do not belong together."""
    vocabulary = max(len(side) for side in data.tokens)
    if data.pairs.vocabulary != vocabulary:
        raise ArgumentError(
            f"{IDS} was encoded with {data.pairs.vocabulary:,} tokens, but the vocabulary has {vocabulary:,}"
        )
    if not len(data.pairs) or not data.dev:
        raise ArgumentError(f"{IDS} has {len(data.pairs):,} pairs and {DEV} has {len(data.dev):,}")
    if data.links is not None and len(data.links) != len(data.pairs):
        raise ArgumentError(
            f"{LINKS} has links for {len(data.links):,} pairs, but {IDS} has {len(data.pairs):,} pairs"
        )
    if data.links is not None and (data.links.sizes[:, 0] != data.links.sizes[:, 1]).any():
        raise ArgumentError(f"{LINKS} has links without a source or a target")


def prepare(
    folder: Path,
    config: TranslationConfig,
    pairs: Iterable[Pair],
    dev: Iterable[Pair] | None = None,
    notify: Callable[[str], None] = print,
) -> TrainingData:
    """Clean and split the pairs, learn vocabularies, and write everything into a model folder.

    dev: validation pairs. Default: held out from `pairs`. notify: called with messages about the data.
    """
    (folder / DATA).mkdir(parents=True, exist_ok=True)
    remove_partial_files(folder / DATA)  # left by a killed run
    for name in (IDS, LINKS, DEV):
        (folder / name).unlink(missing_ok=True)
    cleaned = _clean(pairs, config.corpus)
    written = write_pairs(folder / TEXT, cleaned)  # standard input cannot be read twice
    notify(str(cleaned.dropped))
    if not written:
        raise ArgumentError(f"No training pairs are left: {cleaned.dropped}. Use other data.")
    dev_pairs, train = _hold_out(folder / TEXT, config, dev, notify)
    tokens = _learn_tokens(config.tokens, train, config.training.seed)
    write_tokens(folder, tokens)
    notify(_describe(tokens, config.tokens))
    dropped = _token_filter(config.corpus)
    encoded = (pair for pair in _encode(tokens, train) if dropped.keeps(*map(len, pair)))
    corpus = EncodedCorpus.write(folder / IDS, encoded, vocabulary=max(len(side) for side in tokens))
    if dropped.total:
        notify(str(dropped))
    if not len(corpus):
        raise ArgumentError(
            f"No training pairs are left: {dropped}. Raise corpus.max_tokens or corpus.max_length_ratio."
        )
    dev_pairs = _filter_dev(dev_pairs, tokens, config.corpus, notify)
    write_pairs(folder / DEV, dev_pairs)
    links = None
    if config.training.guided_alignment_weight:
        notify("aligning words for guided alignment")
        links = EncodedCorpus.write(
            folder / LINKS, _align_tokens(tokens, train, config.corpus), vocabulary=config.corpus.max_tokens
        )
    (folder / TEXT).unlink()
    write_checksums(folder / READY, _checksummed(config))
    return TrainingData(tokens, corpus, dev_pairs, links)


def _clean(pairs: Iterable[Pair], config: CorpusConfig) -> CleanedPairs:
    max_length = _MAX_CHARACTERS * config.max_tokens
    return clean_pairs(pairs, max_length=max_length, max_ratio=config.max_length_ratio)


def _hold_out(
    text: Path, config: TranslationConfig, dev: Iterable[Pair] | None, notify: Callable[[str], None]
) -> tuple[list[Pair], Iterable[Pair]]:
    """Return the dev and training pairs; iterating over the latter reads the file."""

    def read() -> Iterable[Pair]:
        return read_pairs(text, format="tsv")

    if dev is None:
        splits = split_pairs(read, dev=config.corpus.dev_size, seed=config.training.seed)
        if not splits.dev:
            raise ArgumentError(
                "Fewer than 10 distinct source sentences: too few to hold some out for validation. Use more "
                "data, or pass dev pairs."
            )
        return splits.dev, splits.train
    cleaned = _clean(dev, config.corpus)
    dev_pairs = list(cleaned)
    if cleaned.dropped.total:
        notify(f"dev: {cleaned.dropped}")
    if not dev_pairs:
        raise ArgumentError(f"No dev pairs are left: {cleaned.dropped}. Use other data.")
    return dev_pairs, _Reread(read)


class _Reread(Iterable[Pair]):
    """Pairs that are read again in each iteration."""

    def __init__(self, read: Callable[[], Iterable[Pair]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._read())


def _filter_dev(
    pairs: list[Pair], tokens: TokenizerPair, config: CorpusConfig, notify: Callable[[str], None]
) -> list[Pair]:
    dropped = _token_filter(config)
    encoded = zip(pairs, _encode(tokens, pairs), strict=True)
    kept = [pair for pair, ids in encoded if dropped.keeps(*map(len, ids))]
    if dropped.total:
        notify(f"dev: {dropped}")
    if not kept:
        raise ArgumentError(
            f"No dev pairs are left: {dropped}. Raise corpus.max_tokens or corpus.max_length_ratio."
        )
    notify(f"{len(kept):,} dev pairs")
    return kept


def _token_filter(config: CorpusConfig) -> LengthFilter:
    return LengthFilter(config.max_tokens, config.max_length_ratio, _SLACK, "tokens")


def _learn_tokens(config: TokensConfig, train: Iterable[Pair], seed: int) -> TokenizerPair:
    def learn(lines: Iterable[str]) -> Tokenizer:
        coverage = config.character_coverage
        return Tokenizer.learn(
            lines, kind=config.kind, size=config.size, character_coverage=coverage, seed=seed
        )

    if config.shared:
        shared = learn(chain.from_iterable(train))
        return TokenizerPair(shared, shared)
    return TokenizerPair(learn(pair.source for pair in train), learn(pair.target for pair in train))


def _describe(tokens: TokenizerPair, config: TokensConfig) -> str:
    sizes = [len(side) for side in dict.fromkeys(tokens)]
    text = f"vocabulary: {' and '.join(f'{size:,}' for size in sizes)} tokens"
    if min(sizes) < config.size:
        text += f" (tokens.size={config.size:,}, but the text yields no more tokens)"
    return text


def _encode(tokens: TokenizerPair, pairs: Iterable[Pair]) -> Iterator[tuple[list[int], list[int]]]:
    remaining = iter(pairs)
    while chunk := list(islice(remaining, _LINES)):
        sides = zip(tokens, zip(*chunk, strict=True), strict=True)
        yield from zip(*(side.encode_batch(lines) for side, lines in sides), strict=True)


def _align_tokens(
    tokens: TokenizerPair, train: Iterable[Pair], config: CorpusConfig
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the linked source and target tokens of each pair that passes the length filter."""

    def filtered() -> Iterator[Pair]:
        token_filter, (first, second) = _token_filter(config), tee(train)
        sizes = ((len(source), len(target)) for source, target in _encode(tokens, second))
        return (pair for pair, size in zip(first, sizes, strict=True) if token_filter.keeps(*size))

    aligner = LexicalAligner.learn(list(islice(filtered(), _LEXICON_PAIRS)))
    remaining = filtered()
    while chunk := list(islice(remaining, _LINES)):
        for pair, word_links in zip(chunk, aligner.links(chunk, "grow-diag-final-and"), strict=True):
            source, target = tokens.source.segment(pair.source), tokens.target.segment(pair.target)
            links = token_links(source, target, word_links)
            yield links[:, 0].tolist(), links[:, 1].tolist()
