"""Masks are immutable: no later change affects a mask or a call that used it."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard import Causal, Documents, Mask, Padding, Prefix, Rule, Window
from regard.mechanism import dispatch, fused, operator
from regard.mechanism.masks.algebra import CallShape
from tests.cases import looped

B, H, N, D = 4, 2, 10, 16  # lengths sum to N, for Padding and Documents

MAKERS: dict[str, Callable[[Any], Mask]] = {
    "padding": lambda lengths: Padding(lengths),
    "left padding": lambda lengths: Padding(lengths, side="left"),
    "documents": lambda lengths: Documents(lengths),
    "causal documents": lambda lengths: Documents(lengths, within=Causal()),
    "documents with keys": lambda lengths: Documents([2, 3, 1, 4], lengths),
}
BEFORE, AFTER = [1, 2, 3, 4], [4, 3, 2, 1]


def inputs(requires_grad: bool = False) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(B, H, N, D, generator=generator).requires_grad_(requires_grad) for _ in range(3))


def output(mask: Mask, **options: Any) -> Tensor:
    return regard.attention(*inputs(), mask=mask, **options)


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.tensor(BEFORE)


@torch.inference_mode()
def change_inference_tensor(lengths: Tensor) -> None:
    lengths.copy_(torch.tensor(AFTER))


# Lengths, and ways to change them after a mask was created from them.
SOURCES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "tensor": (lambda: torch.tensor(BEFORE), lambda x: x.copy_(torch.tensor(AFTER))),
    # `.data` shares memory, and torch does not count its changes
    "data": (lambda: torch.tensor(BEFORE), lambda x: x.data.copy_(torch.tensor(AFTER))),
    "view": (
        lambda: torch.tensor([BEFORE, BEFORE])[1],
        lambda x: x._base.copy_(torch.tensor([AFTER, AFTER])),
    ),
    "array": (lambda: np.array(BEFORE), lambda x: np.copyto(x, AFTER)),
    "shared memory": (lambda: torch.from_numpy(np.array(BEFORE)), lambda x: np.copyto(x.numpy(), AFTER)),
    "list": (lambda: list(BEFORE), lambda x: x.__setitem__(slice(None), AFTER)),
    # inference tensors have no version counter
    "inference": (inference_tensor, change_inference_tensor),
}


def lengths_of(source: str) -> tuple[Any, Callable[[], object]]:
    make, change = SOURCES[source]
    lengths = make()
    return lengths, lambda: change(lengths)


each_source = looped("source", SOURCES)
each_mask = looped("kind", MAKERS)


@each_mask
@each_source
@pytest.mark.parametrize("implementation", [None, "tiled", "reference"])
def test_changing_the_lengths_changes_no_mask(kind, source, implementation):
    lengths, change = lengths_of(source)
    mask = MAKERS[kind](lengths)
    expected = output(MAKERS[kind](BEFORE), implementation="reference")
    torch.testing.assert_close(output(mask, implementation=implementation), expected)
    change()
    torch.testing.assert_close(output(mask, implementation=implementation), expected)
    after = MAKERS[kind](lengths)
    torch.testing.assert_close(output(after), output(MAKERS[kind](AFTER), implementation="reference"))
    assert mask != after


@each_mask
@each_source
@pytest.mark.parametrize("implementation", [None, "tiled", "reference"])
def test_gradients_and_weights_are_those_of_the_forward_pass(kind, source, implementation):
    lengths, change = lengths_of(source)
    tensors = inputs(requires_grad=True)
    result, weights = regard.attend(*tensors, mask=MAKERS[kind](lengths), implementation=implementation)
    change()
    actual = torch.autograd.grad(result.square().sum(), tensors)
    expected, dense = regard.attend(*tensors, mask=MAKERS[kind](BEFORE), implementation="reference")
    torch.testing.assert_close(weights.dense(), dense.dense())
    wanted = torch.autograd.grad(expected.square().sum(), tensors)
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


@looped("name", MAKERS)
def test_changed_terms_do_not_change_the_mask(name):
    mask = MAKERS[name](BEFORE)
    expected = mask.dense(N, N, lead=(B, H))
    for term in mask.terms(CallShape((B, H), N, N, torch.device("cpu"))):
        for side in (term.start, term.stop):
            if side is not None:
                side.zero_()
    assert torch.equal(mask.dense(N, N, lead=(B, H)), expected)


def test_attributes_of_a_mask_are_copies():
    padding, documents = Padding(BEFORE), Documents([2, 3, 1, 4], BEFORE)
    expected = output(padding), output(documents)
    padding.lengths.fill_(1)
    documents.queries.fill_(1)
    documents.keys.fill_(1)
    for mask in (padding, documents, Padding(BEFORE, side="left")):
        for term in mask.terms(CallShape((B, H), N, N, torch.device("cpu"))):
            for part in term:
                if part is not None:
                    part.fill_(1)
    assert torch.equal(output(padding), expected[0])
    assert torch.equal(output(documents), expected[1])
    assert padding.lengths.tolist() == documents.keys.tolist() == BEFORE
    assert documents.queries.tolist() == [2, 3, 1, 4]


@pytest.mark.parametrize(
    ("mask", "name", "value"),
    [
        (Padding(BEFORE), "lengths", torch.tensor(AFTER)),
        (Padding(BEFORE), "_lengths", torch.tensor(AFTER)),
        (Padding(BEFORE), "side", "left"),
        (Padding(BEFORE), "lenghts", torch.tensor(AFTER)),
        (Documents(BEFORE), "queries", torch.tensor(AFTER)),
        (Documents(BEFORE), "keys", torch.tensor(AFTER)),
        (Documents(BEFORE), "within", Causal()),
        (Window(3), "left", 5),
        (Window(3), "align", "start"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_attributes_cannot_be_set(mask, name, value):
    expected = output(mask)
    kind = type(mask).__name__
    with pytest.raises(AttributeError, match=rf"cannot set {name} of {kind}.*immutable.*Create a new {kind}"):
        setattr(mask, name, value)
    with pytest.raises(AttributeError, match=f"cannot delete {name}"):
        delattr(mask, name)
    assert torch.equal(output(mask), expected)


def test_a_subclass_may_add_attributes():
    class Marked(Padding):
        def __init__(self, lengths: Any, mark: str) -> None:
            super().__init__(lengths)
            self.mark = mark

    mask = Marked(BEFORE, "a")
    assert mask.mark == "a"
    torch.testing.assert_close(output(mask), output(Padding(BEFORE)))
    with pytest.raises(AttributeError, match="immutable"):
        mask.side = "left"  # type: ignore[misc]


# Equality


@each_mask
def test_masks_are_equal_by_value(kind):
    make = MAKERS[kind]
    same = [make(BEFORE), make(torch.tensor(BEFORE)), make(torch.tensor(BEFORE, dtype=torch.int32))]
    assert len(set(same)) == 1
    assert all(one == other for one in same for other in same)
    assert make(BEFORE) != make(AFTER)
    assert len({make(BEFORE), make(AFTER)}) == 2


def test_masks_that_differ_in_one_attribute_are_not_equal():
    masks = [
        Padding([2, 3]),
        Padding([2, 3], side="left"),
        Padding([[2, 3]]),
        Padding([[2], [3]]),
        Padding([2, 3, 0]),
        Documents([2, 3]),
        Documents([2, 3], [3, 2]),
        Documents([2, 3], within=Causal()),
        Documents([2, 3], within=Causal(align="start")),
        Documents([2, 3], within=Window(2)),
        Documents([2, 3], within=Prefix(2)),
        *(rule for align in ("end", "start") for rule in (Causal(align), Prefix(2, align))),
        *(Window(left=left, right=1, align=align) for left in (2, None) for align in ("end", "start")),
        Window(left=2),
    ]
    assert len(set(masks)) == len(masks)
    assert all((one == other) == (i == j) for i, one in enumerate(masks) for j, other in enumerate(masks))
    assert Padding([2, 3]) != "Padding([2, 3])"

    class Mine(Padding):
        pass

    assert Mine([2, 3]) != Padding([2, 3])
    assert Mine([2, 3]) == Mine([2, 3])


@pytest.mark.parametrize("kind", [Padding, Documents])
def test_many_lengths_are_compared_by_identity(kind):
    assert kind([1] * 4096) == kind([1] * 4096)
    mask = kind([1] * 4097)
    assert mask == mask
    assert mask != kind([1] * 4097)
    assert len({mask, mask, kind([1] * 4097)}) == 2


def test_lengths_without_values_are_compared_by_identity():
    mask = Padding(torch.empty(2, dtype=torch.long, device="meta"))
    assert mask == mask
    assert mask != Padding(torch.empty(2, dtype=torch.long, device="meta"))


@each_mask
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask))])
def test_copies_are_equal(kind, copied):
    mask = MAKERS[kind](BEFORE)
    assert copied(mask) == mask
    assert hash(copied(mask)) == hash(mask)
    assert torch.equal(output(copied(mask)), output(mask))


# Caching


@pytest.fixture
def forgotten() -> None:
    operator._CACHE.clear()


@pytest.mark.skipif(
    not fused.available() or dispatch.FROM_ENVIRONMENT not in (None, "fused"), reason="no fast path"
)
@each_mask
def test_equal_masks_share_a_cache_entry(kind):
    operator._CACHE.clear()
    for lengths in (BEFORE, torch.tensor(BEFORE), np.array(BEFORE)):
        output(MAKERS[kind](lengths))
    assert len(operator._CACHE) == 1


def test_the_cache_stays_small(forgotten):
    x = torch.randn(3, 1, 4, D)
    for i in range(600):
        lengths = [i % 5, i // 5 % 5, i // 25]
        seen = (torch.arange(4) < torch.tensor(lengths)[:, None, None, None]).expand(3, 1, 4, 4)
        expected = regard.attention(x, x, x, mask=seen, implementation="reference")
        torch.testing.assert_close(regard.attention(x, x, x, mask=Padding(lengths)), expected)
    assert len(operator._CACHE) <= 256


def test_large_masks_and_long_calls_are_not_remembered(forgotten):
    many = torch.randn(4097, 1, 2, D)
    lengths = torch.arange(4097) % 3
    seen = (torch.arange(2) < lengths[:, None, None, None]).expand(4097, 1, 2, 2)
    expected = regard.attention(many, many, many, mask=seen)
    torch.testing.assert_close(regard.attention(many, many, many, mask=Padding(lengths)), expected)
    long = torch.randn(1, 5000, D)
    regard.attention(long, long[:, :8], long[:, :8], mask=Causal())
    assert not operator._CACHE


def test_a_custom_rule_inside_documents_may_change(forgotten):
    """Custom rules are not cached: the next call uses the new state, and backward the old one."""

    class Last(Rule):
        keys = 1

        def ranges(self, position: Tensor, keys: Any) -> Any:
            return position + 1 - self.keys, position + 1

    rule = Last()
    mask = Documents(BEFORE, within=rule)
    tensors = inputs(requires_grad=True)
    result = regard.attention(*tensors, mask=mask)
    rule.keys = 3
    torch.testing.assert_close(output(mask), output(Documents(BEFORE, within=Window(3))))
    actual = torch.autograd.grad(result.square().sum(), tensors)
    expected = regard.attention(*tensors, mask=Documents(BEFORE, within=Window(1)))
    wanted = torch.autograd.grad(expected.square().sum(), tensors)
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
    assert Documents(BEFORE, within=rule) != Documents(BEFORE, within=rule)


def test_threads_with_masks_of_their_own():
    x = torch.randn(3, 1, 6, D)

    def work(thread: int) -> None:
        for i in range(100):
            lengths = [(thread + i) % 7, i % 7, (3 * i + thread) % 7]
            seen = (torch.arange(6) < torch.tensor(lengths)[:, None, None, None]).expand(3, 1, 6, 6)
            expected = regard.attention(x, x, x, mask=seen, implementation="reference")
            torch.testing.assert_close(regard.attention(x, x, x, mask=Padding(lengths)), expected)

    with ThreadPoolExecutor(4) as pool:
        for task in [pool.submit(work, i) for i in range(4)]:
            task.result()


def test_masks_made_in_inference_mode_serve_training():
    with torch.inference_mode():
        masks = [make(source) for make in MAKERS.values() for source in (BEFORE, torch.tensor(BEFORE))]
    for mask in masks:
        for implementation in (None, "tiled"):
            query, key, value = tensors = inputs(requires_grad=True)
            result = regard.attention(query, key, value, mask=mask, implementation=implementation)
            torch.autograd.grad(result.sum(), tensors)
