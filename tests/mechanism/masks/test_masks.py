"""Masks, pair by pair, compared with their definitions in plain Python."""

import dataclasses
from collections.abc import Sequence
from typing import Any

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
from regard.mechanism.call.problem import Problem, tiles
from regard.mechanism.masks.algebra import CallShape, as_mask
from tests import naive
from tests.cases import looped
from tests.recorder import Largest


def by_definition(mask: Any, queries: int, keys: int, lead: Sequence[int] = ()) -> Tensor:
    """Evaluate the definition of the mask, pair by pair."""
    dense = torch.zeros(*lead, queries, keys, dtype=torch.bool)
    for *at, i, j in torch.cartesian_prod(*(torch.arange(n) for n in dense.shape)).tolist():
        dense[(*at, i, j)] = naive.sees(mask, tuple(at), i, j, queries, keys)
    return dense


def looked(mask: Mask | Tensor, queries: int, keys: int, lead: Sequence[int] = ()) -> Tensor:
    """Return the keys that the operator attends to: with equal scores, only visible keys have weight."""
    query, key = torch.zeros(*lead, queries, 2), torch.zeros(*lead, keys, 2)
    return regard.attend(query, key, key, mask=mask)[1].dense() != 0


def check(mask: Mask, expected: Tensor) -> None:
    """Check the dense form of the mask and its effect in the operator."""
    *lead, queries, keys = expected.shape
    dense = mask.dense(queries, keys, lead)
    assert dense.dtype is torch.bool
    assert torch.equal(dense, expected), f"{mask!r}: the dense mask is\n{dense}\ninstead of\n{expected}"
    seen = looked(mask, queries, keys, lead)
    assert torch.equal(seen, expected), f"{mask!r}: the operator attends to\n{seen}\ninstead of\n{expected}"


# Masks and combinations


@st.composite
def rules(draw: st.DrawFn, align: str) -> Rule:
    n, m = draw(st.integers(0, 9)), draw(st.none() | st.integers(0, 9))
    return draw(
        st.sampled_from(
            [
                Causal(align=align),
                Window(n + 1, align=align),
                Window(left=n, right=m, align=align),
                Window(left=m, right=n, align=align),
                Prefix(n, align=align),
            ]
        )
    )


@st.composite
def masks(draw: st.DrawFn) -> tuple[Mask, tuple[int, ...]]:
    """Draw a nested mask, and its shape (lead, queries, keys)."""
    align, lead = draw(st.sampled_from(["end", "start"])), draw(st.sampled_from([(), (2,), (2, 3)]))
    parts = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=4))  # document lengths
    queries, keys = sum(q for q, _ in parts), sum(k for _, k in parts)

    def leaf() -> Any:
        kind = draw(st.sampled_from(["rule", "rule", "padding", "documents", "tensor"]))
        if kind == "rule":
            return draw(rules(align))
        if kind == "documents":
            within = draw(st.none() | rules(draw(st.sampled_from(["end", "start"]))))
            return Documents([q for q, _ in parts], [k for _, k in parts], within=within)
        if kind == "padding":
            shape = lead[: draw(st.integers(0, len(lead)))]
            lengths = torch.randint(0, 12, shape, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
            return Padding(lengths, side=draw(st.sampled_from(["right", "left"])))
        shape = draw(
            st.sampled_from([(), (1,), (keys,), (queries, 1), (queries, keys), (*lead, queries, keys)])
        )
        return torch.rand(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) < 0.6

    def tree(depth: int) -> Any:
        if depth == 0 or draw(st.booleans()):
            return leaf()
        one, two = tree(depth - 1), tree(depth - 1)
        return one & two if draw(st.booleans()) else one | two

    return as_mask(tree(3)), (*lead, queries, keys)


@settings(max_examples=150)
@given(masks())
def test_masks_and_their_combinations_by_definition(drawn):
    mask, (*lead, queries, keys) = drawn
    check(mask, by_definition(mask, queries, keys, lead))


@settings(max_examples=60)
@given(st.sampled_from(["end", "start"]).flatmap(rules), st.integers(0, 9), st.integers(0, 9))
def test_rules_by_definition(rule, queries, keys):
    check(rule, by_definition(rule, queries, keys))


def test_causal_is_aligned_to_the_end_by_default():
    assert torch.equal(Causal().dense(3, 5), torch.ones(3, 5).tril(2).bool())
    assert torch.equal(Causal(align="start").dense(3, 5), torch.ones(3, 5).tril().bool())
    assert torch.equal(Causal().dense(5, 3), torch.ones(5, 3).tril(-2).bool())


@looped("n", [1, 3, 12])
def test_window_keeps_exactly_n_keys_including_its_own(n):
    dense, own = Window(n).dense(6, 9), torch.arange(6) + 3
    assert dense[torch.arange(6), own].all()
    assert dense.sum(-1).tolist() == [min(n, int(i) + 1) for i in own]


def test_prefix_is_a_causal_mask_and_padding():
    for queries, keys, length in ((5, 5, 3), (3, 7, 2), (7, 3, 0), (4, 4, 9)):
        expected = (Causal() | Padding(length)).dense(queries, keys)
        assert torch.equal(Prefix(length).dense(queries, keys), expected)


def test_padding_may_differ_between_heads():
    lengths = torch.tensor([[1, 2, 3], [4, 5, 0]])
    expected = torch.arange(5).expand(2, 3, 2, 5) < lengths[:, :, None, None]
    check(Padding(lengths), expected)
    check(Padding(lengths.tolist()), expected)
    check(Padding([[1], [4]]), torch.arange(5).expand(2, 3, 2, 5) < torch.tensor([1, 4])[:, None, None, None])
    assert Padding([]).dense(2, 3, [0]).shape == (0, 2, 3)


@looped("dtype", [getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)])
def test_padding_takes_any_integers(dtype):
    assert Padding(torch.tensor([1, 3], dtype=dtype)).dense(1, 4, [2]).sum().item() == 4


def test_documents_serve_a_whole_batch():
    mask = Documents([2, 0, 3], within=Causal())
    assert torch.equal(looked(mask, 5, 5, [2, 3]), mask.dense(5).expand(2, 3, 5, 5))
    assert torch.equal(Documents([2, 3]).dense(5), Documents([2, 3], [2, 3]).dense(5))


class Neighbours(Rule):
    """A custom rule: keys on both sides, with a stop one beyond Window's."""

    def ranges(self, position, keys):
        return position - 1, position + 3


def test_a_rule_of_ones_own_works_alone_and_within_documents():
    check(Neighbours(), by_definition(Window(left=1, right=2), 4, 6))
    check(Documents([2, 3], within=Neighbours()), Documents([2, 3], within=Window(left=1, right=2)).dense(5))


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (5, 1), (1, 7), (5, 7), (3, 1, 1), (2, 1, 5, 7), (2, 3, 5, 7)]
)
def test_boolean_tensors_broadcast(shape):
    tensor = torch.randint(2, shape, generator=torch.Generator().manual_seed(0)).bool()
    check(as_mask(tensor), tensor.expand(2, 3, 5, 7))


def test_the_checker_can_fail():
    """The checker detects a window with one key too many and a rule with the wrong alignment."""
    for wrong, right in ((Window(4), Window(3)), (Causal(align="start"), Causal())):
        with pytest.raises(AssertionError, match="dense mask is"):
            check(wrong, by_definition(right, 3, 5))

    class Liar(Causal):
        def dense(self, queries, keys=None, lead=()):
            return torch.ones(*lead, queries, keys, dtype=torch.bool)

    with pytest.raises(AssertionError, match="operator attends to"):
        check(Liar(), torch.ones(3, 3, dtype=torch.bool))


def test_tensors_combine_from_either_side():
    tensor, causal = torch.rand(3, 3) < 0.5, Causal().dense(3)
    for mask, expected in (
        *((mask, tensor & causal) for mask in (tensor & Causal(), Causal() & tensor)),
        *((mask, tensor | causal) for mask in (tensor | Causal(), Causal() | tensor)),
    ):
        assert isinstance(mask, Mask)
        check(mask, expected)


@pytest.mark.parametrize("implementation", ["reference", "tiled", "fused"])
def test_streaming_sinks_are_two_intervals(implementation):
    """StreamingLLM's mask: the first keys and the recent ones, with a gap between them."""
    mask = Causal() & (Window(3) | Padding(2))
    expected = by_definition(mask, 12, 12)
    assert (~expected[9, 2:7]).all()  # the gap
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


@looped("first", [Causal, lambda align: Window(3, align=align), lambda align: Prefix(2, align)])
@looped("second", [Causal, lambda align: Window(left=1, right=1, align=align)])
def test_rules_from_both_ends_contradict_each_other(first, second):
    for combine in (lambda a, b: a & b, lambda a, b: a | b):
        combine(first("start"), second("start"))
        combine(first("end"), second("end"))
        with pytest.raises(MaskError, match="'start'") as error:
            combine(first("start"), second("end"))
        assert repr(first("start")) in str(error.value)
        assert repr(second("end")) in str(error.value)
        for one, other in (
            (first("end"), second("start")),
            (first("end") & Padding(3), second("start") | Padding(2)),
        ):
            with pytest.raises(MaskError, match="align positions differently"):
                combine(one, other)


# Printing and drawing

EVERY_MASK = {
    "Causal()": Causal(),
    "Causal(align='start')": Causal(align="start"),
    "Window(3)": Window(3),
    "Window(left=1, right=2)": Window(left=1, right=2),
    "Window(left=None, right=1)": Window(left=None, right=1),
    "Window(left=2, right=None)": Window(left=2, right=None),
    "Prefix(3)": Prefix(3),
    "Padding(5)": Padding(5),
    "Padding(2, side='left')": Padding(2, side="left"),
    "Documents([3, 0, 5])": Documents([3, 0, 5]),
    "Documents([3, 5], [2, 6], within=Causal())": Documents([3, 5], [2, 6], within=Causal()),
    "mask(8, 8)": as_mask(torch.eye(8, dtype=torch.bool)),
    "mask(8,)": as_mask(torch.arange(8) < 3),
    "Causal() & Padding(6)": Causal() & Padding(6),
    "Window(2) | Padding(2)": Window(2) | Padding(2),
    "(Window(2) | Padding(2)) & Causal()": (Window(2) | Padding(2)) & Causal(),
}


def picture(dense: Tensor) -> str:
    return "\n".join("".join("■" if seen else "·" for seen in row) for row in dense.tolist())


@looped("text mask", EVERY_MASK.items())
def test_a_mask_writes_and_draws_itself(text, mask):
    assert repr(mask) == text
    assert mask.draw(8) == picture(mask.dense(8))
    assert str(mask) == f"{text}\n{mask.draw(8)}"
    if type(mask) in (Causal, Window, Prefix, Padding):
        assert torch.equal(eval(text, vars(regard)).dense(5, 7), mask.dense(5, 7))


def test_how_other_masks_are_written():
    assert repr(Window(3, align="start")) == "Window(3, align='start')"
    assert repr(Prefix(3, align="start")) == "Prefix(3, align='start')"
    assert repr(Padding(torch.arange(9))) == "Padding(<9 lengths>)"
    assert repr(Padding([[1, 2], [3, 4]])) == "Padding([[1, 2], [3, 4]])"


def block_picture(dense: Tensor, rows: int, columns: int) -> str:
    """Return a picture of equal blocks with all, some or none of their pairs visible."""
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


@given(st.integers(0, 150), st.integers(0, 150))
def test_a_drawing_has_at_most_32_rows_of_64_cells(queries, keys):
    lines = Causal().draw(queries, keys).split("\n")
    if queries and keys:
        assert len(lines) == min(queries, 32)
        assert {len(line) for line in lines} == {min(keys, 64)}
    assert set("".join(lines)) <= set("■▪·")


@pytest.mark.parametrize(
    "mask", [Documents([500, 0, 700]), Padding(3000), as_mask(torch.ones(90, 130) > 0)], ids=repr
)
def test_a_large_mask_prints_itself_small(mask):
    first, *lines = str(mask).split("\n")
    assert first == repr(mask)
    assert 1 <= len(lines) <= 32
    assert all(1 <= len(line) <= 64 for line in lines)


def test_the_size_of_a_drawing():
    assert Causal().draw(2) == "■·\n■■"
    assert Causal().draw(2, 3) == "■■·\n■■■"
    assert Causal().draw(keys=9).split("\n")[-1] == "■" * 9
    assert Causal().draw(0, 3) == Padding([]).draw(2, 3, lead=[0]) == ""
    batch = Padding([1, 3])  # its first sequence is drawn
    assert batch.draw(2, 4, lead=[2]) == batch.draw(2, 4, lead=[2, 5]) == "■···\n■···"
    assert "Padding([1, 3])" in str(batch)


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
    """Only one of the two masks has a default size; the drawing must use it."""
    assert str(mask) == f"{mask!r}\n{picture(expected)}"


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
    """A dense mask for 65,536 packed tokens would take 4 GB; the drawing has 2,048 cells."""
    with Largest() as largest:
        lines = draw().split("\n")
    assert largest.elements <= 4096**2 / 16
    assert len(lines) >= 32  # something is drawn


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
    for mask in (Padding(lengths), Documents(lengths)):
        assert regard.attention(query, query, query, mask=mask).shape == (2, 3, 5, 4)
        assert repr(mask) in str(mask)
    assert repr(Padding(lengths)) == "Padding(<2 lengths>)"


# Skipped keys


def prepared(mask: Mask | None, queries: int, keys: int) -> Problem:
    query, key = torch.empty(queries, 4), torch.empty(keys, 4)
    call = Call(regard.Dot(), mask, None, regard.Softmax(), 0.0, None)
    return prepare(query, key, key, Layout.of(query, key, key), call)


def tile_area(mask: Mask | None, queries: int, keys: int, budget: int = 2**20) -> int:
    """Return the number of pairs in the tiles of a call."""
    return sum(
        len(range(*at.rows.indices(queries))) * len(range(*at.keys.indices(keys)))
        for at in tiles(prepared(mask, queries, keys), budget)
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


@settings(max_examples=40)
@given(masks(), st.integers(1, 40))
def test_tiles_hold_every_pair_in_sight(drawn, budget):
    mask, (*lead, queries, keys) = drawn
    if lead:
        return
    covered = torch.zeros(queries, keys, dtype=torch.bool)
    for at in tiles(prepared(mask, queries, keys), budget):
        assert not covered[at.rows].any()  # every row is in exactly one tile
        covered[at.rows, at.keys] = True
    assert covered[mask.dense(queries, keys)].all()


@pytest.mark.parametrize("tile", [1, 7, 20, 40, 60, 90])
@pytest.mark.parametrize("side", ["right", "left"])
def test_sequences_of_one_tile_may_see_different_keys(side, tile, monkeypatch):
    """A tile covers the union of its sequences' keys, but each sequence attends only to its own."""
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
