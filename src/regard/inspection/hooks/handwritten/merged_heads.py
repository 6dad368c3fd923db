"""Values with a merged axis h·b instead of b·h, (h·b, n, e), as in the Set Transformer (Lee et al. 2019).

Most models merge batch and heads as b·h. The shape alone does not distinguish the two orders.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

MERGING = ("cat", "concat", "reshape", "view", "flatten")


class MergedHeads(NamedTuple):
    """The number of heads in a merged axis h·b. `certain` is False if the axis may also be b·h."""

    heads: int
    certain: bool

    def agrees_with(self, heads: int | None) -> bool:
        """Return whether the order is h·b. heads: the module's number of heads; None if unknown."""
        return self.certain if heads is None else heads == self.heads


def merged_heads(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> MergedHeads | None:
    """Return the heads of an output (h·b, n, e), or None if the function does not merge heads.

    >>> import torch
    >>> from regard.inspection.hooks.handwritten.merged_heads import merged_heads
    >>> heads = torch.zeros(2, 5, 12).split(4, -1)  # 3 heads of b n e
    >>> merged_heads("cat", (heads, 0), {}, torch.cat(heads, 0))
    MergedHeads(heads=3, certain=True)
    """
    if not args or not isinstance(output, Tensor) or output.dim() != 3:
        return None
    if name in ("cat", "concat"):
        parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return MergedHeads(len(parts), True) if dim in (0, -3) and _are_slices_of_features(parts) else None
    x = args[0]
    if not isinstance(x, Tensor) or x.dim() != 4 or output.shape != (x.shape[0] * x.shape[1], *x.shape[2:]):
        return None
    first, second = x.shape[:2]
    axis = adjacent_axis(x, (0, 1), 3)
    if min(first, second) < 2 or axis == 1 or (axis is None and first == second):
        return None
    return MergedHeads(first, axis == 0)


def adjacent_axis(x: Tensor, axes: Iterable[int], features: int) -> int | None:
    """Return the only axis among `axes` that lies next to the features in memory, or None.

    A projection writes the features of each head side by side, so the heads can be distinguished from an
    axis of the same size, unless the tensor was copied in another order.

    >>> import torch
    >>> from regard.inspection.hooks.handwritten.merged_heads import adjacent_axis
    >>> query = torch.zeros(2, 5, 2, 4).transpose(1, 2)  # b n h d -> b h n d
    >>> adjacent_axis(query, (0, 1), 3)
    1
    """
    step = x.shape[features] * x.stride(features)
    matching = [axis for axis in axes if x.shape[axis] > 1 and x.stride(axis) == step]
    return matching[0] if len(matching) == 1 else None


def _are_slices_of_features(parts: Any) -> bool:
    """Return whether 3-dimensional tensors are adjacent slices of the last axis of one tensor."""
    if not isinstance(parts, list | tuple) or len(parts) < 2:
        return False
    first = parts[0]
    if any(not isinstance(x, Tensor) or x.dim() != 3 or x.shape != first.shape for x in parts):
        return False
    width = first.shape[-1] * first.stride(-1)
    offsets = [x.storage_offset() - first.storage_offset() for x in parts]
    storages = {x.untyped_storage().data_ptr() for x in parts}
    return len(storages) == 1 and offsets == [width * i for i in range(len(parts))]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Split the first axis into batch and heads: (h·b, …) → (b, h, …).

    >>> import torch
    >>> from regard.inspection.hooks.handwritten.merged_heads import split_heads
    >>> split_heads(torch.zeros(6, 5, 4), 3).shape
    torch.Size([2, 3, 5, 4])
    """
    return x.unflatten(0, (heads, -1)).transpose(0, 1)


def join_heads(x: Tensor) -> Tensor:
    """Merge heads and batch: (b, h, …) → (h·b, …), the inverse of `split_heads`.

    >>> import torch
    >>> from regard.inspection.hooks.handwritten.merged_heads import join_heads
    >>> join_heads(torch.zeros(2, 3, 5, 4)).shape
    torch.Size([6, 5, 4])
    """
    return x.transpose(0, 1).flatten(0, 1)
