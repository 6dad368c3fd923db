"""Compare a watched model with its reference, and a model on regard with eager."""

import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import regard
from benchmarks.architectures.inputs import find_inputs, first_tensor, run
from benchmarks.architectures.models import build
from benchmarks.architectures.references import references
from regard.errors import ArgumentError

ROUNDED = 1e-4  # smaller output differences count as rounding, without a further check


@dataclass
class Result:
    """A row of the table."""

    name: str
    kernel: str = ""
    lazy: int = 0  # attentions stored as query and key
    dense: int = 0  # attentions stored as weights
    reference: str = ""  # "attentions" or "softmax"
    expected: int = 0  # attentions in the reference
    matched: int = 0  # reference attentions that equal a recorded one within 1e-5
    weights: float | None = None  # largest difference from the reference
    same: bool | None = None  # whether the output is bitwise equal while watched
    on_regard: float | None = None  # largest difference from eager's output
    rounding: float | None = None  # difference between eager and float64, if it explains `on_regard`
    leak: bool | None = None  # whether a model on regard attends to future tokens
    unseen: str = ""  # watch's report of attention it did not record
    note: str = ""
    failed: str = ""

    @property
    def complete(self) -> bool:
        return self.expected > 0 and self.matched == self.expected


@torch.no_grad()
def check(name: str) -> Result:
    """Check one architecture."""
    model = build(name)
    result = Result(name, getattr(model.config, "_attn_implementation", None) or "")
    batch = find_inputs(model)
    before = first_tensor(run(model, batch))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with regard.watch(model) as seen:
            during = first_tensor(run(model, batch))
    result.same = bool(torch.equal(before.nan_to_num(), during.nan_to_num()))
    result.unseen = seen.unseen
    storage = Counter(seen.storage(entry) for entry in seen)
    result.lazy, result.dense = storage["lazy"], storage["dense"]
    eager = build(name, "eager") if result.kernel not in ("", "eager") else model
    result.reference, expected, output = references(eager, batch)
    if not first_tensor(output).isfinite().all() and before.isfinite().all():
        result.note = f"Eager returns NaN in transformers; compared with {result.kernel}."
        eager = model
        result.reference, expected, output = references(model, batch)
    compare(seen, expected, batch, result)
    gap = float((first_tensor(output) - before).abs().max())
    if eager is not model and not result.complete and not gap < 1e-3:
        # transformers' own kernels disagree: compare the eager model with its own attentions
        with regard.watch(eager) as seen:
            run(eager, batch)
        compare(seen, expected, batch, result)
        result.note = f"Watched on eager, from which {result.kernel} differs by {gap:.0e} in transformers."
        result.kernel = "eager"
    host(model, batch, first_tensor(output), result)
    if result.on_regard is not None and not result.on_regard <= ROUNDED:
        explain_rounding(eager, batch, first_tensor(output), result)
    return result


def compare(seen: regard.Seen, expected: list[Tensor], batch: dict[str, Tensor], result: Result) -> None:
    """Compare the watched weights with the reference."""
    watched = [weights for entry in seen for weights in dense_weights(seen, entry)]
    distances = [distance(weights, watched, batch)[0] for weights in expected]
    result.expected, result.matched = len(expected), sum(d <= 1e-5 for d in distances)
    finite = [d for d in distances if d < float("inf")]
    result.weights = max(finite) if finite else None


def dense_weights(seen: regard.Seen, entry: str) -> list[Tensor]:
    """Return the weights of an entry; for a layer with windows, each window's weights, read from its map."""
    dense = seen[entry].dense()
    try:
        layer = seen.windows(entry)
    except ArgumentError:  # no windows
        return [dense]
    parts = []
    for windows in layer:
        raw = windows.weights.dense()  # w h q k
        raw = raw.reshape(len(windows.queries), *raw.shape[-3:])
        tokens = dense.shape[-1]
        image = windows.queries.amax(-1) // tokens
        rows, keys = windows.queries % tokens, windows.keys % tokens
        read = dense[image[:, None, None], :, rows[:, :, None], keys[:, None, :]].permute(0, 3, 1, 2)
        inside = (windows.queries >= 0)[:, :, None] & (windows.keys >= 0)[:, None, :]
        parts.append(torch.where(inside[:, None], read, raw))  # padding is not in the map
    return parts


def host(model: Any, batch: dict[str, Tensor], expected: Tensor, result: Result) -> None:
    """Run the model on regard, and compare its output with eager's."""
    regard.huggingface.enable()
    try:
        regard.huggingface.check(model)
        result.leak = False
        model.set_attn_implementation("regard")
        if model.config._attn_implementation == "regard":
            difference = (first_tensor(run(model, batch)) - expected).abs()
            difference = difference.flatten(2).amax(-1) if difference.dim() > 2 else difference
            result.on_regard = float(without_padding(difference, batch).max())
    except ArgumentError as error:
        result.leak = "future" in str(error)
        if "computes its own attention" not in str(error):
            result.note = f"{result.note} Not on regard: {error}".strip()
    except (AttributeError, ValueError) as error:
        print(f"{result.name} on regard: {str(error)[:150]}", file=sys.stderr)


def explain_rounding(eager: Any, batch: dict[str, Tensor], expected: Tensor, result: Result) -> None:
    """Record the distances of eager and regard from the model in float64, if regard is as close as eager."""
    exact = first_tensor(run(eager.double(), {name: _to_double(x) for name, x in batch.items()}))
    rounding, scale = float((expected - exact).abs().max()), float(exact.abs().max())
    if result.on_regard is not None and result.on_regard <= 2 * rounding:
        result.rounding = rounding
        result.note = (
            f"{result.note} Rounding: its outputs reach {scale:.0f}, and eager in float32 differs from eager "
            f"in float64 by {rounding:.0e}."
        ).strip()


def _to_double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def distance(expected: Tensor, seen: list[Tensor], batch: dict[str, Tensor]) -> tuple[float, int]:
    """Return the smallest difference between a reference and any watched weights, and their index."""
    best = (float("inf"), -1)
    for number, weights in enumerate(seen):
        candidates = [weights]
        if weights.dim() > 2:  # longformer: heads after queries; wavlm: mean over heads
            candidates += [weights.transpose(-3, -2), weights.mean(-3, keepdim=True).expand_as(weights)]
        if weights.dim() > 4:  # hiera: heads before windows
            candidates.append(weights.movedim(-3, 1))
        if weights.shape[-1] > expected.shape[-1]:  # t5gemma2: decoder tokens, then encoder tokens
            candidates.append(weights[..., : expected.shape[-1]])
        candidates.append(weights / weights.sum(-1, keepdim=True))  # granite_swa: excluding the sink
        for candidate in candidates:
            if candidate.shape[-1] > expected.shape[-1] and candidate.shape[:-2] == expected.shape[:-2]:
                queries, keys = expected.shape[-2:]  # cpmant truncates its prompt
                candidate = candidate[..., -queries:, -keys:]
            if candidate.shape[-1] != expected.shape[-1] or candidate.numel() != expected.numel():
                continue
            if candidate.shape != expected.shape:
                candidate = candidate.reshape(expected.shape)
            difference = (candidate - expected).abs().amax(-1)  # … q
            if difference.dim() == 3:
                difference = without_padding(difference.amax(1), batch)
            best = min(best, (float(difference.max()), number))
    return best


def without_padding(x: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Remove padding from (b, n): implementations differ there, but the result does not depend on it."""
    mask = batch.get("attention_mask")
    return x[mask.bool()] if mask is not None and mask.shape == x.shape else x
