"""Interface for position encodings. Without a position encoding, attention ignores the order of the keys.

An encoding is added to the embeddings, rotates queries and keys, or is a relative bias added to the scores.
All encodings have a method `encode`. Each kind is a module in `positions/` with a function `make(sizes)`.
"""

import math
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.mechanism.biases import RelativeBias
from regard.mechanism.torch_state import concrete
from regard.models.configs import Sinusoids
from regard.models.layers.positions import Positions


class PositionEncoding(nn.Module):
    """Base class for position encodings other than `regard.RelativeBias`.

    The base class does not encode positions. Subclasses implement `encode`, and `tables` to support drawing.

    >>> import torch, regard
    >>> class Linear(regard.models.PositionEncoding):
    ...     def encode(self, x, positions):
    ...         return x + positions[:, None] / 100, {}
    >>> Linear().encode(torch.zeros(3, 2), torch.arange(3))[0]
    tensor([[0.0000, 0.0000],
            [0.0100, 0.0100],
            [0.0200, 0.0200]])
    """

    columns: ClassVar[str] = "feature"  # column label in drawings of `tables`
    max_length: int | None = None  # maximum number of positions; None if unlimited

    def encode(self, x: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return the input (…, n, m) of the first block, and keyword arguments for all self-attention layers.

        The keyword argument, if any, is `bias` or `rotation`. positions: integers of shape (…, n).
        """
        return x, {}

    def tables(self, length: int) -> dict[str, Tensor]:
        """Return the tables to draw for the first `length` positions: title → (length, columns)."""
        raise ArgumentError(f"{type(self).__name__} has nothing to draw; implement tables(length).")


class PositionSizes(NamedTuple):
    """Sizes that an encoding may depend on.

    width: model dimension. heads: number of attention heads. head_width: dimension of each head.
    max_positions: size of a learned table. causal: whether queries attend only to earlier keys and their own.
    sinusoids: order of sinusoidal features. buckets, max_distance: see `T5Bias`.
    """

    width: int
    heads: int
    head_width: int
    max_positions: int
    causal: bool = False
    sinusoids: Sinusoids = "interleaved"
    buckets: int = 32
    max_distance: int = 128


def make_positions(kind: Positions, sizes: PositionSizes) -> PositionEncoding | RelativeBias:
    """Create a position encoding.

    >>> from regard.models.layers.position_encoding import PositionSizes, make_positions
    >>> make_positions("rotary", PositionSizes(width=64, heads=8, head_width=8, max_positions=512))
    RotaryPositions(8)
    """
    if kind == "none":
        return PositionEncoding()
    encoding = import_module(f"regard.models.layers.positions.{kind}").make(sizes)
    assert isinstance(encoding, PositionEncoding | RelativeBias)
    return encoding


def waves(positions: Tensor, width: int, base: float, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Return sin and cos of position · base^(−2i / width) for each feature pair i, both (…, width / 2).

    The angles are computed in float64, because in float32 they are off by 0.06 at position 1e6. If there are
    more tokens than positions, each position is computed only once.
    """
    if concrete(positions) and positions.numel():
        low, high = (int(bound) for bound in positions.aminmax())
        if low >= 0 and positions.numel() > high + 1:
            sin, cos = waves(torch.arange(high + 1, device=positions.device), width, base, dtype)
            return sin[positions], cos[positions]
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width
    angles = positions[..., None].double() * torch.exp(exponents * -math.log(base))
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return angles.sin().to(dtype), angles.cos().to(dtype)
