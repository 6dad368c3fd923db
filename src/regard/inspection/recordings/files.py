"""Recordings in folders, as safetensors and JSON."""

import hashlib
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard._util.files import write_atomic
from regard.errors import ArgumentError
from regard.inspection.recordings.recording import Seen
from regard.inspection.recordings.texts import CallTokens, RecordedTexts
from regard.mechanism.weights.weights import Weights

FORMAT = "recording 2"
_DESCRIPTION = "recording.json"
_MAX_BYTES = 2**28  # maximum size of the description


def save(seen: Seen, folder: str | os.PathLike[str]) -> Path:
    """Write a recording. The description comes last, so an interrupted save leaves no valid recording."""
    home = Path(folder)
    if home.exists() and (not home.is_dir() or (any(home.iterdir()) and not (home / _DESCRIPTION).exists())):
        raise ArgumentError(f"{os.fspath(folder)!r} exists and is not a recording. Choose a new folder.")
    (home / _DESCRIPTION).unlink(missing_ok=True)
    for old in home.glob("[0-9]*.safetensors"):
        old.unlink()
    for number, weights in enumerate(seen.values()):
        weights.save(home / f"{number}.safetensors")

    description = {
        "format": FORMAT,
        "regard": version("regard"),
        "layers": [
            {"name": seen._modules[name][0], "kind": seen.kind(name), "run": seen._modules[name][1]}
            for name in seen
        ],
        "texts": _describe(seen._texts),
    }
    content = {**description, "checksum": _checksum(description)}
    write_atomic(home / _DESCRIPTION, json.dumps(content).encode())
    return home


def _checksum(description: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()


def _describe(texts: RecordedTexts) -> list[dict[str, Any]]:
    calls = []
    for call in range(max(len(texts.calls), len(texts.loaded), 1)):
        sides: dict[str, Any] = {}
        for side in ("source", "target"):
            ids = texts.ids(call, side)
            tokens = [texts.tokens(call, side, row) for row in range(1 if ids is None else len(ids))]
            sides[side] = {
                "ids": None if ids is None else ids.tolist(),
                "words": None if None in tokens else tokens,
            }
        calls.append(sides)
    return calls


def load(cls: type[Seen], folder: str | os.PathLike[str]) -> Seen:
    """Read a recording. Raises an ArgumentError if the folder is not a recording in this format."""
    home = Path(folder)
    if not (home / _DESCRIPTION).is_file() or (home / _DESCRIPTION).stat().st_size > _MAX_BYTES:
        raise ArgumentError(f"{os.fspath(folder)!r} is not a recording. Pass a folder written by Seen.save.")
    try:
        description = json.loads((home / _DESCRIPTION).read_bytes())
        if not isinstance(description, dict) or not isinstance(description.get("format"), str):
            raise ValueError(f"{_DESCRIPTION} has no format")
        _check_format(folder, description)
        if description.pop("checksum", None) != _checksum(description):
            raise ValueError(f"the checksum of {_DESCRIPTION} is wrong")
        seen = cls(_texts(description["texts"]))
        for number, layer in enumerate(description["layers"]):
            name, kind = layer["name"], layer["kind"]
            if not isinstance(name, str) or len(name) > 1000 or kind not in ("self", "cross"):
                raise ValueError(f"layer {number} has no valid name or kind")
            file = home / f"{number}.safetensors"
            if file.is_symlink() or not file.is_file():
                raise ValueError(f"{file.name} is missing")
            run = layer.get("run", 0)
            if type(run) is not int or not 0 <= run < 2**31:
                raise ValueError(f"layer {number} has no valid run")
            seen.add(name, Weights.load(file), kind, run)
    except (
        LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError, RuntimeError
    ) as error:  # fmt: skip
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"Cannot read the recording {os.fspath(folder)!r}: {str(error)[:200]}. Record it again."
        ) from None
    seen._empty = "nothing"
    return seen


def _check_format(folder: str | os.PathLike[str], description: dict[str, Any]) -> None:
    if description["format"] != FORMAT:
        raise ArgumentError(
            f"{os.fspath(folder)!r} has the format {description['format'][:40]!r} of regard "
            f"{str(description.get('regard'))[:20]}; regard {version('regard')} reads {FORMAT!r}. "
            "Record it again, or use that version of regard."
        )


def _texts(calls: Any) -> RecordedTexts:
    """Parse the tokens of a recording; the file is not trusted."""
    texts = RecordedTexts()
    for call in calls:
        ids: dict[str, Tensor | None] = {}
        tokens: dict[str, list[list[str]]] = {}
        for side in ("source", "target"):
            ids[side] = _parse_ids(call[side]["ids"])
            if call[side]["words"] is not None:
                tokens[side] = _parse_tokens(call[side]["words"])
        texts.calls.append(CallTokens(**ids))
        texts.loaded.append(tokens)
    return texts


def _parse_ids(ids: Any) -> Tensor | None:
    """Parse token ids (b, n). Negative ids are allowed: some models use them as placeholders."""
    if ids is None:
        return None
    rows: list[Any] = ids if isinstance(ids, list) and ids else [None]
    if not all(isinstance(row, list) and len(row) == len(rows[0]) for row in rows):
        raise ValueError("token ids are not lists of equal length")
    if not all(type(i) is int and -(2**63) <= i < 2**63 for row in rows for i in row):
        raise ValueError("token ids are not 64-bit integers")
    return torch.tensor(rows, dtype=torch.long)


def _parse_tokens(tokens: Any) -> list[list[str]]:
    rows: list[Any] = tokens if isinstance(tokens, list) else [None]
    if not all(isinstance(row, list) and all(isinstance(token, str) for token in row) for row in rows):
        raise ValueError("tokens are not lists of strings")
    return rows
