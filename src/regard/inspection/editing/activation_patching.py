"""Activation patching: record heads in one run and insert them into another run."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from regard._util.text import pluralize, type_name
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.inspection.editing.edges import Positions, _check, _selection
from regard.inspection.editing.replacements import AttentionCall, Inputs, Intervention
from regard.mechanism.masks.algebra import broadcasts

_ROUNDING = 1e-6  # keys with at most this total weight are treated as masked


class _CapturedHeads(NamedTuple):
    """The outputs of some heads in one call, (…, len(heads), q, e), and the call's inputs if captured."""

    heads: list[int]
    output: Tensor
    call: AttentionCall


class Capture(Intervention):
    """Record the outputs of heads without changing them; `Patch` inserts them into another run.

    weights: also record query and key, from which `Patch(…, weights=True)` computes the weights.

    >>> import torch, regard
    >>> layer, clean = regard.models.SelfAttention(), regard.Capture()
    >>> with regard.edit(layer, 0, None, clean):
    ...     output = layer(torch.eye(2))
    >>> clean
    Capture(1 layer, 1 call)
    """

    def __init__(self, *, weights: bool = False) -> None:
        self.weights = weights
        self._calls: dict[str, list[_CapturedHeads]] = {}

    def __call__(self, call: AttentionCall, heads: list[int]) -> Tensor:
        output = call.output[..., heads, :, :]
        inputs = _detached(call.inputs()) if self.weights else None
        captured = replace(
            call, output=output[..., :0], value=output[..., :0], inputs=lambda: _present(inputs)
        )
        self._calls.setdefault(call.layer, []).append(
            _CapturedHeads(heads, output.detach().clone(), captured)
        )
        return output

    def apply(self, call: AttentionCall, heads: list[int]) -> AttentionCall:
        self(call, heads)
        return call

    def find(self, call: AttentionCall, heads: list[int]) -> _CapturedHeads:
        """Return the last captured call to the layer of `call` with these heads and the same positions."""
        calls = self._calls.get(call.layer)
        if not calls:
            layers = ", ".join(self._calls) or "none; run the model in an edit block with this Capture first"
            raise ArgumentError(f"Patch: layer {call.layer!r} was not captured. Captured: {layers}.")
        first, last = call.first_query, call.first_query + call.output.shape[-2]
        for captured in reversed(calls):
            start = captured.call.first_query
            if start <= first and last <= start + captured.output.shape[-2]:
                break
        else:
            spans = [(c.call.first_query, c.call.first_query + c.output.shape[-2]) for c in calls]
            known = ", ".join(_positions(*span) for span in spans)
            raise ShapeError(
                f"Patch: {call.layer!r} computes {_positions(first, last)}, but the captured calls have "
                f"{known}. Use inputs of equal length in both runs."
            )
        missing = [head for head in heads if head not in captured.heads]
        if missing:
            raise ArgumentError(
                f"Patch: head {missing[0]} of {call.layer!r} was not captured; captured: {captured.heads}."
            )
        return captured

    def __repr__(self) -> str:
        layers, calls = len(self._calls), sum(map(len, self._calls.values()))
        return f"Capture({layers} layer{'s' * (layers != 1)}, {calls} call{'s' * (calls != 1)})"


def _positions(start: int, stop: int) -> str:
    return f"position {start}" if stop - start == 1 else f"positions {start} to {stop - 1}"


@dataclass(frozen=True)
class Patch(Intervention):
    """Replace heads with heads that a `Capture` recorded in another run (Vig et al. 2020; Meng et al. 2022).

    captured: the `Capture` from the other run. positions: the queries to patch, as in `Block`; None for all.
    weights: use the weights of the other run with the values of this run, in linear memory. Default: use the
        outputs of the other run.

    >>> import torch, regard
    >>> layer, clean, x = regard.models.SelfAttention(), regard.Capture(), torch.randn(3, 2)
    >>> with regard.edit(layer, 0, None, clean):
    ...     before = layer(x)
    >>> with regard.edit(layer, 0, None, regard.Patch(clean)):
    ...     torch.equal(layer(torch.zeros(3, 2)), before)
    True
    """

    captured: Capture
    positions: Positions = None
    weights: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.captured, Capture):
            raise DTypeError(f"Patch() got {type_name(self.captured)}; pass a Capture from another run.")
        _check("Patch", self.positions)

    def __call__(self, call: AttentionCall, heads: list[int]) -> Tensor:
        captured = self.captured.find(call, heads)
        new = self._from_weights(captured, call) if self.weights else self._from_output(captured, call)
        new = new[..., [captured.heads.index(head) for head in heads], :, :]
        old = call.output[..., heads, :, :]
        if not broadcasts(new.shape, old.shape):
            raise ShapeError(
                f"Patch: {call.layer!r} has heads of shape {tuple(old.shape)}, but the captured heads have "
                f"shape {tuple(new.shape)}. Use the same batch size in both runs."
            )
        rows = _selection(self.positions, call.first_query, old.shape[-2], old.device)
        return torch.where(rows[:, None], new.to(old), old)

    def _from_output(self, captured: _CapturedHeads, call: AttentionCall) -> Tensor:
        start = call.first_query - captured.call.first_query
        return captured.output[..., start : start + call.output.shape[-2], :]

    def _from_weights(self, captured: _CapturedHeads, call: AttentionCall) -> Tensor:
        value, inputs = call.inputs().value, captured.call.inputs()
        queries, keys, known = call.output.shape[-2], value.shape[-2], inputs.key.shape[-2]
        first_row = call.first_query - captured.call.first_query
        before = call.first_key - captured.call.first_key  # number of captured keys before those of this call
        after = known - before - keys
        if before == after == first_row == 0 and inputs.query.shape[-2] == queries:
            return captured.call.recompute(value=value)[..., captured.heads, :, :]
        # the captured call may cover more positions: a step of generate has one query and the keys up to it
        if before >= 0 and after >= 0:
            weights = captured.call.lazy_weights().rows(slice(first_row, first_row + queries))
            outside = value.new_ones(known, 1)
            outside[before : before + keys] = 0.0
            if bool(((weights @ outside).abs() <= _ROUNDING).all()):
                value = F.pad(value, (0, 0, before, after))
                value = value.repeat_interleave(call.heads // value.shape[-3], -3)
                return (weights @ value)[..., captured.heads, :, :]
        raise ShapeError(
            f"Patch: {call.layer!r} has {pluralize(queries, 'query')} and {pluralize(keys, 'key')}, but the "
            f"captured call has {inputs.query.shape[-2]} and {known}; with weights=True, this run must have "
            "all keys that the captured queries attend to. "
            "Use inputs of equal length in both runs."
        )


@dataclass(frozen=True)
class ResampleAblation(Intervention):
    """Replace the output of each head with its output for another text in the batch.

    The texts are rotated: text b receives the heads of text b + shift (Chan et al. 2022, *Causal scrubbing*).
    For a single text, use `Capture` and `Patch`.

    >>> import torch, regard
    >>> layer, x = regard.models.SelfAttention(), torch.randn(2, 3, 4)
    >>> before = layer(x)
    >>> with regard.edit(layer, 0, None, regard.ResampleAblation()):
    ...     torch.equal(layer(x), before.flip(0))
    True
    """

    shift: int = 1

    def __call__(self, call: AttentionCall, heads: list[int]) -> Tensor:
        output = call.output[..., heads, :, :]
        texts = output.shape[0] if output.dim() > 3 else 1
        if self.shift % texts == 0:
            raise ArgumentError(
                f"ResampleAblation(shift={self.shift}) needs a batch whose size does not divide the shift; "
                f"got a batch of {texts}. For a single text, use Capture and Patch."
            )
        return output.roll(-self.shift, 0)


def _detached(inputs: Inputs) -> Inputs:
    """Detach the inputs, and copy the tensors that later steps may overwrite, as in a static cache."""

    def keep(x: Tensor) -> Tensor:
        x = x.detach()
        return x.clone() if x.is_inference() or x._version > 0 else x

    return inputs._replace(query=keep(inputs.query), key=keep(inputs.key), value=inputs.value[..., :0])


def _present(inputs: Any) -> Inputs:
    if inputs is None:
        raise ArgumentError(
            "Patch(…, weights=True) needs the other run's weights; record them with Capture(weights=True)."
        )
    assert isinstance(inputs, Inputs)
    return inputs
