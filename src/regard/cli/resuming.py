"""What a training was begun with, so that `regard train --resume` goes on with the same and nothing else."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regard._util.text import printable
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.translation.config import TranslationConfig

PRESET = "small"  # unless one is asked for
_ENDS = ("training.epochs", "training.updates")
_BOTH_ENDS = 1 << 20  # bytes at both ends of a file by which it is known again
_CURE = "leave it out, as the training goes on with what it was begun with; or train in a new folder."


class Asked(NamedTuple):
    """What a command asks for; None and False are what it does not say."""

    preset: str | None
    model: str | None
    config: Path | None
    single: Sequence[str]
    source: str | None
    target: str | None
    dev: Sequence[str] | None
    swap: bool
    languages: str

    def origin(self) -> dict[str, Any]:
        """Where the pairs come from, as config.json has it: files by their names and contents."""
        files = [
            *([] if self.source is None else [self.source]),
            *([] if self.target is None else [self.target]),
        ]
        found: dict[str, Any] = {"corpus": [_described(file) for file in files], "swap": self.swap}
        found["preset"] = self.preset or PRESET
        if self.source == "embedded":
            found["languages"] = self.languages
        if self.dev is not None:
            found["dev"] = [_described(file) for file in self.dev]
        return found


def begun_plan(output: Path, asked: Asked) -> "TranslationConfig | None":
    """The plan that a training goes on with: what it was begun with, or a longer one if it is asked for.

    Other options that say otherwise would have no effect, and are refused. None if nothing was begun yet.
    """
    from regard.translation.training.checkpoint import CONFIG, read_config
    from regard.translation.training.preparation import is_prepared

    if not (output / CONFIG).exists() or not is_prepared(output):  # nothing was begun yet
        return None
    config = read_config(output)
    plan = _checked_plan(output, config["settings"], asked)
    begun = config.get("origin")
    if isinstance(begun, dict):
        _check_origin(output, begun, asked)
    return plan


def _checked_plan(output: Path, settings: dict[str, Any], asked: Asked) -> "TranslationConfig":
    """By the settings that single options and a file say, each on its own."""
    from regard.translation.config import TranslationConfig

    begun = TranslationConfig.from_dict(settings)
    ends = [one for one in asked.single if one.partition("=")[0].strip() in _ENDS]
    single = [one for one in asked.single if one not in ends]
    if asked.model is not None:
        single.insert(0, f"model.kind={asked.model}")
    later = {one.partition("=")[0].strip() for one in [*single, *ends]}
    for one in single:
        _check_settings(output, begun, begun.override([one]), "now it is")
    if asked.config is not None:
        found = TranslationConfig.read_toml(asked.config)
        kept = {
            section: {name: value for name, value in values.items() if f"{section}.{name}" not in later}
            for section, values in found.items()
        }
        _check_settings(output, begun, begun.replace(kept), f"--config {printable(str(asked.config))} says")
    return _longer(output, begun, begun.override(ends))


def _longer(output: Path, begun: "TranslationConfig", wanted: "TranslationConfig") -> "TranslationConfig":
    """A plan with another end; a training can be lengthened, and what is learned cannot be unlearned."""
    if wanted == begun or begun.is_extended_by(wanted):
        return wanted
    option = "--epochs" if begun.training.updates is None else "--updates"
    raise ArgumentError(
        f"{str(output)!r} was planned for {begun.training.duration()}, and now it is {wanted.training.duration()}; a "
        f"training can be made longer, {option} N with a larger number, and not shorter. Or train in a new "
        "folder."
    )


def _check_settings(output: Path, begun: Any, wanted: Any, option: str) -> None:
    after = wanted.to_dict()
    for section, values in begun.to_dict().items():
        for name, value in values.items():
            if after[section][name] != value:
                raise ArgumentError(
                    f"{str(output)!r} was begun with {section}.{name}={_shown(value)}, and {option} "
                    f"{_shown(after[section][name])}; {_CURE}"
                )


def _check_origin(output: Path, begun: dict[str, Any], asked: Asked) -> None:
    """The files, and the direction."""
    wanted = asked.origin()
    if asked.preset is None:
        wanted.pop("preset")
    if asked.source is None:
        wanted.pop("corpus")
        if not asked.swap:
            wanted.pop("swap")
    for name, option in (
        ("preset", "--preset"),
        ("corpus", "the corpus"),
        ("languages", "--languages"),
        ("dev", "--dev"),
        ("swap", "--swap"),
    ):
        if name in wanted and not _same(begun.get(name), wanted[name]):
            if _shown(begun.get(name)) == _shown(wanted[name]):  # the same names, and other contents
                raise ArgumentError(
                    f"{str(output)!r} was begun with {option} {_shown(wanted[name])}, and the contents have "
                    f"changed since then; {_CURE}"
                )
            raise ArgumentError(
                f"{str(output)!r} was begun with {option} {_shown(begun.get(name))}, and now it is "
                f"{_shown(wanted[name])}; {_CURE}"
            )


def _same(begun: Any, wanted: Any) -> bool:
    """Files are the same if their contents are, wherever they are; standard input cannot be looked at."""
    if isinstance(begun, list) and isinstance(wanted, list):
        pairs = zip(begun, wanted, strict=True) if len(begun) == len(wanted) else [(None, 0)]
        return all(_same_file(one, other) for one, other in pairs)
    return bool(begun == wanted)


def _same_file(begun: Any, wanted: Any) -> bool:
    if not isinstance(begun, dict) or not isinstance(wanted, dict):
        return False
    if begun.get("digest") is None or wanted.get("digest") is None:
        return bool(begun.get("name") == wanted.get("name"))
    return bool(begun["digest"] == wanted["digest"])


def _described(file: str) -> dict[str, Any]:
    """The name of a file, and what it is known by: its size and its two ends."""
    path = Path(file)
    name = os.fsencode(path.name or file).decode(errors="replace")
    if file == "-" or not path.is_file():  # standard input, a pipe, or a corpus of regard's own
        return {"name": name, "digest": None}
    size = path.stat().st_size
    found = hashlib.blake2b(str(size).encode(), digest_size=8)
    with path.open("rb") as opened:
        found.update(opened.read(_BOTH_ENDS))
        opened.seek(max(0, size - _BOTH_ENDS))
        found.update(opened.read(_BOTH_ENDS))
    return {"name": name, "digest": found.hexdigest()}


def _shown(value: Any) -> str:
    """For a message: names of files, and values as an option has them."""
    if isinstance(value, list):
        return " and ".join(repr(one.get("name")) if isinstance(one, dict) else repr(one) for one in value)
    if value is None:
        return "none"
    return repr(value) if isinstance(value, str) else str(value).lower()
