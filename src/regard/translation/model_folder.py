"""Layout of a model folder: file names and config.json. Does not import torch.

FOLDER/config.json         settings, origin of the data, alignment head, score calibration
FOLDER/text.json           statistics of the training text: line lengths, words, letter case, copied spans
FOLDER/tokens.model        vocabulary; or source.model and target.model
FOLDER/model.safetensors   parameters of the best model so far
FOLDER/checkpoints/step-00001000/   model.safetensors  optimizer.safetensors  state.json  SHA256SUMS
FOLDER/data/               training data: train.ids  links.ids  dev.tsv  dev.links  ready
FOLDER/log.csv  samples.jsonl  tensorboard/
FOLDER/README.md           model card
FOLDER/initial.safetensors, pretrained/   only with --from; see training/initialization.py

Files and checkpoints are written under temporary names and then renamed, so none is ever incomplete.
Checksums are verified on reading. They are stored in config.json (for itself), in the metadata of
model.safetensors (tensors and vocabularies), in `ready` (data) and in SHA256SUMS (checkpoint).
"""

import difflib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard._util.files import MAX_TEXT_BYTES, read_regular, write_atomic
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.translation.config import TranslationConfig

FORMAT = "regard translator 3"
_OLD_FORMATS = ("regard translator 1", "regard translator 2")
CONFIG, MODEL, CARD = "config.json", "model.safetensors", "README.md"
PROFILE = "text.json"
SHARED, SOURCE, TARGET = "tokens.model", "source.model", "target.model"
INITIAL, PRETRAINED = "initial.safetensors", "pretrained"
CHECKPOINTS, OPTIMIZER, STATE = "checkpoints", "optimizer.safetensors", "state.json"
DATA = "data"
TEXT, IDS, LINKS, DEV, DEV_LINKS, READY = (
    f"{DATA}/{name}" for name in ("text.tsv", "train.ids", "links.ids", "dev.tsv", "dev.links", "ready")
)
LOG, SAMPLES, TENSORBOARD = "log.csv", "samples.jsonl", "tensorboard"
# files written by preparation; READY is written last
PREPARED = (CONFIG, INITIAL, PROFILE, SHARED, SOURCE, TARGET, TEXT, IDS, LINKS, DEV, DEV_LINKS, READY)
# files written by training, as glob patterns; all other files in a folder belong to the user
OWN_FILES = (
    *(*PREPARED, MODEL, CARD, LOG, SAMPLES, f"{TENSORBOARD}/events.out.tfevents.*"),
    f"{PRETRAINED}/*",
    *(".regard-*.part", f"{DATA}/.regard-*.part", f"{CHECKPOINTS}/step-*/*", f"{CHECKPOINTS}/.*.part/*"),
)
ORIGIN, ALIGNMENT, EXTENDED = "origin", "alignment", "extended"  # keys in config.json
CALIBRATION = "calibration"
CHECKSUM = "sha256"
_KEYS = ("format", "settings", ORIGIN, ALIGNMENT, EXTENDED, CALIBRATION, CHECKSUM)
_CURE = "Use a folder written by regard train, or one in Hugging Face format."
# supported values of model_type in a Hugging Face config.json
TRANSLATORS = ("marian", "pegasus", "m2m_100", "mbart", "t5", "mt5")


def is_pretrained(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder is in Hugging Face format: its config.json has a model_type.

    >>> from regard.translation.model_folder import is_pretrained
    >>> is_pretrained("no/such/folder")
    False
    """
    return _model_type(Path(folder)) is not None


def is_pretrained_translator(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder contains a translator in Hugging Face format."""
    return _model_type(Path(folder)) in TRANSLATORS


def _model_type(folder: Path) -> object:
    try:
        settings = json.loads(read_regular(folder / CONFIG, MAX_TEXT_BYTES))
    except (OSError, ValueError, RecursionError, ArgumentError):
        return None
    if not isinstance(settings, dict) or "format" in settings:
        return None
    kind = settings.get("model_type")
    return kind if isinstance(kind, str) else None


def check_folder_name(folder: str | os.PathLike[str]) -> None:
    """Raise ArgumentError unless the name is valid UTF-8, as safetensors requires."""
    try:
        os.fspath(folder).encode()
    except UnicodeEncodeError:
        raise ArgumentError(
            f"The folder name {os.fspath(folder)!r} is not UTF-8, so safetensors cannot read a model "
            "from it. Choose another name."
        ) from None


def is_prepared(folder: Path) -> bool:
    """Return whether the training data in a folder is complete."""
    return (folder / READY).exists()


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and verify config.json."""
    path = Path(folder)
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise ArgumentError(f"{os.fspath(folder)!r} {problem}. {_CURE}")
    try:
        text = read_regular(path / CONFIG, MAX_TEXT_BYTES).decode()
        folder_config = json.loads(text)
    except ArgumentError:
        raise
    except FileNotFoundError:
        raise ArgumentError(
            f"{os.fspath(folder)!r} is not a model folder: it has no {CONFIG}. {_CURE}"
        ) from None
    except (ValueError, RecursionError):
        folder_config, text = None, ""
    if isinstance(folder_config, dict) and folder_config.get("format") in _OLD_FORMATS:
        raise ArgumentError(
            f"{os.fspath(folder)!r} was written by an older version of regard ({folder_config['format']!r}; "
            f"this version reads {FORMAT!r}). Train a new model."
        )
    if (
        not isinstance(folder_config, dict)
        or folder_config.get("format") != FORMAT
        or not isinstance(folder_config.get("settings"), dict)
    ):
        raise ArgumentError(
            f"{os.fspath(folder)!r} is not a model folder: its {CONFIG} does not contain {FORMAT!r}. {_CURE}"
        )
    _check_config(folder_config, text, f"The {CONFIG} in {os.fspath(folder)!r}")
    return {name: value for name, value in folder_config.items() if name != CHECKSUM}


def _check_config(folder_config: dict[str, Any], text: str, where: str) -> None:
    """Raise ArgumentError for unknown keys or a wrong checksum. A missing checksum is accepted."""
    unknown = next((name for name in folder_config if name not in _KEYS), None)
    if unknown is not None:
        close = difflib.get_close_matches(unknown, _KEYS, 1)
        cure = f"Did you mean {close[0]!r}?" if close else "Was it written by a newer version of regard?"
        raise ArgumentError(f"{where} has the unknown key {unknown[:80]!r}. {cure}")
    if CHECKSUM in folder_config and text != _config_text(folder_config):
        raise ArgumentError(
            f"{where} is corrupted: it does not match its checksum. Copy the folder again; if you edited the "
            f"file, remove {CHECKSUM!r} from it."
        )


def _config_text(folder_config: Mapping[str, Any]) -> str:
    """Return the text of config.json, with its checksum at the end."""
    known = {name: value for name, value in folder_config.items() if name != CHECKSUM}
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    return json.dumps({**known, CHECKSUM: digest}, indent=2, ensure_ascii=False)


def write_config(folder: Path, config: "TranslationConfig", **other: Any) -> None:
    """Write config.json with the settings and the `other` keys."""
    folder_config = {"format": FORMAT, "settings": config.to_dict(), **other}
    write_atomic(folder / CONFIG, _config_text(folder_config).encode())


def damaged_checkpoint(path: Path, error: Exception) -> ArgumentError:
    """Return the error for a checkpoint that cannot be read."""
    return ArgumentError(
        f"The checkpoint {os.fspath(path)!r} is corrupted ({error}). Remove it to resume from the previous "
        "one."
    )
