"""Read untrusted checkpoint files in Hugging Face format: JSON and safetensors.

Sizes, names and shapes are checked before anything is allocated. Pickle files are never read.
"""

import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard._util.files import check_loadable, read_regular
from regard._util.text import type_name
from regard.errors import ArgumentError

MAX_JSON_BYTES = 64 * 2**20  # the largest known tokenizer.json is about 34 MB
_CONVERT = (
    'python -c "from transformers import {convert} as M; '
    "M.from_pretrained('{folder}').save_pretrained('{folder}')\""
)


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file of limited size."""
    try:
        content = json.loads(read_text(path, max_bytes))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"{path} is not valid JSON: {short(str(error))}. Copy or download it again."
        ) from None
    if not isinstance(content, dict):
        raise ArgumentError(f"{path} contains {type_name(content)}; it must contain a JSON object, {{…}}.")
    return content


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """Read a text file of limited size."""
    try:
        return read_regular(path, max_bytes).decode()
    except OSError as error:
        raise ArgumentError(
            f"Cannot read {path}: {error.strerror}. The folder needs config.json, a safetensors "
            "file and a tokenizer."
        ) from None
    except UnicodeDecodeError:
        raise ArgumentError(f"{path} is not UTF-8 text. Copy or download it again.") from None


@contextmanager
def open_tensors(folder: Path, *, convert: str = "AutoModel") -> Iterator[dict[str, tuple[Any, Any]]]:
    """Open the safetensors files of a folder and yield a mapping from tensor name to (file, slice).

    convert: the transformers class that the error message suggests for converting pickled weights.
    """
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        slices: dict[str, Any] = {}
        for path in _files(folder, convert):
            try:
                check_loadable(path)
                file = stack.enter_context(safe_open(path, framework="pt"))
                slices |= {name: (file, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, OSError, RuntimeError, MemoryError) as error:
                raise ArgumentError(
                    f"{path} is not a complete safetensors file, or it does not fit in memory: "
                    f"{short(str(error))}. Copy or download it again."
                ) from None
        try:
            yield slices
        except (SafetensorError, RuntimeError, MemoryError) as error:
            raise ArgumentError(
                f"Cannot read the weights in {folder}: {short(str(error))}. Check the available memory."
            ) from None


def read_tensor(folder: Path, files: Mapping[str, Any], shape: tuple[int, ...]) -> Tensor:
    """Read and concatenate tensors of the same shape, without an intermediate copy."""
    result = torch.empty(len(files) * shape[0], *shape[1:], dtype=torch.float32, device="cpu")
    for (name, file), part in zip(files.items(), result.split(shape[0]), strict=True):
        part.copy_(file.get_tensor(name))
        if not all(math.isfinite(bound) for bound in part.aminmax()):
            raise ArgumentError(f"{name} in {folder} has NaN or infinite values. Use an earlier checkpoint.")
    return result


def _files(folder: Path, convert: str) -> list[Path]:
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        return _shards(folder, index)
    paths = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if len(paths) == 1:
        return paths
    if paths:
        raise ArgumentError(
            f"{folder} has {len(paths)} safetensors files, but no model.safetensors and no index; keep one "
            "file, or add model.safetensors.index.json."
        )
    pickled = [path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern)]
    if pickled:
        command = _CONVERT.format(folder=folder, convert=convert)
        raise ArgumentError(
            f"{folder} stores its weights in {pickled[0]}, a pickle file, which can execute code; regard "
            f"reads only safetensors. If you trust the file, convert it: {command}"
        )
    raise ArgumentError(f"{folder} has no weights; add model.safetensors.")


def _shards(folder: Path, index: Path) -> list[Path]:
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise ArgumentError(
            f"{index} has no valid weight_map from tensor names to file names. Copy or download it again."
        )
    names = sorted(set(files.values()))
    for name in names:
        if Path(name).name != name or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
            raise ArgumentError(
                f"{index} refers to {short(name)}; only safetensors files in the same folder are allowed."
            )
    paths = [folder / name for name in names]
    for path in paths:
        if not path.is_file():
            raise ArgumentError(
                f"{index} refers to {short(path.name)}, which does not exist; copy the whole folder."
            )
    return paths


def check_tensor(folder: Path, name: str, part: Any, shape: tuple[int, ...]) -> None:
    """Raise an error unless a tensor's safetensors slice has this shape and a floating-point dtype."""
    if tuple(part.get_shape()) != shape:
        raise ArgumentError(
            f"{name} in {folder} has shape {tuple(part.get_shape())}; config.json requires {shape}. Use "
            "the config.json and weights of the same model."
        )
    if part.get_dtype() not in ("F64", "F32", "F16", "BF16"):
        raise ArgumentError(
            f"{name} in {folder} has dtype {part.get_dtype()}; regard needs floating-point weights. "
            "Use the unquantized model."
        )


def short_list(names: list[str]) -> str:
    """Return the first three names as text, followed by the number of other names.

    >>> from regard.models.checkpoint_files import short_list
    >>> short_list(["a", "b", "c", "d", "e"])
    "'a', 'b', 'c' and 2 more"
    """
    shown = ", ".join(short(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def short(value: object) -> str:
    """Return a short repr of a value from an untrusted file."""
    limited = reprlib.Repr()
    limited.maxstring = limited.maxother = 120
    return limited.repr(value)
