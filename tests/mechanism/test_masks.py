"""Masks, pair by pair, compared with their definitions in plain Python."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import Causal, Documents, Mask, MaskError, Padding, Prefix, Rule, Window
from regard.mechanism import tiled
from regard.mechanism.call.arguments import Call, Layout, prepare
from regard.mechanism.call.problem import tiles
from regard.mechanism.mask_algebra import CallShape, as_mask
from tests.recorder import Largest

few = settings(max_examples=40)
sizes = st.integers(0, 9)
aligns = st.sampled_from(["end", "start"])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def pairs(queries: int, keys: int, sees: Callable[[int, int], bool]) -> Tensor:
    """The mask that a predicate of (query, key) describes."""
    rows = [[bool(sees(i, j)) for j in range(keys)] for i in range(queries)]
    return torch.tensor(rows, dtype=torch.bool).reshape(queries, keys)


def position(i: int, queries: int, keys: int, align: str) -> int:
    """The key position of query i."""
    return i if align == "start" else i + keys - queries


def looked(mask: Mask | Tensor, queries: int, keys: int, lead: Sequence[int] = ()) -> Tensor:
    """The keys that the operator uses: with equal scores, exactly the visible keys have weight."""
    query, key = torch.zeros(*lead, queries, 2), torch.zeros(*lead, keys, 2)
    return regard.attend(query, key, key, mask=mask)[1].dense() != 0


def check(mask: Mask, expected: Tensor) -> None:
    """The dense form of the mask and its effect in the operator are as expected."""
    *lead, queries, keys = expected.shape
    dense = mask.dense(queries, keys, lead)
    assert dense.dtype is torch.bool
    assert torch.equal(dense, expected), f"{mask!r}: says\n{dense}\nnot\n{expected}"
    seen = looked(mask, queries, keys, lead)
    assert torch.equal(seen, expected), f"{mask!r}: operator sees\n{seen}\nnot\n{expected}"


# Each mask by its definition


@few
@given(sizes, sizes, aligns)
def test_causal_sees_its_own_and_earlier_keys(queries, keys, align):
    expected = pairs(queries, keys, lambda i, j: j <= position(i, queries, keys, align))
    check(Causal(align=align), expected)


def test_causal_is_aligned_to_the_end_by_default():
    assert torch.equal(Causal().dense(3, 5), torch.ones(3, 5).tril(2).bool())
    assert torch.equal(Causal(align="start").dense(3, 5), torch.ones(3, 5).tril().bool())
    assert torch.equal(Causal().dense(5, 3), torch.ones(5, 3).tril(-2).bool())
    assert torch.equal(Causal(align="start").dense(5, 3), torch.ones(5, 3).tril().bool())


@few
@given(sizes, sizes, st.integers(1, 12), aligns)
def test_window_keeps_keys_up_to_the_querys_own(queries, keys, n, align):
    def sees(i, j):
        own = position(i, queries, keys, align)
        return own - n < j <= own

    check(Window(n, align=align), pairs(queries, keys, sees))


@few
@given(st.integers(1, 9), st.integers(0, 5), st.integers(1, 12))
def test_window_keeps_exactly_n_keys_including_its_own(queries, more, n):
    keys = queries + more
    dense = Window(n).dense(queries, keys)
    own = torch.arange(queries) + more
    assert dense[torch.arange(queries), own].all()
    assert dense.sum(-1).tolist() == [min(n, int(i) + 1) for i in own]


@few
@given(sizes, sizes, st.none() | st.integers(0, 9), st.none() | st.integers(0, 9), aligns)
def test_window_with_sides(queries, keys, left, right, align):
    if left is None and right is None:
        left = 0

    def sees(i, j):
        own = position(i, queries, keys, align)
        return (left is None or own - left <= j) and (right is None or j <= own + right)

    check(Window(left=left, right=right, align=align), pairs(queries, keys, sees))


@few
@given(sizes, sizes, st.integers(0, 12), aligns)
def test_prefix_is_seen_by_all_and_the_rest_is_causal(queries, keys, length, align):
    def sees(i, j):
        return j < length or j <= position(i, queries, keys, align)

    mask = Prefix(length, align=align)
    check(mask, pairs(queries, keys, sees))
    assert torch.equal(
        mask.dense(queries, keys), (Causal(align=align) | Padding(length)).dense(queries, keys)
    )


@few
@given(sizes, sizes, st.integers(0, 12), st.sampled_from(["right", "left"]))
def test_padding_of_one_length(queries, keys, length, side):
    def sees(i, j):
        return j < length if side == "right" else j >= keys - length

    check(Padding(length, side=side), pairs(queries, keys, sees))
    check(Padding(torch.tensor(length), side=side), pairs(queries, keys, sees))


@few
@given(
    sizes,
    sizes,
    st.lists(st.integers(0, 12), max_size=4),
    st.sampled_from(["right", "left"]),
    st.sampled_from([(), (1,), (3,), (2, 3)]),
)
def test_padding_of_a_batch(queries, keys, lengths, side, inner):
    """One length per sequence, for any number of further axes, such as heads."""

    def sequence(length):
        return pairs(queries, keys, lambda i, j: j < length if side == "right" else j >= keys - length)

    expected = torch.stack([sequence(n) for n in lengths]) if lengths else torch.zeros(0, queries, keys) > 0
    expected = expected.reshape(len(lengths), *[1] * len(inner), queries, keys).expand(-1, *inner, -1, -1)
    check(Padding(lengths, side=side), expected)
    check(Padding(torch.tensor(lengths, dtype=torch.int32), side=side), expected)


def test_padding_may_differ_between_heads():
    lengths = torch.tensor([[1, 2, 3], [4, 5, 0]])
    expected = torch.arange(5).expand(2, 3, 2, 5) < lengths[:, :, None, None]
    check(Padding(lengths), expected)
    check(Padding(lengths.tolist()), expected)
    check(Padding([[1], [4]]), torch.arange(5).expand(2, 3, 2, 5) < torch.tensor([1, 4])[:, None, None, None])


def test_padding_takes_any_integers():
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        assert Padding(torch.tensor([1, 3], dtype=dtype)).dense(1, 4, [2]).sum().item() == 4


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_padding_takes_wide_unsigned_integers(dtype):
    assert Padding(torch.tensor([1, 3], dtype=dtype)).dense(1, 4, [2]).sum().item() == 4


def test_padding_longer_than_the_keys_masks_nothing():
    assert Padding([4, 9]).dense(2, 4, [2]).all()
    assert Padding([4, 9], side="left").dense(2, 4, [2]).all()


document_lengths = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=5)


def documents(lengths: Sequence[tuple[int, int]], sees: Callable[[int, int, int, int], bool]) -> Tensor:
    """Blocks on the diagonal, one per document; `sees` receives i, j and the block sizes."""
    blocks = [pairs(q, k, lambda i, j, q=q, k=k: sees(i, j, q, k)) for q, k in lengths]
    return torch.block_diag(*blocks).bool() if blocks else torch.zeros(0, 0) > 0


@few
@given(document_lengths)
def test_documents_see_their_own_keys_only(lengths):
    queries, keys = [q for q, _ in lengths], [k for _, k in lengths]
    check(Documents(queries, keys), documents(lengths, lambda *_: True))
    check(
        Documents(torch.tensor(queries, dtype=torch.long), torch.tensor(keys, dtype=torch.long)),
        documents(lengths, lambda *_: True),
    )
    check(Documents(queries), documents([(q, q) for q in queries], lambda *_: True))


@few
@given(document_lengths, aligns)
def test_documents_with_causal_within(lengths, align):
    mask = Documents([q for q, _ in lengths], [k for _, k in lengths], within=Causal(align=align))
    check(mask, documents(lengths, lambda i, j, q, k: j <= position(i, q, k, align)))


@few
@given(document_lengths, st.none() | st.integers(0, 3), st.integers(0, 3), aligns)
def test_documents_with_a_window_within(lengths, left, right, align):
    def sees(i, j, q, k):
        own = position(i, q, k, align)
        return (left is None or own - left <= j) and j <= own + right

    within = Window(left=left, right=right, align=align)
    check(
        Documents([q for q, _ in lengths], [k for _, k in lengths], within=within), documents(lengths, sees)
    )


@few
@given(document_lengths, st.integers(0, 4))
def test_documents_with_a_prefix_within(lengths, length):
    mask = Documents([q for q, _ in lengths], [k for _, k in lengths], within=Prefix(length))
    check(mask, documents(lengths, lambda i, j, q, k: j < min(length, k) or j <= position(i, q, k, "end")))


def test_documents_serve_a_whole_batch():
    mask = Documents([2, 0, 3], within=Causal())
    assert torch.equal(looked(mask, 5, 5, [2, 3]), mask.dense(5).expand(2, 3, 5, 5))


class Neighbours(Rule):
    """A custom rule: keys on both sides, with a stop one beyond Window's."""

    def ranges(self, position, keys):
        return position - 1, position + 3


def test_a_rule_of_ones_own_works_alone_and_within_documents():
    check(Neighbours(), pairs(4, 6, lambda i, j: i + 1 <= j < i + 5))
    check(
        Documents([2, 3], within=Neighbours()),
        documents([(2, 2), (3, 3)], lambda i, j, q, k: i - 1 <= j < i + 3),
    )


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (5, 1), (1, 7), (5, 7), (3, 1, 1), (2, 1, 5, 7), (2, 3, 5, 7)]
)
def test_boolean_tensors_broadcast(shape):
    tensor = torch.randint(2, shape, generator=torch.Generator().manual_seed(0)).bool()
    check(as_mask(tensor), tensor.expand(2, 3, 5, 7))


def test_the_checker_can_fail():
    """A window with one key too many, and a rule with the wrong alignment."""
    with pytest.raises(AssertionError, match="says"):
        check(Window(4), pairs(5, 5, lambda i, j: i - 3 < j <= i))
    with pytest.raises(AssertionError, match="says"):
        check(Causal(align="start"), pairs(3, 5, lambda i, j: j <= position(i, 3, 5, "end")))

    class Liar(Causal):
        def dense(self, queries, keys=None, lead=()):
            return torch.ones(*lead, queries, keys, dtype=torch.bool)

    with pytest.raises(AssertionError, match="operator sees"):
        check(Liar(), torch.ones(3, 3, dtype=torch.bool))


# Combining


@st.composite
def combinations(draw):
    """A nested mask and its expected value, by set algebra."""
    queries, keys, align = draw(sizes), draw(sizes), draw(aligns)

    def leaf():
        n = draw(st.integers(0, 6))
        kind = draw(st.sampled_from(["causal", "window", "sides", "prefix", "padding", "left", "tensor"]))
        own = [position(i, queries, keys, align) for i in range(queries)]
        if kind == "causal":
            return Causal(align=align), pairs(queries, keys, lambda i, j: j <= own[i])
        if kind == "window":
            return Window(n + 1, align=align), pairs(queries, keys, lambda i, j: own[i] - n <= j <= own[i])
        if kind == "sides":
            return (
                Window(left=n, right=2, align=align),
                pairs(queries, keys, lambda i, j: own[i] - n <= j <= own[i] + 2),
            )
        if kind == "prefix":
            return Prefix(n, align=align), pairs(queries, keys, lambda i, j: j < n or j <= own[i])
        if kind == "padding":
            return Padding(n), pairs(queries, keys, lambda i, j: j < n)
        if kind == "left":
            return Padding(n, side="left"), pairs(queries, keys, lambda i, j: j >= keys - n)
        bits = draw(st.lists(st.booleans(), min_size=queries * keys, max_size=queries * keys))
        tensor = torch.tensor(bits, dtype=torch.bool).reshape(queries, keys)
        return tensor, tensor

    def tree(depth):
        if depth == 0 or draw(st.booleans()):
            return leaf()
        (one, this), (two, that) = tree(depth - 1), tree(depth - 1)
        return (one & two, this & that) if draw(st.booleans()) else (one | two, this | that)

    mask, expected = tree(3)
    return as_mask(mask), expected


@given(combinations())
def test_combinations_are_set_algebra(combination):
    check(*combination)


def test_tensors_combine_from_either_side():
    tensor = torch.tensor([[True, False, True], [False, True, True], [True, True, False]])
    causal = Causal().dense(3)
    for mask in (tensor & Causal(), Causal() & tensor):
        assert isinstance(mask, Mask)
        check(mask, tensor & causal)
    for mask in (tensor | Causal(), Causal() | tensor):
        assert isinstance(mask, Mask)
        check(mask, tensor | causal)


def test_combinations_of_a_batch():
    lengths = torch.tensor([1, 4])
    mask = (Causal() & Padding(lengths)) | torch.eye(4, dtype=torch.bool)
    padded = torch.arange(4) < lengths[:, None, None, None]
    expected = ((torch.ones(4, 4).tril().bool() & padded) | torch.eye(4).bool()).expand(2, 3, 4, 4)
    check(mask, expected)


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_streaming_sinks_are_two_intervals(implementation):
    """The first keys and the near ones, with a gap between them: StreamingLLM's mask."""
    mask = Causal() & (Window(3) | Padding(2))
    expected = pairs(12, 12, lambda i, j: j <= i and (j < 2 or i - j < 3))
    assert (~expected[9, 2:7]).all()  # there is a gap
    check(mask, expected)
    query, key, value = torch.randn(3, 2, 12, 5).unbind()
    torch.testing.assert_close(
        regard.attention(query, key, value, mask=mask, implementation=implementation),
        regard.attention(query, key, value, mask=expected, implementation="reference"),
    )


def test_overlapping_intervals_count_once():
    query, key, value = torch.randn(3, 6, 4).unbind()
    once = regard.attention(query, key, value, mask=Window(4))
    torch.testing.assert_close(regard.attention(query, key, value, mask=Window(4) | Window(2)), once)
    torch.testing.assert_close(regard.attention(query, key, value, mask=Window(4) | Window(4)), once)


@pytest.mark.parametrize(
    "first", [Causal, lambda align: Window(3, align=align), lambda align: Prefix(2, align)]
)
@pytest.mark.parametrize("second", [Causal, lambda align: Window(left=1, right=1, align=align)])
def test_rules_from_both_ends_contradict_each_other(first, second):
    for combine in (lambda a, b: a & b, lambda a, b: a | b):
        combine(first("start"), second("start"))
        combine(first("end"), second("end"))
        with pytest.raises(MaskError, match="'start'") as error:
            combine(first("start"), second("end"))
        assert repr(first("start")) in str(error.value)
        assert repr(second("end")) in str(error.value)
        with pytest.raises(MaskError, match="align positions differently"):
            combine(first("end"), second("start"))
        with pytest.raises(MaskError, match="align positions differently"):
            combine(first("end") & Padding(3), second("start") | Padding(2))


def test_masks_without_positions_combine_with_either_end():
    for align in ("end", "start"):
        assert (Causal(align=align) & Padding(3) & torch.ones(2, 2, dtype=torch.bool)).dense(2).shape == (
            2,
            2,
        )


# Printing and drawing

EVERY_MASK = [
    Causal(),
    Causal(align="start"),
    Window(3),
    Window(left=1, right=2),
    Window(left=None, right=1),
    Window(left=2, right=None),
    Prefix(3),
    Padding(5),
    Padding(2, side="left"),
    Documents([3, 0, 5]),
    Documents([3, 5], [2, 6], within=Causal()),
    as_mask(torch.eye(8, dtype=torch.bool)),
    as_mask(torch.arange(8) < 3),
    Causal() & Padding(6),
    Window(2) | Padding(2),
    (Window(2) | Padding(2)) & Causal(),
]


@pytest.mark.parametrize("mask", EVERY_MASK, ids=repr)
def test_a_mask_draws_itself(mask):
    dense = mask.dense(8)
    drawing = mask.draw(8)
    assert drawing == "\n".join("".join("■" if seen else "·" for seen in row) for row in dense.tolist())
    assert str(mask) == f"{mask!r}\n{drawing}"


def test_how_masks_are_written():
    assert [repr(mask) for mask in EVERY_MASK] == [
        "Causal()",
        "Causal(align='start')",
        "Window(3)",
        "Window(left=1, right=2)",
        "Window(left=None, right=1)",
        "Window(left=2, right=None)",
        "Prefix(3)",
        "Padding(5)",
        "Padding(2, side='left')",
        "Documents([3, 0, 5])",
        "Documents([3, 5], [2, 6], within=Causal())",
        "mask(8, 8)",
        "mask(8,)",
        "Causal() & Padding(6)",
        "Window(2) | Padding(2)",
        "(Window(2) | Padding(2)) & Causal()",
    ]
    assert repr(Window(3, align="start")) == "Window(3, align='start')"
    assert repr(Prefix(3, align="start")) == "Prefix(3, align='start')"
    assert repr(Padding(torch.arange(9))) == "Padding(<9 lengths>)"
    assert repr(Padding([[1, 2], [3, 4]])) == "Padding([[1, 2], [3, 4]])"


@pytest.mark.parametrize(
    "mask", [m for m in EVERY_MASK if type(m) in (Causal, Window, Prefix, Padding)], ids=repr
)
def test_repr_recreates_the_mask(mask):
    again = eval(repr(mask), vars(regard))
    assert torch.equal(again.dense(5, 7), mask.dense(5, 7))


def block_picture(dense: Tensor, rows: int, columns: int) -> str:
    """Blocks of equal size: all, some or none of their pairs visible."""
    q, k = dense.shape
    share = dense.reshape(rows, q // rows, columns, k // columns).float().mean((1, 3))
    return "\n".join("".join("■" if x == 1 else "▪" if x > 0 else "·" for x in row) for row in share.tolist())


@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        Window(37),
        Prefix(100),
        Padding(333),
        Window(9) | Padding(20),
        Documents([128, 192], [400, 240]),
    ],
    ids=repr,
)
def test_a_large_mask_draws_itself_small(mask):
    assert mask.draw(320, 640) == block_picture(mask.dense(320, 640), 32, 64)


@few
@given(st.integers(0, 150), st.integers(0, 150))
def test_a_drawing_has_at_most_32_rows_of_64_cells(queries, keys):
    lines = Causal().draw(queries, keys).split("\n")
    if queries and keys:
        assert len(lines) == min(queries, 32)
        assert {len(line) for line in lines} == {min(keys, 64)}
    assert set("".join(lines)) <= set("■▪·")


def test_a_mask_without_queries_draws_an_empty_string():
    assert Causal().draw(0, 3) == ""


@pytest.mark.parametrize(
    "mask", [Documents([500, 0, 700]), Padding(3000), as_mask(torch.ones(90, 130) > 0)], ids=repr
)
def test_a_large_mask_prints_itself_small(mask):
    first, *lines = str(mask).split("\n")
    assert first == repr(mask)
    assert 1 <= len(lines) <= 32
    assert all(1 <= len(line) <= 64 for line in lines)


def test_a_mask_for_a_batch_draws_its_first_sequence():
    mask = Padding([1, 3])
    assert mask.draw(2, 4, lead=[2]) == "■···\n■···"
    assert mask.draw(2, 4, lead=[2, 5]) == mask.draw(2, 4, lead=[2])
    assert "Padding([1, 3])" in str(mask)


def test_a_mask_for_an_empty_batch_draws_an_empty_string():
    assert Padding([]).draw(2, 3, lead=[0]) == ""


def test_the_size_of_a_drawing_can_be_set():
    assert Causal().draw(2) == "■·\n■■"
    assert Causal().draw(2, 3) == "■■·\n■■■"
    assert Causal().draw(keys=9).split("\n")[-1] == "■" * 9


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Documents([2, 3]) & Causal(), Documents([2, 3], within=Causal()).dense(5)),
        (Padding(2) | Documents([2, 3]), Documents([2, 3]).dense(5) | (torch.arange(5) < 2)),
        (torch.ones(3, 5, dtype=torch.bool) & Causal(), Causal().dense(3, 5)),
        (Causal() & torch.ones(3, 5, dtype=torch.bool), Causal().dense(3, 5)),
    ],
    ids=["documents-rule", "padding-documents", "tensor-rule", "rule-tensor"],
)
def test_a_combination_is_drawn_at_the_size_of_the_part_that_has_one(mask, expected):
    """Only one of the two has a default size, which the drawing must use."""
    picture = "\n".join("".join("■" if seen else "·" for seen in row) for row in expected.tolist())
    assert str(mask) == f"{mask!r}\n{picture}"


@pytest.mark.parametrize(
    "draw",
    [
        lambda: str(Documents([1500, 2596])),
        lambda: Causal().draw(4096),
        lambda: (Window(9) | Padding(4)).draw(4096),
    ],
    ids=["print documents", "draw causal", "draw sinks"],
)
def test_drawing_a_large_mask_needs_no_dense_mask(draw):
    """65,536 packed tokens would be 4 GB of pairs; a drawing has 2048 cells."""
    with Largest() as largest:
        lines = draw().split("\n")
    assert largest.elements <= 4096**2 / 16
    assert len(lines) >= 32  # and it is drawn


# Values


def test_frozen_masks_are_equal_by_value():
    assert Causal() == Causal()
    assert Causal() != Causal(align="start")
    assert Prefix(3) == Prefix(3) != Prefix(4)
    assert len({Causal(), Causal(), Prefix(2), Prefix(2), Causal(align="start")}) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        Causal().align = "start"
    with pytest.raises(dataclasses.FrozenInstanceError):
        Prefix(3).length = 4


def test_combining_masks_does_not_modify_them():
    lengths, tensor = torch.tensor([1, 3]), torch.eye(4, dtype=torch.bool)
    mask = Padding(lengths) & tensor | Causal()
    mask.dense(4, 4, [2])
    looked(mask, 4, 4, [2])
    assert torch.equal(lengths, torch.tensor([1, 3]))
    assert torch.equal(tensor, torch.eye(4, dtype=torch.bool))


# Devices


@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        Window(2),
        Prefix(1),
        Padding([3, 4]),
        Padding([3, 4], side="left"),
        Documents([2, 3], [3, 4], within=Causal()),
        (Causal() & Padding([3, 4])) | Window(2),
    ],
    ids=repr,
)
def test_a_mask_goes_where_the_call_is(mask):
    meta = torch.device("meta")
    for term in mask.terms(CallShape((2, 3), 5, 7, meta)):
        assert all(part.device == meta for part in term if part is not None)
    query, key = torch.empty(2, 3, 5, 4, device=meta), torch.empty(2, 3, 7, 4, device=meta)
    output = regard.attention(query, key, key, mask=mask)
    assert output.device == meta
    assert output.shape == (2, 3, 5, 4)


def test_lengths_on_the_calls_device_need_no_value():
    lengths = torch.empty(2, dtype=torch.long, device="meta")
    query = torch.empty(2, 3, 5, 4, device="meta")
    assert regard.attention(query, query, query, mask=Padding(lengths)).shape == (2, 3, 5, 4)
    assert regard.attention(query, query, query, mask=Documents(lengths)).shape == (2, 3, 5, 4)
    assert repr(Padding(lengths)) == "Padding(<2 lengths>)"


@pytest.mark.parametrize("kind", [Padding, Documents])
def test_lengths_without_values_can_be_printed(kind):
    mask = kind(torch.empty(2, dtype=torch.long, device="meta"))
    assert repr(mask) in str(mask)


# Keys outside the interval are skipped


def tile_area(mask: Mask | None, queries: int, keys: int, budget: int = 2**20) -> int:
    """The number of pairs in the tiles of a call."""
    query, key = torch.empty(queries, 4), torch.empty(keys, 4)
    layout = Layout.of(query, key, key)
    problem = prepare(query, key, key, layout, Call(regard.Dot(), mask, None, regard.Softmax(), 0.0, None))
    return sum(
        len(range(*at.rows.indices(queries))) * len(range(*at.keys.indices(keys)))
        for at in tiles(problem, budget)
    )


@pytest.mark.parametrize(
    ("mask", "share"),
    [
        (Window(64), 1 / 16),
        (Window(left=32, right=31), 1 / 16),
        (Causal(), 0.7),
        (Causal() & Window(64), 1 / 16),
        (Padding(256), 1 / 12),
        (Documents([256] * 16), 1 / 8),
        (Documents([256] * 16, within=Window(16)), 1 / 16),
        (Prefix(512), 0.8),
        (Window(64) & torch.ones(4096, dtype=torch.bool), 1 / 16),
    ],
    ids=repr,
)
def test_tiles_skip_masked_pairs(mask, share):
    assert tile_area(None, 4096, 4096) == 4096**2
    assert tile_area(mask, 4096, 4096) <= share * 4096**2


@few
@given(combinations(), st.integers(1, 40))
def test_tiles_hold_every_pair_in_sight(combination, budget):
    mask, expected = combination
    queries, keys = expected.shape
    query, key = torch.empty(queries, 4), torch.empty(keys, 4)
    call = Call(regard.Dot(), mask, None, regard.Softmax(), 0.0, None)
    problem = prepare(query, key, key, Layout.of(query, key, key), call)
    covered = torch.zeros(queries, keys, dtype=torch.bool)
    for at in tiles(problem, budget):
        assert not covered[at.rows].any()  # every row is in one tile
        covered[at.rows, at.keys] = True
    assert covered[expected].all()


@pytest.mark.parametrize("tile", [1, 7, 20, 40, 60, 90])
@pytest.mark.parametrize("side", ["right", "left"])
def test_sequences_of_one_tile_may_see_different_keys(side, tile, monkeypatch):
    """A tile has the keys that any of its sequences sees; each sequence still sees its own."""
    monkeypatch.setattr(tiled, "TILE", tile)
    lengths = [1, 9, 4, 0, 7, 2]
    padding = Padding(lengths, side=side)
    expected = torch.stack([Padding(n, side=side).dense(2, 9) for n in lengths])
    check(padding, expected)
    check(padding & Window(3), expected & Window(3).dense(2, 9))
    check(padding & Causal() | Padding(1), expected & Causal().dense(2, 9) | (torch.arange(9) < 1))


def multiplications(mask: Mask | None, n: int, width: int, *, backward: bool = False) -> int:
    x = torch.zeros(n, width, requires_grad=backward)
    with FlopCounterMode(display=False) as counter:
        output = regard.attention(x, x, x, mask=mask, implementation="tiled")
        if backward:
            output.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("backward", [False, True])
def test_the_operator_multiplies_no_more_than_that(backward):
    n, width = 1024, 2
    everything = multiplications(None, n, width, backward=backward)
    assert everything >= 2 * 2 * n * n * width
    assert multiplications(Window(16), n, width, backward=backward) < everything / 12
    assert multiplications(Padding(32), n, width, backward=backward) < everything / 25
    assert multiplications(Documents([64] * 16), n, width, backward=backward) <= everything / 8


def test_fully_masked_calls_cost_nothing():
    assert tile_area(Padding(0), 4096, 4096) == 0
    x = torch.randn(6, 4)
    assert torch.equal(regard.attention(x, x, x, mask=Padding(0)), torch.zeros(6, 4))
    assert not math.isnan(float(regard.attention(x, x, x, mask=Causal() & Padding(0)).sum()))
