"""Select batch entries, heads and queries of a lazy matrix without computing weights."""

import operator
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Self

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.mechanism.call.problem import Problem
from regard.mechanism.torch_state import concrete
from regard.mechanism.weights.reader import LazyMatrix
from regard.mechanism.weights.tensor_like import as_slice


def select_heads(problem: Problem, batch: Sequence[slice], heads: slice | Sequence[int]) -> Problem:
    """Select batch entries (one slice per axis) and query heads.

    If not all heads are selected, each selected query head gets its own key head: r = 1.
    """
    *_, groups, per_group = problem.lead()
    indices = torch.arange(groups * per_group, device=problem["query"].device)[heads]
    all_heads = isinstance(heads, slice) and len(indices) == groups * per_group

    def cut(name: str, tensor: Tensor) -> Tensor:
        # axes of size 1 are shared by the whole batch, except in τ, whose axes are never shared
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


class SelectableMatrix(LazyMatrix):
    """A lazy matrix that supports selection along its axes, `unbind`, `squeeze` and `unsqueeze`."""

    def rows(self, rows: slice | Tensor) -> Self:
        """Select queries by a slice or by their indices. The result is lazy.

        >>> import torch, regard
        >>> x = torch.randn(8, 5, 4)
        >>> regard.attend(x, x, x)[1].rows(slice(1, 3)).shape
        torch.Size([8, 2, 5])
        """
        return self._like(self.problem.select_rows(rows), self._lead)

    def part(self, lead: Sequence[slice], rows: slice | Tensor = slice(None)) -> Self:
        """Select along the leading axes, with one slice per axis, and select queries. The result is lazy.

        >>> import torch, regard
        >>> x = torch.randn(3, 8, 5, 4)
        >>> regard.attend(x, x, x)[1].part([slice(0, 1), slice(4)]).shape
        torch.Size([1, 4, 5, 5])
        """
        problem = self.problem.select_rows(rows)
        if lead:
            batch, heads = (lead[:-1], lead[-1]) if self.has_heads else (lead, slice(None))
            problem = select_heads(problem, batch, heads)
        return self._like(problem, [len(range(n)[i]) for n, i in zip(self._lead, lead, strict=True)])

    def heads(self, index: int | slice | Sequence[int]) -> Self:
        """Select heads, e.g. `heads(3)`, `heads([0, 2])` or `heads(slice(4))`. The result is lazy.

        >>> import torch, regard
        >>> x = torch.randn(8, 5, 4)
        >>> weights = regard.attend(x, x, x)[1]
        >>> weights.heads(3).shape, weights.heads([0, 2]).shape
        (torch.Size([5, 5]), torch.Size([2, 5, 5]))
        """
        self._require_heads("heads")
        *batch, heads = self._lead
        with suppress(TypeError):
            index = operator.index(index)  # type: ignore[arg-type]  # accepts numpy and torch integers
        chosen = as_slice(index, heads) if isinstance(index, int | slice) else index
        problem = select_heads(self.problem, [slice(None)] * len(batch), chosen)
        count = torch.arange(heads, device="cpu")[chosen].numel()
        if isinstance(index, int):
            return self._like(problem, batch, "single")
        return self._like(problem, (*batch, count))

    def batch(self, index: int) -> Self:
        """Select one sequence from a batch. The result is lazy, whereas `weights[0]` is a dense tensor.

        The index refers to the first leading axis.

        >>> import torch, regard
        >>> x = torch.randn(3, 8, 5, 4)  # 3 sequences, 8 heads
        >>> regard.attend(x, x, x)[1].batch(-1).topk(2).indices.shape
        torch.Size([8, 5, 2])
        """
        axes = len(self._lead) - self.has_heads
        if not axes:
            raise ArgumentError(
                f"batch({index}): weights of shape {tuple(self.shape)} have no batch axis; they already "
                "belong to one sequence."
            )
        return self._batch_entry(0, operator.index(index))

    def _batch_entry(self, axis: int, index: int) -> Self:
        """Select one entry along a batch axis and drop the axis."""
        cuts = [slice(None)] * len(self._lead)
        cuts[axis] = as_slice(index, self._lead[axis])
        problem = copy_part(self.part(cuts).problem, self.problem)
        problem = problem.map(lambda _, tensor: tensor.squeeze(axis))
        return self._like(problem, [*self._lead[:axis], *self._lead[axis + 1 :]])

    def select(self, dim: int, index: int) -> Any:
        """Return one entry along an axis: lazy weights for a leading axis, a tensor for a query or a key.

        >>> import torch, regard
        >>> x = torch.randn(3, 8, 5, 4)
        >>> weights = regard.attend(x, x, x)[1]
        >>> weights.select(1, 7), weights.select(-1, 0).shape
        (Weights(3 × 5 × 5, float32: ScaledDot, ...), torch.Size([3, 8, 5]))
        """
        (axis,) = self._axes(dim)
        if axis == len(self._lead) - 1 and self.has_heads:
            return self.heads(index)
        if axis < len(self._lead):
            return self._batch_entry(axis, index)
        return self[(slice(None),) * axis + (index,)]

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Return all entries along an axis: lazy weights for a leading axis, tensors for queries or keys."""
        (axis,) = self._axes(dim)
        if axis >= len(self._lead):
            return self.to_dense().unbind(axis)
        return tuple(self.select(axis, index) for index in range(self.shape[axis]))

    def __iter__(self) -> Iterator[Any]:
        return (self.select(0, index) for index in range(len(self)))

    def squeeze(self, dim: int | Sequence[int] | None = None) -> Any:
        """Remove axes of size 1. The result is lazy unless the query or key axis is removed.

        >>> import torch, regard
        >>> x = torch.randn(1, 8, 5, 4)
        >>> regard.attend(x, x, x)[1].squeeze(0)
        Weights(8 × 5 × 5, float32: ScaledDot, ...)
        """
        if dim == ():  # no axes, as in torch
            return self
        axes = [axis for axis in self._axes(dim) if self.shape[axis] == 1]
        if any(axis >= len(self._lead) for axis in axes):
            return self.to_dense().squeeze(axes)
        result = self
        for axis in reversed(axes):
            result = result.select(axis, 0)
        return result

    def unsqueeze(self, dim: int) -> Any:
        """Insert an axis of size 1. The result is lazy if the axis becomes a batch axis."""
        axis = dim if dim >= 0 else dim + self.ndim + 1
        if not 0 <= axis <= len(self._lead) - self.has_heads or self.is_head_mean:
            return self.to_dense().unsqueeze(dim)
        problem = self.problem.map(lambda _, tensor: tensor.unsqueeze(axis))
        return self._like(problem, (*self._lead[:axis], 1, *self._lead[axis:]))

    def _require_heads(self, what: str) -> None:
        if not self.has_heads:
            raise ArgumentError(
                f"{what}: weights of shape {tuple(self.shape)} have no heads axis; they already belong to "
                "one head, or are the mean over several heads."
            )
