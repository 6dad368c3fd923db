"""Lazy weights in a file: safetensors, with the rules as JSON in its header. Nothing is ever unpickled."""

import json
import math
import os
from pathlib import Path
from typing import Any, Literal, get_args

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from regard.errors import ArgumentError
from regard.mechanism.files import write_whole
from regard.mechanism.normalizers import spell, unspell
from regard.mechanism.problem import DIFFERENTIABLE, KEY_AXIS, QUERY_AXIS, Problem, Rules, kind

# Whether the last leading axis counts the heads, there is but one head, or the mean of all is meant.
Heads = Literal["axis", "one", "mean"]

FORMAT = "weights 1"


def write(path: str | os.PathLike[str], problem: Problem, lead: tuple[int, ...], heads: Heads) -> Path:
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
        **{name: getattr(rules, name) for name in ("family", "softcap", "dropout", "terms", "queries")},
        "lead": lead,
        "heads": heads,
    }
    # cloned, as query and key may be the same tensor, which safetensors refuses
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in problem.tensors.items()}
    return write_whole(path, save(tensors, {"regard": json.dumps(described)}))


def read(path: str | os.PathLike[str]) -> tuple[Problem, tuple[int, ...], Heads]:
    """Read what `write` wrote, or say that the file is no such thing."""
    try:
        with safe_open(path, "pt") as file:
            described = json.loads((file.metadata() or {}).get("regard", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _understand(described, tensors)
    except (SafetensorError, json.JSONDecodeError, LookupError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{os.fspath(path)} holds no lazy weights that can be read ({error}); "
            "such a file is written by Weights.save."
        ) from None


def _understand(described: Any, tensors: dict[str, Tensor]) -> tuple[Problem, tuple[int, ...], Heads]:
    """A file's content, which anybody may have written: nothing in it is taken for granted."""
    if not isinstance(described, dict) or described.pop("format", None) != FORMAT:
        raise ValueError("its description is another one")
    lead, heads = tuple(described.pop("lead")), described.pop("heads")
    problem = Problem(Rules(unspell(described.pop("normalize")), **described), tensors)
    _check(problem)
    found = problem.lead()[:-2] if heads == "mean" else problem.lead()
    if heads not in get_args(Heads) or math.prod(found) != math.prod(lead):
        raise ValueError(f"its tensors have leading axes {found}, and its description says {lead}")
    return problem, lead, heads


def _check(problem: Problem) -> None:
    """Raise ValueError unless this problem could have been written by `write`."""
    rules, names = problem.rules, problem.tensors.keys()
    numbers = (rules.dropout, 0.0 if rules.softcap is None else rules.softcap, rules.terms, rules.queries)
    if rules.family not in ("dot", "tanh", "relu") or not all(isinstance(n, int | float) for n in numbers):
        raise ValueError(f"the rules {rules} make no sense")
    needed = {"query", "key", "tau"} | ({"vector"} if rules.family != "dot" else set())
    needed |= {"row", "head", "seed"} if rules.dropout else set()
    needed |= {"row"} if problem.all("line") else set()
    known = {*QUERY_AXIS, *KEY_AXIS, *DIFFERENTIABLE, "head", "seed"}
    if needed - names or {kind(name) for name in names} - known:
        raise ValueError(f"it holds {sorted(names)} and needs {sorted(needed)}")
    if any(all(part is None for part in term) for term in problem.terms()):
        raise ValueError(f"its mask has {rules.terms} terms, and not all are there")
    axes = {tensor.dim() for tensor in problem.tensors.values()}
    if len(axes) != 1 or min(axes) < 4 or problem["query"].shape[-1] != problem["key"].shape[-1]:
        raise ValueError("its tensors do not fit each other")
