"""The command line as a whole: startup time, help, and one-line errors."""

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import regard

pytest.importorskip("typer")

import typer

from regard.cli import _WAIT_POLICIES, main
from regard.cli.app import COMMANDS, add_command
from regard.cli.shared import parse_languages
from regard.errors import ArgumentError
from regard.translation.model_folder import FORMAT
from tests.cli.running import error_of, run

NAMES = [name for commands in COMMANDS.values() for name in commands]
# runs `regard attempt`; its function is defined above
ATTEMPT = """
import sys, types
import regard.cli.app
sys.modules["regard.cli.attempt"] = types.SimpleNamespace(attempt=attempt)
regard.cli.app.COMMANDS["Tests"] = {"attempt": ""}
regard.cli.main(["attempt"])
"""


@pytest.fixture
def command(monkeypatch):
    """Register a function as `regard attempt`."""

    def add(function):
        monkeypatch.setitem(sys.modules, "regard.cli.attempt", SimpleNamespace(attempt=function))
        monkeypatch.setitem(COMMANDS, "Tests", {"attempt": ""})

    return add


def click_command(name: str):
    """Return the click command that typer runs."""
    app = typer.Typer(add_completion=False)
    add_command(app, name)
    return typer.main.get_command(app)


def examples(name: str) -> list[str]:
    return [line.partition("  #")[0] for line in click_command(name).epilog.splitlines()[1:]]


def python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)


def test_python_m_regard_runs_the_command_line(capsys):
    run("--version")
    done = subprocess.run([sys.executable, "-m", "regard", "--version"], capture_output=True, text=True)
    assert done.stdout == capsys.readouterr().out == f"regard {regard.__version__}\n", done.stderr


def test_help_lists_all_commands_and_is_printed_without_a_command(capsys):
    run("--help")
    printed = capsys.readouterr().out
    assert all(f" {command} " in printed for command in NAMES)
    run(status=2)
    assert capsys.readouterr().out.strip() == printed.strip()


def test_invalid_arguments_are_reported_before_torch_is_imported(tmp_path):
    """The import takes two seconds, and more on a cold disk."""
    (tmp_path / "a.de").write_text("ja\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"format": FORMAT, "settings": {}}))
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
        "train embedded -o m --set training.epochs=x",
        "train embedded -o m --set model.heads=7",
        "train embedded -o m --epochs 0",
        "translate -m model ja --beam 0",
        "translate -m model ja --beam 2 --n-best 3",
        "evaluate -m model a.de a.de --batch 0",
        "align -m model a.de a.de --threshold 2",
        "demo --seed -1",
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.de", "empty", "model"]


@pytest.mark.parametrize("name", NAMES)
def test_help_names_values_and_shows_valid_examples(name, capsys, monkeypatch):
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        run(name, "--help")
        printed = capsys.readouterr().out
        type_names = r"<(bool|str|list|path|int|float)|\[x>=|\bPath\b|None"  # typer's type names
        assert not re.search(type_names, printed)
        assert all(len(line) <= columns for line in printed.split("\n"))
        assert "\x1b" not in printed  # no colors if stdout is not a terminal
        assert all(f" {line} " in printed for line in examples(name))  # not wrapped
    command = click_command(name)
    for param in command.params:
        assert (param.help or "").endswith((".", "…")), param.name
        assert param.param_type_name == "option" or (param.metavar or "").isupper()
    assert 1 <= len(examples(name)) <= 6
    for line in examples(name):  # every option exists and accepts its value
        program, called, *arguments = shlex.split(line)
        assert (program, called) == ("regard", name)
        command.make_context(name, arguments)


def test_help_does_not_import_torch():
    """Other slow packages that few commands need are not imported either."""
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


def test_the_version_needs_no_package():
    program = "import sys; sys.modules['typer'] = None; from regard.cli import main; main(sys.argv[1:])"
    assert python(program, "--version").stdout == f"regard {regard.__version__}\n"
    done = python(program, "--help")
    cure = 'needs the package typer, which is not installed. Run: pip install "regard[cli]"'
    assert (done.returncode, done.stderr) == (2, f"regard: The command line {cure}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embed", "--lyaer", "2"], "No such option: --lyaer"),
        (["embed", "bark", "--layer", "two"], "Invalid value for '--layer'"),
        (["compare", "one"], "Missing argument 'SECOND'. See regard compare --help."),
        (["--", "embed"], "The command comes first: regard COMMAND [OPTIONS]."),
        (["embd"], "No such command 'embd'. Did you mean 'embed'? See regard --help."),
    ],
)
def test_usage_errors_are_one_line(arguments, message, capsys):
    run(*arguments, status=2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"regard: {message}")
    assert captured.err.count("\n") == 1


def raising(error: BaseException):
    def attempt() -> None:
        raise error

    return attempt


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model/x"),
            "model/x: No space left on device; free some",
        ),
        (MemoryError("Unable to allocate 9.09 TiB for an array"), "Out of memory. Reduce --batch or --beam"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes."),
            "Out of memory.",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"), "Out of memory."),
        (ModuleNotFoundError("", name="nowhere"), "Missing package 'nowhere'. Run: pip install nowhere"),
        (SystemExit(130), ""),  # the command has reported the interrupt itself
    ],
)
def test_errors_of_a_command_are_one_line(error, message, command, capsys):
    command(raising(error))
    run("attempt", status=130 if isinstance(error, SystemExit) else 2)
    shown = capsys.readouterr().err
    assert shown.startswith(f"regard: {message}" if message else "")
    assert shown.count("\n") == bool(message)


@pytest.mark.parametrize(
    "error", [RuntimeError("internal"), *(ModuleNotFoundError("", name=f"{n}.x") for n in ("regard", "json"))]
)
def test_internal_errors_keep_their_traceback(error, command):
    command(raising(error))
    with pytest.raises(type(error)):
        main(["attempt"])


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_outputs_are_discarded(closed, tmp_path):
    """If they stayed closed, the next opened file would get their descriptors and the printed text."""
    program = (
        "def attempt():\n"
        "    with open(sys.argv[1], 'w') as file:\n"
        "        print('printed'); print('error', file=sys.stderr)\n"
        "        file.write('written')\n"
    ) + ATTEMPT
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


def test_the_exit_status_survives_a_closed_terminal():
    attempt = "def attempt() -> None:\n    print('lost')\n    raise SystemExit(129)\n"
    done = subprocess.run(
        ["sh", "-c", f'("{sys.executable}" -c "$0"; echo $? >&2) | true', attempt + ATTEMPT],
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        capture_output=True,
        text=True,
    )
    assert done.stderr == "129\n"


SCRIPT = ATTEMPT.replace("regard.cli.main([", "sys.argv = sys.argv[:1] + [").replace("])", "]")
SCRIPT += "regard.cli.script()\n"


def test_the_program_ends_without_tearing_down_modules():
    program = """
import atexit, sys
class Freed:
    def __del__(self):
        sys.stdout.write("freed\\n")
sys.modules["freed"] = Freed()
atexit.register(print, "exit function")
def attempt() -> None:
    print("command")
    raise SystemExit(3)
"""
    done = python(program + SCRIPT)
    assert (done.stdout, done.stderr, done.returncode) == ("command\nexit function\n", "", 3)


def test_the_program_waits_for_its_threads():
    program = """
import threading, time
def attempt() -> None:
    threading.Timer(0.2, print, ["done"]).start()
"""
    done = python(program + SCRIPT)
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


def test_an_unexpected_error_keeps_its_traceback():
    done = python("def attempt() -> None:\n    raise ZeroDivisionError('cause')\n" + SCRIPT)
    assert done.stderr.endswith("ZeroDivisionError: cause\n")
    assert done.returncode == 1


@pytest.mark.parametrize("where", ["regard.cli.words._load", "regard.cli.app.run"])
def test_an_interrupt_is_one_line(where, monkeypatch, capsys):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupt)
    run("embed", "bark", status=130)
    assert capsys.readouterr().err == "regard: interrupted.\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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
        "def attempt():\n"
        "    sys.path.insert(0, sys.argv[1])\n"
        "    import torchlike\n"
        "    import os, signal\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
    ) + ATTEMPT
    done = python(program, str(tmp_path))
    assert (done.returncode, done.stderr) == (130, "regard: interrupted.\n")


def without_wait_policies() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _WAIT_POLICIES}


@pytest.mark.parametrize(
    ("variables", "imported", "expected"),
    [
        ({}, False, {"GOMP_SPINCOUNT": "1000"}),
        ({}, True, {}),  # too late: torch is already imported
        ({"OMP_WAIT_POLICY": "ACTIVE"}, False, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({"GOMP_SPINCOUNT": "5"}, False, {"GOMP_SPINCOUNT": "5"}),
    ],
)
def test_threads_spin_briefly_unless_configured_otherwise(variables, imported, expected, monkeypatch):
    monkeypatch.setattr(os, "environ", without_wait_policies() | variables)
    if imported:
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    else:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    run("--version")
    assert {name: os.environ[name] for name in _WAIT_POLICIES if name in os.environ} == expected


WAITING = """
import os, sys
before = dict(os.environ)
import regard, regard.models, regard.translation, regard.cli
assert dict(os.environ) == before
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(os.environ["GOMP_SPINCOUNT"], flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
from regard.cli import main
main(["draw", "--mask", "causal", "-o", "x.svg"])
"""


def test_threads_spin_briefly_before_torch_is_imported():
    """Only the command line sets the variable: importing regard does not change the environment."""
    done = subprocess.run(
        [sys.executable, "-c", WAITING], env=without_wait_policies(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "1000\n"), done.stderr


@pytest.mark.slow
def test_openmp_reads_the_wait_policy(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "regard", "draw", "--mask", "causal", "-o", str(tmp_path / "x.svg")],
        env=without_wait_policies() | {"OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch's OpenMP is not GNU's")
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr


@pytest.mark.parametrize("command", ["translate -m", "train -o", "draw", "curves", "look"])
def test_arguments_that_cannot_be_file_names_are_one_line(command, capsys):
    for argument in ("\0", "a\0b", "\ud800"):
        assert "a NUL character or a lone surrogate; remove it." in error_of(
            capsys, *command.split(), argument
        )


def test_circular_symlinks_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("a").write_text("1\n")
    for line in ("evaluate -m loop a a", "evaluate --translations loop a a", "curves loop"):
        assert error_of(capsys, *line.split())


def test_language_tags_may_have_regions_and_scripts():
    for languages in (
        "en-de",
        "pt-BR-en",
        "en-zh-Hant-TW",
        "de_DE-en_US",
        "deu_Latn-eng_Latn",
        "es-419-en-GB",
    ):
        source, target = parse_languages(languages)
        assert f"{source}-{target}" == languages
    assert parse_languages("en-pt-BR") == ("en", "pt-BR")
    for wrong in ("en", "en-", "-de", "en-de-fr", "", "a--b"):
        with pytest.raises(ArgumentError, match="pass source and target, such as en-de"):
            parse_languages(wrong)
