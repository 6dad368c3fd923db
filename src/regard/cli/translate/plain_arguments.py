"""Parse plain arguments of `regard translate` without typer, whose import takes longer than a translation."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from regard.cli.translate.run import Options

_VALUES = {
    "-m": ("model", Path),
    "--model": ("model", Path),
    "-o": ("output", Path),
    "--output": ("output", Path),
    "--file": ("file", Path),
    "--beam": ("beam", int),
    "--dtype": ("dtype", str),
}
_MAX_DIGITS = 9  # of numbers; int() rejects thousands of digits
_FLAGS = {"--alignment": "alignment", "--scores": "scores", "--json": "as_json"}


def parse_plain(arguments: Sequence[str]) -> Options | None:
    """Return the options; None if typer must parse the arguments.

    Only the options in this file are supported, each at most once and separate from its value.

    >>> from regard.cli.translate.plain_arguments import parse_plain
    >>> parse_plain(["-m", "de-en", "Zwei Hunde.", "--beam", "1"]).sentences
    ['Zwei Hunde.']
    >>> parse_plain(["-m", "de-en", "--help"])
    """
    values: dict[str, Any] = {}
    sentences = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "-" or not argument.startswith("-"):
            sentences.append(argument)
            continue
        name, value = _read_option(argument, remaining)
        if name is None or name in values:
            return None
        values[name] = value
    if "model" not in values:
        return None
    return Options(**values, sentences=sentences or None)


def _read_option(argument: str, remaining: Iterator[str]) -> tuple[str | None, Any]:
    """Return the name and value of an option; the name is None if typer must parse it."""
    if argument in _FLAGS:
        return _FLAGS[argument], True
    name, kind = _VALUES.get(argument, (None, str))
    value = next(remaining, None)
    if value is None or (value.startswith("-") and value != "-"):
        return None, None
    if kind is int and not (value.isascii() and value.isdecimal() and len(value) <= _MAX_DIGITS):
        return None, None
    return name, kind(value)
