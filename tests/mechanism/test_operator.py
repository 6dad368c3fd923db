"""The operator against the formulas: every implementation, forward and backward, over the table of cases."""

import itertools
import math
from collections.abc import Callable
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
    pairs,
    product,
    tiles_of,
    upstream,
)
from tests.fresh import run_fresh

IMPLEMENTATIONS = ("reference", "tiled")  # of float64; test_fused.py is about the kernels
EVERY = dispatch.IMPLEMENTATIONS if fused.available() else IMPLEMENTATIONS


pytestmark = pytest.mark.usefixtures("one_thread")


def derived(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The output, and the gradients of the inputs; zeros for those that it does not depend on."""
    output = function()
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream(output), materialize_grads=True)]


def close(actual: Tensor, wanted: Tensor, within: float = 1e-10) -> None:
    torch.testing.assert_close(actual, wanted, rtol=within, atol=within)


# Against the formulas


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_implementations_agree_with_the_formulas(case):
    query, key, value = case.tensors(requires_grad=True)
    options = case.options()
    wanted, weights = naive.attention(query, key, value, **options)
    inputs = (query, key, value, *leaves(options))
    actual = {}
    with tiles_of(64):
        for name in IMPLEMENTATIONS:
            output, lazy = regard.attend(query, key, value, implementation=name, **options)
            assert output.shape == wanted.shape
            close(output.detach(), wanted)
            close(lazy.dense().detach(), weights)
            actual[name] = torch.autograd.grad(output, inputs, upstream(output), materialize_grads=True)
    for one, other in zip(*actual.values(), strict=True):
        close(one, other)


def test_the_formulas_agree_with_dense_torch():
    # two independent formulations; the next test uses the second
    sizes = Shape((2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 2))
    for case in pairs(("grouped",), masks=("no mask", "tensor"), biases=("no bias", "dense"), sizes=sizes):
        options = case.options()
        wanted, _ = naive.attention(*case.tensors(), **options)
        options["seen"], options["bias"] = (
            options.pop("mask"),
            options["bias"] if case.bias == "dense" else 0.0,
        )
        close(naive.eager(*case.tensors(), **options).detach(), wanted, 1e-9)


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
            return naive.eager(query, key[:, order], value[:, order], **options)

        exact = run(regard.attention, torch.float64, implementation="reference")
        # how far one order of the additions is off is chance: the worst of several is what float32 does
        orders = [torch.randperm(LONGER.keys, generator=torch.Generator().manual_seed(i)) for i in range(3)]
        dense = [
            run(eager, torch.float32, mask=None, seen=seen, order=order)
            for order in (torch.arange(LONGER.keys), *orders)
        ]
        # the slope of Entmax above 2 has no bound at the edge of its support: one unlucky pair decides all
        parts = 1 if normalize == "entmax 2.5" else len(exact)
        with tiles_of(2048):
            for name in EVERY:
                ours = run(regard.attention, torch.float32, implementation=name)
                for part in range(parts):
                    error, *several = ((x[part] - exact[part]).abs().max().item() for x in (ours, *dense))
                    allowed = max(several)
                    tiny = 4 * torch.finfo(torch.float32).eps * max(exact[part].abs().max().item(), 1)
                    assert error <= 2 * allowed + tiny, (
                        case.name,
                        name,
                        ("output", "query", "key", "value")[part],
                    )


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
    for one, other in zip(small, whole, strict=True):
        close(one, other, 1e-9)


def test_small_tiles_are_many():
    # or else the tests above would show nothing
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

    def attention(*_: Tensor) -> Tensor:  # gradcheck changes its inputs in place, the parameters too
        return regard.attention(*tensors, implementation="tiled", **options)

    with tiles_of(20):
        assert gradcheck(attention, (*tensors, *leaves(options)), fast_mode=True, rtol=1e-5, atol=1e-7)


# Every name several times, with others each time; the slow test has all combinations.
VARIED = [
    Case("grouped", *names, sizes=TINY)
    for names, _ in zip(
        zip(*map(itertools.cycle, (SCORES, NORMALIZERS, MASKS, BIASES)), strict=True), range(45), strict=False
    )
]


@pytest.mark.parametrize("case", VARIED, ids=lambda case: case.name)
@pytest.mark.sampled(2)
def test_gradients_are_those_of_finite_differences(case):
    check_gradients(case)


@pytest.mark.slow
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("normalize", NORMALIZERS)
@pytest.mark.parametrize("score", SCORES)
def test_gradients_over_the_whole_product(score, normalize, bias):
    for case in product(("grouped",), (score,), (normalize,), biases=(bias,), sizes=TINY):
        try:
            check_gradients(case)
        except Exception as error:
            raise AssertionError(case.name) from error


# Normalizers


class OwnSoftmax(regard.Normalizer):
    def tau(self, scores):
        return scores.logsumexp(-1, keepdim=True)

    def phi(self, x):
        return x.exp()

    def slope(self, x):
        return x.exp()


class OwnMean(regard.Normalizer):
    sums_to_one = False

    def tau(self, scores):
        return torch.zeros_like(scores[..., :1])

    def phi(self, x):
        return x

    def slope(self, x):
        return torch.ones_like(x)

    def divisor(self, x, visible):
        return visible.sum(-1, keepdim=True).clamp(min=1).to(x.dtype)


@looped("implementation", IMPLEMENTATIONS)
@looped("mask", ["no mask", "causal", "tensor"])
@looped(
    ("own", "built_in"),
    [
        (OwnSoftmax(), regard.Softmax()),
        (OwnMean(), regard.Mean()),
    ],
    ids=lambda normalize: type(normalize).__name__,
)
def test_a_normalizer_of_ones_own_equals_the_built_in_one(own, built_in, mask, implementation):
    case = Case("more queries", mask=mask, bias="relative")
    tensors, options = case.tensors(requires_grad=True), case.options()
    inputs = (*tensors, *leaves(options))
    with tiles_of(64):
        for one, other in zip(
            *(
                derived(
                    lambda normalize=normalize: regard.attention(
                        *tensors, **{**options, "normalize": normalize}, implementation=implementation
                    ),
                    *inputs,
                )
                for normalize in (own, built_in)
            ),
            strict=True,
        ):
            close(one, other)


# Which implementation


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
        with pytest.raises(regard.ArgumentError, match="'quick'; use reference, tiled, fused"):
            call(x, x, x, implementation="quick")


class LearnedScale(torch.nn.Module, OwnSoftmax):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(()))


class TestExplain:
    @pytest.fixture(autouse=True)
    def _free_choice(self, monkeypatch):
        monkeypatch.setattr(dispatch, "FROM_ENVIRONMENT", None)

    def test_explain_computes_nothing(self):
        x = torch.empty(8, 65536, 64, device="meta")
        text = str(regard.explain(x, x, x, mask=regard.Causal()))
        assert text.startswith("tiled\n")
        assert "137.4 GB" in text

    @pytest.mark.parametrize("name", IMPLEMENTATIONS)
    def test_explain_respects_the_requested_implementation(self, name):
        x = torch.eye(3)
        explanation = regard.explain(x, x, x, implementation=name)
        assert explanation.implementation == name
        assert "requested by name" in explanation.reasons

    def test_explain_reports_dense_score_functions(self):
        x = torch.eye(3)

        def my_score(query, key):
            return query @ key.mT

        assert "my_score" in str(regard.explain(x, x, x, score=my_score))
        assert "my_score" not in str(regard.explain(x, x, x))

    def test_explain_reports_learned_normalizers(self):
        x = torch.eye(3)
        explanation = regard.explain(x, x, x, normalize=LearnedScale())
        assert explanation.implementation == "reference"
        assert "LearnedScale has parameters" in str(explanation)

    def test_explain_reports_why_kernels_are_not_used(self):
        x = torch.eye(3)
        if fused.available():
            assert regard.explain(x, x, x).implementation == "fused"
            assert "kernels" in regard.explain(x, x, x).reasons[0]
        for options, reason in (
            ({"normalize": regard.Hard()}, "Hard has no kernel"),
            ({"normalize": regard.Entmax(1.3)}, "Entmax has no kernel"),
            ({"normalize": OwnSoftmax()}, "OwnSoftmax has no kernel"),
        ):
            for asked in (None, EVERY[-1]):
                explanation = regard.explain(x, x, x, implementation=asked, **options)
                assert explanation.implementation == "tiled"
                assert reason in explanation.reasons[0] or asked == "tiled"
        assert "float64 has no kernel" in str(regard.explain(x.double(), x.double(), x.double()))

    def test_explain_rejects_what_attention_rejects(self):
        with pytest.raises(regard.ShapeError, match="4 tokens and value has 5"):
            regard.explain(torch.ones(3, 2), torch.ones(4, 2), torch.ones(5, 2))


def test_explain_names_dense_arguments():
    x = torch.zeros(8, 16)
    text = str(regard.explain(x, x, x, mask=torch.ones(8, 8, dtype=torch.bool), bias=[torch.zeros(8, 8)]))
    assert "the mask is a dense tensor of 0.1 kB" in text
    assert "the bias is a dense tensor of 0.3 kB" in text
    assert "dense tensor" not in str(regard.explain(x, x, x, mask=regard.Causal(), bias=regard.ALiBi(1)))
