"""Lazy weights detect changed inputs, keep only the memory they need, and do not depend on torch's modes."""

import contextlib
import copy
import functools
import gc
import itertools
import os
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from tests.cases import TABLE, Case, looped, rotated
from tests.mechanism.weights.calls import B, Call, G, K, Q, attend, close, entropy, randn, same

# Inputs modified in place

OPERATIONS: dict[str, Callable[[regard.Weights], Any]] = {
    "dense": lambda weights: weights.dense(),
    "numpy": lambda weights: np.asarray(weights),
    "row": lambda weights: weights[..., 0, :],
    "picked": lambda weights: weights[..., [0], :],
    "scores": lambda weights: weights.scores(),
    "topk": lambda weights: weights.topk(1),
    "argmax": lambda weights: weights.argmax(-1),
    "entropy": lambda weights: weights.entropy(),
    "received": lambda weights: weights.received(),
    "pool": lambda weights: weights.pool(2, 2),
    "rows": lambda weights: weights.rows(slice(1)),
    "part": lambda weights: weights.part([slice(1), slice(1)]),
    "tiles": lambda weights: list(weights.tiles()),
    "check_inputs": lambda weights: weights.check_inputs(),
    "product": lambda weights: weights @ randn(K),
    "transposed": lambda weights: weights.T @ randn(Q),
    "heads": lambda weights: weights.heads(0),
    "mean": lambda weights: weights.mean("heads"),
    "detach": lambda weights: weights.detach(),
    "to": lambda weights: weights.to("cpu"),
    "save": lambda weights: weights.save(os.devnull),
    "deepcopy": lambda weights: copy.deepcopy(weights),
    "pickle": lambda weights: pickle.dumps(weights),
}


@looped("operation", OPERATIONS)
@looped("changed", ["query", "key"])
def test_changed_tensors_are_detected(operation, changed):
    query, key, value = Call().inputs()
    weights = regard.attend(query, key, value, score=regard.Dot())[1]
    {"query": query, "key": key}[changed].mul_(2)
    with pytest.raises(regard.StaleError, match=changed):
        OPERATIONS[operation](weights)
    assert weights.shape == (B, G, Q, K)  # the shape is still available
    assert repr(weights)


HELD = [
    *(Call(case) for case in TABLE[2::9]),
    *(Call(Case(score="dot"), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    *(Call(Case(mask=mask, bias=bias)) for mask, bias in (("tensor", "dense"), ("no mask", "relative"))),
    Call(Case(normalize="sinks")),
]


@rotated(call=HELD, part=["all", "detached", "heads"])
def test_weights_are_never_silently_wrong(call, part):
    query, key, value = call.inputs()
    options = call.options()
    held = [x for x in (query, key, options["mask"], options["bias"]) if isinstance(x, Tensor)]
    held += [getattr(options["bias"], "vector", query), getattr(options["normalize"], "score", query)]
    weights = regard.attend(query, key, value, **options)[1]
    dense = weights.dense().detach()
    if part == "detached":
        weights = weights.detach()
    elif part == "heads" and call.lead:
        weights = weights.heads(slice(None))
    with torch.no_grad():
        for tensor in held:
            if isinstance(tensor, Tensor):
                tensor.zero_()
    with contextlib.suppress(regard.StaleError):
        close(weights.dense().detach(), dense, call.dtype)


def test_changes_elsewhere_do_not_matter():
    query, key, value = Call().inputs()
    options = {"score": regard.Dot(), "mask": randn(G, Q, K) > 0.3, "bias": randn(Q, K)}
    output, weights = regard.attend(query, key, value, **options)
    dense = weights.dense()
    top = weights.topk(2).values
    for seen in (value, output, weights.dense(), weights.scores(), top, weights.received(), weights[0, 0]):
        seen.zero_()
    weights.numpy().fill(0)
    assert torch.equal(weights.dense(), dense)


def test_an_optimizer_step_is_detected():
    sink = regard.Sink(G)
    query, key, value = Call(dtype=torch.float32).inputs()
    weights = regard.attend(query, key, value, normalize=sink)[1]
    with torch.no_grad():
        sink.score.add_(1)
    with pytest.raises(regard.StaleError, match="sink"):
        weights.dense()


@pytest.mark.parametrize("score", ["dot", "scaled dot", "additive"])
def test_inference_mode(score, tmp_path):
    call = Call(Case(score=score, mask="causal", bias="alibi"))
    expected = call.formulas()[1]
    options = call.options()
    with torch.no_grad(), torch.inference_mode():
        inside = regard.attend(*(t.clone() for t in call.inputs()), **options)[1]
        close(inside.dense(), expected)
        close(inside.heads([1]).dense(), expected[:, [1]])
        close(call.weights()[0, 1], expected[0, 1])
        outside = call.weights()
    for weights in (inside.detach(), outside):
        close(weights.dense(), expected)
        close(weights[0, 1, 2], expected[0, 1, 2])
        close(weights.mean("heads").entropy(), entropy(expected.mean(1)))
        same(copy.deepcopy(weights), weights)
        same(regard.Weights.load(weights.save(tmp_path / "weights")), weights)
        x = randn(K, 3).requires_grad_()
        close(*(torch.autograd.grad((w @ x).sum(), x)[0] for w in (weights, expected)))
    with torch.inference_mode():
        close(attend(mask="causal").heads(0).dense(), Call(Case(mask="causal")).formulas()[1][:, 0])


def test_memory_is_linear_in_the_length():
    short, long = (
        regard.attend(x, x, x, mask=regard.Causal())[1].held
        for x in (torch.randn(64, 8), torch.randn(128, 8))
    )
    assert long == 2 * short


# Memory

WAYS: dict[str, dict[str, Any]] = {
    "fast path": {},
    "fast path, masked": {"mask": regard.Padding(torch.tensor([4, 5]))},
    "general path": {"bias": torch.zeros(5, 5)},
    "tiled": {"implementation": "tiled"},
    "reference": {"implementation": "reference"},
}
CUTS: dict[str, Callable[[regard.Weights], Any]] = {
    "before a look": lambda weights: weights,
    "after a look": lambda weights: (weights.detach().topk(1), weights)[1],
    "heads": lambda weights: weights.heads([0, 2]),
    "batch": lambda weights: weights.batch(1),
    "mean": lambda weights: weights.mean("heads"),
    "detach": lambda weights: weights.detach(),
    "to": lambda weights: weights.to("cpu"),
    "transpose": lambda weights: weights.T,
    "copy": copy.deepcopy,
}


class Node(torch.autograd.Function):
    """An autograd node that is identified by a tensor attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Any) -> Tensor:
        ctx.mark = mark
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


class Mark:
    """An object whose lifetime is observed."""


def test_weights_release_value_and_its_graph() -> None:
    gone, kept = {}, []
    for way, part in itertools.product(WAYS, CUTS):
        leaf, mark = torch.randn(2, 3, 5, 8, requires_grad=True), Mark()
        query, key = leaf.detach() + 1, leaf.detach() + 2
        value = Node.apply(leaf, mark)
        weights = regard.attend(query, key, value, **WAYS[way])[1]
        gone[way, part] = weakref.ref(mark), weakref.ref(value)
        kept.append(CUTS[part](weights))
    del value, mark, weights, leaf
    gc.collect()
    assert all(part is not None for part in kept)
    alive = [name for name, refs in gone.items() if any(ref() is not None for ref in refs)]
    assert not alive


def storages() -> dict[int, int]:
    """Return the sizes of live tensors, excluding frozen ones."""
    gc.collect()
    tensors = (x for x in gc.get_objects() if type(x) is Tensor and x.layout is torch.strided)
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in found}


def test_held_counts_all_memory_kept_alive() -> None:
    """After everything else is deleted, `held` counts exactly the remaining tensors."""
    for way, dtype in itertools.product(WAYS, (torch.float32, torch.bfloat16)):
        x = torch.randn(2, 3, 5, 8, dtype=dtype)
        regard.attend(x, x, x, **WAYS[way])[1].topk(1)  # fill the caches
    old = storages()
    gc.freeze()
    for way, dtype in itertools.product(WAYS, (torch.float32, torch.bfloat16)):
        before = old | storages()
        query, key, value = (torch.randn(2, 3, 5, 8).to(dtype) for _ in range(3))
        weights = regard.attend(query, key, value, **WAYS[way])[1]
        weights.topk(1)
        del query, key, value
        after = storages()
        cached = {t.untyped_storage()._cdata: t.untyped_storage() for t in weights.problem.tensors.values()}
        shared = sum(storage.nbytes() for name, storage in cached.items() if name in before)
        new = sum(size for name, size in after.items() if name not in before)
        assert weights.held - shared == new, (way, dtype)


# Grad modes and autocast

READS: dict[str, Callable[[regard.Weights], Tensor]] = {
    "dense": lambda weights: weights.dense(),
    "scores": lambda weights: weights.scores(),
    "tau": lambda weights: weights.tau,
    "row": lambda weights: weights[:, :, 3],
    "pairs": lambda weights: weights[0, 0, [1, 2], [3, 4]],
    "boolean": lambda weights: weights[torch.tensor([True, False], device="cpu")],
    "top": lambda weights: weights.topk(3).values,
    "all in order": lambda weights: weights.topk(40).values,
    "aligned": lambda weights: weights.argmax(-1),
    "entropy": lambda weights: weights.entropy(),
    "received": lambda weights: weights.received(),
    "pool": lambda weights: weights.pool(4, 4),
    "pool of a part": lambda weights: weights.pool(2, 5, within=(slice(3, 9), slice(4, 30))),
    "product": lambda weights: weights @ FACTOR,
    "transposed": lambda weights: weights.T @ FACTOR,
    "mean": lambda weights: weights.mean("heads").dense(),
    "heads": lambda weights: weights.heads([1, 2]).dense(),
    "batch": lambda weights: weights.batch(1).dense(),
    "rollout": lambda weights: regard.rollout([weights, weights], queries=[1, 2]),
    "mean rollout": lambda weights: regard.rollout([weights, weights]),
    "numpy": lambda weights: torch.from_numpy(weights.numpy()),
    "copy": lambda weights: copy.deepcopy(weights).dense(),
}
FACTOR = torch.randn(40, 3, generator=torch.Generator().manual_seed(3))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "default float64": lambda: default_dtype(torch.float64),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
}
READ: dict[str, dict[str, Any]] = {
    "fused": {},
    "causal": {"mask": regard.Causal()},
    "biased": {"bias": regard.ALiBi(4), "mask": torch.ones(40, 40, dtype=torch.bool).tril()},
    "tiled": {"implementation": "tiled"},
    "reference": {"implementation": "reference", "normalize": regard.Entmax(1.3)},
    "sigmoid": {"normalize": regard.Sigmoid(), "implementation": "tiled"},
}


def read_from() -> tuple[Tensor, Tensor, Tensor]:
    x, y = (torch.randn(2, 4, 40, 16, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    return x, y, y


@functools.cache
def expected_reads(options: str) -> dict[str, Tensor]:
    weights = regard.attend(*read_from(), **READ[options])[1]
    return {name: read(weights) for name, read in READS.items()}


@pytest.mark.parametrize("mode", MODES)
@looped("options", READ)
@pytest.mark.sampled(2)
def test_results_do_not_depend_on_the_grad_mode_of_the_read(options: str, mode: str) -> None:
    expected = expected_reads(options)
    weights = regard.attend(*read_from(), **READ[options])[1]
    with MODES[mode]():
        inside = {name: read(weights) for name, read in READS.items()}
    for name, seen in inside.items():
        assert (seen.dtype, seen.device) == (expected[name].dtype, expected[name].device), name
        assert torch.equal(seen, expected[name]), name
    assert torch.equal(weights.dense(), expected["dense"])  # independent of an earlier read's mode


@looped("options", READ)
def test_weights_that_were_made_under_autocast(options: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = regard.attend(*read_from(), **READ[options])[1]
        inside = {name: read(weights) for name, read in READS.items()}
    rounded = regard.attend(*(t.bfloat16() for t in read_from()), **READ[options])[1]
    for name, read in READS.items():
        assert torch.equal(inside[name], read(weights)), name
        torch.testing.assert_close(inside[name], read(rounded), rtol=1e-6, atol=1e-6)


@looped("mode", ["autocast", "inference", "no_grad"])
@looped("implementation", [None, "tiled", "reference"])
def test_a_first_read_in_another_mode_keeps_the_graph(implementation: str | None, mode: str) -> None:
    x = torch.randn(2, 4, 40, 16, requires_grad=True)

    def gradient(weights: regard.Weights) -> Tensor:
        return torch.autograd.grad(weights.dense().square().sum(), x)[0]

    weights = regard.attend(x, x, x, implementation=implementation)[1]
    with MODES[mode]():
        weights.topk(2)
        weights.pool(3, 3)
    expected = gradient(regard.attend(x, x, x, implementation=implementation)[1])
    assert torch.equal(gradient(weights), expected)


def test_inputs_modified_before_the_first_read_are_detected() -> None:
    """Covers the fast path, where nothing has been prepared yet."""
    for name in ("query", "key"):
        tensors = {name: torch.randn(2, 3, 5, 8) for name in ("query", "key", "value")}
        weights = regard.attend(**tensors)[1]
        tensors["value"].zero_()
        expected = regard.attend(**tensors)[1].dense()
        assert torch.equal(regard.attend(**tensors)[1].dense(), expected)
        tensors[name].zero_()
        with pytest.raises(regard.StaleError, match=name):
            weights.dense()
