"""Training data is prepared once, without leaks from dev data."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from regard._util.files import write_checksums
from regard.errors import ArgumentError, MissingExtraError
from regard.translation.config import TranslationConfig
from regard.translation.data.pairs import Pair
from regard.translation.model_folder import SHARED, SOURCE, TARGET, is_prepared, write_config
from regard.translation.tokens import UNKNOWN
from regard.translation.training.preparation import TrainingData, prepare
from regard.translation.training.train import Run
from tests.translation.folders import check_flipped_bits, content

# each source sentence twice, with two translations and a unique word
PAIRS = [Pair(f"word{n // 2} and more", f"Wort{n // 2} und mehr {n % 2}") for n in range(200)]
WORDS = ("tokens.kind=words", "corpus.dev_size=7")
VOCABULARY = ["vocabulary: 196 tokens (tokens.size=1,000, but the text yields no more tokens)"]


def prepare_pairs(
    folder: Path, pairs: list[Pair], *settings: str, dev: list[Pair] | None = None
) -> tuple[TrainingData, list[str]]:
    """Prepare pairs from an iterator; return the data and the messages."""
    config, messages = TranslationConfig.preset("tiny").override([*WORDS, *settings]), list[str]()
    folder.mkdir(exist_ok=True)
    write_config(folder, config)
    data = prepare(folder, config, iter(pairs), None if dev is None else iter(dev), messages.append)
    return data, messages


def texts(data: TrainingData) -> list[Pair]:
    """Return the training pairs, decoded."""
    return [
        Pair(data.tokens.source.decode(source.tolist()).text, data.tokens.target.decode(target.tolist()).text)
        for source, target in data.pairs
    ]


def test_each_pair_is_in_train_or_dev(tmp_path):
    data, messages = prepare_pairs(tmp_path, PAIRS)
    assert sorted([*texts(data), *data.dev]) == sorted(PAIRS)
    assert len({pair.source for pair in data.dev}) == 7
    assert len(data.dev) == 14
    assert messages == ["dropped none of 200 pairs", *VOCABULARY, "14 dev pairs"]
    ten, _ = prepare_pairs(tmp_path / "ten", PAIRS[:20])  # ten distinct sources are enough
    assert (len(ten.dev), len(ten.pairs)) == (2, 18)


def test_train_and_vocabulary_contain_no_dev_data(tmp_path):
    data, _ = prepare_pairs(tmp_path, PAIRS)
    assert not {pair.source for pair in texts(data)} & {pair.source for pair in data.dev}
    for pair in data.dev:
        assert data.tokens.source.encode(pair.source.split()[0]) == [UNKNOWN]
        assert data.tokens.target.encode(pair.target.split()[0]) == [UNKNOWN]


def test_with_dev_pairs_all_pairs_are_for_training(tmp_path):
    dev = [Pair("word1  and more", "Wort1 und mehr"), Pair("", "nichts")]
    data, messages = prepare_pairs(tmp_path, PAIRS, dev=dev)
    assert texts(data) == PAIRS
    assert data.dev == [Pair("word1 and more", "Wort1 und mehr")]
    assert "dev: dropped 1 of 2 pairs: 1 with an empty side" in messages


def test_prepared_data_is_loaded(tmp_path):
    assert not is_prepared(tmp_path)
    data, _ = prepare_pairs(tmp_path, PAIRS)
    again = Run.load(tmp_path).data
    assert again.dev == data.dev
    assert again.tokens.shared
    assert again.tokens.source.content == data.tokens.source.content
    assert texts(again) == texts(data)
    assert {path.name for path in (tmp_path / "data").iterdir()} == {
        *("train.ids", "dev.tsv", "dev.links", "ready")
    }
    assert again.dev_links == data.dev_links
    assert len(data.dev_links) == len(data.dev)


def test_a_folder_of_an_earlier_version_is_named_as_such(tmp_path):
    """The checksum file of an earlier version has no entry for dev.links, which does not exist."""
    prepare_pairs(tmp_path, PAIRS)
    ready, links = tmp_path / "data" / "ready", tmp_path / "data" / "dev.links"
    links.unlink()
    with pytest.raises(ArgumentError, match="is corrupted"):
        Run.load(tmp_path)
    lines = ready.read_text().splitlines(keepends=True)
    ready.write_text("".join(line for line in lines if "dev.links" not in line))
    with pytest.raises(
        ArgumentError, match=r"prepared by an earlier version of regard.*not write data/dev\.links"
    ):
        Run.load(tmp_path)


@pytest.mark.parametrize("number", [0, 5, 99])
def test_each_dev_pair_has_its_links(tmp_path, number):
    """Too few or too many links cannot belong to these pairs, even if the checksum is correct."""
    data, _ = prepare_pairs(tmp_path, PAIRS)
    folder = tmp_path / "data"
    names = [line.split(maxsplit=1)[1].lstrip("*") for line in (folder / "ready").read_text().splitlines()]
    (folder / "dev.links").write_text("0-0\n" * number)
    write_checksums(folder / "ready", names)
    message = f"dev.links has links for {number} pairs, but data/dev.tsv requires links for {len(data.dev)}"
    with pytest.raises(ArgumentError, match=message):
        Run.load(tmp_path)


def test_data_is_not_damaged_because_a_package_is_missing(tmp_path, monkeypatch):
    prepare_pairs(tmp_path, PAIRS)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(MissingExtraError, match="pip install"):
        Run.load(tmp_path)


def test_the_same_pairs_give_the_same_files(tmp_path):
    for name in ("a", "b"):
        prepare_pairs(tmp_path / name, PAIRS)
    prepare_pairs(tmp_path / "c", PAIRS, "training.seed=1")
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert content(tmp_path / "a")["data/dev.tsv"] != content(tmp_path / "c")["data/dev.tsv"]


@pytest.mark.parametrize("kind", ["unigram", "bpe", "words", "characters"])
@pytest.mark.parametrize("shared", ["true", "false"])
def test_one_or_two_vocabularies(tmp_path, kind, shared):
    data, _ = prepare_pairs(
        tmp_path, PAIRS, f"tokens.kind={kind}", f"tokens.shared={shared}", "tokens.size=60"
    )
    assert data.tokens.shared == (shared == "true")
    assert {path.name for path in tmp_path.glob("*.model")} == (
        {SHARED} if shared == "true" else {SOURCE, TARGET}
    )
    if kind in ("unigram", "bpe"):  # the others lack some characters
        assert set(texts(data)) <= set(PAIRS)
    assert all(max(*source, *target) < max(map(len, data.tokens)) for source, target in data.pairs)


def test_pairs_are_dropped_and_counted(tmp_path):
    long = " ".join(["word1"] * 30)
    pairs = [*PAIRS, Pair(" ", "leer"), Pair(long, long), Pair("word2", " ".join(["und"] * 19))]
    data, messages = prepare_pairs(tmp_path, pairs, "corpus.max_tokens=25", "corpus.max_length_ratio=1.5")
    assert sorted([*texts(data), *data.dev]) == sorted(PAIRS)
    assert messages[0].startswith("dropped 2 of 203 pairs: 1 with an empty side, 1 with very different")
    assert any(
        text.startswith("dropped 1 of") and text.endswith("1 longer than 25 tokens") for text in messages[1:]
    )


def test_long_dev_pairs_are_dropped(tmp_path):
    dev = [Pair("word1 " * 30, "Wort1 " * 30), Pair("word2", "Wort2")]
    data, messages = prepare_pairs(tmp_path, PAIRS, "corpus.max_tokens=25", dev=dev)
    assert data.dev == dev[1:]
    assert "dev: dropped 1 of 2 pairs: 1 longer than 25 tokens" in messages
    with pytest.raises(ArgumentError, match="No dev pairs are left: dropped 1 of 1"):
        prepare_pairs(tmp_path / "other", PAIRS, "corpus.max_tokens=25", dev=dev[:1])


@pytest.mark.parametrize(
    ("pairs", "dev", "why"),
    [
        ([], None, "No training pairs are left: dropped none of 0 pairs"),
        ([Pair("", ""), Pair("a", "")], None, "dropped 2 of 2 pairs: 2 with an empty side"),
        (PAIRS[:18], None, "9 distinct source sentences; at least 10"),  # two pairs per source
        (PAIRS, [], "No dev pairs are left: dropped none of 0 pairs"),
        (PAIRS, [Pair("a", " ")], "No dev pairs are left: dropped 1 of 1 pair"),
        ([Pair("a b c d e f", "a b c d e f g")] * 20, [Pair("a", "a")], "Raise corpus.max_tokens"),
    ],
)
def test_too_little_data_is_rejected(tmp_path, pairs, dev, why):
    with pytest.raises(ArgumentError, match=why):
        prepare_pairs(tmp_path, pairs, "corpus.max_tokens=5", dev=dev)
    assert not is_prepared(tmp_path)


def test_an_interrupted_preparation_is_repeated(tmp_path):
    def broken() -> Iterator[Pair]:
        yield from PAIRS[:150]
        raise KeyboardInterrupt

    prepare_pairs(tmp_path / "whole", PAIRS)
    config, folder = TranslationConfig.preset("tiny").override(list(WORDS)), tmp_path / "cut"
    folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        prepare(folder, config, broken(), notify=lambda text: None)
    assert not is_prepared(folder)
    (folder / "data" / ".regard-0123456789abcdef.part").write_bytes(b"of a killed run")
    prepare_pairs(folder, PAIRS)
    assert content(folder) == content(tmp_path / "whole")


def test_preparation_keeps_foreign_files(tmp_path):
    prepare_pairs(tmp_path, PAIRS)
    (tmp_path / "data" / "ready").unlink()
    others = {"video.part": b"half", ".download.part": b"a download", ".regard-x.part": b"no such name"}
    for name, text in others.items():
        (tmp_path / "data" / name).write_bytes(text)
    prepare_pairs(tmp_path, PAIRS)
    assert {name: (tmp_path / "data" / name).read_bytes() for name in others} == others


@pytest.mark.parametrize("shared", ["true", "false"])
def test_every_flipped_bit_is_detected(tmp_path, shared):
    prepare_pairs(
        tmp_path, PAIRS, f"tokens.shared={shared}", "training.guided_alignment_weight=0.3", "tokens.size=60"
    )
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"config.json", "dev.tsv", "train.ids", "links.ids", "ready"}
    check_flipped_bits(files, lambda: Run.load(tmp_path), "corrupted|does not contain|unknown key")
