"""Invalid input: every mistake raises a regard error with the value and the fix."""

import math
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

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
    """`attention` of valid inputs, unless overridden."""
    inputs = (query() if q is None else q, key() if k is None else k, value() if v is None else v)
    return regard.attention(*inputs, **options)


def quietly(make: Callable[[], Tensor]) -> Tensor:
    """Create tensors for which torch emits warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def flags(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, dtype=torch.bool, **options)


class Case(NamedTuple):
    """A call, the expected error, and fragments of its message."""

    name: str
    run: Callable[[], Any]
    error: type[RegardError]
    words: tuple[str, ...]


def check(case: Case) -> None:
    caught: Exception | None = None
    try:
        case.run()
    except Exception as error:
        caught = error
    assert caught is not None, "nothing was raised"
    kind, message = type(caught).__name__, str(caught)
    assert isinstance(caught, RegardError), f"no regard error but {kind}: {message}"
    assert isinstance(caught, case.error), f"{kind}, not {case.error.__name__}: {message}"
    assert isinstance(caught, ValueError | TypeError)
    missing = [word for word in case.words if word not in message]
    assert not missing, f"the message lacks {missing}: {message}"
    assert message[-1] in ".)", f"the message does not end: {message}"
    assert any(mark in message for mark in (";", ". ", ": ")), f"the message has no cure: {message}"


def table(*cases: tuple[str, Callable[[], Any], type[RegardError], tuple[str, ...]]) -> Any:
    made = [Case(*case) for case in cases]
    assert len({case.name for case in made}) == len(made)
    return looped("case", made, ids=lambda case: case.name)


# Query, key and value


@table(
    ("key width", lambda: call(k=key(2, 3, 7, 9)), ShapeError, ("8", "9", "General(8, 9)")),
    ("tokens of key and value", lambda: call(v=value(2, 3, 6, 4)), ShapeError, ("key has 7", "value has 6")),
    ("heads do not divide", lambda: call(query(2, 4, 5, 8)), ShapeError, ("4 heads", "has 3", "multiple")),
    ("fewer heads than key", lambda: call(query(2, 2, 5, 8)), ShapeError, ("2 heads", "has 3", "multiple")),
    ("no key heads", lambda: call(k=key(2, 0, 7, 8), v=value(2, 0, 7, 4)), ShapeError, ("6 heads", "has 0")),
    (
        "key and value heads",
        lambda: call(v=value(2, 2, 7, 4)),
        ShapeError,
        ("3 heads", "value has 2", "same"),
    ),
    (
        "batch of query",
        lambda: call(query(5, 6, 5, 8)),
        ShapeError,
        ("(5, 6, 5, 8)", "(2, 3, 7, 8)", "(2, 3, 7, 4)", "equal or 1"),
    ),
    ("batch of value", lambda: call(v=value(4, 3, 7, 4)), ShapeError, ("(2, 3, 7, 8)", "(4, 3, 7, 4)")),
    (
        "outer batch",
        lambda: call(query(11, 2, 6, 5, 8), key(13, 2, 3, 7, 8)),
        ShapeError,
        ("(11, 2, 6, 5, 8)", "(13, 2, 3, 7, 8)"),
    ),
    ("query is a number", lambda: call(torch.tensor(1.0)), ShapeError, ("query", "()", "2 axes")),
    ("query is a vector", lambda: call(torch.zeros(8)), ShapeError, ("query", "(8,)", "query[None]")),
    ("key is a vector", lambda: call(k=torch.zeros(8)), ShapeError, ("key", "(8,)", "key[None]")),
    ("value is a vector", lambda: call(v=torch.zeros(7)), ShapeError, ("value", "(7,)", "value[None]")),
    (
        "query of int64",
        lambda: call(query(dtype=torch.int64)),
        DTypeError,
        ("query", "int64", "query.float()"),
    ),
    ("all of int32", lambda: call(*(t().int() for t in (query, key, value))), DTypeError, ("query", "int32")),
    (
        "key of bool",
        lambda: call(k=key(dtype=torch.bool)),
        DTypeError,
        ("key", "torch.bool", "floating point"),
    ),
    ("value of uint8", lambda: call(v=value(dtype=torch.uint8)), DTypeError, ("value", "uint8")),
    ("query of complex64", lambda: call(query(dtype=torch.complex64)), DTypeError, ("query", "complex64")),
    (
        "value of complex128",
        lambda: call(v=value(dtype=torch.complex128)),
        DTypeError,
        ("value", "complex128"),
    ),
    (
        "mixed dtypes, key",
        lambda: call(k=key(dtype=torch.float64)),
        DTypeError,
        ("torch.float32", "torch.float64", "key.to(query.dtype)"),
    ),
    (
        "mixed dtypes, value",
        lambda: call(v=value(dtype=torch.bfloat16)),
        DTypeError,
        ("torch.float32", "torch.bfloat16", "value.to(query.dtype)"),
    ),
    ("query is a list", lambda: call([[1.0, 2.0]]), DTypeError, ("query", "list", "torch.as_tensor(query)")),
    (
        "key is an array",
        lambda: call(k=key().numpy()),
        DTypeError,
        ("key", "ndarray", "torch.as_tensor(key)"),
    ),
    ("value is a number", lambda: call(v=3.0), DTypeError, ("value", "float", "torch.as_tensor")),
    ("query is None", lambda: regard.attention(None, key(), value()), DTypeError, ("query", "None")),
    ("key is None", lambda: regard.attention(query(), None, value()), DTypeError, ("key", "None")),
    ("value is None", lambda: regard.attention(query(), key(), None), DTypeError, ("value", "None")),
    (
        "key elsewhere",
        lambda: call(k=key(device=META)),
        DeviceError,
        ("query is on cpu", "key on meta", "key.to(query.device)"),
    ),
    ("value elsewhere", lambda: call(v=value(device=META)), DeviceError, ("cpu", "value on meta")),
    ("query elsewhere", lambda: call(query(device=META)), DeviceError, ("meta", "key on cpu")),
)
def test_inputs_that_do_not_fit(case):
    check(case)


@table(
    ("sparse query", lambda: call(query(5, 8).to_sparse()), DTypeError, ("query", "sparse", "to_dense()")),
    (
        "sparse key",
        lambda: call(query(5, 8), key(7, 8).to_sparse(), value(7, 4)),
        DTypeError,
        ("key", "sparse", "to_dense()"),
    ),
    (
        "sparse value",
        lambda: call(query(5, 8), key(7, 8), value(7, 4).to_sparse()),
        DTypeError,
        ("value", "sparse", "to_dense()"),
    ),
    (
        "sparse rows",
        lambda: call(quietly(query(5, 8).to_sparse_csr), key(7, 8), value(7, 4)),
        DTypeError,
        ("query", "sparse", "to_dense()"),
    ),
    (
        "nested",
        lambda: call(
            *[torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)] * 3
        ),
        DTypeError,
        ("query", "nested"),
    ),
    (
        "quantized",
        lambda: call(quietly(lambda: torch.quantize_per_tensor(query(), 0.1, 0, torch.quint8))),
        DTypeError,
        ("query", "quint8", "floating point"),
    ),
)
def test_tensors_of_other_layouts(case):
    check(case)


# Scores


@table(
    ("Dot widths", lambda: call(k=key(2, 3, 7, 9), score=Dot()), ShapeError, ("8", "9", "General(8, 9)")),
    (
        "ScaledDot widths",
        lambda: call(k=key(2, 3, 7, 9), score=ScaledDot(2.0)),
        ShapeError,
        ("8", "9", "General"),
    ),
    (
        "Cosine widths",
        lambda: call(k=key(2, 3, 7, 9), score=Cosine()),
        ShapeError,
        ("8", "9", "General(8, 9)"),
    ),
    ("Gaussian widths", lambda: call(k=key(2, 3, 7, 9), score=Gaussian()), ShapeError, ("8", "9")),
    (
        "General key width",
        lambda: call(score=General(8, 9)),
        ShapeError,
        ("8", "General(8, 9)", "General(8, 8)"),
    ),
    (
        "General query width",
        lambda: call(score=General(9, 8)),
        ShapeError,
        ("General(9, 8)", "General(8, 8)"),
    ),
    ("General swapped", lambda: call(k=key(2, 3, 7, 9), score=General(9, 8)), ShapeError, ("General(8, 9)",)),
    (
        "Additive widths",
        lambda: call(score=Additive(8, 9, 5)),
        ShapeError,
        ("Additive(8, 9", "Additive(8, 8"),
    ),
    ("Concat widths", lambda: call(score=Concat(9, 8)), ShapeError, ("Concat(9, 8", "Concat(8, 8")),
    ("a class", lambda: call(score=Dot), DTypeError, ("class Dot", "instance", "score=Dot(")),
    ("a module's class", lambda: call(score=General), DTypeError, ("class General", "score=General(")),
    ("a name", lambda: call(score="dot"), DTypeError, ("score", "str", "function of (query, key)")),
    ("None", lambda: call(score=None), DTypeError, ("score", "None")),
    ("a tensor", lambda: call(score=torch.zeros(5, 7)), DTypeError, ("score", "Tensor")),
    (
        "a function's shape",
        lambda: call(score=lambda q, k: torch.zeros(7, 5)),
        ShapeError,
        ("(7, 5)", "(2, 6, 5, 7)", "(2, 6, 5, 8)"),
    ),
    (
        "a function's axes",
        lambda: call(score=lambda q, k: torch.zeros(1, 2, 6, 5, 7)),
        ShapeError,
        ("(1, 2, 6, 5, 7)", "(2, 6, 5, 7)"),
    ),
    ("a function's result", lambda: call(score=lambda q, k: [1.0]), ShapeError, ("list", "(2, 6, 5, 7)")),
    (
        "a function without a result",
        lambda: call(score=lambda q, k: None),
        ShapeError,
        ("None", "(2, 6, 5, 7)"),
    ),
    (
        "a function's device",
        lambda: call(score=lambda q, k: torch.zeros(5, 7, device=META)),
        DeviceError,
        ("cpu", "meta"),
    ),
    (
        "a function's dtype",
        lambda: call(score=lambda q, k: torch.zeros(5, 7, dtype=torch.complex64)),
        DTypeError,
        ("score", "complex64"),
    ),
    ("General elsewhere", lambda: call(score=General(8, 8).to(META)), DeviceError, ("cpu", "meta")),
    ("Additive elsewhere", lambda: call(score=Additive(8, 8).to(META)), DeviceError, ("cpu", "meta")),
    ("Concat elsewhere", lambda: call(score=Concat(8, 8).to(META)), DeviceError, ("cpu", "meta")),
    ("sigma 0", lambda: Gaussian(0), ArgumentError, ("sigma=0", "above 0")),
    ("sigma -1", lambda: Gaussian(-1.5), ArgumentError, ("sigma=-1.5", "above 0")),
    ("sigma nan", lambda: Gaussian(math.nan), ArgumentError, ("sigma=nan", "above 0")),
    ("softcap 0", lambda: Dot(softcap=0), ArgumentError, ("softcap", "0", "above 0", "None")),
    ("softcap -2", lambda: ScaledDot(softcap=-2.0), ArgumentError, ("softcap", "-2.0", "above 0")),
    ("softcap nan", lambda: Cosine(softcap=math.nan), ArgumentError, ("softcap", "nan", "above 0")),
    ("softcap of General", lambda: General(2, 3, softcap=-1), ArgumentError, ("softcap", "-1", "above 0")),
)
def test_scores_that_cannot_be(case):
    check(case)


# Masks


@table(
    ("does not broadcast", lambda: call(mask=flags(7, 5)), MaskError, ("(7, 5)", "(2, 6, 5, 7)", "size 1")),
    ("per head, wrong", lambda: call(mask=flags(3, 5, 7)), MaskError, ("(3, 5, 7)", "(2, 6, 5, 7)")),
    (
        "too many axes",
        lambda: call(mask=flags(1, 1, 1, 5, 7)),
        MaskError,
        ("(1, 1, 1, 5, 7)", "(2, 6, 5, 7)"),
    ),
    ("combined", lambda: call(mask=Causal() & flags(7, 5)), MaskError, ("(7, 5)", "(2, 6, 5, 7)")),
    ("of float", lambda: call(mask=torch.zeros(5, 7)), DTypeError, ("float32", "torch.bool", "bias=")),
    (
        "of int",
        lambda: call(mask=torch.ones(5, 7).long()),
        DTypeError,
        ("int64", "torch.bool", "True = may attend"),
    ),
    ("of uint8", lambda: call(mask=torch.ones(5, 7).byte()), DTypeError, ("uint8", "torch.bool")),
    ("of float, combined", lambda: Causal() & torch.zeros(5, 7), DTypeError, ("float32", "torch.bool")),
    ("a class", lambda: call(mask=Causal), DTypeError, ("class Causal", "instance", "mask=Causal(")),
    ("a class, combined", lambda: Causal() & Window, DTypeError, ("class Window", "instance")),
    ("a class first", lambda: Window | Causal(), DTypeError, ("class Window", "instance")),
    ("a name", lambda: call(mask="causal"), DTypeError, ("mask", "str", "boolean tensor")),
    ("a list", lambda: call(mask=[[True, False]]), DTypeError, ("mask", "list", "boolean tensor")),
    ("an array", lambda: call(mask=np.ones((5, 7), bool)), DTypeError, ("mask", "ndarray", "boolean tensor")),
    ("True", lambda: call(mask=True), DTypeError, ("mask", "bool", "boolean tensor")),
    ("combined with None", lambda: Causal() & None, DTypeError, ("mask", "None")),
    ("combined with a number", lambda: 3 | Causal(), DTypeError, ("mask", "int")),
    ("elsewhere", lambda: call(mask=flags(5, 7, device=META)), DeviceError, ("cpu", "mask on meta")),
    (
        "elsewhere, combined",
        lambda: call(mask=flags(5, 7, device=META) | Causal()),
        DeviceError,
        ("cpu", "meta"),
    ),
    (
        "elsewhere, two tensors",
        lambda: call(mask=Causal() & flags(5, 7, device=META) & flags(5, 7)),
        DeviceError,
        ("cpu", "meta"),
    ),
    ("sparse", lambda: call(mask=flags(5, 7).to_sparse()), DTypeError, ("mask", "sparse", "to_dense()")),
    (
        "of the call on meta",
        lambda: call(*(t(device=META) for t in (query, key, value)), mask=flags(5, 7)),
        DeviceError,
        ("meta", "mask on cpu"),
    ),
    (
        "both ends, and",
        lambda: Causal() & Causal(align="start"),
        MaskError,
        ("Causal()", "Causal(align='start')", "Use the same align="),
    ),
    (
        "both ends, or",
        lambda: Window(2, align="start") | Prefix(3),
        MaskError,
        ("Window(2, align='start')", "Prefix(3)"),
    ),
    (
        "both ends, nested",
        lambda: (Causal() & Padding(3)) | (Padding(2) & Window(4, align="start")),
        MaskError,
        ("end",),
    ),
    ("align of Causal", lambda: Causal(align="left"), ArgumentError, ("'left'", "'end'", "'start'")),
    ("align of Window", lambda: Window(3, align="top"), ArgumentError, ("'top'", "'end'", "'start'")),
    ("align of Prefix", lambda: Prefix(3, align=None), ArgumentError, ("None", "'end'", "'start'")),
)
def test_masks_that_do_not_fit(case):
    check(case)


@table(
    ("Window of nothing", lambda: Window(), ArgumentError, ("None", "Window(4)", "Window(left=3, right=0)")),
    ("Window of both", lambda: Window(3, left=2), ArgumentError, ("keys=3", "left=2", "either")),
    ("Window(0)", lambda: Window(0), ArgumentError, ("Window", "0", "at least 1")),
    ("Window(-4)", lambda: Window(-4), ArgumentError, ("Window", "-4", "at least 1")),
    ("Window left", lambda: Window(left=-1), ArgumentError, ("left=-1", "at least 0")),
    ("Window right", lambda: Window(left=2, right=-3), ArgumentError, ("right=-3", "at least 0")),
    ("Window of a half", lambda: Window(2.5), RegardError, ("2.5",)),
    ("Window left of a half", lambda: Window(left=0.5), RegardError, ("0.5",)),
    ("Window of nan", lambda: Window(math.nan), RegardError, ("nan",)),
    ("Window of text", lambda: Window("3"), RegardError, ("3",)),
    ("Prefix(-1)", lambda: Prefix(-1), ArgumentError, ("length=-1", "at least 0")),
    ("Prefix of a half", lambda: Prefix(2.5), RegardError, ("2.5",)),
    ("Prefix of text", lambda: Prefix("2"), RegardError, ("2",)),
    ("Prefix of a list", lambda: Prefix([2, 3]), RegardError, ("[2, 3]",)),
    (
        "Padding count",
        lambda: call(mask=Padding([1, 2, 3])),
        MaskError,
        ("(3,)", "(2, 6)", "one length per sequence"),
    ),
    ("Padding axes", lambda: call(mask=Padding([[1, 2, 3]] * 2)), MaskError, ("(2, 3)", "(2, 6)")),
    (
        "Padding without a batch",
        lambda: call(query(5, 8), key(7, 8), value(7, 4), mask=Padding([3])),
        MaskError,
        ("(1,)", "()"),
    ),
    ("Padding negative", lambda: Padding([3, -2]), MaskError, ("-2", "at least 0")),
    ("Padding of floats", lambda: Padding([1.5, 2.0]), DTypeError, ("float32", "integer")),
    ("Padding of a float tensor", lambda: Padding(torch.ones(2)), DTypeError, ("float32", "integer")),
    ("Padding of flags", lambda: Padding(flags(2, 7)), DTypeError, ("torch.bool", "integer")),
    ("Padding side", lambda: Padding(3, side="top"), ArgumentError, ("'top'", "'right'", "'left'")),
    ("Padding of None", lambda: Padding(None), RegardError, ("None",)),
    ("Padding of text", lambda: Padding("3"), RegardError, ("Padding",)),
    ("Padding of a ragged list", lambda: Padding([[1, 2], [3]]), RegardError, ("Padding",)),
    (
        "Padding elsewhere",
        lambda: call(mask=Padding(torch.tensor([1, 2], device=META))),
        DeviceError,
        ("cpu", "meta"),
    ),
    (
        "Documents queries",
        lambda: call(mask=Documents([2, 2], [3, 4])),
        MaskError,
        ("4 queries", "5 queries", "sum to"),
    ),
    (
        "Documents keys",
        lambda: call(mask=Documents([2, 3], [3, 3])),
        MaskError,
        ("6 keys", "7 keys", "sum to"),
    ),
    (
        "Documents counts",
        lambda: Documents([2, 3], [7]),
        MaskError,
        ("(2,)", "(1,)", "one number per document"),
    ),
    ("Documents of one number", lambda: Documents(5), MaskError, ("()", "one list")),
    ("Documents of two axes", lambda: Documents([[2, 3]]), MaskError, ("(1, 2)", "one list")),
    ("Documents negative", lambda: Documents([6, -1]), MaskError, ("-1", "at least 0")),
    ("Documents of floats", lambda: Documents([2.5, 2.5]), DTypeError, ("float32", "integer")),
    ("Documents of None", lambda: Documents(None), RegardError, ("Documents",)),
    (
        "Documents within a mask",
        lambda: Documents([5], within=Padding(3)),
        MaskError,
        ("Padding(3)", "Causal()", "Combine other masks with &"),
    ),
    ("Documents within a class", lambda: Documents([5], within=Causal), MaskError, ("Causal", "Causal()")),
    (
        "Documents elsewhere",
        lambda: call(mask=Documents(torch.tensor([2, 3], device=META), torch.tensor([3, 4], device=META))),
        DeviceError,
        ("cpu", "meta"),
    ),
)
def test_masks_of_impossible_numbers(case):
    check(case)


# Biases


class Lines(RelativeBias):
    """A bias that returns a given line, valid or not."""

    def __init__(self, line: Any) -> None:
        super().__init__()
        self.given = line

    def forward(self, distance: Tensor) -> Any:
        return self.given


@table(
    (
        "does not broadcast",
        lambda: call(bias=torch.zeros(7, 5)),
        ShapeError,
        ("(7, 5)", "(2, 6, 5, 7)", "size 1"),
    ),
    ("heads", lambda: call(bias=torch.zeros(3, 5, 7)), ShapeError, ("(3, 5, 7)", "(2, 6, 5, 7)")),
    ("axes", lambda: call(bias=torch.zeros(1, 2, 6, 5, 7)), ShapeError, ("(1, 2, 6, 5, 7)", "(2, 6, 5, 7)")),
    ("of bool", lambda: call(bias=flags(5, 7)), DTypeError, ("torch.bool", "mask=")),
    ("of int", lambda: call(bias=torch.zeros(5, 7).long()), DTypeError, ("int64", "bias.float()")),
    ("of complex", lambda: call(bias=torch.zeros(5, 7, dtype=torch.complex64)), DTypeError, ("complex64",)),
    ("elsewhere", lambda: call(bias=torch.zeros(5, 7, device=META)), DeviceError, ("cpu", "bias on meta")),
    (
        "sparse",
        lambda: call(bias=torch.zeros(5, 7).to_sparse()),
        DTypeError,
        ("bias", "sparse", "to_dense()"),
    ),
    ("a number", lambda: call(bias=3.0), DTypeError, ("bias", "float", "tensor")),
    ("a name", lambda: call(bias="alibi"), DTypeError, ("bias", "str", "relative bias")),
    ("an array", lambda: call(bias=np.zeros((5, 7))), DTypeError, ("bias", "ndarray", "tensor")),
    ("a class", lambda: call(bias=ALiBi), DTypeError, ("bias", "ALiBi", "instance")),
    ("another module", lambda: call(bias=nn.Linear(2, 2)), DTypeError, ("bias", "Linear", "relative bias")),
    ("a mask", lambda: call(bias=Causal()), DTypeError, ("bias", "Causal", "mask=")),
    ("a list of a list", lambda: call(bias=[[torch.zeros(5, 7)]]), DTypeError, ("bias", "list")),
    ("a list of None", lambda: call(bias=[None]), DTypeError, ("bias", "None")),
    (
        "one wrong of two",
        lambda: call(bias=[torch.zeros(7), torch.zeros(5)]),
        ShapeError,
        ("(5,)", "(2, 6, 5, 7)"),
    ),
    ("ALiBi heads", lambda: call(bias=ALiBi(4)), ShapeError, ("ALiBi", "4 heads", "has 6", "one for all")),
    ("T5 heads", lambda: call(bias=T5Bias(3)), ShapeError, ("T5Bias", "3 heads", "has 6", "one for all")),
    (
        "Relative heads",
        lambda: call(bias=ClippedRelativeBias(torch.zeros(3, 5))),
        ShapeError,
        ("ClippedRelativeBias", "3 heads", "has 6"),
    ),
    (
        "heads without an axis",
        lambda: call(query(5, 8), key(7, 8), value(7, 4), bias=T5Bias(6)),
        ShapeError,
        ("6", "1"),
    ),
    ("Relative even", lambda: ClippedRelativeBias(torch.zeros(4)), ShapeError, ("(4,)", "(2r + 1)")),
    (
        "Relative axes",
        lambda: ClippedRelativeBias(torch.zeros(2, 3, 5)),
        ShapeError,
        ("(2, 3, 5)", "(heads, 2r + 1)"),
    ),
    ("Relative of a list", lambda: ClippedRelativeBias([0.0, 1.0, 2.0]), DTypeError, ("vector", "list")),
    ("Relative of an array", lambda: ClippedRelativeBias(np.zeros(3)), DTypeError, ("vector", "ndarray")),
    (
        "Relative of complex",
        lambda: quietly(lambda: call(bias=ClippedRelativeBias(torch.zeros(3, dtype=torch.complex64)))),
        DTypeError,
        ("complex64",),
    ),
    (
        "Relative elsewhere",
        lambda: call(bias=ClippedRelativeBias(torch.zeros(3, device=META))),
        DeviceError,
        ("cpu", "meta"),
    ),
    ("T5 elsewhere", lambda: call(bias=T5Bias(6).to(META)), DeviceError, ("cpu", "meta")),
    ("ALiBi(0)", lambda: ALiBi(0), ArgumentError, ("heads=0", "at least 1")),
    ("ALiBi(-2)", lambda: ALiBi(-2), ArgumentError, ("heads=-2", "at least 1")),
    ("T5Bias(0)", lambda: T5Bias(0), ArgumentError, ("T5Bias", "heads=0")),
    ("T5 buckets", lambda: T5Bias(2, buckets=3), ArgumentError, ("buckets=3", "at least 4")),
    (
        "T5 buckets one way",
        lambda: T5Bias(2, buckets=1, bidirectional=False),
        ArgumentError,
        ("buckets=1", "at least 2"),
    ),
    ("T5 max_distance", lambda: T5Bias(2, max_distance=8), ArgumentError, ("max_distance=8", "above the 8")),
    ("a line too short", lambda: call(bias=Lines(torch.zeros(10))), ShapeError, ("10", "11")),
    ("a line too long", lambda: call(bias=Lines(torch.zeros(12))), ShapeError, ("12", "11")),
    ("a line of three axes", lambda: call(bias=Lines(torch.zeros(5, 6, 11))), ShapeError, ("(5, 6, 11)",)),
    ("no line", lambda: call(bias=Lines(None)), DTypeError, ("Lines", "None")),
)
def test_biases_that_do_not_fit(case):
    check(case)


# Normalizers


@table(
    ("a class", lambda: call(normalize=Softmax), DTypeError, ("Softmax", "instance", "normalize=Softmax()")),
    ("the class of a sink", lambda: call(normalize=Sink), DTypeError, ("Sink", "instance")),
    (
        "torch's function",
        lambda: call(normalize=torch.softmax),
        DTypeError,
        ("softmax", "normalize=Softmax()"),
    ),
    (
        "torch's module",
        lambda: call(normalize=nn.Softmax(-1)),
        DTypeError,
        ("Softmax", "derive from Normalizer"),
    ),
    ("a name", lambda: call(normalize="softmax"), DTypeError, ("str", "normalize=Softmax()")),
    ("None", lambda: call(normalize=None), DTypeError, ("None", "normalize=Softmax()")),
    ("temperature 0", lambda: Softmax(0), ArgumentError, ("temperature=0", "above 0", "Hard()")),
    ("temperature -1", lambda: Softmax(-1.0), ArgumentError, ("temperature=-1.0", "above 0")),
    ("temperature nan", lambda: Softmax(math.nan), ArgumentError, ("temperature=nan", "above 0")),
    ("temperature inf", lambda: Softmax(math.inf), ArgumentError, ("temperature=inf",)),
    ("alpha 1", lambda: Entmax(1), ArgumentError, ("alpha=1", "Softmax()")),
    ("alpha 0.5", lambda: Entmax(0.5), ArgumentError, ("alpha=0.5", "Softmax()")),
    ("alpha nan", lambda: Entmax(math.nan), ArgumentError, ("alpha=nan", "Softmax()")),
    ("alpha inf", lambda: Entmax(math.inf), ArgumentError, ("alpha=inf", "Hard()")),
    ("sinks", lambda: call(normalize=Sink(4)), ShapeError, ("(4,)", "6 heads", "one for all")),
    ("sinks of Softmax1", lambda: call(normalize=Softmax1(torch.zeros(3))), ShapeError, ("(3,)", "6 heads")),
    (
        "a table of sinks",
        lambda: call(normalize=Softmax1(torch.zeros(2, 6))),
        ShapeError,
        ("(2, 6)", "6 heads"),
    ),
    ("a sink elsewhere", lambda: call(normalize=Sink(6).to(META)), DeviceError, ("cpu", "meta")),
    ("a sink of text", lambda: call(normalize=Softmax1("0")), DTypeError, ("sink", "str")),
    (
        "a sink of complex",
        lambda: quietly(lambda: call(normalize=Softmax1(torch.zeros(6, dtype=torch.complex64)))),
        DTypeError,
        ("sink", "complex64"),
    ),
    ("sinks for -1 heads", lambda: Sink(-1), ArgumentError, ("-1",)),
)
def test_normalizers_that_cannot_be(case):
    check(case)


# Dropout, generator, implementation


@table(
    *(
        (
            f"dropout {p}",
            lambda p=p: call(dropout=p),
            ArgumentError,
            ("dropout", str(p), "at least 0", "below 1"),
        )
        for p in (1.0, 1, 1.5, -0.1, math.nan, math.inf, -math.inf)
    ),
    ("dropout True", lambda: call(dropout=True), RegardError, ("dropout", "True")),
    ("dropout of text", lambda: call(dropout="0.1"), RegardError, ("dropout", "0.1")),
    ("dropout of None", lambda: call(dropout=None), RegardError, ("dropout", "None")),
    ("dropout of a list", lambda: call(dropout=[0.1]), RegardError, ("dropout", "[0.1]")),
    ("dropout of a tensor", lambda: call(dropout=torch.tensor([0.1, 0.2])), RegardError, ("dropout",)),
    ("dropout of a module", lambda: call(dropout=nn.Dropout(0.1)), RegardError, ("dropout", "Dropout")),
    (
        "a seed for a generator",
        lambda: call(dropout=0.1, generator=42),
        DTypeError,
        ("generator", "torch.Generator"),
    ),
    ("a seed without dropout", lambda: call(generator=42), DTypeError, ("generator", "torch.Generator")),
    (
        "implementation",
        lambda: call(implementation="flash"),
        ArgumentError,
        ("'flash'", "reference", "tiled"),
    ),
    (
        "implementation of a number",
        lambda: call(implementation=3),
        ArgumentError,
        ("3", "reference", "tiled"),
    ),
    (
        "implementation of nothing",
        lambda: call(implementation=""),
        ArgumentError,
        ("''", "reference", "tiled"),
    ),
)
def test_options_that_cannot_be(case):
    check(case)


def test_a_generator_may_stay_where_it_is():
    """The seed is drawn on the generator's device and moved to the call's."""
    inputs = [t(device=META) for t in (query, key, value)]
    assert call(*inputs, dropout=0.5, generator=torch.Generator()).device == META


# Invalid numbers


INVALID: dict[str, Callable[[], Any]] = {
    "temperature of text": lambda: Softmax("1"),
    "temperature of None": lambda: Softmax(None),
    "alpha of text": lambda: Entmax("2"),
    "sigma of text": lambda: Gaussian("1"),
    "softcap of text": lambda: Dot(softcap="30"),
    "scale of text": lambda: call(score=ScaledDot(scale="1")),
    "cosine scale of text": lambda: call(score=Cosine(scale="1")),
    "sigmoid bias of text": lambda: call(normalize=regard.Sigmoid(bias="1")),
    "ALiBi of text": lambda: ALiBi("8"),
    "ALiBi of a half": lambda: ALiBi(2.5),
    "T5 of text": lambda: T5Bias("8"),
    "T5 of a half": lambda: T5Bias(2.5),
    "Sink of a half": lambda: Sink(2.5),
    "General of text": lambda: General("8", 8),
    "General of a half": lambda: General(8.5, 8),
    "General negative": lambda: General(-8, 8),
    "Additive negative": lambda: Additive(8, 8, -1),
    "Additive of text": lambda: Additive(8, "8"),
    "Concat negative": lambda: Concat(8, 8, -1),
    "Concat of None": lambda: Concat(8, 8, None),
}


@looped("name", INVALID)
def test_invalid_numbers_and_sizes_are_rejected_by_regard(name):
    check(Case(name, INVALID[name], RegardError, ()))


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
    check(Case("", raises(ShapeError("2 and 3; use 4.")), ShapeError, ("2", "3")))
    with pytest.raises(AssertionError, match=message):
        check(Case("", run, ShapeError, ("2", "3")))


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
        ("score_mod", "score="),
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
