"""Lazy weights in a file: safetensors, with the rules as JSON in its header. Nothing is ever unpickled."""

import hashlib
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
from regard._util.files import check_loadable, write_atomic
from regard.errors import ArgumentError
from regard.mechanism.call.problem import Problem, Rules, kind
from regard.mechanism.mask_algebra import MaskTerm, broadcasts
from regard.mechanism.normalizers import Softmax1, spell, unspell

# Whether the last leading axis counts the heads, there is but one head, or the mean of all is meant.
Heads = Literal["axis", "one", "mean"]

FORMAT = "weights 2"
_OLD = ("weights 1",)  # had no checksum


def write(
    path: str | os.PathLike[str], problem: Problem, lead: tuple[int, ...], heads: Heads, together: int
) -> Path:
    """Write weights to a file, whole or not at all."""
    rules = problem.rules
    if spell(rules.normalize) is None:
        raise ArgumentError(
            f"{type(rules.normalize).__name__} is somebody's own normalizer, which a file cannot hold; "
            "save weights.dense() instead."
        )
    described = {
        "format": FORMAT,
        "normalize": spell(rules.normalize),
        **{
            name: getattr(rules, name)
            for name in ("family", "scale", "softcap", "dropout", "terms", "queries", "score", "fused")
        },
        "lead": lead,
        "heads": heads,
        "together": together,
    }
    # cloned, as query and key may be the same tensor, which safetensors refuses
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in problem.tensors.items()}
    described["checksum"] = checksum(tensors, tensors.__getitem__, json.dumps(described))
    return write_atomic(path, save(tensors, {"regard": json.dumps(described)}))


def checksum(names: Iterable[str], read: Callable[[str], Tensor], about: str = "") -> str:
    """SHA-256 of a description and of the names, types, shapes and numbers of tensors, in any order.

    read: returns the tensor of a name; one is held at a time.
    """
    digest = hashlib.sha256(about.encode())
    for name in sorted(names):
        tensor = read(name).detach().cpu().contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read(path: str | os.PathLike[str]) -> tuple[Problem, tuple[int, ...], Heads, int | None]:
    """Read what `write` wrote, or say that the file is no such thing."""
    wrong = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
    check_loadable(path)
    try:
        with safe_open(path, "pt") as file:
            described = json.loads((file.metadata() or {}).get("regard", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _understand(described, tensors)
    except (SafetensorError, *wrong) as error:
        raise ArgumentError(
            f"{os.fspath(path)} holds no lazy weights that can be read ({str(error)[:200]}); "
            "such a file is written by Weights.save."
        ) from None


def _understand(
    described: Any, tensors: dict[str, Tensor]
) -> tuple[Problem, tuple[int, ...], Heads, int | None]:
    """A file's content, which anybody may have written: nothing in it is taken for granted."""
    if not isinstance(described, dict) or described.get("format") not in (FORMAT, *_OLD):
        raise ValueError("its description is another one")
    if described["format"] != FORMAT:
        raise ValueError(
            f"its format is {described['format']!r}, which had no checksum; save the weights again"
        )
    expected = described.pop("checksum", None)
    if expected != checksum(tensors, tensors.__getitem__, json.dumps(described)):
        raise ValueError("it is damaged: it does not have its checksum")
    del described["format"]
    lead, heads, together = described.pop("lead"), described.pop("heads"), described.pop("together", None)
    rules = Rules(unspell(described.pop("normalize")), **described)
    problem = Problem(rules, tensors)
    _check_rules(rules, tensors)
    _check_tensors(problem)
    found = problem.lead()[:-2] if heads == "mean" else problem.lead()
    whole = isinstance(lead, list) and all(type(size) is int and size >= 0 for size in lead)
    if heads not in get_args(Heads) or not whole or math.prod(found) != math.prod(lead):
        raise ValueError(f"its tensors have leading axes {found}, and its description says {lead}")
    if together is not None:
        check_int("the file got together", together)
    return problem, tuple(lead), heads, together


def _check_rules(rules: Rules, tensors: dict[str, Tensor]) -> None:
    """Raise unless these rules go with tensors of these names."""
    check_number("the file got dropout", rules.dropout, min=0, below=1)
    if rules.softcap is not None:
        check_number("the file got softcap", rules.softcap, above=0)
    check_number("the file got scale", rules.scale)
    check_int("the file got queries", rules.queries)
    check_int("the file got terms", rules.terms)
    if not isinstance(rules.score, str) or len(rules.score) > 100:
        raise ValueError("the name of its score is none")
    if (
        rules.family not in ("dot", "tanh", "relu")
        or rules.careful is not True
        or type(rules.fused) is not bool
    ):
        raise ValueError(f"the score's family is {rules.family!r}")
    masks = {f"{part}{i}" for part in MaskTerm._fields for i in range(min(rules.terms, len(tensors)))}
    terms = {int(name.lstrip("abcdefghijklmnopqrstuvwxyz")) for name in masks & tensors.keys()}
    needed = {"query", "key", "tau"} | ({"vector"} if rules.family != "dot" else set())
    needed |= {"row", "head", "seed"} if rules.dropout else set()
    needed |= {"row"} if "line0" in tensors else set()
    needed |= {"sink"} if isinstance(rules.normalize, Softmax1) else set()
    biases = {name for name in tensors if kind(name) in ("bias", "line")}
    if len(terms) != rules.terms or tensors.keys() - masks - biases != needed:
        raise ValueError(f"it holds {sorted(tensors)}, which is not what its rules need")


def _check_tensors(problem: Problem) -> None:
    """Raise unless every tensor has the dtype and the size that its kind has."""
    query, tau = problem["query"], problem["tau"]
    real = query.dtype
    if real not in (torch.float32, torch.float64) or query.dim() < 4:
        raise ValueError(f"its query is a tensor of {real} with {query.dim()} axes")
    q, k, d = problem.queries, problem.keys, query.shape[-1]
    distances = max(problem.rules.queries + k - 1, 0)
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
            raise ValueError(f"its {name} is a tensor of {tensor.dtype} and shape {tuple(tensor.shape)}")
    row = problem.get("row")
    if row is not None and q and not 0 <= int(row.min()) <= int(row.max()) < max(problem.rules.queries, 1):
        raise ValueError("its rows are numbered beyond its queries")
