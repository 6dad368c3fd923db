"""Every implementation compared with the formulas, forward and backward, over the table of cases."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

import regard
from regard.mechanism import dispatch, fused, tiled
from tests import naive
from tests.cases import (
    BIASES,
    MASKS,
    NORMALIZERS,
    SCORES,
    TABLE,
    Case,
    Shape,
    leaves,
    looped,
    tiles_of,
    upstream,
)
from tests.custom import OwnMean, OwnSoftmax
from tests.fuzz import oracle

IMPLEMENTATIONS = ("reference", "tiled")  # in float64; see test_fused.py for the kernels
EVERY = dispatch.IMPLEMENTATIONS if fused.available() else IMPLEMENTATIONS


pytestmark = pytest.mark.usefixtures("one_thread")


def derived(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the inputs; zeros for inputs that do not affect the output."""
    output = function()
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream(output), materialize_grads=True)]


def close(actual: Any, wanted: Any, within: float = 1e-10) -> None:
    torch.testing.assert_close(actual, wanted, rtol=within, atol=within)


# Formulas


@looped("case", TABLE, ids=lambda case: case.name, sampled=5)
def test_implementations_agree_with_the_formulas(case):
    query, key, value = case.tensors(requires_grad=True)
    options = case.options()
    wanted, weights = naive.attention(query, key, value, **options)
    inputs = (query, key, value, *leaves(options))
    actual = {}
    with tiles_of(100):
        for name in IMPLEMENTATIONS:
            output, lazy = regard.attend(query, key, value, implementation=name, **options)
            assert output.shape == wanted.shape
            close(output.detach(), wanted)
            close(lazy.dense().detach(), weights)
            actual[name] = torch.autograd.grad(output, inputs, upstream(output), materialize_grads=True)
    close(*actual.values())


LONGER = Shape((4, 37, 16), (2, 67, 16), (2, 67, 8))


@pytest.mark.parametrize(
    ("normalize", "scores"),
    [
        pytest.param(name, list(SCORES)[(i + part) % 4 :: 4], id=name, marks=[pytest.mark.slow] * (part > 0))
        for part in range(4)
        for i, name in enumerate(NORMALIZERS)
    ],
)
def test_float32_error_is_at_most_twice_that_of_dense_torch(normalize, scores):
    seen = regard.Causal().dense(LONGER.queries, LONGER.keys)
    for score in scores:
        case = Case("grouped", score, normalize, "causal", "dense", sizes=LONGER)

        def run(
            how: Callable[..., Tensor], dtype: torch.dtype, case: Case = case, **more: Any
        ) -> list[Tensor]:
            tensors = case.tensors(dtype, rounded=torch.float32, requires_grad=True)
            options = {**case.options(dtype, rounded=torch.float32), **more}
            options = {name: option for name, option in options.items() if option is not None}
            return derived(lambda: how(*tensors, **options), *tensors)

        def eager(*tensors: Tensor, order: Tensor, bias: Tensor, seen: Tensor, **options: Any) -> Tensor:
            query, key, value = tensors
            options |= {"bias": bias[..., order], "seen": seen[:, order]}
            return oracle.attention(query, key[:, order], value[:, order], **options).output

        exact = run(regard.attention, torch.float64, implementation="reference")
        # the error of one summation order is random; use the worst of several orders as the float32 error
        orders = [torch.randperm(LONGER.keys, generator=torch.Generator().manual_seed(i)) for i in range(3)]
        dense = [
            run(eager, torch.float32, mask=None, seen=seen, order=order)
            for order in (torch.arange(LONGER.keys), *orders)
        ]
        # the slope of Entmax above 2 is unbounded at the edge of its support: one pair can dominate the error
        parts = 1 if normalize == "entmax 2.5" else len(exact)
        with tiles_of(2048):
            for name in EVERY:
                ours = run(regard.attention, torch.float32, implementation=name)
                for part in range(parts):
                    error, *several = ((x[part] - exact[part]).abs().max().item() for x in (ours, *dense))
                    allowed = max(several)
                    tiny = 4 * torch.finfo(torch.float32).eps * max(exact[part].abs().max().item(), 1)
                    assert error <= 2 * allowed + tiny, (case.name, name, part)


# Tiles


@given(
    tile=st.sampled_from([1, 7, 64]),
    batch=st.sampled_from([(), (2,), (2, 3)]),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    queries=st.sampled_from([1, 2, 6, 7, 8, 63, 64, 65]),
    keys=st.sampled_from([1, 2, 6, 7, 8, 63, 64, 65]),
    score=st.sampled_from(sorted(SCORES)),
    normalize=st.sampled_from(sorted(NORMALIZERS)),
    mask=st.sampled_from(sorted(MASKS)),
    bias=st.sampled_from(sorted(BIASES)),
)
def test_results_do_not_depend_on_the_tile_size(
    tile, batch, groups, per_group, queries, keys, score, normalize, mask, bias
):
    if queries * keys * math.prod(batch) * groups * per_group // tile > 500:
        tile = 64
        batch = ()
    heads = groups * per_group
    sizes = Shape((*batch, heads, queries, 3), (*batch, groups, keys, 3), (*batch, groups, keys, 2))
    case = Case("heads", score, normalize, mask, bias, sizes=sizes)
    tensors, options = case.tensors(requires_grad=True), case.options()
    inputs = (*tensors, *leaves(options))
    with tiles_of(tile):
        small = derived(lambda: regard.attention(*tensors, implementation="tiled", **options), *inputs)
    whole = derived(lambda: regard.attention(*tensors, implementation="reference", **options), *inputs)
    close(small, whole, 1e-9)


def test_small_tiles_are_many():
    # otherwise the tests above would prove nothing
    x = torch.randn(2, 9, 4)
    with patch.object(tiled.reference, "scores", wraps=tiled.reference.scores) as counted:
        for size, least in ((1, 18), (7, 18), (64, 3), (2**20, 1)):
            counted.reset_mock()
            with tiles_of(size):
                regard.attention(x, x, x, implementation="tiled")
            assert counted.call_count >= least
    assert counted.call_count == 1


# Gradients

TINY = Shape((4, 3, 2), (2, 5, 2), (2, 5, 3))


def check_gradients(case: Case) -> None:
    tensors, options = case.tensors(requires_grad=True), case.options()

    def attention(*_: Tensor) -> Tensor:  # gradcheck changes inputs and parameters in place
        return regard.attention(*tensors, implementation="tiled", **options)

    with tiles_of(20):
        assert gradcheck(attention, (*tensors, *leaves(options)), fast_mode=True, rtol=1e-5, atol=1e-7)


# Every name at least once, in varying combinations; the slow test covers every triple of names.
VARIED = [
    Case("grouped", *names, sizes=TINY)
    for names in itertools.islice(
        zip(*map(itertools.cycle, (SCORES, NORMALIZERS, MASKS, BIASES)), strict=True), 20
    )
]


@looped("case", VARIED, ids=lambda case: case.name)
def test_gradients_are_those_of_finite_differences(case):
    check_gradients(case)


@pytest.mark.slow
@pytest.mark.parametrize("normalize", NORMALIZERS)
@pytest.mark.parametrize("score", SCORES)
def test_gradients_of_every_three_names_together(score, normalize):
    """The bias index is the sum of the other three indices (a Latin cube), because there are fewer biases."""
    assert len(BIASES) <= min(map(len, (SCORES, NORMALIZERS, MASKS)))
    first = list(SCORES).index(score) + list(NORMALIZERS).index(normalize)
    for i, mask in enumerate(MASKS, first):
        case = Case("grouped", score, normalize, mask, list(BIASES)[i % len(BIASES)], sizes=TINY)
        try:
            check_gradients(case)
        except Exception as error:
            raise AssertionError(case.name) from error


# Normalizers


@looped("implementation", IMPLEMENTATIONS)
@looped("mask", ["no mask", "causal", "tensor"])
@looped(("own", "built_in"), [(OwnSoftmax(), regard.Softmax()), (OwnMean(), regard.Mean())])
def test_a_normalizer_of_ones_own_equals_the_built_in_one(own, built_in, mask, implementation):
    case = Case("more queries", mask=mask, bias="relative")
    tensors, options = case.tensors(requires_grad=True), case.options()
    inputs = (*tensors, *leaves(options))

    def run(normalize: regard.Normalizer) -> Tensor:
        return regard.attention(*tensors, **options | {"normalize": normalize}, implementation=implementation)

    with tiles_of(64):
        close(*(derived(partial(run, normalize), *inputs) for normalize in (own, built_in)))
