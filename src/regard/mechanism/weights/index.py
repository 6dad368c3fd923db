"""Parts of a problem: some of its batch, heads and rows, and what an index asks for."""

from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from regard.mechanism.call.problem import QUERY_AXIS, Problem, kind
from regard.mechanism.torch_state import concrete

Index = Any  # whatever a tensor can be indexed with


def plain_index(index: Index, axes: int) -> list[int | slice] | None:
    """One integer or slice per axis; None if the index holds anything else, such as an array."""
    parts = list(index) if isinstance(index, tuple) else [index]
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
    """An integer as a slice of length one; like torch, steps go forward only."""
    if isinstance(index, slice):
        if index.step is not None and index.step <= 0:
            raise ValueError("slice step must be positive")
        return index
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of range for an axis of size {size}")
    index %= size
    return slice(index, index + 1)


def some_rows(problem: Problem, rows: slice | Tensor) -> Problem:
    """Some query rows: a slice of them, or their numbers."""

    def cut(name: str, tensor: Tensor) -> Tensor:
        # what serves every row stays as it is; query and τ have rows of their own even if it is only one
        own = kind(name) in ("query", "tau") or (kind(name) in QUERY_AXIS and tensor.shape[-2] > 1)
        return tensor[..., rows, :] if own else tensor

    return problem.map(cut)


def some_heads(problem: Problem, batch: Sequence[slice], heads: slice | Sequence[int]) -> Problem:
    """Some of the batch, a slice per axis, and of the query heads, which then stand alone: r = 1."""
    *_, groups, per_group = problem.lead()
    chosen = torch.arange(groups * per_group, device=problem["query"].device)[heads]
    every = isinstance(heads, slice) and len(chosen) == groups * per_group

    def cut(name: str, tensor: Tensor) -> Tensor:
        # an axis of size 1 serves every batch, but τ has all of them and may be cut to none
        cuts = zip(batch, tensor.shape, strict=False)
        tensor = tensor[tuple(i if n > 1 or name == "tau" else slice(None) for i, n in cuts)]
        if every or (tensor.shape[-4:-2] == (1, 1) and name != "tau"):
            return tensor
        spread = tensor.expand(*tensor.shape[:-4], groups, per_group, *tensor.shape[-2:])
        return spread[..., chosen // per_group, chosen % per_group, :, :].unsqueeze(-3)

    return problem.map(cut)


def apart(part: Problem, whole: Problem) -> Problem:
    """A part with copies of what was cut from the whole, of which it would hold all the memory otherwise."""
    copies: dict[Any, Tensor] = {}

    def own(name: str, tensor: Tensor) -> Tensor:
        if not concrete(tensor) or tensor.numel() == whole[name].numel():
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() <= tensor.numel() * tensor.element_size():
            return tensor
        if tensor.requires_grad:
            return tensor.clone()
        # query and key of the same x stay one
        place = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if place not in copies:
            copies[place] = tensor.clone()
        return copies[place]

    return part.map(own)
