"""`regard translate`: arguments, files and stdin; output formats; several processes."""

import gzip
import io
import json
import os
import stat
from functools import cache
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")

from regard.cli.translate.run import _write_shards
from regard.cli.translate.shards import MAX_LINES, Shards, digest
from regard.cli.translate.writer import OutputFormat, Writer
from regard.translation.decoding.strategies import Beam, Sample
from regard.translation.translator import load_translator
from tests.cli.running import error_of, run
from tests.translation.processes import run_together

pytestmark = pytest.mark.usefixtures("one_thread")

LINES = ["ein Hund bellt", "", "zwei Katzen schlafen heute gern", "Frau", "   ", "ein 漢字 lacht"]


@pytest.fixture(scope="module")
def translator(model):
    return load_translator(model)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{line}\n" for line in LINES), "utf-8")
    return path


@cache
def expected(translator) -> list[str]:
    return [translation.text for translation in translator.translate(LINES)]


def n_best(translator, sentences: list[str], n: int) -> list[str]:
    translations = enumerate(translator.translate(sentences, strategy=Beam(5, n_best=n)), 1)
    return [f"{i}\t{each.text}" for i, best in translations for each in (best, *best.alternatives)]


class TestInput:
    @pytest.mark.parametrize(
        "arguments", [LINES, [], ["-"], *(["--file", name] for name in ("-", "in.txt", "in.gz"))]
    )
    def test_arguments_files_and_stdin(self, arguments, model, translator, file, monkeypatch, capsys):
        monkeypatch.chdir(file.parent)
        Path("in.gz").write_bytes(gzip.compress(file.read_bytes()))
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes()), encoding="ascii"))
        run("translate", "-m", model, *arguments)
        assert capsys.readouterr().out.split("\n") == [*expected(translator), ""]

    def test_stdin_is_answered_line_by_line(self, model, translator, monkeypatch):
        (our_input, our_output), (its_input, its_output) = os.pipe(), os.pipe()
        stdin, answers = (os.fdopen(end, encoding="utf-8") for end in (our_input, its_input))
        lines, stdout = (os.fdopen(end, "w", encoding="utf-8") for end in (our_output, its_output))
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr("sys.stdout", stdout)
        command = Thread(target=run, args=("translate", "-m", model), daemon=True)
        command.start()
        for line, text in zip(LINES, expected(translator), strict=True):
            print(line, file=lines, flush=True)
            assert answers.readline() == f"{text}\n"
        lines.close()
        command.join()
        stdout.close()
        assert answers.read() == ""
        answers.close()
        stdin.close()


class TestOutput:
    def test_the_output_file_is_written_atomically(self, model, translator, file, tmp_path, capsys):
        output = tmp_path / "out.txt"
        output.write_text("before")
        output.chmod(0o640)
        run("translate", "-m", model, "--file", file, "-o", output)
        assert output.read_text("utf-8").split("\n") == [*expected(translator), ""]
        assert stat.S_IMODE(output.stat().st_mode) == 0o640
        assert capsys.readouterr().out == ""
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.txt"]

    def test_a_failure_keeps_the_old_output_file(self, model, tmp_path, capsys):
        source, output = tmp_path / "in.txt", tmp_path / "out.txt"
        source.write_bytes(b"ein Hund\n" * 9 + b"\xff\n")
        output.write_text("before")
        assert "line 10: not UTF-8" in error_of(
            capsys, "translate", "-m", model, "--file", source, "-o", output, "--batch", 1
        )
        assert output.read_text() == "before"
        assert len(list(tmp_path.iterdir())) == 2

    def test_the_input_is_not_replaced(self, model, file, tmp_path, capsys):
        (tmp_path / "link").symlink_to(file.name)
        before = file.read_bytes()
        error = error_of(capsys, "translate", "-m", model, "--file", file, "-o", tmp_path / "link")
        assert "--file and --output are the same file" in error
        assert file.read_bytes() == before

    def test_a_pipe_is_not_replaced(self, model, tmp_path, capsys):
        os.mkfifo(tmp_path / "pipe")
        assert "is not a regular file; pass another file" in error_of(
            capsys, "translate", "-m", model, "ein", "-o", tmp_path / "pipe"
        )
        assert (tmp_path / "pipe").is_fifo()

    def test_columns_count_words_by_whitespace(self, model, capsys):
        """Link indices must match the text in the same line, even if a span contains a space."""
        run("translate", "-m", model, "ein 3,5 % Hund", "ein Hund.\tZwei Hunde.", "--alignment")
        for line in capsys.readouterr().out.splitlines():
            text, links = line.split("\t")
            assert all(int(link.split("-")[1]) < len(text.split()) for link in links.split())
            if "3,5 %" in text:
                at = text.split().index("3,5")
                assert {f"{i}-{j}" for i in (1, 2) for j in (at, at + 1)} <= set(links.split())

    def test_scores_and_alignments_follow_tabs(self, model, translator, capsys):
        run("translate", "-m", model, *LINES, "--scores", "--alignment")
        lines = capsys.readouterr().out.splitlines()
        for line, translation in zip(lines, translator.translate(LINES), strict=True):
            links = translation.alignment.to_pharaoh()
            assert line == f"{translation.text}\t{translation.score:.4f}\t{links}"

    def test_n_best_prints_several_lines_per_sentence(self, model, translator, capsys):
        run("translate", "-m", model, "ein Hund", "", "Frau", "--n-best", 3)
        lines = n_best(translator, ["ein Hund", "", "Frau"], 3)
        assert capsys.readouterr().out.splitlines() == lines
        assert len(lines) == 7
        run("translate", "-m", model, "ein Hund", "--n-best", 7)  # more than the default beam
        assert len(capsys.readouterr().out.splitlines()) == 7

    def test_json(self, model, translator, capsys):
        run("translate", "-m", model, "ein 漢字", "--json", "--n-best", 2, "--alignment")
        printed = json.loads(capsys.readouterr().out)
        (best,) = translator.translate("ein 漢字", strategy=Beam(5, n_best=2))
        for name in ("source", "text", "tokens", "note"):
            assert printed[name] == getattr(best, name)
        assert printed["score"] == pytest.approx(best.score)
        assert printed["alignment"]["links"] == best.alignment.to_pharaoh()
        assert printed["alignment"]["source_words"] == ["ein", "漢字"]
        assert [each["text"] for each in printed["alternatives"]] == [each.text for each in best.alternatives]

    def test_sampling(self, model, translator, capsys):
        options = ["--sample", "--temperature", 0.7, "--top-p", 0.9, "--seed", 4]
        run("translate", "-m", model, *LINES, *options)
        strategy = Sample(temperature=0.7, top_p=0.9, seed=4)
        texts = [translation.text for translation in translator.translate(LINES, strategy=strategy)]
        assert capsys.readouterr().out.split("\n") == [*texts, ""]

    def test_notes_are_on_stderr_and_few(self, model, capsys):
        run("translate", "-m", model, *["ein 漢字"] * 8)
        notes = capsys.readouterr().err.splitlines()
        assert len(notes) == 6
        assert notes[0].startswith("regard: line 1: ")
        assert "unknown words copied: '漢字'" in notes[0]
        assert notes[-1] == "regard: 3 more notes are not shown; use --json to see all notes."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("ein --file x", "--file 'x' and sentences are mutually exclusive; pass one of them"),
        ("--file no/such", "no/such: No such file or directory; check the path"),
        ("--file .", "--file '.' is a folder; pass a file name"),
        ("ein --temperature 2", "--temperature requires --sample; add it, or remove --temperature"),
        ("ein --seed 2 --top-p 0.5", "--top-p, --seed require --sample; add it"),
        ("ein --sample --beam 3", "--beam 3 and --sample are mutually exclusive"),
        ("ein --sample --temperature 0", "--temperature is 0.0; it must be at least 1e-06 and at most 1e+06"),
        ("ein --sample --temperature nan", "--temperature is nan"),
        ("ein --sample --top-p 0", "--top-p is 0.0; it must be above 0 and at most 1"),
        ("ein --sample --seed -1", "--seed is -1; it must be at least 0"),
        ("ein --sample --n-best 1000000", "--n-best is 1000000; it must be at most 10000"),
        ("ein --n-best 1000000", "--beam is 1000000; it must be at most 10000"),
        ("ein --n-best 0", "--n-best is 0; it must be at least 1"),
        ("ein --beam 2 --n-best 3", "--n-best 3; --n-best cannot exceed --beam. Use --beam 3."),
        ("ein --beam 0", "--beam is 0; it must be at least 1."),
        ("ein --batch 1000000000", "--batch is 1000000000; it must be at most 100000"),
        ("ein -o no/such/x", "the folder 'no/such' does not exist; create it first"),
        ("ein -o .", "--output '.' is a folder; pass a file name"),
    ],
)
def test_errors_are_one_line(arguments, message, model, capsys):
    assert message in error_of(capsys, "translate", "-m", model, *arguments.split())


def test_documents_have_no_scores(model, tmp_path, capsys):
    (tmp_path / "page.html").write_text("<p>ein Hund</p>")
    message = error_of(capsys, "translate", "-m", model, "--file", tmp_path / "page.html", "--json")
    assert "The format html writes a document, without scores" in message


def test_a_closed_stdin(model, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    assert "stdin is closed" in error_of(capsys, "translate", "-m", model)


@pytest.mark.parametrize(
    ("name", "message"), [("no", "does not exist"), (".", "is not a model folder: it has no config.json")]
)
def test_a_path_that_is_not_a_model_folder(name, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert message in error_of(capsys, "translate", "-m", name, "ein")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission(model, tmp_path, capsys):
    tmp_path.chmod(0o500)
    assert "Permission denied; choose another path" in error_of(
        capsys, "translate", "-m", model, "ein", "-o", tmp_path / "x"
    )


class TestShards:
    def test_every_line_is_in_one_shard(self):
        for lines in (0, 1, 5, 17, 3 * MAX_LINES + 1):
            for processes in (1, 2, 3):
                shards = Shards.of(Path("out"), "key", lines, processes)
                missing = [shards.missing(rank, processes) for rank in range(processes)]
                assert sorted(number for own in missing for number in own) == list(range(shards.number))
                numbers = range(shards.number)
                parts = [part for _, part in shards.parts(map(str, range(lines)), numbers)]
                assert [line for part in parts for line in part] == [str(i) for i in range(lines)]
                assert all(0 < len(part) <= MAX_LINES for part in parts)

    def test_the_key_depends_on_input_and_strategy(self, tmp_path):
        (tmp_path / "a").write_text("a")
        (tmp_path / "b").write_text("b")
        keys = [digest(tmp_path / name, strategy) for name in "ab" for strategy in (Beam(4), Beam(5))]
        assert len(set(keys)) == 4
        assert digest(tmp_path / "a", Beam(4)) == keys[0]

    def test_existing_shards_are_reused(self, model, translator, file, tmp_path):
        """Two processes run in sequence; the second shard is left over from an interrupted run."""
        output = tmp_path / "out.txt"

        def writer():
            return Writer(translator, Beam(), 64, OutputFormat(False, False, False, False))

        key = digest(file, model / "model.safetensors", writer().options, writer().format)
        shards = Shards.of(output, key, len(LINES), 2)
        shards.folder.mkdir()
        shards.path(1).write_text("from before\n")
        for rank in (1, 0):
            world = SimpleNamespace(rank=rank, size=2, barrier=lambda: None)
            _write_shards(writer(), model, file, output, world)
            assert output.exists() == (rank == 0)
        assert output.read_text().splitlines() == [*expected(translator)[: shards.lines], "from before"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.txt"]

    def test_torchrun_requires_file_and_output(self, model, monkeypatch, capsys):
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert "translate needs --file and --output" in error_of(capsys, "translate", "-m", model, "ein")

    @pytest.mark.slow  # both import torch
    def test_two_processes(self, model, translator, file, tmp_path):
        output = tmp_path / "out.txt"
        options = ["--file", str(file), "--output", str(output), "--n-best", "2"]
        arguments = ["translate", "-m", str(model), *options]
        preload = "regard.cli.translate.run, regard.translation.translator"
        done = run_together(f"regard.cli.main({arguments})", preload=preload)
        assert done.returncode == 0, done.stderr
        assert output.read_text("utf-8").splitlines() == n_best(translator, LINES, 2)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.txt"]
