"""Prepare training data: clean and split the pairs, learn vocabularies, encode the corpus.

This happens once per model folder; a resumed run reads the result.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from regard._util.files import (
    MAX_TEXT_BYTES,
    read_regular,
    remove_partial_files,
    verify_checksums,
    write_atomic,
    write_checksums,
)
from regard._util.text import pluralize
from regard.errors import ArgumentError, MissingExtraError, RegardError
from regard.translation.alignment.aer import read_pharaoh
from regard.translation.alignment.guided_loss import token_links
from regard.translation.alignment.lexical_aligner import LexicalAligner
from regard.translation.alignment.links import Links, to_pharaoh
from regard.translation.automatic import describe_choice
from regard.translation.config import CorpusConfig, TokensConfig, TranslationConfig
from regard.translation.data.cleaning import CleanedPairs, LengthFilter, clean_pairs
from regard.translation.data.diagnosis import diagnose
from regard.translation.data.encoded import EncodedCorpus
from regard.translation.data.formats import read_pairs, write_pairs
from regard.translation.data.pairs import Pair, Splitter
from regard.translation.data.statistics import CorpusStatistics
from regard.translation.model_folder import (
    DATA,
    DEV,
    DEV_LINKS,
    IDS,
    LINKS,
    PRETRAINED,
    PROFILE,
    READY,
    TEXT,
)
from regard.translation.saved_model import token_files
from regard.translation.text.profile import ProfileBuilder, TextProfile
from regard.translation.tokens import Tokenizer, TokenizerPair
from regard.translation.training.checkpoint import read_tokens, write_tokens
from regard.translation.training.distributed.rendezvous import first_sentence

_LINES = 1000  # lines to tokenize at a time
_GUIDE_PAIRS = 50_000  # training pairs for the lexical aligner used in guided alignment
_HEAD_PAIRS = 5000  # training pairs for the lexical aligner whose links select the alignment head
_MAX_LINKED = 300  # maximum number of validation pairs with links
_SAMPLED, _SAMPLE_LENGTH = 100, 50  # candidates for the example sentence; its ideal length
_SLACK = 10  # tokens by which lengths may differ regardless of the ratio
_MAX_CHARACTERS = 16  # per token; drops sentences that are far too long before they are tokenized

_MIN_OCCURRENCES = 20  # minimum mean frequency of vocabulary entries in the text
_LARGE_VOCABULARY = 1000  # smaller vocabularies never cause a warning

_Ids = tuple[list[int], list[int]]
ConfigChoice = Callable[[CorpusStatistics], TranslationConfig]


class TrainingData(NamedTuple):
    """Everything that a training run reads.

    pairs: the training pairs. links: their token links, for guided alignment.
    dev: validation pairs. dev_links: word links of the first validation pairs, to select the alignment head.
    """

    tokens: TokenizerPair
    pairs: EncodedCorpus
    dev: list[Pair]
    links: EncodedCorpus | None = None
    dev_links: Sequence[Links] = ()

    def example(self) -> str:
        """Return a dev source sentence of medium length, to try the model on."""
        sources = (pair.source for pair in self.dev[:_SAMPLED])
        return min(sources, key=lambda text: abs(len(text) - _SAMPLE_LENGTH))


def load_data(folder: Path, config: TranslationConfig) -> TrainingData:
    """Load the data written by `prepare`."""
    _check_version(folder, config)
    try:
        verify_checksums(folder / READY, _checksummed(folder, config))
        data = TrainingData(
            read_tokens(folder, config.tokens),
            EncodedCorpus(folder / IDS),
            list(read_pairs(folder / DEV)),
            EncodedCorpus(folder / LINKS) if config.training.guided_alignment_weight else None,
            [] if config.model.kind == "plain" else read_pharaoh(folder / DEV_LINKS),
        )
        if (folder / PROFILE).exists():  # missing in folders from earlier versions
            TextProfile.load(folder / PROFILE)
        _check_consistent(data, with_dev_links=config.model.kind != "plain")
    except MissingExtraError:
        raise
    except (RegardError, OSError, ValueError) as error:
        raise ArgumentError(
            f"The training data in {str(folder)!r} is corrupted ({first_sentence(error)}). Copy the folder "
            "again, or train in a new one."
        ) from None
    return data


def _check_version(folder: Path, config: TranslationConfig) -> None:
    """Raise ArgumentError for a folder from an earlier version, whose `ready` does not mention dev.links."""
    if config.model.kind == "plain" or (folder / DEV_LINKS).exists():
        return
    ready = b""
    with suppress(OSError, RegardError):  # verifying the checksums reports these errors
        ready = read_regular(folder / READY, MAX_TEXT_BYTES)
    if ready and Path(DEV_LINKS).name.encode() not in ready:
        raise ArgumentError(
            f"{str(folder)!r} was prepared by an earlier version of regard, which did not write {DEV_LINKS}. "
            "Finish its training with that version, or train in a new folder."
        )


def _checksummed(folder: Path, config: TranslationConfig) -> list[str]:
    """Return the files whose checksums are in `ready`; train.ids and links.ids contain their own."""
    tokens: Iterable[str] = dict.fromkeys(token_files(config.tokens.shared))
    if (folder / PRETRAINED).is_dir():
        tokens = sorted(f"{PRETRAINED}/{path.name}" for path in (folder / PRETRAINED).iterdir())
    links = [] if config.model.kind == "plain" else [Path(DEV_LINKS).name]
    return [Path(DEV).name, *links, *(f"../{name}" for name in tokens)]


def _check_consistent(data: TrainingData, *, with_dev_links: bool) -> None:
    """Raise ArgumentError if the parts do not belong together."""
    vocabulary = max(len(side) for side in data.tokens)
    if data.pairs.vocabulary != vocabulary:
        raise ArgumentError(
            f"{IDS} was encoded with a vocabulary of {data.pairs.vocabulary:,} tokens, but this one has "
            f"{vocabulary:,}"
        )
    if not len(data.pairs) or not data.dev:
        raise ArgumentError(
            f"{IDS} has {len(data.pairs):,} pairs and {DEV} has {len(data.dev):,}; both need at least one"
        )
    linked = min(len(data.dev), _MAX_LINKED)
    if with_dev_links and len(data.dev_links) != linked:
        raise ArgumentError(
            f"{DEV_LINKS} has links for {len(data.dev_links):,} pairs, but {DEV} requires links for "
            f"{linked:,}"
        )
    if data.links is not None and len(data.links) != len(data.pairs):
        raise ArgumentError(
            f"{LINKS} has links for {len(data.links):,} pairs, but {IDS} has {len(data.pairs):,} pairs"
        )
    if data.links is not None and (data.links.sizes[:, 0] != data.links.sizes[:, 1]).any():
        raise ArgumentError(f"{LINKS} contains links without a source or without a target")


def prepare(
    folder: Path,
    config: TranslationConfig,
    pairs: Iterable[Pair],
    dev: Iterable[Pair] | None = None,
    notify: Callable[[str], None] = print,
    tokens: TokenizerPair | None = None,
) -> TrainingData:
    """Clean and split the pairs, learn vocabularies, and write everything into a model folder.

    dev: validation pairs. Default: held out from `pairs`. notify: called with messages about the data.
    tokens: vocabularies of the initial model. Default: learned from the pairs.
    """
    return prepare_with(folder, lambda statistics: config, pairs, dev, notify, tokens)[1]


def prepare_with(
    folder: Path,
    choose: ConfigChoice,
    pairs: Iterable[Pair],
    dev: Iterable[Pair] | None,
    notify: Callable[[str], None],
    tokens: TokenizerPair | None = None,
) -> tuple[TranslationConfig, TrainingData]:
    """Like `prepare`, but choose the config after counting the pairs, and return it too.

    choose: returns a config for the given corpus statistics, such as `choose_config`. The [corpus] section
        and the seed must not depend on the statistics, because both are needed to read the corpus.
    """
    statistics = CorpusStatistics()
    early = choose(statistics)
    (folder / DATA).mkdir(parents=True, exist_ok=True)
    remove_partial_files(folder / DATA)  # left by a killed run
    for name in (IDS, LINKS, DEV, DEV_LINKS, PROFILE):
        (folder / name).unlink(missing_ok=True)
    dev_pairs, train = _hold_out(folder / TEXT, early, pairs, dev, statistics, notify)
    config = choose(statistics)
    for warning in diagnose(statistics, dev_pairs if dev is not None else ()):
        notify(f"Warning: {warning}")
    if config != early:
        notify(describe_choice(statistics, config))
    learned = tokens is None
    if tokens is None:
        tokens = _learn_tokens(config.tokens, train, config.training.seed)
    write_tokens(folder, tokens)
    notify(_describe(tokens, config.tokens))
    guided = config.training.guided_alignment_weight
    sample: list[Pair] = []  # the first training pairs as text, for lexical aligners
    sample_size = _GUIDE_PAIRS if guided else _HEAD_PAIRS
    profile = ProfileBuilder()
    encoded = _encode_and_sample(tokens, train, config.corpus, sample, sample_size, notify, profile)
    corpus = EncodedCorpus.write(folder / IDS, encoded, vocabulary=max(len(side) for side in tokens))
    if learned and (too_large := _check_vocabulary(tokens, corpus, config.tokens)):
        notify(f"Warning: {too_large}")
    lengths = corpus.sizes[:, 0]
    profile.build(int(lengths.max(initial=0)), int(lengths.sum())).save(folder / PROFILE)
    dev_filter = _token_filter(config.corpus)
    dev_pairs = [pair for pair, _ in _encode(tokens, dev_pairs, dev_filter)]
    _report("dev", dev_filter, notify)
    notify(pluralize(len(dev_pairs), "dev pair"))
    write_pairs(folder / DEV, dev_pairs)
    dev_links: list[Links] = []
    if config.model.kind != "plain":
        linked = dev_pairs[:_MAX_LINKED]
        dev_links = LexicalAligner.learn([*linked, *sample[:_HEAD_PAIRS]]).links(linked)
        write_atomic(folder / DEV_LINKS, "".join(f"{to_pharaoh(links)}\n" for links in dev_links).encode())
    links = None
    if guided:
        notify("aligning words for guided alignment")
        filtered = (pair for pair, _ in _encode(tokens, train, _token_filter(config.corpus)))
        token_pairs = _align_tokens(tokens, filtered, LexicalAligner.learn(sample))
        links = EncodedCorpus.write(folder / LINKS, token_pairs, vocabulary=config.corpus.max_tokens)
    (folder / TEXT).unlink()
    write_checksums(folder / READY, _checksummed(folder, config))
    return config, TrainingData(tokens, corpus, dev_pairs, links, dev_links)


def _check_vocabulary(tokens: TokenizerPair, corpus: EncodedCorpus, config: TokensConfig) -> str | None:
    """Return a warning if the vocabulary is too large for the text; None otherwise."""
    total, size = int(corpus.sizes.sum()), sum(len(side) for side in dict.fromkeys(tokens))
    if config.kind not in ("unigram", "bpe") or total >= _MIN_OCCURRENCES * size or size < _LARGE_VOCABULARY:
        return None
    better = max(total // (2 * _MIN_OCCURRENCES), _LARGE_VOCABULARY // 2)
    return (
        f"a vocabulary of {size:,} is too large for a text of {total:,} tokens: each entry occurs only "
        f"{pluralize(round(total / size), 'time')} on average, too rarely to learn. "
        f"Set tokens.size={round(better, -2)}, or use --preset auto."
    )


def _report(side: str, dropped: LengthFilter, notify: Callable[[str], None], *, always: bool = False) -> None:
    """Report dropped pairs (with `always`, even if there are none); raise if no pair is left."""
    if dropped.total or always:
        notify(f"{'dev: ' if side == 'dev' else ''}{dropped}")
    if dropped.total == dropped.seen:
        too_strict = dropped.unit == "tokens"
        cure = "Raise corpus.max_tokens or corpus.max_length_ratio" if too_strict else "Use other data"
        raise ArgumentError(f"No {side} pairs are left: {dropped}. {cure}.")


def _clean(pairs: Iterable[Pair], config: CorpusConfig) -> CleanedPairs:
    max_length = _MAX_CHARACTERS * config.max_tokens
    return clean_pairs(pairs, max_length=max_length, max_ratio=config.max_length_ratio)


def _hold_out(
    text: Path,
    config: TranslationConfig,
    pairs: Iterable[Pair],
    dev: Iterable[Pair] | None,
    statistics: CorpusStatistics,
    notify: Callable[[str], None],
) -> tuple[list[Pair], Iterable[Pair]]:
    """Write the cleaned pairs to `text`, because standard input cannot be read twice.

    Returns the dev and training pairs; iterating over the latter reads the file.
    """
    cleaned = _clean(pairs, config.corpus)
    splitter = Splitter(config.corpus.dev_size if dev is None else 0, seed=config.training.seed)
    write_pairs(text, splitter.observe(statistics.observe(cleaned)))
    _report("training", cleaned.dropped, notify, always=True)
    splits = splitter.split(lambda: read_pairs(text, format="tsv"))
    if dev is None:
        if not splits.dev:
            distinct = len({pair.source for pair in splits.train})
            raise ArgumentError(
                f"The corpus has {pluralize(distinct, 'distinct source sentence')}; at least 10 are needed "
                "to hold out a validation set. Add sentence pairs, or pass a validation set (--dev)."
            )
        return splits.dev, splits.train
    cleaned = _clean(dev, config.corpus)
    dev_pairs = list(cleaned)
    _report("dev", cleaned.dropped, notify)
    return dev_pairs, splits.train


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


def _encode(
    tokens: TokenizerPair, pairs: Iterable[Pair], token_filter: LengthFilter
) -> Iterator[tuple[Pair, _Ids]]:
    """Yield the pairs that pass the filter, with their token ids."""
    remaining = iter(pairs)
    while chunk := list(islice(remaining, _LINES)):
        sides = zip(tokens, zip(*chunk, strict=True), strict=True)
        ids = zip(*(side.encode_batch(lines) for side, lines in sides), strict=True)
        for pair, (source, target) in zip(chunk, ids, strict=True):
            if token_filter.keeps(len(source), len(target)):
                yield pair, (source, target)


def _encode_and_sample(
    tokens: TokenizerPair,
    train: Iterable[Pair],
    config: CorpusConfig,
    sample: list[Pair],
    sample_size: int,
    notify: Callable[[str], None],
    profile: ProfileBuilder,
) -> Iterator[_Ids]:
    """Yield the token ids of the training pairs; add all to `profile`, and the first pairs to `sample`."""
    dropped = _token_filter(config)
    for pair, ids in _encode(tokens, train, dropped):
        if len(sample) < sample_size:
            sample.append(pair)
        profile.add(pair)
        yield ids
    _report("training", dropped, notify)


def _align_tokens(tokens: TokenizerPair, pairs: Iterator[Pair], aligner: LexicalAligner) -> Iterator[_Ids]:
    """Yield the linked source and target tokens of each pair."""
    while chunk := list(islice(pairs, _LINES)):
        for pair, word_links in zip(chunk, aligner.links(chunk, "grow-diag-final-and"), strict=True):
            source, target = tokens.source.segment(pair.source), tokens.target.segment(pair.target)
            links = token_links(source, target, word_links)
            yield links[:, 0].tolist(), links[:, 1].tolist()
