"""Interventions on edges: which keys each query attends to, and which values it receives.

Positions count from the start of the sequence, including padding, even while a model generates with a cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.errors import ArgumentError, DTypeError
from regard.inspection.editing.replacements import AttentionCall, Intervention
from regard.mechanism.masks.algebra import BUILT_IN, CallShape, Mask, MaskTerm

Positions = int | slice | range | Sequence[int] | None


class _EdgeIntervention(Intervention):
    """Base class for interventions on the edges between selected queries and keys."""

    queries: Positions
    keys: Positions

    def __post_init__(self) -> None:
        _check(type(self).__name__, self.queries, self.keys)

    def __call__(self, call: AttentionCall, heads: list[int]) -> Tensor:
        return self.apply(call, heads).output[..., heads, :, :]

    def apply(self, call: AttentionCall, heads: list[int]) -> AttentionCall:
        rows, keys = _edges(call, self.queries, self.keys)
        if not bool(rows.any()) or not bool(keys.any()):
            return call
        return self._change(call, heads, rows, keys)

    def _change(self, call: AttentionCall, heads: list[int], rows: Tensor, keys: Tensor) -> AttentionCall:
        raise NotImplementedError


@dataclass(frozen=True)
class Block(_EdgeIntervention):
    """Attention knockout: hide keys from queries and renormalize the remaining weights.

    Sets the scores of these query-key pairs to −inf before the softmax (Geva et al. 2023). The pairs are
    stored as a mask, in linear memory. If all keys of a query are hidden, its output is zero.

    queries, keys: positions in the sequence: a number, a list, a range, or a slice such as slice(40, None).
        None: all positions.

    >>> import torch, regard
    >>> layer = regard.models.SelfAttention()
    >>> with regard.edit(layer, 0, None, regard.Block(queries=1, keys=0)):
    ...     layer(torch.eye(2))
    tensor([[0.6698, 0.3302],
            [0.0000, 1.0000]])
    """

    queries: Positions = None
    keys: Positions = None

    def _change(self, call: AttentionCall, heads: list[int], rows: Tensor, keys: Tensor) -> AttentionCall:
        hidden: Mask = HiddenEdges(_selected_heads(call, heads), rows, ~keys)
        hidden = hidden if call.hidden is None else call.hidden & hidden
        call = replace(call, hidden=hidden)
        return _with_rows(call, call.recompute(), heads, rows)


@dataclass(frozen=True)
class ZeroValues(_EdgeIntervention):
    """Replace the values of some keys with zero; the weights stay the same (Mohebbi et al. 2023).

    queries, keys: positions in the sequence, as in `Block`.

    >>> import torch, regard
    >>> layer = regard.models.SelfAttention()
    >>> with regard.edit(layer, 0, None, regard.ZeroValues(keys=0)):
    ...     layer(torch.eye(2))
    tensor([[0.0000, 0.3302],
            [0.0000, 0.6698]])
    """

    keys: Positions = None
    queries: Positions = None

    def _change(self, call: AttentionCall, heads: list[int], rows: Tensor, keys: Tensor) -> AttentionCall:
        value = call.inputs().value.masked_fill(keys[: call.inputs().value.shape[-2], None], 0.0)
        return _with_rows(call, call.recompute(value=value), heads, rows)


class HiddenEdges(Mask):
    """A mask that hides some keys from some query rows of some heads, in linear memory.

    All arguments are boolean tensors. heads: the affected heads, (h, 1, 1); None for all. rows: the affected
    queries, (q,). visible: the keys that these queries may still attend to, (k,).

    >>> import torch
    >>> from regard.inspection.editing.edges import HiddenEdges
    >>> rows, visible = torch.tensor([False, True, True]), torch.tensor([True, False, True])
    >>> print(HiddenEdges(None, rows, visible).draw(3, 3))
    ■■■
    ■·■
    ■·■
    """

    def __init__(self, heads: Tensor | None, rows: Tensor, visible: Tensor) -> None:
        self.heads, self.rows, self.visible = heads, rows, visible

    def terms(self, call_shape: CallShape) -> tuple[MaskTerm, ...]:
        rows = self.rows.to(call_shape.device)[:, None]
        affected = rows if self.heads is None else rows & self.heads.to(call_shape.device)
        zero = torch.zeros_like(affected, dtype=torch.long)
        visible = self.visible.to(call_shape.device)[None, : call_shape.keys]
        return (
            MaskTerm(zero, torch.where(affected, 0, call_shape.keys)),
            MaskTerm(zero, torch.where(affected, call_shape.keys, 0), visible),
        )


BUILT_IN.add(HiddenEdges)


def _selected_heads(call: AttentionCall, heads: list[int]) -> Tensor | None:
    if len(set(heads)) == call.heads:
        return None
    selected = torch.zeros(call.heads, 1, 1, dtype=torch.bool)
    selected[heads] = True
    return selected


def _with_rows(call: AttentionCall, output: Tensor, heads: list[int], rows: Tensor) -> AttentionCall:
    """Replace the output of the given heads and rows; leave all other outputs unchanged, bit for bit."""
    selected = torch.zeros(call.heads, 1, 1, dtype=torch.bool, device=output.device)
    selected[heads] = True
    return replace(call, output=torch.where(selected & rows[:, None], output.to(call.output), call.output))


def _edges(call: AttentionCall, queries: Positions, keys: Positions) -> tuple[Tensor, Tensor]:
    """Return which rows and keys of this call are selected, (q,) and (k,)."""
    size = call.output.shape[-2], call.value.shape[-2]
    device = call.output.device
    return (
        _selection(queries, call.first_query, size[0], device),
        _selection(keys, call.first_key, size[1], device),
    )


def _selection(positions: Positions, first: int, size: int, device: torch.device) -> Tensor:
    """Return which of the positions first … first + size − 1 are selected."""
    if positions is None:
        return torch.ones(size, dtype=torch.bool, device=device)
    if isinstance(positions, slice):
        positions = range(*positions.indices(first + size))
    elif isinstance(positions, int):
        positions = [positions]
    selected = torch.zeros(size, dtype=torch.bool)
    inside = [position - first for position in positions if first <= position < first + size]
    selected[inside] = True
    return selected.to(device)


def _check(name: str, *arguments: Positions) -> None:
    for positions in arguments:
        if positions is None:
            continue
        if isinstance(positions, slice):
            numbers: list[int] = [x for x in (positions.start, positions.stop) if x is not None]
        else:
            numbers = [positions] if isinstance(positions, int) else list(positions)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int):
                raise DTypeError(
                    f"{name} got the position {number!r} of type {type(number).__name__}; pass integers, a "
                    "slice, or None for all positions."
                )
            if number < 0:
                raise ArgumentError(
                    f"{name} got the position {number}. Positions count from the start of the sequence, "
                    f"which grows while a model generates: pass 0 or more, such as length - {-number}."
                )
