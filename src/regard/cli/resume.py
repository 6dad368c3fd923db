"""Checks for `regard train --resume`: a run continues with its original settings and files."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from regard._util.text import printable
from regard.errors import ArgumentError
from regard.translation.config import TranslationConfig

DEFAULT_PRESET, DEFAULT_LANGUAGES = "auto", "en-de"
_CHANGEABLE = ("training.epochs", "training.updates", "training.minutes", "training.precision")
_HASHED_BYTES = 1 << 20  # bytes hashed at the start and at the end of a file


class TrainOptions(NamedTuple):
    """Command-line options of `regard train`; None or False if not given."""

    preset: str | None
    model: str | None
    config: Path | None
    settings: Sequence[str]  # from --set, --epochs, --updates and --minutes
    source: str | None
    target: str | None
    dev: Sequence[str] | None
    swap: bool
    languages: str
    start: Path | None = None  # --from

    def origin(self) -> dict[str, Any]:
        """Describe the origin of the data for config.json; files are described by name and digest."""
        files = [file for file in (self.source, self.target) if file is not None]
        origin: dict[str, Any] = {"corpus": [_describe_file(file) for file in files], "swap": self.swap}
        origin["preset"] = self.preset or DEFAULT_PRESET
        origin["settings"] = [*self._config_settings(), *self.settings]
        if self.start is not None:
            origin["from"] = self.start.name
        if self.source == "embedded":
            origin["languages"] = self.languages
        if self.dev is not None:
            origin["dev"] = [_describe_file(file) for file in self.dev]
        return origin

    def _config_settings(self) -> list[str]:
        """Return the settings in the config file as KEY=VALUE strings."""
        sections = {} if self.config is None else TranslationConfig.read_toml(self.config)
        return [
            f"{section}.{name}={str(value).lower() if isinstance(value, bool) else value}"
            for section, values in sections.items()
            for name, value in values.items()
        ]


def resumed_config(output: Path, options: TrainOptions) -> TranslationConfig | None:
    """Return the config of the run to resume, with a longer duration or a different precision if requested.

    Returns None for a new run.

    Raises an error for options that contradict the config, because they would have no effect.
    """
    from regard.translation.model_folder import CONFIG, is_prepared, read_config

    if not (output / CONFIG).exists() or not is_prepared(output):
        return None
    stored = read_config(output)
    config = _check_config(output, stored["settings"], options)
    if isinstance(stored.get("origin"), dict):
        _check_origin(output, stored["origin"], options)
    return config


def _check_config(output: Path, stored: dict[str, Any], options: TrainOptions) -> TranslationConfig:
    """Check each setting and the config file against the run; return the run's config."""
    started = TranslationConfig.from_dict(stored)
    changes = [setting for setting in options.settings if _name(setting) in _CHANGEABLE]
    settings = [setting for setting in options.settings if setting not in changes]
    if options.model is not None:
        settings.insert(0, f"model.kind={options.model}")
    overridden = {_name(setting) for setting in [*settings, *changes]}
    for setting in settings:
        _check_settings(output, started, started.override([setting]))
    if options.config is not None:
        from_file = {
            section: {name: value for name, value in values.items() if f"{section}.{name}" not in overridden}
            for section, values in TranslationConfig.read_toml(options.config).items()
        }
        where = f" from --config {printable(str(options.config))}"
        _check_settings(output, started, started.replace(from_file), where)
    return _check_duration(output, started, started.override(changes))


def _name(setting: str) -> str:
    return setting.partition("=")[0].strip()


def _check_duration(
    output: Path, started: TranslationConfig, requested: TranslationConfig
) -> TranslationConfig:
    if requested == started or started.is_extended_by(requested):
        return requested
    training = started.training
    option = "--minutes" if training.minutes else "--epochs" if training.updates is None else "--updates"
    raise ArgumentError(
        f"Cannot shorten the training of {str(output)!r} from {started.training.duration()} to "
        f"{requested.training.duration()}. Use a larger value for {option}, or choose a new --output."
    )


def _check_settings(
    output: Path, started: TranslationConfig, requested: TranslationConfig, where: str = ""
) -> None:
    new = requested.to_dict()
    for section, values in started.to_dict().items():
        for name, value in values.items():
            if new[section][name] != value:
                raise ArgumentError(
                    f"Cannot resume {str(output)!r} with {section}.{name}={_format(new[section][name])}"
                    f"{where}: it was started with {_format(value)}. Remove the setting, or choose a new "
                    "--output."
                )


def _check_origin(output: Path, started: dict[str, Any], options: TrainOptions) -> None:
    """Check that files, languages and direction match the run."""
    requested = options.origin()
    if options.preset is None:
        requested.pop("preset")
    if options.source is None:
        requested.pop("corpus")
        if not options.swap:
            requested.pop("swap")
    for name, option in (
        ("preset", "--preset"),
        ("from", "--from"),
        ("corpus", "the corpus"),
        ("languages", "--languages"),
        ("dev", "--dev"),
        ("swap", "--swap"),
    ):
        if name in requested and not _is_same(started.get(name), requested[name]):
            old, new = _format(started.get(name)), _format(requested[name])
            if old == new:
                raise ArgumentError(
                    f"Cannot resume {str(output)!r}: the contents of {option} {new} have changed. "
                    "Restore them, or choose a new --output."
                )
            raise ArgumentError(
                f"Cannot resume {str(output)!r} with {option} {new}: it was started with {old}. Pass "
                "the same value, omit it, or choose a new --output."
            )


def _is_same(started: Any, requested: Any) -> bool:
    """Compare files by content, not by path; compare standard input only by name."""
    if isinstance(started, list) and isinstance(requested, list):
        return len(started) == len(requested) and all(map(_is_same_file, started, requested))
    return bool(started == requested)


def _is_same_file(started: Any, requested: Any) -> bool:
    if not isinstance(started, dict) or not isinstance(requested, dict):
        return False
    if started.get("digest") is None or requested.get("digest") is None:
        return bool(started.get("name") == requested.get("name"))
    return bool(started["digest"] == requested["digest"])


def _describe_file(file: str) -> dict[str, Any]:
    """Return a file's name and a digest of its size, beginning and end."""
    path = Path(file)
    name = os.fsencode(path.name or file).decode(errors="replace")
    if file == "-" or not path.is_file():  # standard input, a pipe, or a built-in corpus
        return {"name": name, "digest": None}
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    with path.open("rb") as content:
        digest.update(content.read(_HASHED_BYTES))
        content.seek(max(0, size - _HASHED_BYTES))
        digest.update(content.read(_HASHED_BYTES))
    return {"name": name, "digest": digest.hexdigest()}


def _format(value: Any) -> str:
    """Format file names and values for a message."""
    if isinstance(value, list):
        return " and ".join(
            repr(file.get("name")) if isinstance(file, dict) else repr(file) for file in value
        )
    if value is None:
        return "none"
    return repr(value) if isinstance(value, str) else str(value).lower()
