"""Execution and `explain` follow the same rules."""

import graphlib
import os
import sys

import pytest
import torch

import regard
from regard.mechanism import dispatch, fused, operator, reference, tiled
from tests.custom import LearnedSoftmax, OwnSoftmax
from tests.fresh import run_fresh

pytestmark = pytest.mark.skipif(
    not fused.available() or dispatch.FROM_ENVIRONMENT is not None, reason="needs all implementations"
)

X = torch.randn(2, 4, 6, 8)
NO_KERNEL = {"Hard": regard.Hard(), "Entmax": regard.Entmax(1.3), "OwnSoftmax": OwnSoftmax()}
FIVE_TERMS = regard.Prefix(1) | regard.Prefix(2) | regard.Prefix(3) | regard.Prefix(4) | regard.Window(1)


class Subclass(torch.Tensor):
    pass


CALLS = {
    "plain": ({}, X),
    "learned": ({"normalize": LearnedSoftmax()}, X),
    "bfloat16, two axes, entmax": (
        {"normalize": regard.Entmax15(), "mask": regard.Causal()},
        X[0, 0].bfloat16(),
    ),
    "float64": ({}, X.double()),
    "bfloat16": ({}, X.bfloat16()),
    "two axes": ({}, X[0, 0]),
    "no kernel": ({"normalize": regard.Hard()}, X),
    "four biases": ({"bias": [torch.zeros(6, 6)] * 4}, X),
    "five biases": ({"bias": [torch.zeros(6, 6)] * 5}, X),
    "two relative biases": ({"bias": [regard.ALiBi(4)] * 2}, X),
    "three relative biases": ({"bias": [regard.ALiBi(4)] * 3}, X),
    "mask": ({"mask": regard.Causal() & regard.Window(3)}, X),
    "five mask terms": ({"mask": FIVE_TERMS}, X),
    "ten axes": ({}, X[(None,) * 6]),
    "eleven axes": ({}, X[(None,) * 7]),
    "function": ({"score": lambda query, key: query @ key.mT}, X),
    "additive": ({"score": regard.Additive(8, 8, 5)}, X),
    "dropout": ({"dropout": 0.5}, X),
    "sink": ({"normalize": regard.Softmax1()}, X),
    "tiled": ({"implementation": "tiled"}, X),
    "reference": ({"implementation": "reference"}, X),
    "subclass": ({}, X.as_subclass(Subclass)),
}


@pytest.fixture
def ran(monkeypatch):
    """Return the implementations that have run, in order, excluding calls cached in the kernels."""
    operator._CACHE.clear()
    names = []

    def record(name, function):
        def call(*args, **kwargs):
            names.append(name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(fused, "forward", record("fused", fused.forward))
    monkeypatch.setattr(tiled, "forward", record("tiled", tiled.forward))
    monkeypatch.setattr(reference, "attention", record("reference", reference.attention))
    monkeypatch.setattr(fused.Encoded, "run", record("fused", fused.Encoded.run))
    monkeypatch.setattr(fused.Prepared, "forward", record("fused", fused.Prepared.forward))
    return names


@pytest.mark.parametrize(("options", "x"), CALLS.values(), ids=CALLS)
def test_explain_names_the_implementation_that_runs(options, x, ran):
    expected = regard.explain(x, x, x, **options).implementation
    assert not ran  # nothing is computed
    regard.attention(x, x, x, **options)
    assert set(ran) == {expected}


def test_kernel_limits_are_named():
    explanation = str(regard.explain(X, X, X, bias=[torch.zeros(6, 6)] * 5))
    assert "5 dense biases" in explanation
    assert "at most 4" in explanation
    x = X[(None,) * 7]
    assert "11 axes" in str(regard.explain(x, x, x))
    assert "float64 has no kernel" in str(regard.explain(X.double(), X.double(), X.double()))


def test_nonfinite_results_are_recomputed_by_tiles(ran):
    x = X.clone()
    x[0, 0, 0, 0] = torch.nan
    assert "tiled implementation recomputes" in str(regard.explain(x, x, x))
    regard.attention(x, x, x)
    assert ran[-1] == "tiled"


def reads_values(query, key):
    return (query @ key.mT) * float(query.abs().max())


class ReadsValues(regard.Rule):
    """A mask whose ranges depend on the values of its arguments."""

    def ranges(self, rows, keys):
        return (rows * 0, rows + 1) if int(rows.max()) > 3 else (rows * 0, rows * 0 + keys)


@pytest.mark.parametrize("options", [{"score": reads_values}, {"mask": ReadsValues()}], ids=["score", "mask"])
def test_custom_classes_that_read_values_are_explained(options, ran):
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    expected = regard.explain(X, X, X, dropout=0.5, generator=generator, **options).implementation
    assert torch.equal(generator.get_state(), before)
    regard.attention(X, X, X, **options)
    assert set(ran) == {expected}


def test_subclasses_of_other_axes_are_explained():
    query, key = X[0, 0].as_subclass(Subclass), X.as_subclass(Subclass)
    assert regard.explain(query, key, key).implementation == "reference"


@pytest.mark.parametrize("place", [0, 1, 2, 3], ids=["query", "key", "value", "bias"])
def test_a_subclass_among_plain_tensors_runs_on_the_reference(place, ran):
    tensors = [X, X, X, torch.zeros(6, 6)]
    tensors[place] = tensors[place].as_subclass(Subclass)
    assert regard.explain(*tensors[:3], bias=tensors[3]).implementation == "reference"
    regard.attention(*tensors[:3], bias=tensors[3])
    assert set(ran) == {"reference"}


def test_a_cached_call_reads_the_tensors_of_each_call():
    operator._CACHE.clear()
    first, second = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    for x in (first, second, first):
        expected = regard.attention(x, x, x, implementation="reference")
        torch.testing.assert_close(regard.attention(x, x, x), expected)
    assert len(operator._CACHE) == 1


@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_cached_calls_of_other_strides_are_distinguished(place):
    operator._CACHE.clear()
    inputs = [torch.randn(2, 4, 6, 8) for _ in range(3)]
    expected = regard.attention(*inputs, implementation="reference")
    for layout in (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x):
        tensors = [layout(x) if i == place else x for i, x in enumerate(inputs)]
        torch.testing.assert_close(regard.attention(*tensors), expected)
    assert len(operator._CACHE) == 2


def test_broadcast_inputs_take_the_cached_path_forward_and_the_general_one_backward():
    operator._CACHE.clear()
    query = torch.randn(2, 4, 6, 8, requires_grad=True)
    key = torch.randn(1, 1, 5, 8, requires_grad=True)
    value = torch.randn(1, 2, 5, 8, requires_grad=True)
    regard.attention(query, key, value).square().sum().backward()
    grads = [x.grad.clone() for x in (query, key, value)]
    doubles = [x.detach().double().requires_grad_() for x in (query, key, value)]
    regard.attention(*doubles, implementation="reference").square().sum().backward()
    for grad, double in zip(grads, doubles, strict=True):
        torch.testing.assert_close(grad.double(), double.grad, rtol=1e-5, atol=1e-5)


def called_files(function):
    """Return the files of regard that a function runs, each with the files that it calls."""
    calls: dict[str, set[str]] = {}
    folder = os.path.dirname(regard.__file__)

    def trace(frame, event, _):
        path, caller = frame.f_code.co_filename, frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(folder):
            caller = caller.f_back
        if path.startswith(folder):
            calls.setdefault(path, set())
            if caller is not None and caller.f_code.co_filename != path:
                calls.setdefault(caller.f_code.co_filename, set()).add(path)

    run_traced(function, trace)
    return calls


def run_traced(function, trace):
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)


@pytest.mark.parametrize(
    ("options", "files"),
    [({}, 6), ({"bias": torch.zeros(6, 6)}, 11), ({"normalize": regard.Hard()}, 13)],
    ids=["plain", "bias", "tiled"],
)
def test_the_way_from_the_operator_to_the_kernel_is_short_and_never_goes_back(options, files):
    operator._CACHE.clear()
    calls = called_files(lambda: regard.attention(X, X, X, **options))
    list(graphlib.TopologicalSorter(calls).static_order())  # raises CycleError
    assert len(calls) <= files, sorted(calls)


def test_a_cached_call_runs_one_file_or_three():
    for x, files in ((X, 1), (X.bfloat16(), 3)):  # the kernels look up calls in float32 themselves
        regard.attention(x, x, x)
        assert len(called_files(lambda x=x: regard.attention(x, x, x))) == files


def test_a_step_back_is_found():
    class Back(regard.Score):
        def prepare(self, query, key):
            regard.attention(X, X, X)
            return regard.Dot().prepare(query, key)

    calls = called_files(lambda: regard.attention(X, X, X, score=Back()))
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter(calls).static_order())


# Requested implementations, and explain


def test_an_environment_variable_forces_an_implementation():
    program = (
        "import torch, regard\n"
        "x = torch.eye(3)\n"
        "regard.mechanism.tiled.forward = None\n"
        "print(regard.explain(x, x, x).implementation, regard.attention(x, x, x).shape)\n"
        "print(regard.explain(x, x, x, implementation='tiled').implementation)\n"
    )
    done = run_fresh(program, REGARD_IMPLEMENTATION="reference")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "reference torch.Size([3, 3])\ntiled\n"


def test_a_wrong_environment_variable_fails_loudly():
    done = run_fresh("import regard", REGARD_IMPLEMENTATION="quick")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "ArgumentError" in last
    assert "REGARD_IMPLEMENTATION is 'quick'" in last
    assert "reference, tiled, fused" in last


def test_an_unknown_implementation_lists_the_valid_ones():
    x = torch.eye(3)
    for call in (regard.attention, regard.attend, regard.explain):
        with pytest.raises(regard.ArgumentError, match="'quick'; use one of reference, tiled, fused"):
            call(x, x, x, implementation="quick")


def test_explain_computes_nothing():
    x = torch.empty(8, 65536, 64, device="meta")
    text = str(regard.explain(x, x, x, mask=regard.Causal()))
    assert text.startswith("tiled\n")
    assert "137.4 GB" in text


def my_score(query, key):
    return query @ key.mT


@pytest.mark.parametrize(
    ("options", "implementation", "reason"),
    [
        ({}, "fused", "kernels"),
        ({"implementation": "reference"}, "reference", "requested by name"),
        ({"implementation": "tiled"}, "tiled", "requested by name"),
        ({"score": my_score}, "fused", "my_score"),
        ({"normalize": LearnedSoftmax()}, "reference", "LearnedSoftmax has parameters"),
        *(
            ({"normalize": normalize, "implementation": asked}, "tiled", f"{name} has no kernel")
            for name, normalize in NO_KERNEL.items()
            for asked in (None, "fused")
        ),
    ],
)
def test_explain_gives_the_reason(options, implementation, reason):
    explanation = regard.explain(X, X, X, **options)
    assert explanation.implementation == implementation
    assert reason in str(explanation)
    assert (reason in str(regard.explain(X, X, X))) == (not options)


def test_explain_names_dense_arguments():
    x = torch.zeros(8, 16)
    text = str(regard.explain(x, x, x, mask=torch.ones(8, 8, dtype=torch.bool), bias=[torch.zeros(8, 8)]))
    assert "the mask is a dense tensor of 0.1 kB" in text
    assert "the bias is a dense tensor of 0.3 kB" in text
    assert "dense tensor" not in str(regard.explain(x, x, x, mask=regard.Causal(), bias=regard.ALiBi(1)))
