"""Preparation: what a training reads, made once; nothing of the dev data gets into it."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from regard.errors import ArgumentError
from regard.translation.config import TranslationConfig
from regard.translation.data.pairs import Pair
from regard.translation.tokens import UNKNOWN
from regard.translation.training.checkpoint import SHARED, SOURCE, TARGET, write_config
from regard.translation.training.preparation import Prepared, prepare, prepared
from tests.translation.training.test_checkpoint import content

# each source sentence twice, with two translations, and with a word that no other has
PAIRS = [Pair(f"word{n // 2} and more", f"Wort{n // 2} und mehr {n % 2}") for n in range(200)]
WORDS = ("tokens.kind=words", "corpus.dev_size=7")
VOCABULARY = ["a vocabulary of 196; 1,000 were asked for (tokens.size), and the text has no more"]


def made(
    folder: Path, pairs: list[Pair], *settings: str, dev: list[Pair] | None = None
) -> tuple[Prepared, list[str]]:
    """What is prepared, from pairs that can be read only once, and what is said."""
    config, said = TranslationConfig.preset("tiny").override([*WORDS, *settings]), list[str]()
    folder.mkdir(exist_ok=True)
    write_config(folder, config)
    found = prepare(folder, config, iter(pairs), None if dev is None else iter(dev), said.append)
    return found, said


def texts(found: Prepared) -> list[Pair]:
    """The pairs to train on, as their ids say."""
    return [
        Pair(found.tokens.source.join(source.tolist()).text, found.tokens.target.join(target.tolist()).text)
        for source, target in found.pairs
    ]


def test_each_pair_is_to_train_on_or_to_judge_by(tmp_path: Path) -> None:
    found, said = made(tmp_path, PAIRS)
    assert sorted([*texts(found), *found.dev]) == sorted(PAIRS)
    assert len({pair.source for pair in found.dev}) == 7
    assert len(found.dev) == 14
    assert said == ["dropped none of 200 pairs", *VOCABULARY, "14 pairs to judge by"]


def test_no_source_sentence_is_on_both_sides_and_no_vocabulary_knows_the_dev_data(tmp_path: Path) -> None:
    found, _ = made(tmp_path, PAIRS)
    assert not {pair.source for pair in texts(found)} & {pair.source for pair in found.dev}
    for pair in found.dev:
        assert found.tokens.source.encode(pair.source.split()[0]) == [UNKNOWN]
        assert found.tokens.target.encode(pair.target.split()[0]) == [UNKNOWN]


def test_dev_pairs_of_their_own_leave_all_others_to_train_on(tmp_path: Path) -> None:
    dev = [Pair("word1  and more", "Wort1 und mehr"), Pair("", "nichts")]
    found, said = made(tmp_path, PAIRS, dev=dev)
    assert texts(found) == PAIRS
    assert found.dev == [Pair("word1 and more", "Wort1 und mehr")]
    assert "dev: dropped 1 of 2 pairs: 1 with an empty side" in said


def test_what_was_prepared_is_found_again(tmp_path: Path) -> None:
    assert prepared(tmp_path) is None
    found, _ = made(tmp_path, PAIRS)
    again = prepared(tmp_path)
    assert again is not None
    assert again.dev == found.dev
    assert again.tokens.shared
    assert again.tokens.source.content == found.tokens.source.content
    assert texts(again) == texts(found)
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"train.ids", "dev.tsv", "ready"}


def test_the_same_pairs_give_the_same_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        made(tmp_path / name, PAIRS)
    made(tmp_path / "c", PAIRS, "training.seed=1")
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert content(tmp_path / "a")["data/dev.tsv"] != content(tmp_path / "c")["data/dev.tsv"]


@pytest.mark.parametrize("kind", ["unigram", "bpe", "words", "characters"])
@pytest.mark.parametrize("shared", ["true", "false"])
def test_vocabularies_are_one_or_two(tmp_path: Path, kind: str, shared: str) -> None:
    found, _ = made(tmp_path, PAIRS, f"tokens.kind={kind}", f"tokens.shared={shared}", "tokens.size=60")
    assert found.tokens.shared == (shared == "true")
    assert {path.name for path in tmp_path.glob("*.model")} == (
        {SHARED} if shared == "true" else {SOURCE, TARGET}
    )
    if kind in ("unigram", "bpe"):  # the others do not know all letters
        assert set(texts(found)) <= set(PAIRS)
    assert all(max(*source, *target) < max(map(len, found.tokens)) for source, target in found.pairs)


def test_pairs_are_dropped_and_counted(tmp_path: Path) -> None:
    long = " ".join(["word1"] * 30)
    pairs = [*PAIRS, Pair(" ", "leer"), Pair(long, long), Pair("word2", " ".join(["und"] * 19))]
    found, said = made(tmp_path, pairs, "corpus.max_tokens=25", "corpus.max_length_ratio=1.5")
    assert sorted([*texts(found), *found.dev]) == sorted(PAIRS)
    assert said[0].startswith("dropped 2 of 203 pairs: 1 with an empty side, 1 with sides of very unequal")
    assert any(
        text.startswith("dropped 1 of") and text.endswith("1 longer than 25 pieces") for text in said[1:]
    )


def test_long_dev_pairs_are_dropped_too(tmp_path: Path) -> None:
    dev = [Pair("word1 " * 30, "Wort1 " * 30), Pair("word2", "Wort2")]
    found, said = made(tmp_path, PAIRS, "corpus.max_tokens=25", dev=dev)
    assert found.dev == dev[1:]
    assert "dev: dropped 1 of 2 pairs: 1 longer than 25 pieces" in said
    with pytest.raises(ArgumentError, match="no dev pairs are left: dropped 1 of 1"):
        made(tmp_path / "other", PAIRS, "corpus.max_tokens=25", dev=dev[:1])


@pytest.mark.parametrize(
    ("pairs", "dev", "why"),
    [
        ([], None, "no pairs are left to train on: dropped none of 0 pairs"),
        ([Pair("", ""), Pair("a", "")], None, "dropped 2 of 2 pairs: 2 with an empty side"),
        (PAIRS[:18], None, "fewer than 10 different source sentences"),
        (PAIRS, [], "no dev pairs are left: dropped none of 0 pairs"),
        (PAIRS, [Pair("a", " ")], "no dev pairs are left: dropped 1 of 1 pair"),
        ([Pair("a b c d e f", "a b c d e f g")] * 20, [Pair("a", "a")], "Raise corpus.max_tokens"),
    ],
)
def test_too_little_is_refused(tmp_path: Path, pairs: list[Pair], dev: list[Pair] | None, why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        made(tmp_path, pairs, "corpus.max_tokens=5", dev=dev)
    assert prepared(tmp_path) is None


def test_ten_different_sources_are_enough(tmp_path: Path) -> None:
    found, _ = made(tmp_path, PAIRS[:20])
    assert len({pair.source for pair in found.dev}) == 1
    assert len(found.pairs) == 18


def test_what_was_cut_off_is_prepared_anew(tmp_path: Path) -> None:
    def broken() -> Iterator[Pair]:
        yield from PAIRS[:150]
        raise KeyboardInterrupt

    made(tmp_path / "whole", PAIRS)
    config, folder = TranslationConfig.preset("tiny").override(list(WORDS)), tmp_path / "cut"
    folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        prepare(folder, config, broken(), say=lambda text: None)
    assert prepared(folder) is None
    (folder / "data" / ".regard-0123456789abcdef.part").write_bytes(b"of one that was killed")
    made(folder, PAIRS)
    assert content(folder) == content(tmp_path / "whole")


def test_files_of_other_programs_stay_when_it_is_prepared_anew(tmp_path: Path) -> None:
    made(tmp_path, PAIRS)
    (tmp_path / "data" / "ready").unlink()
    others = {"video.part": b"half", ".download.part": b"a download", ".regard-x.part": b"no such name"}
    for name, text in others.items():
        (tmp_path / "data" / name).write_bytes(text)
    made(tmp_path, PAIRS)
    assert {name: (tmp_path / "data" / name).read_bytes() for name in others} == others


def flipped(path: Path, bit: int) -> None:
    """A file of which one bit is another."""
    harmed = bytearray(path.read_bytes())
    harmed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(harmed)


@pytest.mark.parametrize("shared", ["true", "false"])
def test_every_flipped_bit_of_what_was_prepared_is_noticed(tmp_path: Path, shared: str) -> None:
    made(tmp_path, PAIRS, f"tokens.shared={shared}", "training.guided_alignment_weight=0.3", "tokens.size=60")
    chance = Random(0)
    names = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in names} >= {"config.json", "dev.tsv", "train.ids", "links.ids", "ready"}
    for path in names:
        whole = path.read_bytes()
        for bit in chance.sample(range(8 * len(whole)), 25):
            flipped(path, bit)
            with pytest.raises(ArgumentError, match=r"damaged|does not say|unknown name"):
                prepared(tmp_path)
            path.write_bytes(whole)
    assert prepared(tmp_path) is not None
