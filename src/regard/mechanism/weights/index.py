"""Indexing: parse indices, and select batch entries, heads and rows of a problem."""

from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from regard.mechanism.call.problem import QUERY_AXIS, Problem, kind
from regard.mechanism.torch_state import concrete

Index = Any  # anything that can index a tensor


def basic_index(index: Index, axes: int) -> list[int | slice] | None:
    """Return one integer or slice per axis, or None for advanced indices, such as arrays."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if word := next((i for i in parts if isinstance(i, str)), None):
        raise TypeError(f"{word!r} is not an index; weights are indexed by numbers: tokens.index({word!r}).")
    if not all(isinstance(i, int | slice | EllipsisType) and not isinstance(i, bool) for i in parts):
        return None
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    at = parts.index(Ellipsis)
    missing = axes - len(parts) + 1
    if missing < 0 or parts.count(Ellipsis) > 1:
        raise IndexError(f"too many indices: {len(parts) - 1} for weights with {axes} axes")
    return [*parts[:at], *[slice(None)] * missing, *parts[at + 1 :]]


def as_slice(index: int | slice, size: int) -> slice:
    """Convert an integer to a slice of length one. As in torch, steps must be positive."""
    if isinstance(index, slice):
        if index.step is not None and index.step <= 0:
            raise ValueError("slice step must be positive")
        return index
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of range for an axis of size {size}")
    index %= size
    return slice(index, index + 1)


def select_rows(problem: Problem, rows: slice | Tensor) -> Problem:
    """Select query rows by a slice or by their indices."""

    def cut(name: str, tensor: Tensor) -> Tensor:
        # tensors shared by all rows are not cut; query and τ always have one row per query
        has_rows = kind(name) in ("query", "tau") or (kind(name) in QUERY_AXIS and tensor.shape[-2] > 1)
        return tensor[..., rows, :] if has_rows else tensor

    return problem.map(cut)


def select_heads(problem: Problem, batch: Sequence[slice], heads: slice | Sequence[int]) -> Problem:
    """Select batch entries, by one slice per axis, and query heads. Each head becomes a group with r = 1."""
    *_, groups, per_group = problem.lead()
    indices = torch.arange(groups * per_group, device=problem["query"].device)[heads]
    all_heads = isinstance(heads, slice) and len(indices) == groups * per_group

    def cut(name: str, tensor: Tensor) -> Tensor:
        # size-1 axes are shared by the whole batch; τ always has full axes and may become empty
        cuts = zip(batch, tensor.shape, strict=False)
        tensor = tensor[tuple(i if n > 1 or name == "tau" else slice(None) for i, n in cuts)]
        if all_heads or (tensor.shape[-4:-2] == (1, 1) and name != "tau"):
            return tensor
        expanded = tensor.expand(*tensor.shape[:-4], groups, per_group, *tensor.shape[-2:])
        return expanded[..., indices // per_group, indices % per_group, :, :].unsqueeze(-3)

    return problem.map(cut)


def copy_part(part: Problem, whole: Problem) -> Problem:
    """Copy tensors that are views of larger tensors, which would otherwise stay in memory."""
    copies: dict[Any, Tensor] = {}

    def compact(name: str, tensor: Tensor) -> Tensor:
        if not concrete(tensor) or tensor.numel() == whole[name].numel():
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() <= tensor.numel() * tensor.element_size():
            return tensor
        if tensor.requires_grad:
            return tensor.clone()
        # if query and key share memory, so do the copies
        view = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if view not in copies:
            copies[view] = tensor.clone()
        return copies[view]

    return part.map(compact)
