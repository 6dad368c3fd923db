"""`regard embed`, `compare` and `attention`: output, files, and one-line errors."""

import io
import json
from itertools import pairwise
from pathlib import Path

import numpy
import pytest
import torch
from safetensors import safe_open

from regard.models.encoders.pretrained import load_encoder

pytest.importorskip("typer")
pytest.importorskip("tokenizers")

from tests.cli.running import error_of, run
from tests.models.encoders.test_pretrained import LAYERS, needs_minilm

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(encoder: Path) -> str:
    return str(encoder)


def titles(printed: str) -> list[str]:
    """Return the sentences printed above the tables of their words."""
    lines = printed.splitlines()
    return [line for line, after in pairwise(lines) if after.startswith("word ")]


def test_embed_prints_each_word(model, capsys):
    run("embed", "Dogs may bark.", "Trees", "--model", model, "--layer", "2")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "Dogs",
        "word",
        "Dogs",
        "may",
        "bark",
        ".",
        "Trees",
        "word",
        "Trees",
    ]
    vector = load_encoder(model).embed("Dogs may bark.")[0]["bark"][2]
    numbers = [float(number) for number in lines[4].split()[1:-1]]
    assert numbers == pytest.approx([float(vector.norm()), *vector[:6].tolist()], abs=1e-3)


def test_output_has_neither_colors_nor_controls_and_markup_is_text(model, capsys):
    run("compare", "bark", "may bark", "--word", "bark", "--model", model)
    run("embed", "[bold]bark[/bold] :dog: \x1b[31m\x07", "--model", model)
    printed = capsys.readouterr().out
    assert not {"\x1b", "\x07"} & set(printed)
    assert "[bold]bark[/bold] :dog:" in printed


def test_wide_words_are_aligned(model, capsys):
    run("embed", "bark 東 may", "--model", model)
    lines = capsys.readouterr().out.splitlines()[2:]
    starts = {line.index(".") + line.count("東") for line in lines}  # 東 takes two columns
    assert len(starts) == 1


@pytest.mark.parametrize("layer", [None, 1])
def test_embed_writes_all_vectors(layer, model, tmp_path, capsys):
    sentences = ["Dogs may bark.", "Trees"]
    options = [] if layer is None else ["--layer", str(layer)]
    for kind in ("safetensors", "npy", "json"):
        run("embed", *sentences, "--model", model, "--output", str(tmp_path / f"x.{kind}"), *options)
        assert "2 sentences, 5 words" in capsys.readouterr().out
    embedded = load_encoder(model).embed(sentences)
    expected = [each.vectors if layer is None else each.vectors[layer] for each in embedded]
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert json.loads(file.metadata()["0"]) == ["Dogs", "may", "bark", "."]
        for i, vectors in enumerate(expected):
            torch.testing.assert_close(file.get_tensor(str(i)), vectors)
    array = numpy.load(tmp_path / "x.npy", allow_pickle=False)
    torch.testing.assert_close(torch.from_numpy(array), torch.cat(expected, -2))
    for written, each, vectors in zip(
        json.loads((tmp_path / "x.json").read_text()), embedded, expected, strict=True
    ):
        assert (written["sentence"], tuple(written["words"])) == (each.sentence, each.words)
        torch.testing.assert_close(torch.tensor(written["vectors"]), vectors)


def test_embed_reads_files_and_stdin(model, tmp_path, monkeypatch, capsys):
    content = "Dogs bark\n\n  \nTrees\r\nné\n".encode()
    (tmp_path / "x.txt").write_bytes(content)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))
    for path in (tmp_path / "x.txt", "-"):
        run("embed", "may", "--file", path, "--model", model)
        assert titles(capsys.readouterr().out) == ["may", "Dogs bark", "Trees", "né"]
    monkeypatch.setattr("sys.stdin", None)
    assert "--file is -, but stdin is closed" in error_of(capsys, "embed", "--file", "-", "--model", model)


def test_embed_splits_lines_only_at_newlines(model, tmp_path, monkeypatch):
    """str.splitlines and universal newlines would split at more characters; a byte order mark is dropped."""
    from regard.cli.words import _lines

    content = "\ufeffDogs\u2028bark\x85 may\r\n\nTrees\x0b and\rtrees".encode()
    (tmp_path / "x.txt").write_bytes(content)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))
    for path in (tmp_path / "x.txt", Path("-")):
        assert _lines(path) == ["Dogs\u2028bark\x85 may", "Trees\x0b and\rtrees"]


def test_compare_prints_every_layer(model, capsys):
    first, second = "Dogs may bark.", "Trees shed bark in winter."
    run("compare", first, second, "--word", "bark", "--model", model)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"bark: {first}", f"bark: {second}"]
    expected = load_encoder(model).compare(first, second, word="bark").similarities.tolist()
    rows = [line.split() for line in lines[4 : 4 + LAYERS + 1]]
    assert [row[0] for row in rows] == ["embedding", *map(str, range(1, LAYERS + 1))]
    assert [float(row[1]) for row in rows] == pytest.approx(expected, abs=1e-3)
    assert rows[0][2] == "█" * 20  # the same word at the same position

    run("compare", "Dogs may bark.", "Trees", "--word", "dogs", "--word", "trees", "--model", model)
    assert capsys.readouterr().out.startswith("Dogs: Dogs may bark.\nTrees: Trees\n")


def test_attention_prints_weights_that_sum_to_one(model, capsys):
    run("attention", "Dogs may bark", "--word", "bark", "--layer", "2", "--model", model)
    printed = capsys.readouterr().out
    run("attention", "Dogs may bark", "bark", "--layer", "2", "--model", model)  # the word as an argument
    assert capsys.readouterr().out == printed
    rows = [line.split() for line in printed.splitlines()]
    assert [row[0] for row in rows] == ["[CLS]", "Dogs", "may", "bark", "[SEP]"]
    assert sum(float(row[1]) for row in rows) == pytest.approx(1, abs=5e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embed"], "embed needs sentences"),
        (["embed", ""], "Sentence 0, '', has no words"),
        (["embed", "bark", "--layer", "4"], "--layer 4 is out of range; use 0 to 3"),
        (["embed", "bark", "--output", "x.pkl"], "'x.pkl' must end in one of .safetensors, .npy, .json"),
        (["embed", "bark", "--output", "typo/x.npy"], "the folder 'typo' does not exist"),
        (["embed", "--file", "/proc/self/exe"], "is not UTF-8"),
        (["attention", "Dogs bark", "brak"], "'brak' is not in 'Dogs bark' (did you mean 'bark'?)"),
        (["embed", "bark", "--output", ".npy"], "--output '.npy' is only an extension; use vectors.npy"),
        (["attention", "Dogs bark"], "attention got 0 words; pass one"),
        (["attention", "Dogs bark", "bark", "--word", "bark"], "attention got 2 words; pass one"),
        (["embed", "bark " * 50], "Sentence 0 is too long: 52 tokens"),
        (["embed", "--file", "not/there.txt"], "not/there.txt: No such file"),
        (["compare", "Dogs", "bark", "--word", "bark"], "'bark' is not in 'Dogs'"),
        (["compare", "a", "b", "--word", "a", "--word", "b", "--word", "c"], "compare got 3 words"),
        (
            ["attention", "Dogs bark", "bark", "--head", "9"],
            "head=9 is not valid; pass an integer from 0 to 1",
        ),
    ],
)
def test_errors_are_one_line(arguments, message, model, capsys):
    assert message in error_of(capsys, *arguments, "--model", model)


def test_a_missing_word_is_reported_before_the_model_is_loaded(tmp_path, capsys):
    (tmp_path / "config.json").write_text("no model at all")
    command = ["compare", "Dogs bark", "Dogs", "--word", "bark", "--model"]
    assert "'bark' is not in 'Dogs'" in error_of(capsys, *command, tmp_path)
    assert "does not exist, and regard does not download models" in error_of(capsys, *command, "no/such")


@needs_minilm
def test_minilm_is_the_default(capsys):
    run("compare", "Dogs may bark at strangers.", "Trees shed bark in winter.", "--word", "bark")
    assert "best on Word-in-Context" in capsys.readouterr().out
