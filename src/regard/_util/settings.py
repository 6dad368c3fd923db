"""Typed settings: each is declared once, with its type, default, bounds and description."""

import dataclasses
import difflib
import math
import operator
import types
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, Literal, get_args, get_origin

from regard._util.text import shorten
from regard.errors import ArgumentError

_COMPARE = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


def setting(
    default: Any,
    description: str,
    *,
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Create a dataclass field with a description and bounds. Very large maxima serve only to catch typos."""
    bounds = {"at least": min, "above": above, "at most": max, "below": below}
    return field(default=default, metadata={"description": description, "bounds": bounds})


class Section:
    """A section of the config. Checks the type and bounds of every setting."""

    section: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.section = cls.__name__.removesuffix("Config").lower()

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            name = f"{self.section}.{item.name}"
            value = _check_type(name, getattr(self, item.name), item.type)
            _check_bounds(name, value, item.metadata["bounds"])
            object.__setattr__(self, item.name, value)

    @classmethod
    def type_of(cls, name: str) -> Any:
        """Return the type of a setting."""
        kinds = {item.name: item.type for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if name not in kinds:
            cure = suggest(name, list(kinds), f"{cls.section}.")
            raise ArgumentError(f"Unknown setting {cls.section}.{shorten(name)}. {cure}")
        return kinds[name]

    @classmethod
    def parse(cls, name: str, text: str) -> Any:
        """Parse a setting from the command line: TOML, except that quotes around strings are optional."""
        kind = cls.type_of(name)
        if text == "none" and isinstance(kind, types.UnionType):
            return None
        if get_origin(kind) is Literal:
            return text.strip("\"'")
        import tomllib  # takes milliseconds to import

        try:
            parsed = tomllib.loads(f"value = {text}")
            return parsed["value"] if len(parsed) == 1 else text  # several lines are not a single value
        except (ValueError, RecursionError):  # not TOML, too many digits, or nested too deeply
            return text  # rejected by the type check


def suggest(name: str, known: Sequence[str], prefix: str = "") -> str:
    """Suggest the most similar name, or list all of them."""
    close = difflib.get_close_matches(name, known, 1)
    return f"Did you mean {prefix}{close[0]}?" if close else f"Choose from {', '.join(known)}."


def _check_type(name: str, value: Any, kind: Any) -> Any:
    """Return the value; raise if it has the wrong type. If a float is expected, an int is converted."""
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        (kind,) = (part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ArgumentError(f"{name} must be one of {', '.join(get_args(kind))}, got {show(value)}.")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 2**53 else math.inf if value > 0 else -math.inf
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        expected = {int: "an integer", float: "a number", bool: "true or false"}[kind]
        raise ArgumentError(f"{name} must be {expected}, got {show(value)}.")
    return value


def _check_bounds(name: str, value: Any, bounds: Mapping[str, float | None]) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ArgumentError(f"{name} must be finite, got {value}.")
    limits = {phrase: limit for phrase, limit in bounds.items() if limit is not None}
    if value is not None and not all(_COMPARE[phrase](value, limit) for phrase, limit in limits.items()):
        expected = " and ".join(f"{phrase} {limit:,}" for phrase, limit in limits.items())
        raise ArgumentError(f"{name} must be {expected}, got {show(value)}.")


def show(value: Any) -> str:
    """Format a value for an error message."""
    try:
        return shorten(repr(value))
    except (ValueError, RecursionError):  # an int with more digits than Python prints
        return "a value that is too long to show"
