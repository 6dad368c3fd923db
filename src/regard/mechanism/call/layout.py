"""Leading axes: how batch and heads of query, key, value and of everything per pair fit together."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from regard.errors import ShapeError


def _broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """The shape that these broadcast to, or None. (torch's own function takes longer than a small call.)"""
    axes = max(map(len, shapes))
    found = [1] * axes
    for shape in shapes:
        for at, size in enumerate(shape, axes - len(shape)):
            if size != 1 and found[at] != 1 and found[at] != size:
                return None
            found[at] = size if size != 1 else found[at]
    return tuple(found)


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of one shape expands to another without changing it."""
    return len(shape) <= len(to) and all(
        mine == 1 or mine == theirs for mine, theirs in zip(reversed(shape), reversed(to), strict=False)
    )


class Layout(NamedTuple):
    """Batch axes, key heads g, query heads r per key head; and whether the caller has an axis of heads."""

    batch: tuple[int, ...]
    groups: int
    per_group: int
    has_heads: bool

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor) -> "Layout":
        """The layout of a call, or an error that names both shapes."""
        heads, key_heads, value_heads = (t.shape[-3] if t.dim() > 2 else 1 for t in (query, key, value))
        if key_heads != value_heads and key_heads != 1 and value_heads != 1:
            raise ShapeError(
                f"key has {key_heads} heads and value has {value_heads}; they need the same number, "
                "as each value belongs to a key."
            )
        groups = key_heads if value_heads == 1 else value_heads  # 0 heads stay 0
        heads = groups if heads == 1 else heads
        if heads != groups and (groups == 0 or heads % groups):
            raise ShapeError(
                f"query has {heads} heads and key has {groups}; the query's heads must be a multiple of the "
                "key's, so that equally many share each. Heads are the third axis from the right."
            )
        batch = _broadcast([t.shape[:-3] for t in (query, key, value)])
        if batch is None:
            raise ShapeError(
                f"the batch axes of query {tuple(query.shape)}, key {tuple(key.shape)} and value "
                f"{tuple(value.shape)} do not broadcast; all before the last three must be equal or 1."
            )
        has_heads = max(query.dim(), key.dim(), value.dim()) > 2
        return cls(batch, groups, heads // groups if groups else 1, has_heads)

    @property
    def heads(self) -> int:
        return self.groups * self.per_group

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading axes of output and weights."""
        return (*self.batch, self.heads) if self.has_heads else ()

    def per_query(self, x: Tensor) -> Tensor:
        """Query, bias, mask: … h q · -> … g r q ·, with 1 for what all heads share."""
        x = self._pad(x)
        if x.shape[-3] == 1 and self.heads != 1:
            return x.unsqueeze(-3)
        return x.unflatten(-3, (self.groups, self.per_group))

    def per_key(self, x: Tensor) -> Tensor:
        """Key and value: … g k · -> … g 1 k ·."""
        return self._pad(x).unsqueeze(-3)

    def per_head(self, x: Tensor) -> Tensor:
        """One number per head, or one for all: (h) or () -> … g r 1 1."""
        return self.per_query(x.reshape(-1, 1, 1))

    def _pad(self, x: Tensor) -> Tensor:
        missing = len(self.batch) + 3 - x.dim()
        return x[(None,) * missing] if missing else x

    def merge(self, x: Tensor) -> Tensor:
        """Back to the caller's axes: … g r q e -> … h q e, or q e."""
        x = x.flatten(-4, -3)
        return x if self.has_heads else x.squeeze(-3)
