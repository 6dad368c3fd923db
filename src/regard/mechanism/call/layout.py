"""Broadcast the leading axes (batch and heads) of query, key and value."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from regard.errors import ShapeError


def _broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Return the broadcast shape, or None. torch.broadcast_shapes is slower than a small attention call."""
    axes = max(map(len, shapes))
    result = [1] * axes
    for shape in shapes:
        for axis, size in enumerate(shape, axes - len(shape)):
            if size != 1 and result[axis] != 1 and result[axis] != size:
                return None
            result[axis] = size if size != 1 else result[axis]
    return tuple(result)


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of this shape can be expanded to the shape `to`."""
    return len(shape) <= len(to) and all(
        size == 1 or size == target for size, target in zip(reversed(shape), reversed(to), strict=False)
    )


class Layout(NamedTuple):
    """Batch axes, key heads g, query heads r per key head, and whether the inputs have a heads axis."""

    batch: tuple[int, ...]
    groups: int
    per_group: int
    has_heads: bool

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor) -> "Layout":
        """Return the layout of a call; raise ShapeError if the shapes are incompatible."""
        heads, key_heads, value_heads = (t.shape[-3] if t.dim() > 2 else 1 for t in (query, key, value))
        if key_heads != value_heads and key_heads != 1 and value_heads != 1:
            raise ShapeError(
                f"key has {key_heads} heads and value has {value_heads}; they must have the same number."
            )
        groups = key_heads if value_heads == 1 else value_heads  # 0 heads remain 0
        heads = groups if heads == 1 else heads
        if heads != groups and (groups == 0 or heads % groups):
            raise ShapeError(
                f"query has {heads} heads and key has {groups}; the number of query heads must be a multiple "
                "of the number of key heads. Heads are axis -3."
            )
        batch = _broadcast([t.shape[:-3] for t in (query, key, value)])
        if batch is None:
            raise ShapeError(
                f"the batch axes of query {tuple(query.shape)}, key {tuple(key.shape)} and value "
                f"{tuple(value.shape)} do not broadcast; the axes before the last three must be equal or 1."
            )
        has_heads = max(query.dim(), key.dim(), value.dim()) > 2
        return cls(batch, groups, heads // groups if groups else 1, has_heads)

    @property
    def heads(self) -> int:
        return self.groups * self.per_group

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of output and weights."""
        return (*self.batch, self.heads) if self.has_heads else ()

    def per_query(self, x: Tensor) -> Tensor:
        """Reshape query, bias or mask: … h q · -> … g r q ·, with size 1 if shared by all heads."""
        x = self._pad(x)
        if x.shape[-3] == 1 and self.heads != 1:
            return x.unsqueeze(-3)
        return x.unflatten(-3, (self.groups, self.per_group))

    def per_key(self, x: Tensor) -> Tensor:
        """Reshape key or value: … g k · -> … g 1 k ·."""
        return self._pad(x).unsqueeze(-3)

    def per_head(self, x: Tensor) -> Tensor:
        """Reshape one number per head, or one for all heads: (h) or () -> … g r 1 1."""
        return self.per_query(x.reshape(-1, 1, 1))

    def _pad(self, x: Tensor) -> Tensor:
        missing = len(self.batch) + 3 - x.dim()
        return x[(None,) * missing] if missing else x

    def merge(self, x: Tensor) -> Tensor:
        """Convert to the caller's axes: … g r q e -> … h q e, or q e."""
        x = x.flatten(-4, -3)
        return x if self.has_heads else x.squeeze(-3)
