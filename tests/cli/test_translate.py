"""`regard translate`: from arguments, files and stdin; in order; alone and in several processes."""

import gzip
import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")

from regard.cli.parallel import LINES, Shards, digest
from regard.cli.translate import Show, Work, _share_out
from regard.translation.decoding.search import Beam, Sample
from regard.translation.translator import load_translator
from tests.cli.running import run
from tests.translation import folders

pytestmark = pytest.mark.usefixtures("one_thread")

LINES_ = ["ein Hund bellt", "", "zwei Katzen schlafen heute gern", "Frau", "   ", "ein 漢字 lacht"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def translator(model):
    return load_translator(model)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{line}\n" for line in LINES_), "utf-8")
    return path


def wanted(translator) -> list[str]:
    return [one.text for one in translator.translate(LINES_)]


class TestInput:
    def test_arguments(self, model, translator, capsys):
        run("translate", "-m", model, *LINES_)
        assert capsys.readouterr().out.split("\n") == [*wanted(translator), ""]

    def test_a_file(self, model, translator, file, capsys):
        run("translate", "-m", model, "--file", file)
        assert capsys.readouterr().out.split("\n") == [*wanted(translator), ""]

    def test_a_gzipped_file(self, model, translator, file, tmp_path, capsys):
        packed = tmp_path / "in.gz"
        packed.write_bytes(gzip.compress(file.read_bytes()))
        run("translate", "-m", model, "--file", packed)
        assert capsys.readouterr().out.split("\n") == [*wanted(translator), ""]

    @pytest.mark.parametrize("option", [[], ["--file", "-"]])
    def test_stdin(self, option, model, translator, monkeypatch, capsys):
        given = io.TextIOWrapper(
            io.BytesIO("".join(f"{line}\n" for line in LINES_).encode()), encoding="ascii"
        )
        monkeypatch.setattr("sys.stdin", given)
        run("translate", "-m", model, *option)
        assert capsys.readouterr().out.split("\n") == [*wanted(translator), ""]

    def test_stdin_is_answered_line_by_line(self, model, translator):
        command = [sys.executable, "-m", "regard", "translate", "-m", str(model)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, encoding="utf-8", **pipes) as process:
            for line, text in zip(LINES_, wanted(translator), strict=True):
                process.stdin.write(f"{line}\n")
                process.stdin.flush()
                assert process.stdout.readline() == f"{text}\n"
            process.stdin.close()
            assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beam", "1000000"], "--beam is 1,000,000; give 1,000 at most"),
        (["--n-best", "1000000"], "--n-best is 1,000,000; give 1,000 at most"),
        (["--batch", "1000000000"], "--batch is 1,000,000,000; give 100,000 at most"),
        (["--sample", "--temperature", "1e-320"], "give one from 1e-6 to 1e6"),
        (["--sample", "--temperature", "nan"], "--temperature is nan"),
        (["--sample", "--top-p", "0"], "--top-p is 0; it must be above 0"),
    ],
)
def test_numbers_that_nobody_can_mean(options, message, model, capsys):
    run("translate", "-m", model, "ein", *options, status=2)
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


class TestOutput:
    def test_a_file_is_written_whole(self, model, translator, file, tmp_path, capsys):
        output = tmp_path / "out.txt"
        output.write_text("before")
        output.chmod(0o640)
        run("translate", "-m", model, "--file", file, "-o", output)
        assert output.read_text("utf-8").split("\n") == [*wanted(translator), ""]
        assert stat.S_IMODE(output.stat().st_mode) == 0o640
        assert capsys.readouterr().out == ""
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.txt"]

    def test_what_was_there_stays_if_something_fails(self, model, tmp_path, capsys):
        given, output = tmp_path / "in.txt", tmp_path / "out.txt"
        given.write_bytes(b"ein Hund\n" * 9 + b"\xff\n")
        output.write_text("before")
        run("translate", "-m", model, "--file", given, "-o", output, "--batch", 1, status=2)
        assert "line 10: not UTF-8" in capsys.readouterr().err
        assert output.read_text() == "before"
        assert len(list(tmp_path.iterdir())) == 2

    def test_a_device_stays_one(self, model, tmp_path, capsys):
        os.mkfifo(tmp_path / "pipe")
        run("translate", "-m", model, "ein", "-o", tmp_path / "pipe", status=2)
        assert "no file that could be replaced" in capsys.readouterr().err
        assert (tmp_path / "pipe").is_fifo()

    def test_scores_and_alignments_come_after_tabs(self, model, translator, capsys):
        run("translate", "-m", model, *LINES_, "--scores", "--alignment")
        lines = capsys.readouterr().out.splitlines()
        for line, one in zip(lines, translator.translate(LINES_), strict=True):
            assert line == f"{one.text}\t{one.score:.4f}\t{one.alignment.to_pharaoh()}"

    def test_several_lines_for_each(self, model, translator, capsys):
        run("translate", "-m", model, "ein Hund", "", "Frau", "--n-best", 3)
        found = translator.translate(["ein Hund", "", "Frau"], how=Beam(5, best=3))
        lines = [f"{i}\t{each.text}" for i, one in enumerate(found, 1) for each in (one, *one.alternatives)]
        assert capsys.readouterr().out.splitlines() == lines
        assert len(lines) == 7

    def test_more_than_the_beam_widens_it(self, model, capsys):
        run("translate", "-m", model, "ein Hund", "--n-best", 7)
        assert len(capsys.readouterr().out.splitlines()) == 7

    def test_json(self, model, translator, capsys):
        run("translate", "-m", model, "ein 漢字", "--json", "--n-best", 2, "--alignment")
        found = json.loads(capsys.readouterr().out)
        (one,) = translator.translate("ein 漢字", how=Beam(5, best=2))
        assert (found["source"], found["text"], found["tokens"]) == (one.source, one.text, one.tokens)
        assert found["score"] == pytest.approx(one.score)
        assert found["note"] == one.note
        assert found["alignment"]["links"] == one.alignment.to_pharaoh()
        assert found["alignment"]["source_words"] == ["ein", "漢字"]
        assert len(found["alignment"]["weights"]) == len(one.alignment.target_words)
        assert [each["text"] for each in found["alternatives"]] == [each.text for each in one.alternatives]

    def test_sampling(self, model, translator, capsys):
        options = ["--sample", "--temperature", 0.7, "--top-p", 0.9, "--seed", 4]
        run("translate", "-m", model, *LINES_, *options)
        how = Sample(temperature=0.7, top_p=0.9, seed=4)
        texts = [one.text for one in translator.translate(LINES_, how=how)]
        assert capsys.readouterr().out.split("\n") == [*texts, ""]

    def test_notes_are_on_stderr_and_few(self, model, capsys):
        run("translate", "-m", model, *["ein 漢字"] * 8)
        notes = capsys.readouterr().err.splitlines()
        assert len(notes) == 6
        assert notes[0].startswith("regard: line 1: ")
        assert "copied what the model does not know: '漢字'" in notes[0]
        assert notes[-1] == "regard: and 3 more lines with notes, which --json shows."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ein", "--file", "x"], "translate got --file 'x' and sentences as well; give one"),
        (["--file", "no/such"], "no/such: No such file or directory; check the path"),
        (["--file", "."], "--file is '.', a folder; name a file in it"),
        (["ein", "--temperature", "2"], "--temperature is for drawing by chance; add --sample"),
        (["ein", "--seed", "2", "--top-p", "0.5"], "--top-p, --seed is for drawing by chance"),
        (["ein", "--sample", "--beam", "3"], "--beam 3 and --sample are two ways to search"),
        (["ein", "--sample", "--temperature", "0"], "--temperature is 0; give one from 1e-6"),
        (["ein", "--beam", "2", "--n-best", "3"], "--n-best is 3 and --beam 2"),
        (["ein", "--beam", "0"], "Invalid value for '--beam'"),
        (["ein", "-o", "no/such/x"], "there is no folder 'no/such'; make it first"),
        (["ein", "-o", "."], "--output is '.', a folder; name a file in it"),
    ],
)
def test_refusals(arguments, message, model, capsys):
    run("translate", "-m", model, *arguments, status=2)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_a_closed_stdin(model, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    run("translate", "-m", model, status=2)
    assert "stdin is closed" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "message"), [("no", "does not exist"), (".", "has no config.json")])
def test_no_model_folder(name, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run("translate", "-m", name, "ein", status=2)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(model, tmp_path, capsys):
    tmp_path.chmod(0o500)
    run("translate", "-m", model, "ein", "-o", tmp_path / "x", status=2)
    assert "Permission denied; choose another place" in capsys.readouterr().err


class TestShards:
    def test_every_line_is_in_one_shard(self):
        for lines in (0, 1, 5, 17, 3 * LINES + 1):
            for processes in (1, 2, 3):
                shards = Shards.of(Path("out"), "key", lines, processes)
                mine = [shards.missing(rank, processes) for rank in range(processes)]
                assert sorted(number for some in mine for number in some) == list(range(shards.number))
                numbers = range(shards.number)
                parts = [part for _, part in shards.parts(map(str, range(lines)), numbers)]
                assert [line for part in parts for line in part] == [str(i) for i in range(lines)]
                assert all(0 < len(part) <= LINES for part in parts)

    def test_the_key_tells_what_they_are_made_of(self, tmp_path):
        (tmp_path / "a").write_text("a")
        (tmp_path / "b").write_text("b")
        keys = [digest(tmp_path / name, how) for name in "ab" for how in (Beam(4), Beam(5))]
        assert len(set(keys)) == 4
        assert digest(tmp_path / "a", Beam(4)) == keys[0]

    def test_what_is_there_is_not_translated_again(self, model, translator, file, tmp_path):
        """Two processes, one after the other; the second shard was left by a run that was cut off."""
        output = tmp_path / "out.txt"

        def work():
            return Work(translator, Beam(), 64, Show(False, False, False, False))

        key = digest(file, model / "model.safetensors", work().options, work().show)
        shards = Shards.of(output, key, len(LINES_), 2)
        shards.folder.mkdir()
        shards.path(1).write_text("from before\n")
        for rank in (1, 0):
            world = SimpleNamespace(rank=rank, size=2, wait=lambda: None)
            _share_out(work(), model, file, output, world)
            assert output.exists() == (rank == 0)
        assert output.read_text().splitlines() == [*wanted(translator)[: shards.lines], "from before"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.txt"]

    def test_a_file_and_an_output_are_needed(self, model, monkeypatch, capsys):
        monkeypatch.setenv("WORLD_SIZE", "2")
        run("translate", "-m", model, "ein", status=2)
        assert "give --file and --output" in capsys.readouterr().err

    def test_two_processes(self, model, translator, file, tmp_path):
        output = tmp_path / "out.txt"
        options = ["--file", str(file), "--output", str(output), "--n-best", "2"]
        command = [
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "regard",
            "translate",
        ]
        done = subprocess.run(
            [sys.executable, "-m", *command, "-m", str(model), *options], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found = translator.translate(LINES_, how=Beam(5, best=2))
        lines = [f"{i}\t{each.text}" for i, one in enumerate(found, 1) for each in (one, *one.alternatives)]
        assert output.read_text("utf-8").splitlines() == lines
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.txt"]
