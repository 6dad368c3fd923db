"""Questions about a recording that concern all of its layers, and recordings in folders."""

import hashlib
import json
import math
import os
import re
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard._util.files import write_atomic
from regard.errors import ArgumentError
from regard.inspection.statistics import head_statistics
from regard.inspection.texts import CallTokens, RecordedTexts
from regard.mechanism.weights.matrix import Weights

if TYPE_CHECKING:
    from regard.inspection.watch import Seen

FORMAT = "recording 2"
_DESCRIPTION = "recording.json"
_MAX_BYTES = 2**28  # size of the description
_MEASURES = ("entropy", "distance", "first", "previous", "induction")


def is_causal(weights: Weights) -> bool:
    """Return whether no row attends to a key after its query."""
    problem = weights.problem
    queries, keys, terms = problem.queries, problem.keys, problem.terms()
    limit = torch.arange(queries, device=weights.device)[:, None] + keys - queries + 1

    def term_is_causal(term: Any) -> bool:
        if term.stop is not None and bool((term.stop <= limit).all()):
            return True
        if term.allowed is None:
            return queries <= 1
        later = torch.arange(keys, device=weights.device) >= limit
        return not bool((term.allowed & later).any())

    return bool(terms) and all(map(term_is_causal, terms))


def self_attention_stack(seen: "Seen") -> list[Weights]:
    """Return the consecutive self-attention layers that end with the last one."""
    names = [name for name in seen if seen.kind(name) == "self"]
    if not names:
        raise ArgumentError(f"rollout needs self-attention; {seen!r} has none.")

    def stack_and_run(name: str) -> tuple[str, int]:
        """Return encoder or decoder, and the run: a shared module is called several times in each."""
        module, call = seen._modules[name]
        calls_per_run = max(len(seen.calls(module)) // max(len(seen._texts.calls), 1), 1)
        return re.split(r"\d", module)[0], call // calls_per_run

    return [seen[name] for name in names if stack_and_run(name) == stack_and_run(names[-1])]


def head_table(seen: "Seen", frame: bool | None) -> Any:
    """Return one row per head: a pandas frame, or a list of dictionaries."""
    rows = []
    for name in seen:
        heads = head_statistics(seen[name], cross=seen.kind(name) == "cross", ids=seen.ids(name))
        for number, head in enumerate(heads):
            measures = {measure: head.measures.get(measure, math.nan) for measure in _MEASURES}
            rows.append({"layer": name, "head": number, **measures})
    if frame is False or (frame is None and find_spec("pandas") is None):
        return rows
    return import_module("pandas").DataFrame(rows, columns=["layer", "head", *_MEASURES])


# Folders


def save(seen: "Seen", folder: str | os.PathLike[str]) -> Path:
    """Write a recording; the description comes last, so an interrupted save leaves no valid recording."""
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
        "layers": [{"name": seen._modules[name][0], "kind": seen.kind(name)} for name in seen],
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


def load(cls: type["Seen"], folder: str | os.PathLike[str]) -> "Seen":
    """Read a recording; raise an ArgumentError if the folder is not one of this format."""
    home = Path(folder)
    if not (home / _DESCRIPTION).is_file() or (home / _DESCRIPTION).stat().st_size > _MAX_BYTES:
        raise ArgumentError(f"{os.fspath(folder)!r} is not a recording. Seen.save writes one.")
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
            seen.add(name, Weights.load(file), kind)
    except (
        LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError, RuntimeError
    ) as error:  # fmt: skip
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"Cannot read the recording {os.fspath(folder)!r}: {str(error)[:200]}. Record it again."
        ) from None
    seen._empty = "nothing: the recording is empty"
    return seen


def _check_format(folder: str | os.PathLike[str], description: dict[str, Any]) -> None:
    if description["format"] != FORMAT:
        raise ArgumentError(
            f"{os.fspath(folder)!r} has the format {description['format'][:40]!r} of regard "
            f"{str(description.get('regard'))[:20]}; regard {version('regard')} reads {FORMAT!r}. "
            "Record it again, or use that version."
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
    """Parse token ids (b, n). Negative ids are placeholders in some models."""
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
