"""Save and load lazy weights as safetensors files, with the configuration as JSON metadata (no pickle)."""

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from regard._util.checks import check_int, check_number
from regard._util.checksums import TensorDigest
from regard._util.files import check_loadable, write_atomic
from regard.errors import ArgumentError
from regard.mechanism.call.problem import Problem, ProblemConfig, deserialize, kind, serialize
from regard.mechanism.masks.algebra import MaskTerm, broadcasts
from regard.mechanism.normalizers import Softmax1, to_text
from regard.mechanism.scores import FAMILIES

# "axis": the last leading axis is the heads axis; "single": one head; "mean": the mean over heads.
Heads = Literal["axis", "single", "mean"]

FORMAT = "weights 4"
_OLD = ("weights 1", "weights 2", "weights 3")
_KEYS = {"format", "call", "queries", "score", "lead", "heads", "rows_per_key_head"}


def write(
    path: str | os.PathLike[str], problem: Problem, lead: tuple[int, ...], heads: Heads, rows: int
) -> Path:
    """Write weights to a file, atomically.

    rows: number of rows per key head; see `Reader`.
    """
    problem = problem.with_tensors({**problem.tensors, "key": problem.dequantized("key")}).without(
        "key_scale"
    )
    config = problem.config
    if to_text(config.normalize) is None:
        raise ArgumentError(
            f"Cannot save lazy weights with the custom normalizer {type(config.normalize).__name__}. "
            "Save weights.dense() instead."
        )
    metadata = {
        "format": FORMAT,
        "call": serialize(config, sorted(problem.tensors)),
        "queries": config.queries,
        "score": config.score,
        "lead": lead,
        "heads": heads,
        "rows_per_key_head": rows,
    }
    # clone, because query and key may share memory, which safetensors rejects
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in problem.tensors.items()}
    metadata["checksum"] = checksum(tensors, tensors.__getitem__, json.dumps(metadata))
    return write_atomic(path, save(tensors, {"regard": json.dumps(metadata)}))


def checksum(names: Iterable[str], read: Callable[[str], Tensor], about: str = "") -> str:
    """Return one SHA-256 hash of `about` and all tensors, independent of the order of the tensors.

    The hash covers the name, dtype, shape and values of each tensor.

    read: function that returns the tensor with a given name. Only one tensor is in memory at a time.
    """
    digest = TensorDigest(about)
    for name in sorted(names):
        tensor = read(name).detach().cpu().contiguous()
        digest.add(name, str(tensor.dtype), tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read(path: str | os.PathLike[str]) -> tuple[Problem, tuple[int, ...], Heads, int]:
    """Read a file written by `write`; raise ArgumentError if it is invalid."""
    errors = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
    check_loadable(path)
    try:
        with safe_open(path, "pt") as file:
            metadata = json.loads((file.metadata() or {}).get("regard", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _parse(metadata, tensors)
    except (SafetensorError, *errors) as error:
        raise ArgumentError(
            f"Cannot load lazy weights from {os.fspath(path)}: {str(error)[:200]}. Pass a file written by "
            "Weights.save."
        ) from None


def _parse(metadata: Any, tensors: dict[str, Tensor]) -> tuple[Problem, tuple[int, ...], Heads, int]:
    """Validate the content of an untrusted file."""
    if not isinstance(metadata, dict) or metadata.get("format") not in (FORMAT, *_OLD):
        raise ValueError("it has no regard metadata")
    if metadata["format"] != FORMAT:
        raise ValueError(
            f"its format, {metadata['format']!r}, is from an older version of regard; save the weights again"
        )
    expected = metadata.pop("checksum", None)
    if expected != checksum(tensors, tensors.__getitem__, json.dumps(metadata)):
        raise ValueError("it is corrupted: it does not match its checksum")
    if metadata.keys() != _KEYS:
        raise ValueError(f"its metadata has the keys {sorted(metadata)} instead of {sorted(_KEYS)}")
    lead, heads, rows = (metadata[name] for name in ("lead", "heads", "rows_per_key_head"))
    config, names = deserialize(metadata["call"])
    if sorted(names) != sorted(tensors):
        raise ValueError(f"it contains {sorted(tensors)}, but its metadata names {sorted(names)}")
    config = config._replace(queries=metadata["queries"], score=metadata["score"], fused=True)
    problem = Problem(config, tensors)
    _check_config(config, tensors)
    _check_tensors(problem)
    actual = problem.lead()[:-2] if heads == "mean" else problem.lead()
    valid = isinstance(lead, list) and all(type(size) is int and size >= 0 for size in lead)
    if heads not in get_args(Heads) or not valid or math.prod(actual) != math.prod(lead):
        raise ValueError(f"its tensors have the leading axes {actual}, but its metadata states {lead}")
    check_int("the file has rows_per_key_head", rows)
    return problem, tuple(lead), heads, rows


def _check_config(config: ProblemConfig, tensors: dict[str, Tensor]) -> None:
    """Raise unless the configuration matches the tensor names."""
    check_number("the file has dropout", config.dropout, min=0, below=1)
    if config.softcap is not None:
        check_number("the file has softcap", config.softcap, above=0)
    check_number("the file has scale", config.scale)
    check_int("the file has queries", config.queries)
    check_int("the file has terms", config.terms)
    if not isinstance(config.score, str) or len(config.score) > 100:
        raise ValueError("the name of its score is invalid")
    if config.family not in FAMILIES:
        raise ValueError(f"its score has the unknown family {config.family!r}")
    masks = {f"{part}{i}" for part in MaskTerm._fields for i in range(min(config.terms, len(tensors)))}
    terms = {int(name.lstrip("abcdefghijklmnopqrstuvwxyz")) for name in masks & tensors.keys()}
    needed = {"query", "key", "tau"} | ({"vector"} if config.family != "dot" else set())
    needed |= {"row", "head", "seed"} if config.dropout else set()
    needed |= {"row"} if "line0" in tensors else set()
    needed |= {"sink"} if isinstance(config.normalize, Softmax1) else set()
    biases = {name for name in tensors if kind(name) in ("bias", "line")}
    if len(terms) != config.terms or tensors.keys() - masks - biases != needed:
        raise ValueError(f"it contains {sorted(tensors)}, which does not match its configuration")


def _check_tensors(problem: Problem) -> None:
    """Raise unless every tensor has the right dtype and shape."""
    query, tau = problem["query"], problem["tau"]
    real = query.dtype
    if real not in (torch.float32, torch.float64) or query.dim() < 4:
        raise ValueError(f"its query has dtype {real} and {query.dim()} axes, which is invalid")
    q, k, d = problem.queries, problem.keys, query.shape[-1]
    distances = max(problem.config.queries + k - 1, 0)
    sizes: dict[str, tuple[torch.dtype, set[int], set[int]]] = {
        "query": (real, {q}, {d}),
        "key": (real, {k}, {d}),
        "tau": (real, {q}, {2}),
        "vector": (real, {1}, {d}),
        "bias": (real, {1, q}, {1, k}),
        "line": (real, {1}, {distances}),
        "sink": (real, {1}, {1}),
        "start": (torch.int64, {1, q}, {1}),
        "stop": (torch.int64, {1, q}, {1}),
        "allowed": (torch.bool, {1, q}, {1, k}),
        "row": (torch.int64, {q}, {1}),
        "head": (torch.int64, {1}, {1}),
        "seed": (torch.int64, {1}, {1}),
    }
    for name, tensor in problem.tensors.items():
        dtype, rows, columns = sizes[kind(name)]
        fits = tensor.dim() == tau.dim() and broadcasts(tensor.shape[:-2], tau.shape[:-2])
        fits = fits and tensor.shape[-2] in rows and tensor.shape[-1] in columns
        if not fits or tensor.dtype != dtype:
            raise ValueError(
                f"its {name} has dtype {tensor.dtype} and shape {tuple(tensor.shape)}, which is invalid"
            )
    row = problem.get("row")
    if row is not None and q and not 0 <= int(row.min()) <= int(row.max()) < max(problem.config.queries, 1):
        raise ValueError("its row indices are out of range")
