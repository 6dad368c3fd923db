"""Windowed attention, as in Swin, stored as one map per layer over all tokens of an image.

A model with windows computes attention within each window, as a batch of small matrices. The attention map of
the layer is zero for pairs of tokens in different windows, so it is block-diagonal up to the order of the
tokens. Its memory is linear in the number of tokens: it stores the key intervals of each row's window, and
either query and key or, if these do not determine the weights, the weights of each window.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.inspection.calls.capture import CapturedCall, WindowPositions, lazy_problem
from regard.inspection.hooks.token_tracker import Tokens
from regard.mechanism.call.arguments import Call
from regard.mechanism.call.problem import Problem
from regard.mechanism.masks.algebra import BUILT_IN, CallShape, Mask, MaskTerm
from regard.mechanism.normalizers import Normalizer, Relu, Softmax, Softmax1
from regard.mechanism.scores import Dot, ScaledDot
from regard.mechanism.weights.weights import Weights

WINDOW_WEIGHTS = "window weights"  # the score of maps that store the weights of each window


class Windows(NamedTuple):
    """The weights of each window in a layer, and the positions of its queries and keys.

    weights: (w, h, q, k). queries: (w, q), the index of each query, image · (tokens per image) + position;
    −1 for padding. keys: (w, k), the same for keys. Returned by `Seen.windows`.
    """

    weights: Weights
    queries: Tensor
    keys: Tensor


def window_positions(queries: Tensor, keys: Tensor, batch: int, tokens: int) -> WindowPositions | None:
    """Return the positions of windows, or None if they are whole images or cannot form one map.

    queries, keys: token numbers (…, q) and (…, k). To form one map, each token must be in at most one window,
    and each window in one image.

    >>> import torch
    >>> from regard.inspection.calls.windows import window_positions
    >>> rows = torch.tensor([[0, 2], [1, 3]])
    >>> window_positions(rows, rows, batch=1, tokens=4).keys.shape
    torch.Size([2, 2])
    >>> window_positions(torch.arange(4)[None], torch.arange(4)[None], batch=1, tokens=4) is None
    True
    """
    queries, keys = queries.reshape(-1, queries.shape[-1]), keys.reshape(-1, keys.shape[-1])
    if len(queries) == batch and queries.shape[-1] == tokens:
        order = torch.arange(tokens, device=queries.device)
        if bool((queries % tokens == order).all()):
            return None
    if len(queries) != len(keys):
        return None
    for positions in (queries, keys):
        inside = positions[positions >= 0]
        if len(inside.unique()) != len(inside):
            return None
        images = positions.div(tokens, rounding_mode="floor")
        first = images.amax(-1, keepdim=True)
        if bool(((images != first) & (positions >= 0)).any()):
            return None
    return WindowPositions(queries, keys, batch, tokens)


def add_window_positions(call: CapturedCall, tokens: tuple[Tokens, Tokens] | None) -> CapturedCall:
    """Return a call with the positions of its windows, if the tokens of its queries and keys are known."""
    if tokens is None:
        return call
    (queries, batch, count, _), (keys, *_) = tokens
    positions = window_positions(queries, keys, batch, count)
    if positions is None or call.query.dim() < 3:
        return call
    entries = math.prod(call.query.shape[:-3])
    fits = positions.queries.shape == (entries, call.query.shape[-2])
    fits = fits and positions.keys.shape == (entries, call.key.shape[-2])
    return replace(call, windows=positions) if fits else call


class Segments(Mask):
    """Several intervals of keys per row: start and stop, (…, q, n).

    >>> import torch
    >>> from regard.inspection.calls.windows import Segments
    >>> print(Segments(torch.tensor([[0, 3], [1, 0]]), torch.tensor([[1, 5], [3, 0]])).draw(2, 5))
    ■··■■
    ·■■··
    """

    def __init__(self, start: Tensor, stop: Tensor) -> None:
        self.start, self.stop = start, stop

    def terms(self, call_shape: CallShape) -> tuple[MaskTerm, ...]:
        start, stop = (end.to(call_shape.device) for end in (self.start, self.stop))
        count = start.shape[-1]
        return tuple(MaskTerm(start[..., i : i + 1], stop[..., i : i + 1]) for i in range(count))


BUILT_IN.add(Segments)  # its terms need no validation


@dataclass
class WindowedLayer:
    """The calls to one layer with windows; a model may make one call per window size."""

    calls: list[CapturedCall]
    run: int = 0  # index of the model call that ran the layer

    @property
    def batch(self) -> int:
        return self._first.batch

    @property
    def _first(self) -> WindowPositions:
        positions = self.calls[0].windows
        assert positions is not None
        return positions

    def accepts(self, call: CapturedCall) -> bool:
        """Return whether a call computes more windows of the same images."""
        positions, first = call.windows, self._first
        if positions is None or (positions.batch, positions.tokens) != (first.batch, first.tokens):
            return False
        if call.query.shape[-3] != self.calls[0].query.shape[-3]:
            return False
        known = torch.cat([other.windows.queries.flatten() for other in self.calls if other.windows])
        return not bool(torch.isin(positions.queries[positions.queries >= 0], known).any())

    def weights(self) -> Weights:
        """Return the lazy weights between all tokens, (b, h, tokens, tokens)."""
        inputs: dict[str, Tensor] = {}
        for number, call in enumerate(self.calls):
            inputs |= {f"{name}{number}": tensor for name, tensor in call.inputs().items()}
        return Weights(self._problem, None, (self.batch, self.calls[0].query.shape[-3]), inputs=inputs)

    def windows(self) -> list[Windows]:
        """Return the weights of the windows, for each call."""
        parts = [(call, call.windows) for call in self.calls]
        return [
            Windows(call.weights(), positions.queries, positions.keys)
            for call, positions in parts
            if positions is not None
        ]

    def _problem(self) -> Problem:
        """Build the problem of the map, on first use."""
        with torch.no_grad():
            mask = Segments(*self._segments())
            if all(map(_is_dot, self.calls)) and len({_options(call) for call in self.calls}) == 1:
                return self._dot_problem(mask)
            return self._weights_problem(mask)

    def _dot_problem(self, mask: Mask) -> Problem:
        """Build the problem of a map whose weights are computed from query and key, in token order."""
        call = self.calls[0]
        query = self._summed(lambda call, at: at.scatter_queries(call.query))
        key = self._summed(lambda call, at: at.scatter_keys(call.key))
        normalize: Normalizer = Softmax() if call.sink is None else Softmax1(call.sink.detach())
        return lazy_problem(query, key, Call(ScaledDot(call.scale, call.softcap), mask, None, normalize))

    def _weights_problem(self, mask: Mask) -> Problem:
        """Build the problem of a map with stored weights.

        The query is a row of weights, and the key is the one-hot vector of its index in the window, so their
        product is the weight.
        """
        slots = max(call.key.shape[-2] for call in self.calls)

        def weight_rows(call: CapturedCall, at: WindowPositions) -> Tensor:
            weights = call.weights().dense()
            weights = weights.reshape(len(at.queries), *weights.shape[-3:])
            visible = (at.keys >= 0).sum(-1).reshape(-1, 1, 1, 1)  # Relu divides by the number of keys
            return at.scatter_queries(
                torch.nn.functional.pad(weights * visible, (0, slots - weights.shape[-1]))
            )

        def one_hot_keys(call: CapturedCall, at: WindowPositions) -> Tensor:
            keys = at.keys.shape[-1]
            eye = torch.eye(slots, dtype=call.query.dtype, device=call.query.device)[:keys]
            return at.scatter_keys(eye.expand(len(at.keys), 1, keys, slots))

        query, key = self._summed(weight_rows), self._summed(one_hot_keys)
        problem = lazy_problem(query, key, Call(Dot(), mask, None, Relu()))
        return problem.with_config(score=WINDOW_WEIGHTS)

    def _summed(self, part: Callable[[CapturedCall, WindowPositions], Tensor]) -> Tensor:
        """Sum the tensors of all calls. Each token belongs to one call; in all others it is zero."""
        total: Tensor | None = None
        for call in self.calls:
            assert call.windows is not None
            x = part(call, call.windows)
            total = x if total is None else total + x
        assert total is not None
        return total

    def _segments(self) -> tuple[Tensor, Tensor]:
        """Return start and stop of the key intervals in the window of each token, (b, 1, tokens, n)."""
        windows = [call.windows for call in self.calls if call.windows is not None]
        ends = [runs(at.keys.where(at.keys < 0, at.keys % at.tokens)) for at in windows]
        size = max(start.shape[-1] for start, _ in ends)
        starts, stops = list[Tensor](), list[Tensor]()
        for at, (start, stop) in zip(windows, ends, strict=True):
            for end, moved in ((start, starts), (stop, stops)):
                padded = torch.nn.functional.pad(end, (0, size - end.shape[-1]))
                rows = padded[:, None, None, :].expand(-1, 1, at.queries.shape[-1], -1)
                moved.append(at.scatter_queries(rows))
        return torch.stack(starts).sum(0), torch.stack(stops).sum(0)  # see `_summed`


def runs(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the runs of consecutive positions in each row, as starts and stops (w, n); −1 is ignored.

    >>> import torch
    >>> from regard.inspection.calls.windows import runs
    >>> runs(torch.tensor([[4, 0, 1, 5, -1]]))
    (tensor([[0, 4]]), tensor([[2, 6]]))
    """
    ordered = positions.sort(-1).values
    valid = ordered >= 0
    before = torch.nn.functional.pad(ordered[:, :-1], (1, 0), value=-2)
    after = torch.nn.functional.pad(ordered[:, 1:], (0, 1), value=-2)
    first, last = valid & (before != ordered - 1), valid & (after != ordered + 1)
    first |= valid & (before < 0)  # the sorted padding, −1, would otherwise join a run that starts at 0
    count = int(first.sum(-1).max()) if first.numel() else 0
    ends = []
    for edge, offset in ((first, 0), (last, 1)):
        number = (edge.cumsum(-1) - 1).where(edge, count)
        end = ordered.new_zeros(len(ordered), count + 1).scatter(1, number, ordered + offset)
        ends.append(end[:, :count])
    return ends[0], ends[1]


def _is_dot(call: CapturedCall) -> bool:
    """Return whether query and key alone determine the weights, and no key is padding."""
    assert call.windows is not None
    plain = call.mask is None and not call.biases and not call.dense
    return plain and call.query.shape[-3] == call.key.shape[-3] and bool((call.windows.keys >= 0).all())


def _options(call: CapturedCall) -> tuple[float | None, float | None, int | None]:
    return call.scale, call.softcap, None if call.sink is None else id(call.sink)
