"""Generation, joined: one map per layer over prompt and generated tokens, of the steps that made them.

A step brings new queries and new keys; only these are kept. Beam search goes on with other rows after each
step, so each row has ancestors, and a finished sequence is the row whose ancestors were fed its tokens.

One map is right only if each step attends to the same keys as the steps before it, and to its own. Caches
that quantize, prune or rotate what they hold break this, so keys are compared: one number of each key in
every step, and all numbers with the keys of the last step. A layer whose keys change is refused.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.inspection.capture import CapturedCall, Rows


class Step(NamedTuple):
    """What one forward pass added to one layer."""

    turn: int  # the number of the forward pass
    query: Tensor  # b h q d
    key: Tensor  # b g q d, the new ones; all of them in cross-attention
    rows: Rows | None
    biases: tuple[Tensor, ...]
    offset: int  # where the first key of this step's mask stands among all
    keys: int  # that this step saw


@dataclass
class Layer:
    """The steps of one attention."""

    rules: CapturedCall  # of its first call, without its tensors
    steps: list[Step] = field(default_factory=list)
    before: Tensor | None = None  # keys that were in the cache already
    count: int = 0  # keys so far
    marks: Tensor | None = None  # one number of each key so far, b g n and room for more
    last: tuple[Tensor, int, int] | None = None  # the keys of the last step, the place of the first, how many
    turn: int = 0  # of the last step
    refusal: str | None = None  # why the steps cannot be joined

    def refuse(self, reason: str) -> None:
        """Join nothing, and let go what was kept."""
        self.refusal, self.before, self.marks, self.last = reason, None, None, None
        self.steps.clear()


class Generation:
    """All that `generate` does: forward passes, reorderings, and the calls of each attention."""

    def __init__(self) -> None:
        self.layers: dict[str, Layer] = {}
        self.plain: list[tuple[str, CapturedCall]] = []  # what has nothing to do with steps: encoders
        self.fed: list[Tensor | None] = []  # the tokens of each forward pass, b n
        self.parents: list[Tensor | None] = []  # which row of the pass before each row goes on from
        self.caches: weakref.WeakSet[Any] = weakref.WeakSet()  # that hold the keys of these steps
        self._next: Tensor | None = None

    # While it runs

    def forward(self, tokens: Tensor | None) -> None:
        """A forward pass begins, with these new tokens."""
        self.fed.append(None if tokens is None else tokens.detach().clone())
        self.parents.append(self._next)
        self._next = None

    def reordered(self, rows: Tensor) -> None:
        """The next pass goes on with these rows."""
        rows = rows.detach().clone()
        self._next = rows if self._next is None else self._next[rows]

    def cropped(self, tokens: int) -> None:
        """The last tokens are taken back."""
        for layer in self.layers.values():
            if layer.rules.kind == "self":
                layer.count -= tokens
                _drop(layer.steps, tokens)

    def add(self, name: str, kept: CapturedCall) -> None:
        """An attention was computed."""
        stepwise = kept.cached or kept.kind == "cross" or kept.query.shape[-2] < kept.key.shape[-2]
        if not self.fed or not stepwise:
            self.plain = [(other, call) for other, call in self.plain if other != name or not self.fed]
            self.plain.append((name, kept.owned()))
            return
        if name not in self.layers:
            self.layers[name] = self._begin(kept)
        layer, (queries, keys) = self.layers[name], (kept.query.shape[-2], kept.key.shape[-2])
        turn = len(self.fed) - 1
        if layer.refusal is not None:
            return
        if layer.steps and layer.rules.kind != kept.kind:
            return layer.refuse(
                f"step {turn + 1} reads {_SEQUENCE[kept.kind]}, and the first {_SEQUENCE[layer.rules.kind]}"
            )
        if kept.kind == "cross":
            if layer.steps and layer.steps[0].keys != keys:
                return layer.refuse(
                    f"step {turn + 1} attends to {keys} keys, and the first to {layer.steps[0].keys}"
                )
            self._recognise(layer, turn, kept.key, 0, keys, kept.key if layer.marks is None else None)
            if layer.refusal is not None:
                return
            key = kept.owned().key if not layer.steps else kept.key[..., :0, :]
            layer.steps.append(Step(turn, kept.query, key, kept.rows, kept.biases, 0, keys))
            return
        layer.count += queries
        new, end = kept.new, min(layer.count, keys)
        if new is None or new.shape[-2] != queries:
            new = kept.key[..., max(end - queries, 0) : end, :].clone()
        offset = max(layer.count - keys, 0)
        self._recognise(layer, turn, kept.key, offset, end, new)
        if layer.refusal is None:
            layer.steps.append(Step(turn, kept.query, new, kept.rows, kept.biases, offset, keys))

    def _begin(self, kept: CapturedCall) -> Layer:
        """A layer, with the keys that its cache brought along."""
        nothing = kept.query[..., :0, :0]
        layer = Layer(replace(kept, query=nothing, key=nothing, new=None, rows=None, biases=()))
        if kept.kind == "self":
            seen = kept.key.shape[-2]
            if kept.rows is not None:
                seen = min(seen, _reach(kept.rows))
            layer.count = max(seen - kept.query.shape[-2], 0)
            if layer.count:
                layer.before = kept.key[..., : layer.count, :].clone()
        return layer

    def _recognise(
        self, layer: Layer, turn: int, key: Tensor, offset: int, end: int, new: Tensor | None
    ) -> None:
        """Compare one number of each earlier key of a step with what it was, and note those of the new keys.

        offset: position of the step's first key among all. end: number of its keys that count. new: the last
            of them, if the step brings any.
        """
        known, earlier = layer.marks, end if new is None else end - new.shape[-2]
        if known is None:
            known, layer.turn = key[..., :earlier, 0].clone(), turn
        for later in range(layer.turn + 1, turn + 1):
            parents = self.parents[later]
            if parents is not None:
                known = layer.marks = known.index_select(0, parents.to(known.device))
        at, head = offset + earlier, turn % key.shape[-3]
        if known.shape[:-1] != key.shape[:-2] or at > known.shape[-1]:
            return layer.refuse(f"step {turn + 1} has keys of another shape than the steps before it")
        # one head in each step: in the end all of them are compared with the keys of the last step
        if earlier and not _same(key[..., head, :earlier, 0], known[..., head, offset:at]):
            return layer.refuse(f"the keys of earlier tokens changed before step {turn + 1}")
        if new is not None:
            count = at + new.shape[-2]
            if known.shape[-1] < count:
                room = known.new_empty(*known.shape[:-1], 2 * count)
                room[..., :at] = known[..., :at]
                known = layer.marks = room
            known[..., at:count] = new[..., 0]
        layer.turn, layer.last = turn, (key, offset, end)

    # When it has ended

    def refusal(self, name: str, whole: CapturedCall) -> str | None:
        """Why the steps of a layer are not one map, `whole`; None if they are."""
        layer = self.layers[name]
        if layer.last is not None and not self._as_in_the_last_step(layer, whole):
            layer.refuse("the keys of earlier tokens changed before the last step")
        return layer.refusal

    def _as_in_the_last_step(self, layer: Layer, whole: CapturedCall) -> bool:
        """Whether the keys of all steps equal those that the last step attended to."""
        assert layer.last is not None
        key, offset, end = layer.last
        key = key[..., :end, :]
        if all(parents is None for parents in self.parents):
            return _within(whole.key, key, -offset)
        turn, rows, at = layer.turn, None, layer.count
        for step in reversed(layer.steps):
            for later in range(turn, step.turn, -1):
                parents = self.parents[later]
                if parents is not None:
                    rows = parents if rows is None else parents[rows.to(parents.device)]
            turn = step.turn
            at = 0 if layer.rules.kind == "cross" else at - step.key.shape[-2]
            if not _within(_take(step.key, rows), key, at - offset):
                return False
        return layer.before is None or _within(_take(layer.before, rows), key, -offset)

    def paths(self, sequences: Tensor | None, inputs: int) -> Tensor | None:
        """The row of each finished sequence in each forward pass, (passes, n); −1 after its end.

        inputs: how many prompts or sources there were, each of which has equally many rows and sequences.
        None if nothing was ever reordered: each row is its own sequence.
        """
        if sequences is None or all(parents is None for parents in self.parents):
            return None
        found = torch.full((len(self.fed), len(sequences)), -1)
        for number, sequence in enumerate(sequences.cpu()):
            turn, row = self._find(sequence, number * inputs // len(sequences), inputs)
            while turn >= 0:
                found[turn, number] = row
                parents = self.parents[turn]
                row = row if parents is None else int(parents[row])
                turn -= 1
        return found

    def _find(self, sequence: Tensor, number: int, inputs: int) -> tuple[int, int]:
        """The last pass, and its row, whose ancestors were fed the beginning of this sequence of an input."""
        histories, best = torch.empty(0), (len(self.fed) - 1, 0)
        for turn, fed in enumerate(self.fed):
            if fed is None:
                if turn or len(self.fed) < 2 or self.fed[1] is None:
                    return best
                histories = self.fed[1].cpu()[:, :0]  # the prompt was vectors, and is not in the sequence
                continue
            parents = self.parents[turn]
            history = (
                fed.cpu() if not turn else histories[parents.cpu()] if parents is not None else histories
            )
            histories = history if not turn else torch.cat([history, fed.cpu()], -1)
            length = histories.shape[-1]
            if length < len(sequence):
                rows = len(histories) // inputs
                mine = histories[number * rows : (number + 1) * rows]
                same = (mine == sequence[:length]).all(-1).nonzero().flatten()
                if len(same):
                    best = turn, number * rows + int(same[0])
        return best

    def joined(self, name: str, paths: Tensor | None) -> CapturedCall:
        """All steps of a layer as one call."""
        layer = self.layers[name]
        steps = layer.steps
        chosen = [None if paths is None else paths[step.turn].to(step.query.device) for step in steps]
        query = torch.cat([_take(step.query, rows) for step, rows in zip(steps, chosen, strict=True)], -2)
        if layer.rules.kind == "cross":
            key, keys = _take(steps[0].key, chosen[0]), steps[0].keys
        else:
            before = [] if layer.before is None else [_take(layer.before, chosen[0])]
            new = [_take(step.key, rows) for step, rows in zip(steps, chosen, strict=True)]
            key, keys = torch.cat([*before, *new], -2), layer.count
        rows = _join_rows(steps, chosen, len(query), keys)
        biases = _join_biases(steps, chosen, keys)
        return replace(layer.rules, query=query, key=key, rows=rows, biases=biases, cached=False)


_SEQUENCE = {"self": "its own sequence", "cross": "another one"}


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal, where NaN equals itself."""
    if first.dtype is not second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first, second) or torch.equal(first.nan_to_num(), second.nan_to_num())


def _within(part: Tensor, whole: Tensor, at: int) -> bool:
    """Whether `whole` has these keys from position `at` on; positions outside of it are not compared."""
    first, last = max(at, 0), min(at + part.shape[-2], whole.shape[-2])
    return first >= last or _same(part[..., first - at : last - at, :], whole[..., first:last, :])


def _reach(rows: Rows) -> int:
    """The last key that any row sees."""
    stop = rows.stop if rows.dark is None else torch.where(rows.dark, 0, rows.stop)
    if rows.allowed is None:
        return int(stop.max())
    seen = rows.allowed if rows.dark is None else rows.allowed & ~rows.dark
    return min(int(stop.max()), int(seen.flatten(0, -2).any(0).nonzero().max()) + 1)


def _take(x: Tensor, rows: Tensor | None) -> Tensor:
    """These rows of the batch; zeros where there is none."""
    if rows is None or len(x) == 1 == len(rows):
        return x
    taken = x.index_select(0, rows.clamp(min=0)) if len(x) > 1 else x.expand(len(rows), *x.shape[1:])
    return taken * (rows >= 0).reshape(-1, *[1] * (x.dim() - 1)).to(x.dtype)


def _drop(steps: list[Step], tokens: int) -> None:
    """Take the last tokens of a layer back."""
    while tokens > 0 and steps:
        last = steps.pop()
        left = last.query.shape[-2] - tokens
        tokens -= last.query.shape[-2]
        if left > 0:
            steps.append(_cut(last, left))


def _cut(step: Step, left: int) -> Step:
    """The first tokens of a step."""

    def cut(x: Tensor) -> Tensor:
        return x if x.shape[-2] == 1 else x[..., :left, :]

    return step._replace(
        query=cut(step.query),
        key=cut(step.key),
        rows=None if step.rows is None else step.rows.each(cut),
        biases=tuple(map(cut, step.biases)),
    )


def _join_rows(steps: Sequence[Step], chosen: Sequence[Tensor | None], batch: int, keys: int) -> Rows:
    """Intervals over all keys; where some step has more to say, also a dense mask."""
    dense = any(step.rows is not None and step.rows.allowed is not None for step in steps)
    starts, stops, allowed, dark = [], [], [], []
    for step, rows in zip(steps, chosen, strict=True):
        size = (batch, 1, step.query.shape[-2], 1)
        here = step.rows
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=step.query.device)
        start, stop = (zero, zero + step.keys) if here is None else (_four(here.start), _four(here.stop))
        ended = zero.bool() if rows is None else (rows < 0)[:, None, None, None]
        # what a step does not see of its own keys' place cannot lie beyond what there was
        start = (_take(start, rows if len(start) > 1 else None) + step.offset).expand(size)
        stop = (_take(stop.clamp(max=step.keys), rows if len(stop) > 1 else None) + step.offset).expand(size)
        starts.append(start)
        stops.append(torch.where(ended, 0, stop))
        dark.append(
            zero.bool().expand(size)
            if here is None or here.dark is None
            else _four_rows(here.dark, rows, size)
        )
        if dense:
            part = torch.ones(1, 1, 1, step.keys, dtype=torch.bool, device=step.query.device)
            if here is not None and here.allowed is not None:
                part = _four(here.allowed)
            part = _take(part, rows if len(part) > 1 else None)
            part = part.expand(batch, part.shape[1], size[2], part.shape[-1])[..., : keys - step.offset]
            allowed.append(torch.nn.functional.pad(part, (step.offset, keys - step.offset - part.shape[-1])))
    any_dark = torch.cat(dark, -2)
    return Rows(
        torch.cat(starts, -2),
        torch.cat(stops, -2),
        torch.cat(allowed, -2) if dense else None,
        dark=any_dark if bool(any_dark.any()) else None,
    )


def _four_rows(x: Tensor, rows: Tensor | None, size: tuple[int, ...]) -> Tensor:
    x = _four(x)
    return _take(x, rows if len(x) > 1 else None).expand(size).bool()


def _four(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.dim())]


def _join_biases(steps: Sequence[Step], chosen: Sequence[Tensor | None], keys: int) -> tuple[Tensor, ...]:
    """Dense biases, row below row."""
    count = max(len(step.biases) for step in steps)
    more = [step.rows.bias if step.rows is not None else None for step in steps]
    found = []
    for number in range(count + (1 if any(part is not None for part in more) else 0)):
        parts = []
        for step, rows, extra in zip(steps, chosen, more, strict=True):
            bias = step.biases[number] if number < len(step.biases) else extra
            bias = step.query.new_zeros(1, 1, 1, step.keys) if bias is None else _four(bias)
            bias = _take(bias, rows if len(bias) > 1 else None)
            bias = bias.expand(*bias.shape[:2], step.query.shape[-2], bias.shape[-1])[
                ..., : keys - step.offset
            ]
            parts.append(torch.nn.functional.pad(bias, (step.offset, keys - step.offset - bias.shape[-1])))
        heads, batch = max(p.shape[1] for p in parts), max(p.shape[0] for p in parts)
        found.append(torch.cat([p.expand(batch, heads, *p.shape[-2:]) for p in parts], -2))
    return tuple(found)
