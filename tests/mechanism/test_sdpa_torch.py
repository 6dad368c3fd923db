"""regard.scaled_dot_product_attention in torch's place: subclasses, modes, compiling, OpInfo and modules."""

import contextlib
import functools
import itertools
import math
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode

from tests.cases import looped
from tests.fresh import run_fresh
from tests.mechanism.sdpa_calls import (
    BACKENDS,
    CASES,
    B,
    Call,
    D,
    H,
    K,
    Q,
    assert_same_outcome,
    boolean,
    draw,
    ours,
    outcome,
    qkv,
    run,
    theirs,
)

# Nested tensors, subclasses, modes


@pytest.mark.filterwarnings("ignore")  # torch warns that nested tensors are a prototype
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors(layout: torch.layout) -> None:
    parts = [draw(H, n, D) for n in (3, 5, 2)]
    if layout is torch.strided:
        nested = torch.nested.nested_tensor(parts, layout=layout)
    else:  # only the axis after the batch axis may be ragged
        turned = [part.transpose(0, 1) for part in parts]
        nested = torch.nested.nested_tensor(turned, layout=layout).transpose(1, 2)
    actual, expected = ours(nested, nested, nested), theirs(nested, nested, nested)
    assert actual.is_nested
    for a, b, part in zip(actual.unbind(), expected.unbind(), parts, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, ours(part, part, part))


@pytest.mark.filterwarnings("ignore")
def test_mixed_nested_and_dense_inputs_raise_the_same_error() -> None:
    nested = torch.nested.nested_tensor([draw(n, H, D) for n in (3, 5)]).transpose(1, 2)
    dense = draw(2, H, 4, D)
    for args in ((nested, dense, dense), (dense, nested, nested)):
        expected, actual = outcome(theirs, args, {}), outcome(ours, args, {})
        assert isinstance(expected, tuple) == isinstance(actual, tuple)
        if isinstance(expected, tuple):
            assert actual == expected
    assert_same_outcome((dense, dense, dense), {"attn_mask": nested}, refused=True)


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_with_options() -> None:
    parts = [draw(n, H, D) for n in (3, 5, 2)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    for options in ({"is_causal": True}, {"scale": 0.3}, {"attn_mask": boolean(5, 5)}):
        expected, actual = outcome(theirs, (nested,) * 3, options), outcome(ours, (nested,) * 3, options)
        if isinstance(expected, tuple):
            assert actual == expected
        else:
            torch.testing.assert_close(actual.values(), expected.values())


class _Noted(Tensor):
    """A tensor that records torch function calls."""

    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


class _Duck:
    """An object that is not a tensor but implements __torch_function__."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "quack" if function is F.scaled_dot_product_attention else NotImplemented


@pytest.mark.parametrize("place", range(4))
def test_a_subclass_intercepts_one_call(place: int) -> None:
    args: list[Tensor] = [*qkv(B, H), draw(Q, K)]
    expected = theirs(*args)
    args[place] = args[place].as_subclass(_Noted)
    _Noted.seen.clear()
    output = ours(*args)
    assert sum(function in (theirs, ours) for function in _Noted.seen) == 1
    assert isinstance(output, _Noted)
    torch.testing.assert_close(output.as_subclass(Tensor), expected)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("place", range(4))
def test_overrides_of_torch_also_override_regard(
    monkeypatch: pytest.MonkeyPatch, place: int, swapped: bool
) -> None:
    # overrides compare with the current F.scaled_dot_product_attention
    args: list[Any] = [*qkv(B, H), draw(Q, K)]
    args[place] = _Duck()
    assert theirs(*args) == "quack"
    if swapped:
        monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
    assert ours(*args) == "quack"


def test_a_mode_intercepts_one_call() -> None:
    seen = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    args = qkv(B, H)
    expected = theirs(*args)
    with Watching():
        output = ours(*args)
    assert sum(function in (theirs, ours) for function in seen) == 1
    torch.testing.assert_close(output, expected)


def test_the_default_device_has_no_effect() -> None:
    """`with torch.device(…)` is also a mode; regard's function is still called."""
    query, key, value = qkv(B, H)
    value[..., -1, :] = math.nan
    mask = torch.arange(K) < K - 1
    expected = ours(query, key, value, attn_mask=mask[None])
    with torch.device("cpu"):
        actual = ours(query, key, value, attn_mask=mask[None])
    torch.testing.assert_close(actual, expected)


# Autocast


@looped("dtype", [torch.bfloat16, torch.float16], ids=str)
@looped(
    "given",
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float64, torch.float64),
        (torch.float64, torch.float32, torch.float32),
    ],
    ids=str,
)
def test_autocast(dtype: torch.dtype, given: tuple[torch.dtype, ...]) -> None:
    args = [t.to(d) for t, d in zip(qkv(B, H), given, strict=True)]
    with torch.autocast("cpu", dtype=dtype):
        expected, actual = outcome(theirs, args, {}), outcome(ours, args, {})
    if isinstance(expected, tuple):
        assert actual == expected
        return
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_autocast_with_a_mask(mask_dtype: torch.dtype) -> None:
    args = [t.float().requires_grad_() for t in qkv(B, H)]
    mask = boolean(Q, K) if mask_dtype is torch.bool else draw(Q, K, dtype=mask_dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, actual = (outcome(f, args, {"attn_mask": mask}) for f in (theirs, ours))
    if isinstance(expected, tuple):
        assert actual == expected
        return
    assert actual.dtype is torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=3e-2, atol=3e-2)
    for a, b in zip(
        torch.autograd.grad(actual.sum(), args), torch.autograd.grad(expected.sum(), args), strict=True
    ):
        assert a.dtype is torch.float32
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


# torch.compile


SLOW = pytest.mark.slow  # cases that compile, which takes a second each


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    [
        *("causal, more keys", "bias (2, 1, 5, 7)", "gqa, two each"),
        *(pytest.param(name, marks=SLOW) for name in ("4-D", "3-D", "mask (5, 7)", "scale 0.5")),
    ],
)
def test_compiles_into_one_graph(name: str) -> None:
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    args, options = CASES[name]()
    actual = run(torch.compile(ours, backend=counter, fullgraph=True), args, options)
    assert counter.frame_count == 1
    torch.testing.assert_close(actual, run(ours, args, options))


@pytest.mark.parametrize("build", [pytest.param(causal_upper_left, marks=SLOW), causal_lower_right])
def test_bias_objects_compile_into_one_graph(build: Callable[..., Tensor]) -> None:
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    args = [t.half() for t in qkv(1, 1, q=23, k=56, d=15, e=15)]
    bias = build(23, 56)
    with sdpa_kernel(BACKENDS["all"]):
        actual = run(torch.compile(ours, backend=counter), args, {"attn_mask": bias})
    assert counter.frame_count == 1
    for a, b in zip(actual, run(theirs, args, {"attn_mask": bias}), strict=True):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("kernels", ["math", pytest.param("flash", marks=SLOW)])
def test_compiles_inside_a_kernel_context(kernels: str) -> None:
    torch._dynamo.reset()
    args = qkv(B, H)

    def call(*args: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[kernels]):
            return ours(*args, is_causal=True)

    actual = torch.compile(call, backend="aot_eager", fullgraph=True)(*args)
    torch.testing.assert_close(actual, theirs(*args, is_causal=True))


def test_dropout_compiles() -> None:
    torch._dynamo.reset()
    args = qkv(B, H)
    compiled = torch.compile(lambda *a: ours(*a, dropout_p=0.5), backend="aot_eager", fullgraph=True)
    torch.manual_seed(5)
    actual = compiled(*args)
    torch.manual_seed(5)
    torch.testing.assert_close(actual, theirs(*args, dropout_p=0.5))


# OpInfo: torch's own test samples, which take seconds to import; test_sdpa.py has a case for each kind


@pytest.fixture(scope="module")
def info() -> Any:
    """Return torch's OpInfo for the function; torch.testing imports one name from expecttest."""
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:
            stand_in = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
            sys.modules["expecttest"] = stand_in
    flag = "__allow_nonbracketed_mutation_flag"  # importing torch.testing freezes torch.backends' settings
    allowed = getattr(torch.backends, flag)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    setattr(torch.backends, flag, allowed)
    (actual,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    return actual


def samples(info: Any, dtype: torch.dtype, dropout: bool | None = None, learn: bool = True) -> Iterator[Call]:
    for sample in info.sample_inputs("cpu", dtype, requires_grad=learn):
        if dropout is None or (sample.kwargs["dropout_p"] > 0) == dropout:
            yield (sample.input, *sample.args), sample.kwargs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_opinfo_samples(info: Any, dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-9, torch.float32: 3e-4}.get(dtype, 0.3)  # the samples reach ±9
    for args, options in samples(info, dtype):
        results = []
        for function in (ours, theirs):
            torch.manual_seed(11)
            results.append(run(function, args, options, mask_learns=True))
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
        assert results[0][0].stride() == results[1][0].stride()


@pytest.mark.slow
def test_opinfo_gradcheck(info: Any) -> None:
    """Derivatives in both modes and batched, checked by torch's own gradient tests."""
    for args, options in samples(info, torch.float64, dropout=False):
        call = functools.partial(ours, **options)
        # torch has no forward mode on the fused path; a query with fewer axes is passed to torch
        forward = args[0].dim() == args[1].dim()
        checks = {"check_forward_ad": forward, "check_batched_forward_grad": forward}
        assert gradcheck(call, args, fast_mode=True, check_batched_grad=True, **checks)
        assert gradgradcheck(call, args, fast_mode=True)


@pytest.mark.slow
def test_opinfo_composite_compliance(info: Any) -> None:
    """Covers every combination of plain tensors and an opaque wrapper subclass."""
    from torch.testing._internal import composite_compliance

    for args, options in itertools.islice(
        samples(info, torch.float32, dropout=False, learn=False), 0, None, 3
    ):
        composite_compliance.check_with_mode(ours, args, options, torch.testing.assert_close)
        with composite_compliance_errors():
            composite_compliance.check_all_permutations(ours, args, options, torch.testing.assert_close)


@pytest.mark.slow
def test_opinfo_composite_compliance_of_the_gradient(info: Any) -> None:
    from torch.testing._internal import composite_compliance

    # plain tensors use the kernels and a subclass the dense formula, which round differently; the samples
    # have size 9, their scores size 100
    almost = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-4)
    for args, options in itertools.islice(samples(info, torch.float32, dropout=False), 0, None, 3):
        with composite_compliance_errors():
            composite_compliance.check_backward_formula(ours, args, options, assert_equal_fn=almost)


@contextlib.contextmanager
def composite_compliance_errors() -> Iterator[None]:
    """Show the underlying error, which torch's checker hides."""
    try:
        yield
    except RuntimeError as error:
        raise AssertionError(f"{error.__cause__!r}\n{error}"[:1500]) from error


# Replacing torch's function


@pytest.fixture
def swap(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Replace torch's function with regard's; the list records the calls."""

    def put() -> list[int]:
        calls: list[int] = []

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            calls.append(1)
            return ours(*args, **kwargs)

        monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
        return calls

    return put


def compare_module(
    module: nn.Module, inputs: tuple[Tensor, ...], swap: Callable[[], list[int]], calls: int, **options: Any
) -> None:
    """Compare outputs and gradients of a module with torch's function and with regard's."""
    results = []
    counted: list[int] = []
    for swapped in (False, True):
        if swapped:
            counted = swap()
        torch.manual_seed(13)
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        output = module(*leaves, **options)
        output = output[0] if isinstance(output, tuple) else output
        wanted = [*leaves, *module.parameters()]
        grads = torch.autograd.grad(output.square().sum(), wanted, allow_unused=True)
        results.append([output, *(g for g in grads if g is not None)])
    assert len(counted) == calls
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def _padding(batch: int, length: int) -> Tensor:
    """Return a mask in torch.nn's convention: True = padding."""
    return torch.arange(length) >= torch.arange(length, length - batch, -1)[:, None]


@pytest.mark.parametrize(
    ("masked", "dropout"),
    [("nothing", 0.3), ("causal", 0.0), ("bool", 0.3), ("float", 0.0), ("padding", 0.3), ("both", 0.0)],
)
def test_multihead_attention(swap: Callable[[], list[int]], masked: str, dropout: float) -> None:
    causal = nn.Transformer.generate_square_subsequent_mask(Q)
    options: dict[str, Any] = {
        "nothing": {},
        "causal": {"attn_mask": causal, "is_causal": True},
        "bool": {"attn_mask": causal != 0},
        "float": {"attn_mask": torch.randn(B * 3, Q, Q)},
        "padding": {"key_padding_mask": _padding(B, Q)},
        "both": {"attn_mask": causal != 0, "key_padding_mask": _padding(B, Q)},
    }[masked]
    module = nn.MultiheadAttention(12, 3, dropout=dropout, batch_first=True)
    inputs = tuple(torch.randn(B, n, 12) for n in (Q, Q, Q))
    compare_module(module, inputs, swap, calls=1, need_weights=False, **options)


def test_multihead_attention_with_other_widths_and_extra_keys(swap: Callable[[], list[int]]) -> None:
    module = nn.MultiheadAttention(12, 3, kdim=7, vdim=5, add_bias_kv=True, add_zero_attn=True)
    inputs = (torch.randn(Q, B, 12), torch.randn(K, B, 7), torch.randn(K, B, 5))
    compare_module(module, inputs, swap, calls=1, need_weights=False)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_transformer(swap: Callable[[], list[int]], training: bool, padded: bool) -> None:
    module = nn.Transformer(12, 2, 2, 2, 16, dropout=0.1, batch_first=True).train(training)
    options: dict[str, Any] = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(Q)}
    if padded:
        options = {
            "tgt_mask": nn.Transformer.generate_square_subsequent_mask(Q) != 0,
            "src_key_padding_mask": _padding(B, K),
            "tgt_key_padding_mask": _padding(B, Q),
            "memory_key_padding_mask": _padding(B, K),
        }
    compare_module(module, (torch.randn(B, K, 12), torch.randn(B, Q, 12)), swap, calls=2 + 2 * 2, **options)


@pytest.mark.filterwarnings("ignore")  # torch warns that nested tensors are a prototype
def test_the_inference_fast_path_agrees(swap: Callable[[], list[int]]) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16, batch_first=True), 2).eval()
    x = torch.randn(B, Q, 12)
    padding = _padding(B, Q)
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
    calls = swap()
    actual = encoder(x, src_key_padding_mask=padding)
    assert len(calls) == 2
    torch.testing.assert_close(actual.masked_fill(padding[..., None], 0), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(encoder(x, src_key_padding_mask=padding), expected)


def test_replacing_the_function_does_not_recurse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that are passed to torch (dropout, unusual shapes, errors) do not recurse either."""
    args = qkv(B, H)
    monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
    assert F.scaled_dot_product_attention(*args).shape == (B, H, Q, D)
    assert F.scaled_dot_product_attention(*args, dropout_p=0.5).shape == (B, H, Q, D)
    assert F.scaled_dot_product_attention(args[0][0], *args[1:]).shape == (B, H, Q, D)
    assert F.scaled_dot_product_attention(*args, attn_mask=causal_upper_left(Q, K)).shape == (B, H, Q, D)
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(args[0], args[1].float(), args[2])


# torch's CausalBias compares with F.scaled_dot_product_attention, so calls that regard passes to torch are
# not recognized after that name is replaced with regard's


@pytest.mark.parametrize("build", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("why", ["dropout", "kernel context", "2-D"])
def test_bias_objects_in_a_swapped_call(
    monkeypatch: pytest.MonkeyPatch, build: Callable[..., Tensor], why: str
) -> None:
    args, bias = (qkv() if why == "2-D" else qkv(B, H)), build(Q, K)
    dropout = 0.3 if why == "dropout" else 0.0
    results = []
    for swapped in (False, True):
        if swapped:
            monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
        torch.manual_seed(19)
        with sdpa_kernel(SDPBackend.MATH) if why == "kernel context" else contextlib.nullcontext():
            results.append(F.scaled_dot_product_attention(*args, attn_mask=bias, dropout_p=dropout))
    torch.testing.assert_close(*results)


# Wrappers around regard in torch's place, set before and after regard is imported.
BY_REGARD = "F.scaled_dot_product_attention = lambda *a, **k: regard.scaled_dot_product_attention(*a, **k)"
REPLACED = {
    "before": (BY_REGARD, ""),
    "after": ("", BY_REGARD),
    "a wrapper of a wrapper": (
        "",
        """
inner = lambda *a, **k: regard.scaled_dot_product_attention(*a, **k)
F.scaled_dot_product_attention = lambda *a, **k: inner(*a, **k)""",
    ),
    "a partial": (
        "",
        "F.scaled_dot_product_attention = functools.partial(regard.scaled_dot_product_attention)",
    ),
    "a wrapper of torch's, then of regard's": (
        "F.scaled_dot_product_attention = lambda *a, **k: torchs(*a, **k)",
        BY_REGARD,
    ),
}
SWAPPED = """
import functools, warnings
import torch
import torch.nn.functional as F
warnings.simplefilter("ignore")
torchs = F.scaled_dot_product_attention
{before}
import regard
{after}

class Kind(torch.Tensor):
    pass

from torch.nn.attention.bias import causal_lower_right
attend = lambda *a, **k: F.scaled_dot_product_attention(*a, **k)
x = torch.randn(2, 3, 5, 8)
jagged = torch.nested.nested_tensor([torch.randn(5, 3, 8), torch.randn(2, 3, 8)], layout=torch.jagged)
jagged = jagged.transpose(1, 2)

def check():
    close = torch.testing.assert_close
    close(attend(x, x, x, is_causal=True), torchs(x, x, x, is_causal=True))
    torch.manual_seed(0)
    dropped = attend(x, x, x, dropout_p=0.5)  # torch's own random numbers
    torch.manual_seed(0)
    close(dropped, torchs(x, x, x, dropout_p=0.5))
    for mine, theirs in zip(attend(jagged, jagged, jagged).unbind(), torchs(jagged, jagged, jagged).unbind()):
        close(mine, theirs)
    close(attend(x, x, x, causal_lower_right(5, 5)), torchs(x, x, x, is_causal=True))
    kind = x.as_subclass(Kind)
    assert type(attend(kind, kind, kind)) is Kind
    print("right")

check()
with regard.patched():
    check()
check()
"""


@pytest.mark.parametrize("case", REPLACED)
def test_wrappers_around_regard_do_not_recurse(case: str) -> None:
    before, after = REPLACED[case]
    program = SWAPPED.format(before=before, after=after)
    done = run_fresh(program)
    assert done.returncode == 0, done.stderr[-1500:]
    assert done.stdout.split() == ["right"] * 3


def test_a_bias_object_and_is_causal_are_rejected_in_a_swapped_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
    with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
        F.scaled_dot_product_attention(*qkv(B, H), attn_mask=causal_upper_left(Q, K), is_causal=True)


def test_swapped_modules_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    module = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True)
    x, mask = torch.randn(B, Q, 12), nn.Transformer.generate_square_subsequent_mask(Q)
    expected = module(x, src_mask=mask)
    monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
    actual = torch.compile(module, backend="aot_eager", fullgraph=True)(x, src_mask=mask)
    torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and torch's tests still use it
def test_swapped_modules_can_be_scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.MultiheadAttention(12, 3, batch_first=True)
    x = torch.randn(B, Q, 12)
    monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
    scripted = torch.jit.script(module)
    torch.testing.assert_close(
        scripted(x, x, x, need_weights=False)[0], module(x, x, x, need_weights=False)[0]
    )
