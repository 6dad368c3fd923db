"""The attention heads from which word alignments are read. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from regard.errors import ArgumentError
from regard.models.generation import SpecialTokens

if TYPE_CHECKING:
    import numpy
    from torch import Tensor

Shift = Literal["input", "output"]
Matrix = TypeVar("Matrix", "Tensor", "numpy.ndarray[Any, Any]")


@dataclass(frozen=True)
class AlignmentHead:
    """The attention heads from which word alignments are read.

    layer: decoder layer, counted from 0; −1 is the last. heads: heads to average; None for all.
    shift: the decoding step whose weights align a token. "output": the step that predicts it; "input": the
        next step, which reads it. "input" aligns better in a Transformer (Chen et al. 2020). Bahdanau
        attention is computed before the token is read, so it needs "output".

    >>> from regard.translation.alignment.alignment_head import AlignmentHead
    >>> AlignmentHead(layer=1, heads=(0, 2)).to_dict()
    {'layer': 1, 'heads': [0, 2], 'shift': 'input'}
    >>> AlignmentHead.from_dict({"layer": -1, "heads": None, "shift": "output"})
    AlignmentHead(layer=-1, heads=None, shift='output')
    """

    layer: int = -1
    heads: tuple[int, ...] | None = None
    shift: Shift = "input"

    def __post_init__(self) -> None:
        if type(self.layer) is not int:  # also rejects bool
            raise ArgumentError(
                f"AlignmentHead got layer={self.layer!r}; pass an integer, such as −1 for the last layer."
            )
        if self.heads is not None and not (
            isinstance(self.heads, tuple)
            and self.heads
            and all(type(head) is int and head >= 0 for head in self.heads)
        ):
            raise ArgumentError(
                f"AlignmentHead got heads={self.heads!r}; pass a tuple of head indices, counted from 0, such "
                "as (0, 2), or None for all heads."
            )
        if self.shift not in get_args(Shift):
            raise ArgumentError(
                f"AlignmentHead got shift={self.shift!r}; it must be {' or '.join(get_args(Shift))}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-serializable values."""
        heads = None if self.heads is None else list(self.heads)
        return {"layer": self.layer, "heads": heads, "shift": self.shift}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "AlignmentHead":
        """Restore the result of `to_dict`."""
        if not isinstance(values, Mapping) or not values.keys() <= {"layer", "heads", "shift"}:
            raise ArgumentError(
                f"{values!r} is not an alignment head; pass a dictionary such as {cls().to_dict()}."
            )
        heads = values.get("heads")
        return cls(**{**values, "heads": tuple(heads) if isinstance(heads, list) else heads})


def drop_special_tokens(
    weights: Matrix,
    target: int,
    source: int,
    shift: Shift,
    special: SpecialTokens = SpecialTokens(),  # noqa: B008 (a frozen value)
) -> Matrix:
    """Drop the rows and columns of special tokens: (…, 1 + target, source + 1) → (…, target, source).

    Row i belongs to the step that reads token i − 1 (or the start token) and predicts token i.
    """
    first = len(special.target_prefix) + (1 if shift == "input" else 0)
    column = len(special.source_prefix)
    return weights[..., first : first + target, column : column + source]
