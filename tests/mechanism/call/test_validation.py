"""Results of custom classes are checked before any implementation runs."""

import math
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import regard
from regard import (
    Additive,
    ArgumentError,
    Causal,
    ClippedRelativeBias,
    Concat,
    DeviceError,
    Documents,
    Dot,
    DTypeError,
    General,
    Mask,
    MaskError,
    Normalizer,
    Padding,
    Prefix,
    RegardError,
    RelativeBias,
    Rule,
    Score,
    ShapeError,
    Sink,
    Softmax,
    Softmax1,
    Window,
)
from regard.mechanism.masks.algebra import CallShape, MaskTerm
from regard.mechanism.scores import Prepared
from tests.cases import crossed, looped
from tests.fresh import run_fresh

# A different number for every axis: 2 sequences, 3 key heads, 2 query heads for each, 5 queries, 7 keys.
B, G, R, Q, K, D, E = 2, 3, 2, 5, 7, 8, 4
IMPLEMENTATIONS = ["reference", "tiled", "fused"]
every = looped("implementation", IMPLEMENTATIONS)


def inputs(requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = ((B, G * R, Q, D), (B, G, K, D), (B, G, K, E))
    query, key, value = (torch.randn(shape, generator=made) for shape in shapes)
    return tuple(x.requires_grad_(requires_grad) for x in (query, key, value))  # type: ignore[return-value]


def run(implementation: str, **options: Any) -> Tensor:
    return regard.attention(*inputs(), implementation=implementation, **options)


def gradients(implementation: str, **options: Any) -> tuple[Tensor, ...]:
    tensors = inputs(requires_grad=True)
    output = regard.attention(*tensors, implementation=implementation, **options)
    return output.detach(), *torch.autograd.grad(output.square().sum(), tensors)


def same(implementation: str, custom: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that outputs and gradients with a custom class equal those of a built-in one."""
    pairs = zip(gradients(implementation, **custom), gradients("reference", **expected), strict=True)
    for actual, right in pairs:
        torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-5)


Wrong = dict[str, tuple[type[RegardError], Any]]  # phrases in the message → error class and cause


def refuses(implementation: str, error: type[RegardError], words: str, **options: Any) -> None:
    """Check that `attention` and `attend` raise this error with these words, with and without gradients."""
    with pytest.raises(error) as caught:
        run(implementation, **options)
    for word in words.split(" | "):
        assert word in str(caught.value), str(caught.value)
    with pytest.raises(error):
        regard.attend(*inputs(requires_grad=True), implementation=implementation, **options)


# Scores


class Custom(Score):
    """A score defined by a function of the arguments of `prepare`."""

    def __init__(self, prepare: Callable[[Tensor, Tensor], Any]) -> None:
        self.made = prepare

    def prepare(self, query: Tensor, key: Tensor) -> Any:
        return self.made(query, key)


def additive(query: Tensor, key: Tensor, **changes: Any) -> Prepared:
    return Prepared(query, key, "tanh", torch.ones(query.shape[-1]))._replace(**changes)


WRONG_SCORES: Wrong = {
    "Custom.prepare | bfloat16 | float32 | .to(query.dtype)": (
        DTypeError,
        lambda q, k: Dot().prepare(q.bfloat16(), k.bfloat16()),
    ),
    "torch.float16 | torch.float32": (DTypeError, lambda q, k: Prepared(q.half(), k.half())),
    "float64 | float32": (DTypeError, lambda q, k: Prepared(q.double(), k.double())),
    "key | float64 | float32": (DTypeError, lambda q, k: Prepared(q, k.double())),
    "int64 | float32": (DTypeError, lambda q, k: Prepared(q.long(), k.long())),
    "Custom.prepare | tuple | Prepared": (DTypeError, lambda q, k: (q, k)),
    "None | Prepared": (DTypeError, lambda q, k: None),
    "query | ndarray | tensor": (DTypeError, lambda q, k: Prepared(q.detach().numpy(), k)),
    "key of shape (2, 3, 1, 3, 8) | (2, 3, 1, 7, 8) | last axis": (
        ShapeError,
        lambda q, k: Prepared(q, k[..., :3, :]),
    ),
    "(2, 3, 1, 14, 8)": (ShapeError, lambda q, k: Prepared(q, torch.cat([k, k], -2))),
    "query of shape | (2, 3, 2, 1, 8)": (ShapeError, lambda q, k: Prepared(q[..., :1, :], k)),
    "8 features | 4 | 8 features and a key with 4": (ShapeError, lambda q, k: Prepared(q, k[..., :4])),
    "query of shape (12, 5, 8)": (ShapeError, lambda q, k: Prepared(q.flatten(0, 2), k)),
    "(4, 3, 2, 5, 8)": (ShapeError, lambda q, k: Prepared(torch.cat([q, q]), k)),
    "(3, 3, 1, 7, 8)": (ShapeError, lambda q, k: Prepared(q, torch.cat([k, k[:1]]))),
    "key of shape (2, 3, 2, 7, 8)": (ShapeError, lambda q, k: Prepared(q, k.expand(-1, -1, 2, -1, -1))),
    "meta | cpu": (DeviceError, lambda q, k: Prepared(q.to("meta"), k.to("meta"))),
    "sparse | to_dense()": (DTypeError, lambda q, k: Prepared(q.to_sparse(), k)),
    '\'cosine\' | "dot" | "tanh"': (ArgumentError, lambda q, k: Prepared(q, k, "cosine")),
    "'tanh' | no vector": (ArgumentError, lambda q, k: Prepared(q, k, "tanh")),
    "'dot' | a vector": (ArgumentError, lambda q, k: Prepared(q, k, vector=torch.ones(D))),
    "vector of shape (3,) | 8 features | (8,)": (
        ShapeError,
        lambda q, k: additive(q, k, vector=torch.ones(3)),
    ),
    "vector of shape (6, 1, 8)": (ShapeError, lambda q, k: additive(q, k, vector=torch.ones(6, 1, D))),
    "vector of dtype torch.float64 | float32": (
        DTypeError,
        lambda q, k: additive(q, k, vector=torch.ones(D).double()),
    ),
    "scale=2.0 | 'tanh'": (ArgumentError, lambda q, k: additive(q, k, scale=2.0)),
    "scale | Tensor | Multiply the query": (DTypeError, lambda q, k: Prepared(q, k, scale=torch.tensor(2.0))),
    "scale=inf | finite": (ArgumentError, lambda q, k: Prepared(q, k, scale=math.inf)),
    "softcap=0.0 | above 0": (ArgumentError, lambda q, k: Prepared(q, k, softcap=0.0)),
    "softcap=1e-46": (ArgumentError, lambda q, k: Prepared(q, k, softcap=1e-46)),
    "bias of dtype torch.int64 | float32": (
        DTypeError,
        lambda q, k: Prepared(q, k, biases=(torch.full((Q, 1), 9),)),
    ),
    "torch.bool": (DTypeError, lambda q, k: Prepared(q, k, biases=(torch.ones(Q, 1) > 0,))),
    "bias of shape (5, 3) | (2, 3, 2, 5, 7)": (
        ShapeError,
        lambda q, k: Prepared(q, k, biases=(torch.ones(Q, 3),)),
    ),
    "(1, 1, 1, 1, 5, 7)": (ShapeError, lambda q, k: Prepared(q, k, biases=(torch.ones(1, 1, 1, 1, Q, K),))),
    "bias on meta | cpu": (
        DeviceError,
        lambda q, k: Prepared(q, k, biases=(torch.ones(Q, 1, device="meta"),)),
    ),
    "biases | Tensor | tuple": (DTypeError, lambda q, k: Prepared(q, k, biases=torch.ones(Q, 1))),
}


@every
@looped("words", WRONG_SCORES)
def test_results_of_custom_scores_are_checked(words, implementation):
    error, prepare = WRONG_SCORES[words]
    refuses(implementation, error, words, score=Custom(prepare))


@every
def test_subclasses_of_built_in_scores_are_checked(implementation):
    class Low(Dot):
        def prepare(self, query: Tensor, key: Tensor) -> Prepared:
            return super().prepare(query.bfloat16(), key.bfloat16())

    refuses(implementation, DTypeError, "Low.prepare | bfloat16", score=Low())


def test_a_score_in_bfloat16_does_not_corrupt_the_heap():
    """Runs in a subprocess: if accepted, the kernels would write float32 into a buffer of half the size."""
    code = """
        import torch, regard

        class Low(regard.Score):
            def prepare(self, query, key):
                return regard.Dot().prepare(query.bfloat16(), key.bfloat16())

        x = torch.randn(2, 400, 16)
        for _ in range(20):
            try:
                regard.attention(x, x, x, score=Low())
            except regard.DTypeError:
                print("refused")
    """
    assert _child(code) == ["refused"] * 20


def _child(code: str) -> list[str]:
    done = run_fresh(textwrap.dedent(code))
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout.split()


@every
def test_replaced_parameters_of_a_built_in_score_are_checked(implementation):
    score = Additive(D, D)
    score.vector = nn.Parameter(torch.ones(3))
    refuses(implementation, ShapeError, "8 rows | vector of shape (3,)", score=score)
    score = Concat(D, D, width=6)
    score.key_map = nn.Parameter(torch.ones(5, D))
    refuses(implementation, ShapeError, "query_map with 6 rows | key_map with 5", score=score)
    score = Concat(D, D, width=6)
    score.mixture = nn.Parameter(torch.ones(()))
    refuses(implementation, ShapeError, "vector of shape ()", score=score)
    replaced = General(D, D)
    replaced.prepare = lambda query, key: Prepared(query, key[..., :3, :])
    refuses(implementation, ShapeError, "General.prepare | key of shape", score=replaced)


@every
def test_valid_results_of_custom_scores_are_accepted(implementation):
    """Covers biases with fewer axes, a shared query, an infinite softcap, and all families."""
    column, row = torch.randn(Q, 1), torch.randn(1, K)
    same(
        implementation,
        {"score": Custom(lambda q, k: Prepared(q, k, scale=0.5, softcap=math.inf, biases=[column, row]))},  # type: ignore[arg-type]
        {"score": regard.ScaledDot(0.5), "bias": [column, row]},
    )
    same(
        implementation,
        {"score": Custom(lambda q, k: Prepared(q, k, softcap=np.float64(2), scale=np.float32(0.5)))},  # type: ignore[arg-type]
        {"score": regard.ScaledDot(0.5, softcap=2.0)},
    )
    score = Additive(D, D, width=6)
    same(implementation, {"score": Custom(score.prepare)}, {"score": score})
    capped = Custom(lambda q, k: score.prepare(q, k)._replace(softcap=1.5))

    def dense(query: Tensor, key: Tensor) -> Tensor:
        hidden = (query @ score.query_map.mT)[..., :, None, :] + (key @ score.key_map.mT)[..., None, :, :]
        return 1.5 * torch.tanh(hidden.tanh() @ score.vector / 1.5)

    same(implementation, {"score": capped}, {"score": dense})


@every
def test_a_query_that_is_the_same_for_all_serves_all(implementation):
    """Axes returned with size 1 broadcast, and the output keeps its shape."""
    query, key, value = inputs()
    score = Custom(lambda q, k: Prepared(q.mean((0, 1, 2), keepdim=True), k))
    actual = regard.attention(query, key[:1], value[:1], score=score, implementation=implementation)
    shared = query.mean((0, 1), keepdim=True).expand_as(query)
    expected = regard.attention(shared, key[:1], value[:1], score=Dot(), implementation="reference")
    assert actual.shape == expected.shape == (B, G * R, Q, E)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    shared_key = Custom(lambda q, k: Prepared(q, k.mean((0, 1), keepdim=True)))
    actual = regard.attention(query[:1], key, value[:1], score=shared_key, implementation=implementation)
    assert actual.shape == (B, G * R, Q, E)


@every
def test_scores_of_a_function_are_checked(implementation):
    refuses(implementation, ShapeError, "(5, 3) | (2, 6, 5, 7)", score=lambda q, k: torch.ones(Q, 3))
    refuses(implementation, DTypeError, "int64", score=lambda q, k: torch.ones(Q, K).long())
    refuses(implementation, DTypeError, "sparse", score=lambda q, k: torch.ones(Q, K).to_sparse())
    refuses(implementation, DeviceError, "meta", score=lambda q, k: torch.ones(Q, K, device="meta"))


# Masks


class Ranges(Rule):
    """A rule defined by a function of position and keys."""

    def __init__(self, ranges: Callable[..., Any]) -> None:
        self.made = ranges

    def ranges(self, position: Tensor, keys: Any) -> Any:
        return self.made(position, keys)


class Terms(Mask):
    """A mask defined by a function of the call shape."""

    def __init__(self, terms: Callable[[CallShape], Any]) -> None:
        self.made = terms

    def terms(self, call_shape: CallShape) -> Any:
        return self.made(call_shape)


# Each rule alone, combined, and inside documents: the mask, and the numbers of keys and queries.
PLACES: dict[str, Callable[[Rule], Mask]] = {
    "alone": lambda rule: rule,
    "and": lambda rule: rule & Causal(),
    "or": lambda rule: Window(2) | rule,
    "nested": lambda rule: Causal() & (Window(2) | rule),
    "within": lambda rule: Documents([2, 3], [3, 4], within=rule),
    "and within": lambda rule: Window(3) & Documents([2, 3], [3, 4], within=rule),
}
INTEGERS = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
WRONG_RANGES: Wrong = {
    "Ranges.ranges | stop | float32 | x.long()": (DTypeError, lambda p, k: (None, p + 1.0)),
    "start | float16": (DTypeError, lambda p, k: (p.half(), None)),
    "start | float64": (DTypeError, lambda p, k: (p.double(), None)),
    "stop | torch.bool": (DTypeError, lambda p, k: (None, p > 2)),
    "Ranges.ranges | shape (5,) | 5 queries | (5, 1)": (MaskError, lambda p, k: (None, p[:, 0] + 1)),
    "shape (1, 5) | (5, 1)": (MaskError, lambda p, k: (None, p.mT + 1)),
    "shape (5, 2)": (MaskError, lambda p, k: (None, p.expand(-1, 2))),
    "shape (2, 1) | 5 queries": (MaskError, lambda p, k: (None, p[:2] + 1)),
    "shape (10, 1) | 5 queries": (MaskError, lambda p, k: (torch.cat([p, p]), None)),
    "(3, 1, 5, 1) | (2, 6, 5, 1)": (MaskError, lambda p, k: (p.expand(3, 1, -1, -1), None)),
    "(1, 1, 1, 5, 1)": (MaskError, lambda p, k: (p[None, None, None], None)),
    "stop | float | integer": (DTypeError, lambda p, k: (None, 3.0)),
    "stop | bool": (DTypeError, lambda p, k: (None, True)),
    "stop | list": (DTypeError, lambda p, k: (None, [1, 2, 3, 4, 5])),
    "stop | ndarray": (DTypeError, lambda p, k: (None, p.numpy())),
    "Ranges.ranges | Tensor | start and stop": (MaskError, lambda p, k: p + 1),
    "None | start and stop": (MaskError, lambda p, k: None),
    "3 values | two": (MaskError, lambda p, k: (p, p, p)),
    "stop on meta | cpu": (DeviceError, lambda p, k: (None, p.to("meta"))),
    "sparse": (DTypeError, lambda p, k: (None, p.to_sparse())),
}


@crossed(words=WRONG_RANGES, place=PLACES, implementation=IMPLEMENTATIONS)
def test_results_of_custom_rules_are_checked(words, place, implementation):
    error, ranges = WRONG_RANGES[words]
    refuses(implementation, error, words, mask=PLACES[place](Ranges(ranges)))


@looped("words", WRONG_RANGES)
def test_results_of_custom_rules_are_checked_when_drawn(words):
    error, ranges = WRONG_RANGES[words]
    with pytest.raises(error):
        Ranges(ranges).dense(Q, K, lead=(B, G * R))
    with pytest.raises(error):
        Ranges(ranges).draw(Q, K, lead=(B, G * R))


def test_two_rows_for_many_queries_are_rejected():
    """Runs in a subprocess: if accepted, the kernels would read far out of bounds."""
    code = """
        import torch, regard

        class Two(regard.Rule):
            def ranges(self, position, keys):
                return None, position[:2] + 1

        x = torch.zeros(1).expand(1, 30_000_000, 1)
        try:
            regard.attention(x, x[:, :2], x[:, :2], mask=Two())
        except regard.MaskError as error:
            print("refused", "30000000" in str(error))
    """
    assert _child(code) == ["refused", "True"]


@every
@looped("place", PLACES)
@looped("dtype", INTEGERS, ids=str)
def test_ranges_of_every_integer_dtype(dtype, place, implementation):
    def ranges(position: Tensor, keys: Any) -> tuple[Tensor, Tensor]:
        return (position - 2).clamp(min=0).to(dtype), (position + 1).clamp(min=0).to(dtype)

    same(implementation, {"mask": PLACES[place](Ranges(ranges))}, {"mask": PLACES[place](Window(3))})


@every
@looped("place", PLACES)
@looped("number", [3, np.int32(3), torch.tensor(3), torch.tensor([[3]], dtype=torch.int8)])
def test_one_integer_applies_to_every_row(number, place, implementation):
    def built_in(position: Tensor, keys: Any) -> tuple[None, Tensor]:
        return None, torch.zeros_like(position) + 3

    actual = Ranges(lambda position, keys: (None, number))
    same(implementation, {"mask": PLACES[place](actual)}, {"mask": PLACES[place](Ranges(built_in))})


@every
@looped("place", PLACES)
def test_key_indices_far_outside_are_no_limit(place, implementation):
    """Sums of these indices, and differences from the first key of a tile, would overflow int64."""
    for far in (2**31, 2**40, 2**62, 2**63 - 1):
        for low, high in ((-far - 1, far), (torch.tensor(-far - 1), torch.tensor(far))):
            same(
                implementation,
                {"mask": PLACES[place](Ranges(lambda p, k, low=low, high=high: (low, high)))},
                {"mask": PLACES[place](Window(left=100, right=100))},
            )
    beyond = torch.tensor([[2**63 - 1]]).to(torch.uint64) * 2
    same(
        implementation,
        {"mask": PLACES[place](Ranges(lambda p, k: (None, beyond)))},
        {"mask": PLACES[place](Window(left=100, right=100))},
    )


@every
@looped("far", [2**31, 2**62, 2**63 - 1, 2**70])
def test_built_in_rules_reach_as_far_as_they_say(far, implementation):
    for mask, near in (
        (Window(far), Window(100)),
        (Window(left=far, right=far), Window(left=100, right=100)),
        (Prefix(far), Prefix(100)),
    ):
        same(implementation, {"mask": mask}, {"mask": near})
        inside = Documents([2, 3], [3, 4], within=mask)
        expected = Documents([2, 3], [3, 4], within=near)
        same(implementation, {"mask": inside}, {"mask": expected})


def test_a_tile_of_keys_with_limits_far_outside():
    """Lazy weights compute tiles that start at a later key."""
    tensors = inputs()
    near = regard.attend(*tensors)[1]
    for far in (2**62, 2**63 - 1):
        mask = Ranges(lambda p, k, far=far: (torch.full_like(p, -far - 1), torch.full_like(p, far)))
        weights = regard.attend(*tensors, mask=mask)[1]
        torch.testing.assert_close(weights[..., 2:5], near[..., 2:5])


WRONG_TERMS: Wrong = {
    "Terms.terms | at least one MaskTerm": (MaskError, lambda s: ()),
    "Terms.terms | a MaskTerm | (MaskTerm(start, stop),)": (MaskError, lambda s: MaskTerm()),
    "None | MaskTerm": (MaskError, lambda s: None),
    "Tensor | MaskTerm": (MaskError, lambda s: torch.ones(Q, K) > 0),
    "[Tensor] | MaskTerm": (MaskError, lambda s: (torch.ones(Q, K) > 0,)),
    "[tuple] | MaskTerm": (MaskError, lambda s: ((None, None, None),)),
    "start | float32": (DTypeError, lambda s: (MaskTerm(torch.zeros(Q, 1)),)),
    "stop | (2, 1) | 5 queries": (MaskError, lambda s: (MaskTerm(stop=torch.ones(2, 1).long()),)),
    "stop | (5,)": (MaskError, lambda s: (MaskTerm(), MaskTerm(stop=torch.ones(Q).long()))),
    "`allowed` of shape (5, 3) | (2, 6, 5, 7)": (
        MaskError,
        lambda s: (MaskTerm(allowed=torch.ones(Q, 3) > 0),),
    ),
    "(5, 14)": (MaskError, lambda s: (MaskTerm(allowed=torch.ones(Q, 14) > 0),)),
    "(2, 7)": (MaskError, lambda s: (MaskTerm(allowed=torch.ones(2, K) > 0),)),
    "(3, 5, 7)": (MaskError, lambda s: (MaskTerm(allowed=torch.ones(G, Q, K) > 0),)),
    "`allowed` of dtype torch.float32 | bool": (DTypeError, lambda s: (MaskTerm(allowed=torch.ones(Q, K)),)),
    "uint8 | torch.bool": (DTypeError, lambda s: (MaskTerm(allowed=torch.ones(Q, K).byte()),)),
    "allowed | bool": (DTypeError, lambda s: (MaskTerm(allowed=True),)),
    "meta": (DeviceError, lambda s: (MaskTerm(allowed=torch.ones(Q, K, device="meta") > 0),)),
    "sparse": (DTypeError, lambda s: (MaskTerm(allowed=(torch.ones(Q, K) > 0).to_sparse()),)),
}


@crossed(words=WRONG_TERMS, place=["alone", "and", "or", "nested"], implementation=IMPLEMENTATIONS)
def test_results_of_custom_masks_are_checked(words, place, implementation):
    error, terms = WRONG_TERMS[words]
    refuses(implementation, error, words, mask=PLACES[place](Terms(terms)))  # type: ignore[arg-type]


@every
@looped("place", ["alone", "and", "or", "nested"])
def test_valid_results_of_custom_masks_are_accepted(place, implementation):
    torch.manual_seed(0)
    per_head, one = torch.rand(B, G * R, Q, K) > 0.4, torch.rand(K) > 0.4
    starts = torch.randint(0, 3, (B, 1, Q, 1))
    stops = torch.randint(3, K, (G * R, 1, 1), dtype=torch.int16)
    number = torch.arange(K)
    expected = (per_head & (number >= starts)) | (one & (number < stops))
    mask = Terms(lambda s: [MaskTerm(starts, None, per_head), MaskTerm(None, stops, one)])
    same(implementation, {"mask": PLACES[place](mask)}, {"mask": PLACES[place](expected)})  # type: ignore[arg-type]


@every
def test_subclasses_of_built_in_masks_are_checked(implementation):
    class Ahead(Causal):
        def ranges(self, position: Tensor, keys: Any) -> Any:
            return None, position + 1.5

    class Half(Padding):
        def terms(self, call_shape: CallShape) -> Any:
            return (MaskTerm(stop=self.lengths[:, None, None, None] / 2),)

    refuses(implementation, DTypeError, "Ahead.ranges | float32", mask=Ahead())
    refuses(implementation, DTypeError, "Half.terms | float32", mask=Half([2, 4]))


@every
def test_custom_rules_may_change_after_the_call(implementation):
    """Backward uses the mask of the forward pass."""
    stop = torch.tensor([[1], [2], [3], [4], [5]])
    rule = Ranges(lambda position, keys: (None, stop))
    tensors = inputs(requires_grad=True)
    output = regard.attention(*tensors, mask=rule, implementation=implementation)
    stop.fill_(1)
    actual = torch.autograd.grad(output.square().sum(), tensors)
    expected = gradients("reference", mask=Causal(align="start"))[1:]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# Biases


class Line(RelativeBias):
    def __init__(self, line: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.made = line

    def forward(self, distance: Tensor) -> Any:
        return self.made(distance)


WRONG_LINES: Wrong = {
    "Line() | torch.bool | .float()": (DTypeError, lambda d: d > 0),
    "complex64": (DTypeError, lambda d: d * 1j),
    "(3,) | 11 distances": (ShapeError, lambda d: d[:3].float()),
    "(11, 1) | 11 distances": (ShapeError, lambda d: d[:, None].float()),
    "3 heads | 6": (ShapeError, lambda d: d.expand(3, -1).float()),
    "float | tensor": (DTypeError, lambda d: 1.0),
    "meta | cpu": (DeviceError, lambda d: d.float().to("meta")),
    "sparse": (DTypeError, lambda d: d.float().to_sparse()),
}


@every
@looped("words", WRONG_LINES)
def test_results_of_custom_biases_are_checked(words, implementation):
    error, line = WRONG_LINES[words]
    refuses(implementation, error, words, bias=Line(line))


@every
@looped("dtype", [torch.int64, torch.int8, torch.float64, torch.bfloat16], ids=str)
def test_a_relative_bias_of_another_dtype_is_converted(dtype, implementation):
    bias = Line(lambda distance: -distance.abs().to(dtype))
    same(implementation, {"bias": bias}, {"bias": Line(lambda distance: -distance.abs().float())})


@every
def test_a_replaced_vector_of_a_built_in_bias_is_checked(implementation):
    bias = ClippedRelativeBias(torch.zeros(3))
    bias.vector = torch.tensor([True, False, True])
    refuses(implementation, DTypeError, "torch.bool", bias=bias)
    bias = ClippedRelativeBias(torch.zeros(3))
    bias.register_forward_hook(lambda module, given, result: result[:2])
    refuses(implementation, ShapeError, "(2,) | 11 distances", bias=bias)


# Normalizers


class Own(Normalizer):
    """Softmax with one method replaced."""

    def __init__(self, **parts: Callable[..., Any]) -> None:
        self.parts = parts

    def _do(self, name: str, right: Any, *given: Any) -> Any:
        return self.parts[name](*given) if name in self.parts else right

    def tau(self, scores: Tensor) -> Any:
        return self._do("tau", torch.logsumexp(scores, -1, keepdim=True), scores)

    def phi(self, x: Tensor) -> Any:
        return self._do("phi", x.exp(), x)

    def slope(self, x: Tensor) -> Any:
        return self._do("slope", x.exp(), x)

    def divisor(self, x: Tensor, visible: Tensor) -> Any:
        return self._do("divisor", None, x)

    def sink(self) -> Any:
        return self._do("sink", None)


WRONG_NORMALIZERS: Wrong = {
    "Own.tau | (2, 2, 2, 5, 1) | keepdim=True": (ShapeError, {"tau": lambda s: s.logsumexp(-1)}),
    "Own.tau | (2, 2, 2, 1, 1)": (ShapeError, {"tau": lambda s: s.logsumexp((-2, -1), keepdim=True)}),
    "Own.tau | (2, 1, 2, 5, 1)": (ShapeError, {"tau": lambda s: s.logsumexp((1, -1), keepdim=True)}),
    "Own.tau | ()": (ShapeError, {"tau": lambda s: s.logsumexp((0, 1, 2, 3, 4))}),
    "Own.tau | float64 | float32": (DTypeError, {"tau": lambda s: s.double()[..., :1]}),
    "Own.tau | int64": (DTypeError, {"tau": lambda s: s.long()[..., :1]}),
    "Own.tau | float | tensor": (DTypeError, {"tau": lambda s: 0.0}),
    "Own.phi | (2, 2, 2, 5, 1)": (ShapeError, {"phi": lambda x: x.exp().sum(-1, keepdim=True)}),
    "Own.phi | (2, 2, 2, 2, 7)": (ShapeError, {"phi": lambda x: x.exp()[..., :2, :]}),
    "Own.slope | (2, 2, 2, 2, 7)": (ShapeError, {"slope": lambda x: x.exp()[..., :2, :]}),
    "Own.phi | float64": (DTypeError, {"phi": lambda x: x.double().exp()}),
    "Own.phi | torch.bool": (DTypeError, {"phi": lambda x: x > 0}),
    "Own.phi | None": (DTypeError, {"phi": lambda x: None}),
    "Own.slope | (2, 2, 2, 5, 1)": (ShapeError, {"slope": lambda x: x.sum(-1, keepdim=True)}),
    "Own.slope | torch.bool": (DTypeError, {"slope": lambda x: x > 0}),
    "Own.slope | float": (DTypeError, {"slope": lambda x: 1.0}),
    "Own.divisor | (2, 2, 2, 5, 7)": (ShapeError, {"divisor": lambda x: torch.ones_like(x)}),
    "Own.divisor | int64": (DTypeError, {"divisor": lambda x: torch.ones_like(x[..., :1]).long()}),
    "Own.divisor | (2, 2, 2, 5)": (ShapeError, {"divisor": lambda x: x[..., 0]}),
    "sums to 2 | sums_to_one = False": (ArgumentError, {"divisor": lambda x: 0.5}),
    "Own.sink | int64": (DTypeError, {"sink": lambda: torch.zeros(6).long()}),
    "(3,) | 6 heads": (ShapeError, {"sink": lambda: torch.zeros(3)}),
    "(6, 1) | 6 heads": (ShapeError, {"sink": lambda: torch.zeros(6, 1)}),
    "Own.sink | str": (DTypeError, {"sink": lambda: "0"}),
    "Own.sink | nan": (ArgumentError, {"sink": lambda: math.nan}),
    "meta | cpu": (DeviceError, {"sink": lambda: torch.zeros(6, device="meta")}),
}


@every
@looped("words", WRONG_NORMALIZERS)
def test_results_of_custom_normalizers_are_checked(words, implementation):
    error, parts = WRONG_NORMALIZERS[words]
    refuses(implementation, error, words, normalize=Own(**parts))


@every
@looped(
    ("parts", "expected"),
    [
        ({}, Softmax()),
        ({"sink": lambda: 1}, Softmax1(1.0)),
        ({"sink": lambda: torch.arange(6.0)}, Softmax1(torch.arange(6.0))),
        ({"divisor": lambda x: torch.ones_like(x[..., :1])}, Softmax()),
        ({"divisor": lambda x: 1}, Softmax()),
    ],
)
def test_valid_results_of_custom_normalizers_are_accepted(parts, expected, implementation):
    same(implementation, {"normalize": Own(**parts)}, {"normalize": expected})


@every
def test_the_last_rows_of_a_causal_mask_are_tried(implementation):
    """The first row has one visible key, whose weight is one even if τ is wrong."""
    normalize = Own(tau=lambda scores: scores.amax(-1, keepdim=True))
    refuses(implementation, ArgumentError, "sums_to_one", normalize=normalize, mask=Causal(align="start"))


@every
def test_a_subclass_of_softmax1_is_itself(implementation):
    """The subclass is a custom normalizer, so its overridden methods are used."""

    class Colder(Softmax1):
        def tau(self, scores: Tensor) -> Tensor:
            return torch.logsumexp(2 * scores, -1, keepdim=True) / 2

        def phi(self, x: Tensor) -> Tensor:
            return (2 * x).exp()

        def slope(self, x: Tensor) -> Tensor:
            return 2 * (2 * x).exp()

    actual = run(implementation, normalize=Colder(0.5), score=Dot())
    expected = run("reference", normalize=Softmax1(1.0), score=regard.ScaledDot(2.0))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@every
def test_results_of_custom_sinks_are_checked(implementation):
    class Other(Sink):
        def forward(self) -> Any:
            return self.score

    refuses(implementation, DTypeError, "Other | Parameter | normalizer", normalize=Other(6))


# Layout of a prepared call


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_problem_tensors_have_one_layout(dtype):
    """Every tensor in a problem has the dtype, the axes and the sizes that the kernels assume."""
    from regard.mechanism.call.arguments import Call, Layout, prepare

    query, key, value = (x.to(dtype) for x in inputs())
    score = Custom(lambda q, k: Prepared(q[:1], k[:, :1], biases=(q[..., :1], torch.zeros(K, dtype=q.dtype))))
    mask = (
        Ranges(lambda p, k: (p.int() - 2, 9)) & Terms(lambda s: [MaskTerm(allowed=torch.ones(K) > 0)])
    ) | Documents([2, 3], [3, 4], within=Ranges(lambda p, k: (torch.tensor(0).short(), p + 1)))
    bias = [torch.randn(Q, 1).half(), Line(lambda d: d)]
    call = Call(score, mask, bias, Own(sink=lambda: torch.zeros(6).half()), 0.1, None)
    problem = prepare(query, key, value, Layout.of(query, key, value), call)
    real = torch.float64 if dtype is torch.float64 else torch.float32
    assert problem.lead() == (B, G, R)
    for name, tensor in problem.tensors.items():
        kind = name.rstrip("0123456789")
        whole = {"start": torch.int64, "stop": torch.int64, "row": torch.int64, "head": torch.int64}
        expected = {**whole, "seed": torch.int64, "allowed": torch.bool}.get(kind, real)
        assert tensor.dtype is expected, name
        assert tensor.dim() == 5, name
        assert all(n in (1, full) for n, full in zip(tensor.shape[:3], (B, G, R), strict=True)), name
    assert set(problem.tensors) >= {"bias0", "bias1", "bias2", "line0", "start0", "allowed0", "stop1", "sink"}


def test_built_in_classes_are_known_by_their_exact_type():
    from regard.mechanism.masks.algebra import BUILT_IN

    class Mine(Causal):
        pass

    assert {Causal, Window, Prefix, Padding, Documents} <= BUILT_IN
    assert Mine not in BUILT_IN
    assert General not in BUILT_IN
