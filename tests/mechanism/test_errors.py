"""Invalid input: every mistake raises a regard error with the value and the fix."""

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import regard
from regard import (
    Additive,
    ALiBi,
    ArgumentError,
    Causal,
    ClippedRelativeBias,
    Concat,
    Cosine,
    DeviceError,
    Documents,
    Dot,
    DTypeError,
    Entmax,
    Gaussian,
    General,
    Hard,
    MaskError,
    Padding,
    Prefix,
    RegardError,
    RelativeBias,
    ScaledDot,
    ShapeError,
    Sink,
    Softmax,
    Softmax1,
    T5Bias,
    Window,
)
from tests.cases import looped

# A different number for every axis: 2 sequences, 6 heads, 3 key heads, 5 queries, 7 keys, widths 8 and 4.
META = torch.device("meta")


def query(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape or (2, 6, 5, 8), **options)


def key(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape or (2, 3, 7, 8), **options)


def value(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape or (2, 3, 7, 4), **options)


def call(q: Any = None, k: Any = None, v: Any = None, **options: Any) -> Tensor:
    """Call `attention` with valid inputs, unless overridden."""
    inputs = (query() if q is None else q, key() if k is None else k, value() if v is None else v)
    return regard.attention(*inputs, **options)


def quietly(make: Callable[[], Tensor]) -> Tensor:
    """Create tensors without torch's warnings about them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def flags(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, dtype=torch.bool, **options)


def check(error: type[RegardError], words: str, run: Callable[[], Any]) -> None:
    """Check that the call raises this error; `words` are the phrases of its message, separated by " | "."""
    caught: Exception | None = None
    try:
        run()
    except Exception as raised:
        caught = raised
    assert caught is not None, "nothing was raised"
    kind, message = type(caught).__name__, str(caught)
    assert isinstance(caught, RegardError), f"no regard error but {kind}: {message}"
    assert isinstance(caught, error), f"{kind}, not {error.__name__}: {message}"
    assert isinstance(caught, ValueError | TypeError)
    missing = [word for word in words.split(" | ") if word not in message]
    assert not missing, f"the message lacks {missing}: {message}"
    assert message[-1] in ".)", f"the message does not end: {message}"
    assert any(mark in message for mark in (";", ". ", ": ")), f"the message has no cure: {message}"


def table(*rows: Any) -> Any:
    """Return the phrases and the call of each message. An error class applies to the rows after it."""
    cases: list[tuple[type[RegardError], str, Callable[[], Any]]] = []
    for row in rows:
        if isinstance(row, type):
            error = row
        else:
            cases.append((error, *row))
    return looped(("error", "words", "run"), cases, ids=[words for _, words, _ in cases])


INVALID_DROPOUT = (1.0, 1, 1.5, -0.1, math.nan, math.inf, -math.inf)

# Query, key and value


@table(
    ShapeError,
    ("8 | 9 | General(8, 9)", lambda: call(k=key(2, 3, 7, 9))),
    ("key has 7 | value has 6", lambda: call(v=value(2, 3, 6, 4))),
    ("4 heads | has 3 | multiple", lambda: call(query(2, 4, 5, 8))),
    ("2 heads | has 3 | multiple", lambda: call(query(2, 2, 5, 8))),
    ("6 heads | has 0", lambda: call(k=key(2, 0, 7, 8), v=value(2, 0, 7, 4))),
    ("3 heads | value has 2 | equal", lambda: call(v=value(2, 2, 7, 4))),
    ("(5, 6, 5, 8) | (2, 3, 7, 8) | (2, 3, 7, 4) | equal sizes or size 1", lambda: call(query(5, 6, 5, 8))),
    ("(2, 3, 7, 8) | (4, 3, 7, 4)", lambda: call(v=value(4, 3, 7, 4))),
    ("(11, 2, 6, 5, 8) | (13, 2, 3, 7, 8)", lambda: call(query(11, 2, 6, 5, 8), key(13, 2, 3, 7, 8))),
    ("query | () | 2 axes", lambda: call(torch.tensor(1.0))),
    ("query | (8,) | query[None]", lambda: call(torch.zeros(8))),
    ("key | (8,) | key[None]", lambda: call(k=torch.zeros(8))),
    ("value | (7,) | value[None]", lambda: call(v=torch.zeros(7))),
    DTypeError,
    ("query | int64 | query.float()", lambda: call(query(dtype=torch.int64))),
    ("query | int32", lambda: call(*(t().int() for t in (query, key, value)))),
    ("key | torch.bool | floating point", lambda: call(k=key(dtype=torch.bool))),
    ("value | uint8", lambda: call(v=value(dtype=torch.uint8))),
    ("query | complex64", lambda: call(query(dtype=torch.complex64))),
    ("value | complex128", lambda: call(v=value(dtype=torch.complex128))),
    ("torch.float32 | torch.float64 | key.to(query.dtype)", lambda: call(k=key(dtype=torch.float64))),
    ("torch.float32 | torch.bfloat16 | value.to(query.dtype)", lambda: call(v=value(dtype=torch.bfloat16))),
    ("query | list | torch.as_tensor(query)", lambda: call([[1.0, 2.0]])),
    ("key | ndarray | torch.as_tensor(key)", lambda: call(k=key().numpy())),
    ("value | float | torch.as_tensor", lambda: call(v=3.0)),
    ("query | None", lambda: regard.attention(None, key(), value())),
    ("key | None", lambda: regard.attention(query(), None, value())),
    ("value | None", lambda: regard.attention(query(), key(), None)),
    DeviceError,
    ("query is on cpu | key on meta | key.to(query.device)", lambda: call(k=key(device=META))),
    ("cpu | value on meta", lambda: call(v=value(device=META))),
    ("meta | key on cpu", lambda: call(query(device=META))),
)
def test_incompatible_inputs(error, words, run):
    check(error, words, run)


@table(
    DTypeError,
    ("query | sparse | to_dense()", lambda: call(query(5, 8).to_sparse())),
    ("key | sparse | to_dense()", lambda: call(query(5, 8), key(7, 8).to_sparse(), value(7, 4))),
    ("value | sparse | to_dense()", lambda: call(query(5, 8), key(7, 8), value(7, 4).to_sparse())),
    ("query | sparse | to_dense()", lambda: call(quietly(query(5, 8).to_sparse_csr), key(7, 8), value(7, 4))),
    (
        "query | nested",
        lambda: call(
            *[torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)] * 3
        ),
    ),
    (
        "query | quint8 | floating point",
        lambda: call(quietly(lambda: torch.quantize_per_tensor(query(), 0.1, 0, torch.quint8))),
    ),
)
def test_tensors_of_other_layouts(error, words, run):
    check(error, words, run)


# Scores


@table(
    ShapeError,
    ("8 | 9 | General(8, 9)", lambda: call(k=key(2, 3, 7, 9), score=Dot())),
    ("8 | 9 | General", lambda: call(k=key(2, 3, 7, 9), score=ScaledDot(2.0))),
    ("8 | 9 | General(8, 9)", lambda: call(k=key(2, 3, 7, 9), score=Cosine())),
    ("8 | 9", lambda: call(k=key(2, 3, 7, 9), score=Gaussian())),
    ("8 | General(8, 9) | General(8, 8)", lambda: call(score=General(8, 9))),
    ("General(9, 8) | General(8, 8)", lambda: call(score=General(9, 8))),
    ("General(8, 9)", lambda: call(k=key(2, 3, 7, 9), score=General(9, 8))),
    ("Additive(8, 9 | Additive(8, 8", lambda: call(score=Additive(8, 9, 5))),
    ("Concat(9, 8 | Concat(8, 8", lambda: call(score=Concat(9, 8))),
    ("(7, 5) | (2, 6, 5, 7) | (2, 6, 5, 8)", lambda: call(score=lambda q, k: torch.zeros(7, 5))),
    ("(1, 2, 6, 5, 7) | (2, 6, 5, 7)", lambda: call(score=lambda q, k: torch.zeros(1, 2, 6, 5, 7))),
    ("list | (2, 6, 5, 7)", lambda: call(score=lambda q, k: [1.0])),
    ("None | (2, 6, 5, 7)", lambda: call(score=lambda q, k: None)),
    DTypeError,
    ("class Dot | instance | score=Dot(", lambda: call(score=Dot)),
    ("class General | score=General(", lambda: call(score=General)),
    ("score | str | function of (query, key)", lambda: call(score="dot")),
    ("score | None", lambda: call(score=None)),
    ("score | Tensor", lambda: call(score=torch.zeros(5, 7))),
    ("score | complex64", lambda: call(score=lambda q, k: torch.zeros(5, 7, dtype=torch.complex64))),
    DeviceError,
    ("cpu | meta", lambda: call(score=lambda q, k: torch.zeros(5, 7, device=META))),
    ("cpu | meta", lambda: call(score=General(8, 8).to(META))),
    ("cpu | meta", lambda: call(score=Additive(8, 8).to(META))),
    ("cpu | meta", lambda: call(score=Concat(8, 8).to(META))),
    ArgumentError,
    ("sigma=0 | above 0", lambda: Gaussian(0)),
    ("sigma=-1.5 | above 0", lambda: Gaussian(-1.5)),
    ("sigma=nan | above 0", lambda: Gaussian(math.nan)),
    ("softcap | 0 | above 0 | None", lambda: Dot(softcap=0)),
    ("softcap | -2.0 | above 0", lambda: ScaledDot(softcap=-2.0)),
    ("softcap | nan | above 0", lambda: Cosine(softcap=math.nan)),
    ("softcap | -1 | above 0", lambda: General(2, 3, softcap=-1)),
)
def test_invalid_scores(error, words, run):
    check(error, words, run)


# Masks


@table(
    MaskError,
    ("(7, 5) | (2, 6, 5, 7) | size 1", lambda: call(mask=flags(7, 5))),
    ("(3, 5, 7) | (2, 6, 5, 7)", lambda: call(mask=flags(3, 5, 7))),
    ("(1, 1, 1, 5, 7) | (2, 6, 5, 7)", lambda: call(mask=flags(1, 1, 1, 5, 7))),
    ("(7, 5) | (2, 6, 5, 7)", lambda: call(mask=Causal() & flags(7, 5))),
    ("Causal() | Causal(align='start') | Use the same align=", lambda: Causal() & Causal(align="start")),
    ("Window(2, align='start') | Prefix(3)", lambda: Window(2, align="start") | Prefix(3)),
    ("end", lambda: (Causal() & Padding(3)) | (Padding(2) & Window(4, align="start"))),
    DTypeError,
    ("float32 | torch.bool | bias=", lambda: call(mask=torch.zeros(5, 7))),
    ("int64 | torch.bool | True = may attend", lambda: call(mask=torch.ones(5, 7).long())),
    ("uint8 | torch.bool", lambda: call(mask=torch.ones(5, 7).byte())),
    ("float32 | torch.bool", lambda: Causal() & torch.zeros(5, 7)),
    ("class Causal | instance | mask=Causal(", lambda: call(mask=Causal)),
    ("class Window | instance", lambda: Causal() & Window),
    ("class Window | instance", lambda: Window | Causal()),
    ("mask | str | boolean tensor", lambda: call(mask="causal")),
    ("mask | list | boolean tensor", lambda: call(mask=[[True, False]])),
    ("mask | ndarray | boolean tensor", lambda: call(mask=np.ones((5, 7), bool))),
    ("mask | bool | boolean tensor", lambda: call(mask=True)),
    ("mask | None", lambda: Causal() & None),
    ("mask | int", lambda: 3 | Causal()),
    ("mask | sparse | to_dense()", lambda: call(mask=flags(5, 7).to_sparse())),
    DeviceError,
    ("cpu | mask on meta", lambda: call(mask=flags(5, 7, device=META))),
    ("cpu | meta", lambda: call(mask=flags(5, 7, device=META) | Causal())),
    ("cpu | meta", lambda: call(mask=Causal() & flags(5, 7, device=META) & flags(5, 7))),
    ("meta | mask on cpu", lambda: call(*(t(device=META) for t in (query, key, value)), mask=flags(5, 7))),
    ArgumentError,
    ("'left' | 'end' | 'start'", lambda: Causal(align="left")),
    ("'top' | 'end' | 'start'", lambda: Window(3, align="top")),
    ("None | 'end' | 'start'", lambda: Prefix(3, align=None)),
)
def test_incompatible_masks(error, words, run):
    check(error, words, run)


@table(
    ArgumentError,
    ("None | Window(4) | Window(left=3, right=0)", lambda: Window()),
    ("keys=3 | left=2 | either", lambda: Window(3, left=2)),
    ("Window | 0 | at least 1", lambda: Window(0)),
    ("Window | -4 | at least 1", lambda: Window(-4)),
    ("left=-1 | at least 0", lambda: Window(left=-1)),
    ("right=-3 | at least 0", lambda: Window(left=2, right=-3)),
    ("length=-1 | at least 0", lambda: Prefix(-1)),
    ("'top' | 'right' | 'left'", lambda: Padding(3, side="top")),
    RegardError,
    ("2.5", lambda: Window(2.5)),
    ("0.5", lambda: Window(left=0.5)),
    ("nan", lambda: Window(math.nan)),
    ("3", lambda: Window("3")),
    ("2.5", lambda: Prefix(2.5)),
    ("2", lambda: Prefix("2")),
    ("[2, 3]", lambda: Prefix([2, 3])),
    ("None", lambda: Padding(None)),
    ("Padding", lambda: Padding("3")),
    ("Padding", lambda: Padding([[1, 2], [3]])),
    ("Documents", lambda: Documents(None)),
    MaskError,
    ("(3,) | (2, 6) | one length per sequence", lambda: call(mask=Padding([1, 2, 3]))),
    ("(2, 3) | (2, 6)", lambda: call(mask=Padding([[1, 2, 3]] * 2))),
    ("(1,) | ()", lambda: call(query(5, 8), key(7, 8), value(7, 4), mask=Padding([3]))),
    ("-2 | at least 0", lambda: Padding([3, -2])),
    ("4 queries | call has 5 | sum to", lambda: call(mask=Documents([2, 2], [3, 4]))),
    ("6 keys | call has 7 | sum to", lambda: call(mask=Documents([2, 3], [3, 3]))),
    ("(2,) | (1,) | one number per document", lambda: Documents([2, 3], [7])),
    ("() | one list", lambda: Documents(5)),
    ("(1, 2) | one list", lambda: Documents([[2, 3]])),
    ("-1 | at least 0", lambda: Documents([6, -1])),
    ("Padding(3) | Causal() | Combine other masks with &", lambda: Documents([5], within=Padding(3))),
    ("Causal | Causal()", lambda: Documents([5], within=Causal)),
    DTypeError,
    ("float32 | integer", lambda: Padding([1.5, 2.0])),
    ("float32 | integer", lambda: Padding(torch.ones(2))),
    ("torch.bool | integer", lambda: Padding(flags(2, 7))),
    ("float32 | integer", lambda: Documents([2.5, 2.5])),
    DeviceError,
    ("cpu | meta", lambda: call(mask=Padding(torch.tensor([1, 2], device=META)))),
    (
        "cpu | meta",
        lambda: call(mask=Documents(torch.tensor([2, 3], device=META), torch.tensor([3, 4], device=META))),
    ),
)
def test_masks_with_invalid_numbers(error, words, run):
    check(error, words, run)


# Biases


class Lines(RelativeBias):
    """A bias that returns a given line, valid or not."""

    def __init__(self, line: Any) -> None:
        super().__init__()
        self.given = line

    def forward(self, distance: Tensor) -> Any:
        return self.given


@table(
    ShapeError,
    ("(7, 5) | (2, 6, 5, 7) | size 1", lambda: call(bias=torch.zeros(7, 5))),
    ("(3, 5, 7) | (2, 6, 5, 7)", lambda: call(bias=torch.zeros(3, 5, 7))),
    ("(1, 2, 6, 5, 7) | (2, 6, 5, 7)", lambda: call(bias=torch.zeros(1, 2, 6, 5, 7))),
    ("(5,) | (2, 6, 5, 7)", lambda: call(bias=[torch.zeros(7), torch.zeros(5)])),
    ("ALiBi | 4 heads | has 6 | one for all", lambda: call(bias=ALiBi(4))),
    ("T5Bias | 3 heads | has 6 | one for all", lambda: call(bias=T5Bias(3))),
    ("ClippedRelativeBias | 3 heads | has 6", lambda: call(bias=ClippedRelativeBias(torch.zeros(3, 5)))),
    ("6 | 1", lambda: call(query(5, 8), key(7, 8), value(7, 4), bias=T5Bias(6))),
    ("(4,) | (2r + 1)", lambda: ClippedRelativeBias(torch.zeros(4))),
    ("(2, 3, 5) | (heads, 2r + 1)", lambda: ClippedRelativeBias(torch.zeros(2, 3, 5))),
    ("10 | 11", lambda: call(bias=Lines(torch.zeros(10)))),
    ("12 | 11", lambda: call(bias=Lines(torch.zeros(12)))),
    ("(5, 6, 11)", lambda: call(bias=Lines(torch.zeros(5, 6, 11)))),
    DTypeError,
    ("torch.bool | mask=", lambda: call(bias=flags(5, 7))),
    ("int64 | bias.float()", lambda: call(bias=torch.zeros(5, 7).long())),
    ("complex64", lambda: call(bias=torch.zeros(5, 7, dtype=torch.complex64))),
    ("bias | sparse | to_dense()", lambda: call(bias=torch.zeros(5, 7).to_sparse())),
    ("bias | float | tensor", lambda: call(bias=3.0)),
    ("bias | str | relative bias", lambda: call(bias="alibi")),
    ("bias | ndarray | tensor", lambda: call(bias=np.zeros((5, 7)))),
    ("bias | ALiBi | instance", lambda: call(bias=ALiBi)),
    ("bias | Linear | relative bias", lambda: call(bias=nn.Linear(2, 2))),
    ("bias | Causal | mask=", lambda: call(bias=Causal())),
    ("bias | list", lambda: call(bias=[[torch.zeros(5, 7)]])),
    ("bias | None", lambda: call(bias=[None])),
    ("vector | list", lambda: ClippedRelativeBias([0.0, 1.0, 2.0])),
    ("vector | ndarray", lambda: ClippedRelativeBias(np.zeros(3))),
    (
        "complex64",
        lambda: quietly(lambda: call(bias=ClippedRelativeBias(torch.zeros(3, dtype=torch.complex64)))),
    ),
    ("Lines | None", lambda: call(bias=Lines(None))),
    DeviceError,
    ("cpu | bias on meta", lambda: call(bias=torch.zeros(5, 7, device=META))),
    ("cpu | meta", lambda: call(bias=ClippedRelativeBias(torch.zeros(3, device=META)))),
    ("cpu | meta", lambda: call(bias=T5Bias(6).to(META))),
    ArgumentError,
    ("heads=0 | at least 1", lambda: ALiBi(0)),
    ("heads=-2 | at least 1", lambda: ALiBi(-2)),
    ("T5Bias | heads=0", lambda: T5Bias(0)),
    ("buckets=3 | at least 4", lambda: T5Bias(2, buckets=3)),
    ("buckets=1 | at least 2", lambda: T5Bias(2, buckets=1, bidirectional=False)),
    ("max_distance=8 | above the 8", lambda: T5Bias(2, max_distance=8)),
)
def test_incompatible_biases(error, words, run):
    check(error, words, run)


# Normalizers


@table(
    DTypeError,
    ("Softmax | instance | normalize=Softmax()", lambda: call(normalize=Softmax)),
    ("Sink | instance", lambda: call(normalize=Sink)),
    ("softmax | normalize=Softmax()", lambda: call(normalize=torch.softmax)),
    ("Softmax | derive from Normalizer", lambda: call(normalize=nn.Softmax(-1))),
    ("str | normalize=Softmax()", lambda: call(normalize="softmax")),
    ("None | normalize=Softmax()", lambda: call(normalize=None)),
    ("sink | str", lambda: call(normalize=Softmax1("0"))),
    (
        "sink | complex64",
        lambda: quietly(lambda: call(normalize=Softmax1(torch.zeros(6, dtype=torch.complex64)))),
    ),
    ArgumentError,
    ("temperature=0 | above 0 | Hard()", lambda: Softmax(0)),
    ("temperature=-1.0 | above 0", lambda: Softmax(-1.0)),
    ("temperature=nan | above 0", lambda: Softmax(math.nan)),
    ("temperature=inf", lambda: Softmax(math.inf)),
    ("alpha=1 | Softmax()", lambda: Entmax(1)),
    ("alpha=0.5 | Softmax()", lambda: Entmax(0.5)),
    ("alpha=nan | Softmax()", lambda: Entmax(math.nan)),
    ("alpha=inf | Hard()", lambda: Entmax(math.inf)),
    ("-1", lambda: Sink(-1)),
    ShapeError,
    ("(4,) | 6 heads | one for all", lambda: call(normalize=Sink(4))),
    ("(3,) | 6 heads", lambda: call(normalize=Softmax1(torch.zeros(3)))),
    ("(2, 6) | 6 heads", lambda: call(normalize=Softmax1(torch.zeros(2, 6)))),
    DeviceError,
    ("cpu | meta", lambda: call(normalize=Sink(6).to(META))),
)
def test_invalid_normalizers(error, words, run):
    check(error, words, run)


# Dropout, generator, implementation


@table(
    ArgumentError,
    *((f"dropout | {p} | at least 0 | below 1", lambda p=p: call(dropout=p)) for p in INVALID_DROPOUT),
    ("'flash' | reference | tiled", lambda: call(implementation="flash")),
    ("3 | reference | tiled", lambda: call(implementation=3)),
    ("'' | reference | tiled", lambda: call(implementation="")),
    RegardError,
    ("dropout | True", lambda: call(dropout=True)),
    ("dropout | 0.1", lambda: call(dropout="0.1")),
    ("dropout | None", lambda: call(dropout=None)),
    ("dropout | [0.1]", lambda: call(dropout=[0.1])),
    ("dropout", lambda: call(dropout=torch.tensor([0.1, 0.2]))),
    ("dropout | Dropout", lambda: call(dropout=nn.Dropout(0.1))),
    DTypeError,
    ("generator | torch.Generator", lambda: call(dropout=0.1, generator=42)),
    ("generator | torch.Generator", lambda: call(generator=42)),
)
def test_invalid_options(error, words, run):
    check(error, words, run)


def test_a_generator_may_stay_where_it_is():
    """The seed is drawn on the generator's device and moved to the call's device."""
    inputs = [t(device=META) for t in (query, key, value)]
    assert call(*inputs, dropout=0.5, generator=torch.Generator()).device == META


# Invalid numbers


@looped(
    "run",
    [
        lambda: Softmax("1"),
        lambda: Softmax(None),
        lambda: Entmax("2"),
        lambda: Gaussian("1"),
        lambda: Dot(softcap="30"),
        lambda: call(score=ScaledDot(scale="1")),
        lambda: call(score=Cosine(scale="1")),
        lambda: call(normalize=regard.Sigmoid(bias="1")),
        lambda: ALiBi("8"),
        lambda: ALiBi(2.5),
        lambda: T5Bias("8"),
        lambda: T5Bias(2.5),
        lambda: Sink(2.5),
        lambda: General("8", 8),
        lambda: General(8.5, 8),
        lambda: General(-8, 8),
        lambda: Additive(8, 8, -1),
        lambda: Additive(8, "8"),
        lambda: Concat(8, 8, -1),
        lambda: Concat(8, 8, None),
    ],
)
def test_invalid_numbers_and_sizes_are_rejected_by_regard(run):
    check(RegardError, "", run)


# All entry points


@looped("run", [regard.attention, regard.attend, regard.explain])
@looped(
    ("inputs", "error"),
    [
        ((query(), key(2, 3, 7, 8), value(2, 3, 6, 4)), ShapeError),
        ((query(2, 4, 5, 8), key(), value()), ShapeError),
        ((query(), key(dtype=torch.float64), value()), DTypeError),
        ((query(), key(device=META), value()), DeviceError),
        ((query(), [1.0], value()), DTypeError),
    ],
)
def test_every_door_rejects_the_same_inputs(run, inputs, error):
    with pytest.raises(error):
        run(*inputs)


@looped("implementation", ["reference", "tiled"])
@looped(
    ("options", "error"),
    [
        ({"mask": flags(7, 5)}, MaskError),
        ({"bias": torch.zeros(7, 5)}, ShapeError),
        ({"normalize": Sink(4)}, ShapeError),
        ({"score": General(8, 9)}, ShapeError),
        ({"dropout": 1.0}, ArgumentError),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_every_implementation_rejects_the_same_options(implementation, options, error):
    with pytest.raises(error):
        call(implementation=implementation, **options)


def test_self_attention_rejects_the_same():
    with pytest.raises(ShapeError, match=r"\(8,\)"):
        regard.self_attention(torch.zeros(8))
    with pytest.raises(MaskError):
        regard.self_attention(torch.zeros(5, 8), mask=flags(5, 7))


@pytest.mark.parametrize(
    "options",
    [
        {"normalize": Softmax},
        {"implementation": "flash"},
        {"score": "dot"},
        {"score": Dot},
        {"masc": Causal()},
    ],
    ids=["normalize", "implementation", "score of text", "score of a class", "unknown name"],
)
def test_explain_rejects_the_same_calls_as_attention(options):
    with pytest.raises((ValueError, TypeError)):
        regard.attention(query(), key(), value(), **options)
    with pytest.raises((ValueError, TypeError)):
        regard.explain(query(), key(), value(), **options)


# Error classes


def test_the_tree_of_errors():
    for error, kind in {
        ShapeError: ValueError,
        MaskError: ValueError,
        DeviceError: ValueError,
        ArgumentError: ValueError,
        regard.StaleError: ValueError,
        DTypeError: TypeError,
    }.items():
        assert issubclass(error, RegardError)
        assert issubclass(error, kind)
        assert error.__name__ in regard.errors.__doc__


def test_valid_calls_do_not_raise():
    """The checks accept everything that the formulas accept."""
    assert call().shape == (2, 6, 5, 4)
    assert call(query(2, 6, 0, 8)).shape == (2, 6, 0, 4)
    assert call(k=key(2, 3, 0, 8), v=value(2, 3, 0, 4)).shape == (2, 6, 5, 4)
    assert call(query(5, 8), key(7, 8), value(7, 4)).shape == (5, 4)
    assert call(k=key(7, 8), v=value(7, 4)).shape == (2, 6, 5, 4)
    assert call(mask=Padding([9, 0]), bias=(), dropout=0, normalize=Hard()).shape == (2, 6, 5, 4)


@looped(
    "make",
    [
        lambda: Window(np.int64(3)),
        lambda: Prefix(np.int32(3)),
        lambda: Padding(np.int64(3)),
        lambda: Padding(np.array([3, 4])),
        lambda: Softmax(np.float32(0.5)),
        lambda: Entmax(np.float64(1.5)),
        lambda: Gaussian(np.float32(0.5)),
        lambda: Softmax1(np.float32(0.5)),
        lambda: T5Bias(np.int64(3)),
        lambda: General(np.int64(3), np.int64(4)),
        lambda: call(dropout=np.float32(0.1)),
    ],
    ids=[
        "Window", "Prefix", "Padding", "Padding of a batch", "Softmax", "Entmax", "Gaussian", "Softmax1",
        "T5Bias", "General", "dropout",
    ],
)  # fmt: skip
def test_numbers_of_numpy_are_numbers(make):
    make()


def raises(error: Exception) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: None, "nothing was raised"),
        (raises(ValueError("2 and 3; use 4.")), "no regard error but ValueError"),
        (raises(RuntimeError("2 and 3; use 4.")), "no regard error but RuntimeError"),
        (raises(IndexError("2 and 3; use 4.")), "no regard error but IndexError"),
        (raises(MaskError("2 and 3; use 4.")), "MaskError, not ShapeError"),
        (raises(ShapeError("2 and more; use 4.")), "lacks"),
        (raises(ShapeError("2 and 3.")), "no cure"),
        (raises(ShapeError("2 and 3; use 4")), "does not end"),
    ],
)
def test_the_checker_can_fail(run, message):
    check(ShapeError, "2 | 3", raises(ShapeError("2 and 3; use 4.")))
    with pytest.raises(AssertionError, match=message):
        check(ShapeError, "2 | 3", run)


# Argument names of other libraries

X = torch.zeros(2, 3, 5, 8)


@looped("function", [regard.attention, regard.attend, regard.explain])
@looped(
    ("keyword", "spelling"),
    [
        ("is_causal", "mask=regard.Causal()"),
        ("causal", "mask=regard.Causal()"),
        ("attn_mask", "bias="),
        ("attention_mask", "Padding(lengths)"),
        ("dropout_p", "dropout="),
        ("scale", "ScaledDot(scale)"),
        ("softcap", "ScaledDot(softcap=softcap)"),
        ("window_size", "Window(left=left, right=right)"),
        ("alibi_slopes", "ALiBi(heads)"),
        ("key_padding_mask", "Padding(lengths)"),
        ("need_weights", "regard.attend("),
        ("enable_gqa", "multiple of the number of key heads"),
        ("normalise", "normalize="),
        ("quantum", "score=, mask=, bias=, normalize=, dropout=, generator=, implementation="),
    ],
)
def test_keywords_of_other_libraries_are_answered_with_regards(function, keyword, spelling):
    with pytest.raises(TypeError) as caught:
        function(X, X, X, **{keyword: True})
    assert f"{function.__name__} got an unexpected keyword argument {keyword!r}" in str(caught.value)
    assert spelling in str(caught.value)


@pytest.mark.parametrize("keyword", ["score_mod", "block_mask"])
def test_keywords_of_flex_attention_name_it(keyword):
    for function in (regard.attention, regard.attend):  # explain accepts them
        with pytest.raises(TypeError, match=rf"regard\.flex_attention\(.*{keyword}="):
            function(X, X, X, **{keyword: True})


def test_suggested_names_exist():
    from regard.mechanism.call import keyword_hints

    codes = [*keyword_hints._NORMALIZERS.values(), *keyword_hints._MASKS.values()]
    named = {code.partition("(")[0] for code in codes}
    named |= {
        name for text in keyword_hints._EQUIVALENTS.values() for name in re.findall(r"regard\.(\w+)", text)
    }
    assert all(hasattr(regard, name) for name in named)


@pytest.mark.parametrize("function", [regard.attention, regard.attend, regard.explain])
def test_a_mask_by_position_is_to_be_named(function):
    with pytest.raises(
        TypeError, match=rf"{function.__name__} takes query, key and value.*1 more \(Causal\).*mask="
    ):
        function(X, X, X, Causal())


def test_names_get_a_matching_suggestion():
    with pytest.raises(DTypeError, match=r"normalize=Entmax15\(\)"):
        call(normalize="entmax15")
    with pytest.raises(DTypeError, match=r"such as Causal\(\)"):
        call(mask="causal")
    with pytest.raises(DTypeError, match=r"such as Padding\(lengths\)"):
        call(mask="padding")


def test_a_mask_of_batch_and_keys_is_answered_with_padding():
    mask = flags(2, 7)
    with pytest.raises(MaskError, match=r"Padding\(lengths\), or mask\[:, None, None, :\]"):
        call(mask=mask)
    assert call(mask=mask[:, None, None, :]).shape == (2, 6, 5, 4)
