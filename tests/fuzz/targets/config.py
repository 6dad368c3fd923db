"""Settings from the command line and from TOML files: accepted, or rejected in one line."""

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

from regard.cli import main
from regard.translation.config import TranslationConfig
from tests.fuzz.case import Case, Failure, deadline

NAMES = [
    f"{section}.{name}"
    for section, names in TranslationConfig.preset("tiny").to_dict().items()
    for name in names
]
NUMBERS = ("1", "-1", "0", "1e3", "1e999", "nan", "inf", "-inf", "0x10", "1_000", "1__0", "2026-01-01", "١")
OTHERS = (
    "true",
    "none",
    "null",
    '"x"',
    "'",
    '"',
    "[1, 2]",
    "{a = 1}",
    "#",
    "1 # 2",
    "softmax",
    "transformer",
)
LONG = ("9" * 5000, "1" + "0" * 400, "[" * 2000, "[" * 50_000, "{" * 999, "x" * 10_000)
ODD = ("", " ", "\ufeff1", "\udcff", "\0", "a\nb", "\r", "\n", "# a comment")
VALUES = (*NUMBERS, *OTHERS, *LONG, *ODD)
TABLES = ("[model]", "[training]", "[[model]]", "[model.x]", "[", "]", "[a.b.c.d]", "=", "'''", "{", "}")
LINES = """width = 16|learning_rate = 0.1|learning_rate = 1e400|layers = 2|kind = 'plain'|x = 1|size = -1
epochs = 1979-05-27|heads = [1, 2]
heads = {a = 1}|dropout = nan|"" = 1|model = 3|é = 1|a.b = 1""".replace("\n", "|").split("|")
PIECES = (*TABLES, *LINES, "seed = " + "9" * 5000, "x = " + "[" * 3000, "a" * 5000, *ODD)


def run(case: Case) -> None:
    with tempfile.TemporaryDirectory(dir=case.shared) as folder:
        arguments = ["train", "--print-config", "--preset", case.random.choice(("tiny", "small", "base"))]
        if case.chance(0.3):
            arguments += ["--model", case.random.choice(("transformer", "recurrent", "plain", "x"))]
        for _ in range(case.random.choice((0, 1, 1, 2))):
            arguments += ["--set", _setting(case)]
        if case.chance(0.5):
            file = Path(folder) / "config.toml"
            file.write_bytes(_toml(case))
            arguments += ["--config", str(file)]
            case.note(f"config.toml = {file.read_bytes()[:300]!r}")
        case.note("regard " + " ".join(f"{argument[:80]!r}" for argument in arguments))
        status, output, errors = command(arguments)
    _check(status, output, errors)


def _setting(case: Case) -> str:
    name = case.random.choice(NAMES)
    if case.chance(0.15):
        name = case.random.choice(
            (
                "",
                ".",
                "a.b",
                "model",
                "model.",
                ".learning_rate",
                "a.b.c",
                "training.learning_rate.x",
                "\0.\0",
            )
        )
    return name + case.random.choice(("=", "=", "=", "=", "", "==")) + case.random.choice(VALUES)


def _toml(case: Case) -> bytes:
    """Return pieces of TOML in random order, in a random encoding."""
    lines = [case.random.choice(PIECES) for _ in range(case.random.randint(0, 6))]
    text = "".join(line + case.random.choice(("\n", "\n", " ", "")) for line in lines)
    encoding = case.random.choice(("utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1"))
    return text.encode(encoding, "surrogatepass" if encoding.startswith("utf") else "replace")


def command(arguments: list[str]) -> tuple[Any, str, str]:
    """Run a command in this process; return exit status, stdout and stderr."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), deadline(30, "the command"):
        try:
            main(arguments)
        except SystemExit as exit:
            return exit.code or 0, output.getvalue(), errors.getvalue()
    return None, output.getvalue(), errors.getvalue()


def _check(status: Any, output: str, errors: str) -> None:
    if status == 0 and "[model]" in output and not errors:
        return
    if status != 2:
        raise Failure(f"exit status {status}", errors[-500:])
    if len(errors.strip().splitlines()) != 1 or "Traceback" in errors:
        raise Failure("the refusal is not one line", errors[:500])
