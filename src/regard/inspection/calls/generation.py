"""Join the steps of `generate` into one attention map per layer, over the prompt and the generated tokens.

Each step adds new queries and keys; only these are stored. Beam search reorders the rows after each step, so
every row has ancestors in earlier steps. A finished sequence is matched to the row whose ancestors received
its tokens as input.

The joined map is correct only if each step attends to the keys of all earlier steps and to its own. Caches
that quantize, prune or rotate keys violate this, so the keys are compared: one feature of each key in every
step, and all features in the last step. A layer whose keys change is not joined.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.inspection.calls.capture import CapturedCall
from regard.inspection.calls.mask_reading import RowMask


class Step(NamedTuple):
    """The queries and keys that one forward pass adds to one layer."""

    forward_pass: int
    query: Tensor  # b h q d
    key: Tensor  # b g q d, the new keys; in cross-attention all keys
    mask: RowMask | None
    biases: tuple[Tensor, ...]
    offset: int  # position of the mask's first key among all keys
    keys: int  # number of keys that this step attends to
    value: Tensor | None = None  # values of the new keys, b g q e


class LastKeys(NamedTuple):
    """The keys of a layer's last step."""

    key: Tensor
    offset: int  # position of the first of these keys among all keys
    valid: int  # number of valid keys


@dataclass
class LayerSteps:
    """The steps of one layer."""

    first_call: CapturedCall  # the first call, without its tensors
    steps: list[Step] = field(default_factory=list)
    initial_keys: Tensor | None = None  # keys in the cache before the first step
    initial_values: Tensor | None = None  # their values, if values are recorded
    count: int = 0  # number of keys so far
    first_features: Tensor | None = None  # one feature of each key so far, b g n, with spare capacity
    last: LastKeys | None = None
    last_pass: int = 0
    error: str | None = None  # why the steps cannot be joined

    def fail(self, reason: str) -> None:
        """Record why the steps cannot be joined, and free their tensors."""
        self.error, self.initial_keys, self.initial_values = reason, None, None
        self.first_features, self.last = None, None
        self.steps.clear()


class Generation:
    """The forward passes, reorderings and attention calls of one call to `generate`."""

    def __init__(self) -> None:
        self.layers: dict[str, LayerSteps] = {}
        self.unreadable: dict[str, str] = {}  # layers with an unreadable call, and the reason
        self.single_calls: list[tuple[str, CapturedCall]] = []  # calls outside the steps, e.g. of an encoder
        self.inputs: list[Tensor | None] = []  # new tokens of each forward pass, b n
        self.parents: list[Tensor | None] = []  # for each row, the row of the previous pass that it continues
        self.caches: weakref.WeakSet[Any] = weakref.WeakSet()  # caches that contain the keys of these steps
        self._next_parents: Tensor | None = None

    # During generation

    def on_forward(self, tokens: Tensor | None) -> None:
        """Record the start of a forward pass and its new tokens."""
        self.inputs.append(None if tokens is None else tokens.detach().clone())
        self.parents.append(self._next_parents)
        self._next_parents = None

    def on_reorder(self, rows: Tensor) -> None:
        """Record that the next forward pass continues the given rows of the previous one."""
        rows = rows.detach().clone()
        self._next_parents = rows if self._next_parents is None else self._next_parents[rows]

    def on_crop(self, tokens: int) -> None:
        """Drop the last tokens."""
        for layer in self.layers.values():
            if layer.first_call.kind == "self":
                layer.count -= tokens
                _drop_last(layer.steps, tokens)

    def add(self, name: str, call: CapturedCall) -> None:
        """Add an attention call made by a layer."""
        queries, keys = call.query.shape[-2], call.key.shape[-2]
        is_step = call.cached or call.kind == "cross" or queries < keys
        if not self.inputs or not is_step:
            if self.inputs:
                self.single_calls = [entry for entry in self.single_calls if entry[0] != name]
            self.single_calls.append((name, call.detached()))
            return
        if name not in self.layers:
            self.layers[name] = _first_step(call)
        layer, number = self.layers[name], len(self.inputs)
        if layer.error is not None:
            return
        first = layer.first_call.kind
        if layer.steps and first != call.kind:
            return layer.fail(f"step {number} is {call.kind}-attention, but step 1 is {first}-attention")
        if call.kind == "cross":
            if layer.steps and layer.steps[0].keys != keys:
                return layer.fail(
                    f"step {number} attends to {keys} keys, but step 1 attends to {layer.steps[0].keys}"
                )
            new = call.key if layer.first_features is None else None
            offset, end = 0, keys
        else:
            layer.count += queries
            new, end, offset = call.new_keys, min(layer.count, keys), max(layer.count - keys, 0)
            if new is None or new.shape[-2] != queries:
                new = call.key[..., max(end - queries, 0) : end, :].clone()
        self._compare(layer, call.key, offset, end, new)
        if layer.error is not None:
            return
        if call.kind == "cross":
            new = call.key[..., :0, :] if layer.steps else call.detached().key
        assert new is not None
        value = None if call.value is None else call.value[..., max(end - new.shape[-2], 0) : end, :].clone()
        layer.steps.append(Step(number - 1, call.query, new, call.mask, call.biases, offset, keys, value))

    def _compare(self, layer: LayerSteps, key: Tensor, offset: int, end: int, new: Tensor | None) -> None:
        """Compare a feature of each earlier key with its stored value; store the feature of each new key.

        offset: position of the step's first key among all keys. end: number of valid keys.
        new: the keys added by this step, at the end; None if there are none.
        """
        current = len(self.inputs) - 1
        known, earlier = layer.first_features, end if new is None else end - new.shape[-2]
        if known is None:
            known, layer.last_pass = key[..., :earlier, 0].clone(), current
        for later in range(layer.last_pass + 1, current + 1):
            parents = self.parents[later]
            if parents is not None:
                known = layer.first_features = known.index_select(0, parents.to(known.device))
        at, head = offset + earlier, current % key.shape[-3]
        if known.shape[:-1] != key.shape[:-2] or at > known.shape[-1]:
            return layer.fail(f"the keys of step {current + 1} differ in shape from earlier keys")
        # each step compares one head; at the end, all heads are compared with the keys of the last step
        if earlier and not _equal(key[..., head, :earlier, 0], known[..., head, offset:at]):
            return layer.fail(f"the keys of earlier tokens changed before step {current + 1}")
        if new is not None:
            count = at + new.shape[-2]
            if known.shape[-1] < count:
                grown = known.new_empty(*known.shape[:-1], 2 * count)
                grown[..., :at] = known[..., :at]
                known = layer.first_features = grown
            known[..., at:count] = new[..., 0]
        layer.last_pass, layer.last = current, LastKeys(key, offset, end)

    # After generation

    def error(self, name: str, joined: CapturedCall) -> str | None:
        """Return why the joined map of a layer is wrong, or None if it is correct."""
        layer = self.layers[name]
        if layer.last is not None and not self._equals_last_keys(layer, joined):
            layer.fail("the keys of earlier tokens changed before the last step")
        return layer.error

    def _equals_last_keys(self, layer: LayerSteps, joined: CapturedCall) -> bool:
        """Return whether the keys of all steps equal the keys that the last step attended to."""
        assert layer.last is not None
        key, offset = layer.last.key[..., : layer.last.valid, :], layer.last.offset
        if all(parents is None for parents in self.parents):
            return _contains(key, joined.key, -offset)
        current, rows, at = layer.last_pass, None, layer.count
        for step in reversed(layer.steps):
            for later in range(current, step.forward_pass, -1):
                parents = self.parents[later]
                if parents is not None:
                    rows = parents if rows is None else parents[rows.to(parents.device)]
            current = step.forward_pass
            at = 0 if layer.first_call.kind == "cross" else at - step.key.shape[-2]
            if not _contains(key, _select_rows(step.key, rows), at - offset):
                return False
        return layer.initial_keys is None or _contains(key, _select_rows(layer.initial_keys, rows), -offset)

    def paths(self, sequences: Tensor | None, inputs: int) -> Tensor | None:
        """Return the row of each finished sequence in each forward pass, (passes, n); −1 after its end.

        inputs: number of prompts or sources; each has the same number of rows and sequences.
        Returns None if nothing was reordered, because each row is then one sequence.
        """
        if sequences is None or all(parents is None for parents in self.parents):
            return None
        paths = torch.full((len(self.inputs), len(sequences)), -1)
        for number, sequence in enumerate(sequences.cpu()):
            current, row = self._last_row(sequence, number * inputs // len(sequences), inputs)
            while current >= 0:
                paths[current, number] = row
                parents = self.parents[current]
                row = row if parents is None else int(parents[row])
                current -= 1
        return paths

    def _last_row(self, sequence: Tensor, number: int, inputs: int) -> tuple[int, int]:
        """Return the last forward pass with a row whose tokens so far begin the sequence, and that row."""
        histories, last = torch.empty(0), (len(self.inputs) - 1, 0)
        for current, tokens in enumerate(self.inputs):
            if tokens is None:
                if current or len(self.inputs) < 2 or self.inputs[1] is None:
                    return last
                histories = self.inputs[1].cpu()[:, :0]  # a prompt of embeddings is not in the sequence
                continue
            if current == 0:
                histories = tokens.cpu()
            else:
                parents = self.parents[current]
                histories = histories if parents is None else histories[parents.cpu()]
                histories = torch.cat([histories, tokens.cpu()], -1)
            length = histories.shape[-1]
            if length < len(sequence):
                rows = len(histories) // inputs
                candidates = histories[number * rows : (number + 1) * rows]
                equal = (candidates == sequence[:length]).all(-1).nonzero().flatten()
                if len(equal):
                    last = current, number * rows + int(equal[0])
        return last

    def joined(self, name: str, paths: Tensor | None) -> CapturedCall:
        """Return all steps of a layer as one call."""
        layer = self.layers[name]
        steps = layer.steps
        paths_of_steps = [
            None if paths is None else paths[step.forward_pass].to(step.query.device) for step in steps
        ]
        pairs = list(zip(steps, paths_of_steps, strict=True))
        query = torch.cat([_select_rows(step.query, rows) for step, rows in pairs], -2)
        if layer.first_call.kind == "cross":
            key, keys = _select_rows(steps[0].key, paths_of_steps[0]), steps[0].keys
        else:
            initial = layer.initial_keys
            before = [] if initial is None else [_select_rows(initial, paths_of_steps[0])]
            new = [_select_rows(step.key, rows) for step, rows in pairs]
            key, keys = torch.cat([*before, *new], -2), layer.count
        mask, biases = _join_masks(pairs, len(query), keys), _join_biases(pairs, keys)
        call = replace(layer.first_call, query=query, key=key, mask=mask, biases=biases, cached=False)
        return replace(call, value=_join_values(pairs, layer.initial_values))


def _first_step(call: CapturedCall) -> LayerSteps:
    """Create an empty record of a layer's steps. Keys already in the cache become `initial_keys`."""
    empty = call.query[..., :0, :0]
    layer = LayerSteps(replace(call, query=empty, key=empty, new_keys=None, mask=None, biases=(), value=None))
    if call.kind == "self":
        keys = call.key.shape[-2] if call.mask is None else min(call.key.shape[-2], _last_visible(call.mask))
        layer.count = max(keys - call.query.shape[-2], 0)
        if layer.count:
            layer.initial_keys = call.key[..., : layer.count, :].clone()
            if call.value is not None:
                layer.initial_values = call.value[..., : layer.count, :].clone()
    return layer


def _equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal; NaN equals NaN."""
    if first.dtype is not second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first, second) or torch.equal(first.nan_to_num(), second.nan_to_num())


def _contains(key: Tensor, part: Tensor, at: int) -> bool:
    """Return whether `key` equals `part` from position `at` on; positions outside of `key` are ignored."""
    first, last = max(at, 0), min(at + part.shape[-2], key.shape[-2])
    return first >= last or _equal(part[..., first - at : last - at, :], key[..., first:last, :])


def _last_visible(mask: RowMask) -> int:
    """Return the number of keys up to and including the last visible key of any row."""
    stop = mask.stop if mask.uniform is None else torch.where(mask.uniform, 0, mask.stop)
    if mask.allowed is None:
        return int(stop.max())
    visible = mask.allowed if mask.uniform is None else mask.allowed & ~mask.uniform
    return min(int(stop.max()), int(visible.flatten(0, -2).any(0).nonzero().max()) + 1)


def _select_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """Select rows of the batch; an index of −1 gives a row of zeros."""
    if rows is None or len(x) == 1 == len(rows):
        return x
    selected = x.index_select(0, rows.clamp(min=0)) if len(x) > 1 else x.expand(len(rows), *x.shape[1:])
    return selected * (rows >= 0).reshape(-1, *[1] * (x.dim() - 1)).to(x.dtype)


def _select_shared(x: Tensor, rows: Tensor | None) -> Tensor:
    """Expand a mask or bias to four axes, and select its rows unless all rows share it."""
    x = x[(None,) * (4 - x.dim())]
    return _select_rows(x, rows if len(x) > 1 else None)


def _drop_last(steps: list[Step], tokens: int) -> None:
    """Drop the last tokens from the steps of a layer."""
    while tokens > 0 and steps:
        last = steps.pop()
        left = last.query.shape[-2] - tokens
        tokens -= last.query.shape[-2]
        if left > 0:
            steps.append(_first_tokens(last, left))


def _first_tokens(step: Step, count: int) -> Step:
    def cut(x: Tensor) -> Tensor:
        return x if x.shape[-2] == 1 else x[..., :count, :]

    return step._replace(
        query=cut(step.query),
        key=cut(step.key),
        mask=None if step.mask is None else step.mask.map(cut),
        biases=tuple(map(cut, step.biases)),
        value=None if step.value is None else step.value[..., :count, :],
    )


Steps = Sequence[tuple[Step, Tensor | None]]  # each step, and the batch rows to select from it


def _join_values(steps: Steps, initial: Tensor | None) -> Tensor | None:
    """Concatenate the values of all keys; None if they were not recorded."""
    values = [] if initial is None else [_select_rows(initial, steps[0][1])]
    for step, rows in steps:
        if step.value is None:
            return None
        values.append(_select_rows(step.value, rows))
    return torch.cat(values, -2)


def _join_masks(steps: Steps, batch: int, keys: int) -> RowMask:
    """Join masks as intervals over all keys, with a dense mask if any step has one."""
    dense = any(step.mask is not None and step.mask.allowed is not None for step, _ in steps)
    starts, stops, allowed, uniform = [], [], [], []
    for step, rows in steps:
        size = (batch, 1, step.query.shape[-2], 1)
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=step.query.device)
        mask = step.mask or RowMask(zero, zero + step.keys)
        # a stop beyond the keys of this step would include keys of later steps
        start, stop = (_select_shared(x, rows) for x in (mask.start, mask.stop.clamp(max=step.keys)))
        ended = zero.bool() if rows is None else (rows < 0)[:, None, None, None]
        starts.append((start + step.offset).expand(size))
        stops.append(torch.where(ended, 0, (stop + step.offset).expand(size)))
        rows_uniform = zero if mask.uniform is None else _select_shared(mask.uniform, rows)
        uniform.append(rows_uniform.expand(size).bool())
        if dense:
            every = torch.ones(1, 1, 1, step.keys, dtype=torch.bool, device=step.query.device)
            part = _select_shared(every if mask.allowed is None else mask.allowed, rows)
            allowed.append(_pad_keys(part.expand(batch, -1, -1, -1), step, keys))
    any_uniform = torch.cat(uniform, -2)
    return RowMask(
        torch.cat(starts, -2),
        torch.cat(stops, -2),
        torch.cat(allowed, -2) if dense else None,
        uniform=any_uniform if bool(any_uniform.any()) else None,
    )


def _join_biases(steps: Steps, keys: int) -> tuple[Tensor, ...]:
    """Concatenate the dense biases of all steps, including the biases contained in their masks."""
    count = max(len(step.biases) for step, _ in steps)
    mask_biases = [None if step.mask is None else step.mask.bias for step, _ in steps]
    count += any(bias is not None for bias in mask_biases)
    joined = []
    for number in range(count):
        parts = []
        for (step, rows), mask_bias in zip(steps, mask_biases, strict=True):
            bias = step.biases[number] if number < len(step.biases) else mask_bias
            bias = step.query.new_zeros(1, 1, 1, step.keys) if bias is None else bias
            parts.append(_pad_keys(_select_shared(bias, rows), step, keys))
        heads, batch = max(p.shape[1] for p in parts), max(p.shape[0] for p in parts)
        joined.append(torch.cat([p.expand(batch, heads, *p.shape[-2:]) for p in parts], -2))
    return tuple(joined)


def _pad_keys(x: Tensor, step: Step, keys: int) -> Tensor:
    """Pad the key axis of a step's tensor (b, h, q, k) to the total number of keys."""
    x = x.expand(*x.shape[:2], step.query.shape[-2], x.shape[-1])[..., : keys - step.offset]
    return torch.nn.functional.pad(x, (step.offset, keys - step.offset - x.shape[-1]))
