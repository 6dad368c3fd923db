"""Plain arguments of `regard translate` are parsed as typer parses them, or left to typer."""

import random
import subprocess
import sys

import pytest

pytest.importorskip("typer")

from regard.cli.app import run as run_typer
from regard.cli.translate.plain_arguments import parse_plain
from tests.translation import folders

PARTS = [
    ["-m", "model"],
    ["--model", "a b"],
    ["Zwei Hunde."],
    ["--beam", "1"],
    ["--beam", "007"],
    ["-"],
    [""],
    ["--dtype", "int8"],
    ["--json"],
    ["--scores"],
    ["--alignment"],
    ["--file", "-"],
    ["-o", "out.txt"],
]
LEFT_TO_TYPER = [
    ["--beam", "-1"],
    ["--beam", "١"],
    ["--beam", "x"],
    ["--beam", "9" * 5000],
    ["--beam=3"],
    ["-mx"],
    ["--"],
    ["--help"],
    ["--n-best", "2"],
    ["--unknown"],
    ["--output"],
    ["--model", "again"],
    ["--json", "--json"],
]


def by_typer(arguments, monkeypatch):
    parsed = []
    monkeypatch.setattr("regard.cli.translate.command.run", parsed.append)
    run_typer(["translate", *arguments])
    return parsed[0]


def test_plain_arguments_equal_those_of_typer(monkeypatch):
    generator = random.Random(0)
    for _ in range(60):
        parts = generator.sample(PARTS[2:], generator.randint(0, 5))
        names = [part[0] for part in parts]
        if len(set(names)) < len(names):
            continue
        arguments = [word for part in [*parts, generator.choice(PARTS[:2])] for word in part]
        options = parse_plain(arguments)
        assert options is not None
        assert options == by_typer(arguments, monkeypatch), arguments


@pytest.mark.parametrize("more", LEFT_TO_TYPER)
def test_other_arguments_are_left_to_typer(more):
    assert parse_plain(["-m", "model", "Zwei Hunde.", *more]) is None


def test_neither_typer_nor_torch_is_imported(tmp_path):
    folder = folders.write(tmp_path / "model")
    arguments = ["regard", "translate", "-m", str(folder), "ein Hund um 15:30", "--alignment"]
    code = (
        "import atexit, sys\n"
        f"sys.argv = {arguments!r}\n"
        "names = ('typer', 'pydantic', 'torch', 'rich')\n"
        "atexit.register(lambda: print('imported:', *(n for n in names if n in sys.modules)))\n"
        "from regard.cli import script\n"
        "script()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported:"
    assert "15:30" in done.stdout
