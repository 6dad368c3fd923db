"""`flex_attention` reuses a route only while the functions and the block mask are equivalent."""

import functools
import random

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask

import regard
from regard.mechanism.flex import attention as flex
from regard.mechanism.flex.route_cache import fingerprint

WINDOW = 3


def global_window(b, h, q, k):
    return (q >= k) & (q - k < WINDOW)


def causal(b, h, q, k):
    return q >= k


def window(size):
    return lambda b, h, q, k: q - k < size


def mutable(sizes):
    return lambda b, h, q, k: q - k < sizes[0]


def importing(b, h, q, k):
    import random

    return q - k < random.randint(1, 5)


def drawing(b, h, q, k):
    return q - k < random.randint(1, 5)


def dense(x, mask_mod):
    i = torch.arange(x.shape[-2])
    allowed = mask_mod(0, 0, i[:, None], i)
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=allowed)


def block_mask(mask_mod, tokens):
    return create_block_mask(mask_mod, None, None, tokens, tokens, device="cpu")


@pytest.fixture
def traces(monkeypatch):
    """Record the calls whose functions were traced."""
    calls = []

    def trace(call):
        calls.append(call)
        return original(call)

    original = flex._trace_route
    monkeypatch.setattr(flex, "_trace_route", trace)
    monkeypatch.setattr(flex, "_CACHE", flex.RouteCache())
    return calls


def test_the_second_call_is_not_traced(traces):
    x = torch.randn(1, 2, 9, 4)
    for _ in range(3):  # a new function object each time, as in a layer's forward
        mask = block_mask(and_masks(causal, window(WINDOW)), 9)
        output = regard.flex_attention(x / 2, x, x, lambda s, b, h, q, k: s * 2.0, mask)
        torch.testing.assert_close(output, dense(x, global_window))
    assert len(traces) == 1


def test_changed_numbers_are_noticed(traces, monkeypatch):
    x = torch.randn(1, 2, 9, 4)
    for size in (3, 5, 3):
        monkeypatch.setattr(f"{__name__}.WINDOW", size)
        for mask_mod in (global_window, and_masks(causal, window(size)), and_masks(causal, mutable([size]))):
            output = regard.flex_attention(x, x, x, block_mask=block_mask(mask_mod, 9))
            torch.testing.assert_close(output, dense(x, global_window))


def test_a_changed_block_mask_is_noticed(traces):
    x = torch.randn(1, 1, 256, 4)
    mask = block_mask(causal, 256)
    before = regard.flex_attention(x, x, x, block_mask=mask)
    torch.testing.assert_close(before, dense(x, causal))
    with torch.no_grad():
        mask.full_kv_num_blocks.zero_()  # the second row of blocks no longer attends to the first
    after = regard.flex_attention(x, x, x, block_mask=mask)
    torch.testing.assert_close(after[:, :, 128:], dense(x[:, :, 128:], causal))
    assert len(traces) == 2


def test_routes_of_captured_tensors_are_not_kept(traces):
    x, table = torch.randn(1, 2, 5, 4), torch.randn(2)

    def score_mod(score, b, h, q, k):
        return score + table[h] * (q - k)

    for _ in range(2):
        table.add_(1)
        output = regard.flex_attention(x, x, x, score_mod)
        bias = table[:, None, None] * (torch.arange(5)[:, None] - torch.arange(5))
        torch.testing.assert_close(
            output, torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=bias)
        )
    assert len(traces) == 2


def test_a_scale_of_the_wrong_type_is_named():
    x = torch.randn(1, 2, 5, 4)
    regard.flex_attention(x, x, x, scale=1.0)
    for scale in ([1.0], True):
        with pytest.raises(regard.DTypeError, match="flex_attention got scale"):
            regard.flex_attention(x, x, x, scale=scale)


def test_inference_mode_does_not_poison_training(traces):
    x = torch.randn(1, 2, 5, 4)

    def alibi(score, b, h, q, k):
        return score - (q - k).abs() * torch.exp2(-(h + 1.0))

    with torch.inference_mode():
        inferred = regard.flex_attention(x, x, x, alibi)
    leaf = x.clone().requires_grad_()
    output = regard.flex_attention(leaf, leaf, leaf, alibi)
    output.sum().backward()
    torch.testing.assert_close(output, inferred)
    assert leaf.grad.isfinite().all()


class Config:
    size = 3


def configured(b, h, q, k):
    return q - k < Config.size


def bound(sizes):
    get = sizes.get
    return lambda b, h, q, k: q - k < get("size")


def test_functions_that_may_change_have_no_fingerprint():
    unset = [lambda b, h, q, k: later]  # noqa: F821 (a name that does not exist)
    functions = [
        importing,
        drawing,
        mutable([1]),
        functools.partial(window(3)),
        window(torch.tensor(3.0, requires_grad=True)),
        window(torch.zeros(5000)),
        window(torch.zeros(3).to(torch.float32)._neg_view()),
        *unset,
    ]
    assert [fingerprint(function) for function in functions] == [None] * len(functions)
    assert fingerprint(window(1)) != fingerprint(window(True))
    assert fingerprint(window(0.0)) != fingerprint(window(-0.0))


def test_the_fingerprint_contains_the_values_of_tensors():
    size = torch.tensor([3.0, 0.0])
    before = fingerprint(window(size))
    assert before == fingerprint(window(size.clone()))
    assert before != fingerprint(window(torch.tensor([3.0, -0.0])))
    assert before != fingerprint(window(size.double()))
    assert before != fingerprint(window(size[:, None]))
    size.data[0] = 4.0  # changes no version counter
    assert before != fingerprint(window(size))
    assert fingerprint(window(size), tensors=False) is None


def slope_of(slopes):
    return lambda s, b, h, q, k: s - slopes[h] * (q - k).abs()


def table_of(bias):
    return lambda s, b, h, q, k: s + bias[q, k]


def test_captured_tensors_are_traced_once(traces):
    x, slopes = torch.randn(1, 2, 9, 4), torch.tensor([0.5, 0.25])
    for _ in range(3):
        regard.flex_attention(x, x, x, slope_of(slopes))
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("make", "tensor"),
    [(slope_of, torch.tensor([0.5, 0.25])), (table_of, torch.randn(9, 9))],
    ids=["slopes", "table"],
)
def test_a_cached_route_has_the_values_of_its_own_call(make, tensor):
    """A later call with the same values must not use a tensor that has changed since the first call."""
    x, earlier = torch.randn(1, 2, 9, 4), tensor.clone()
    score_mod = make(tensor)
    before = regard.flex_attention(x, x, x, score_mod)
    tensor.mul_(3)
    changed = regard.flex_attention(x, x, x, score_mod)
    assert not torch.allclose(before, changed, atol=1e-3)
    assert torch.equal(regard.flex_attention(x, x, x, make(earlier)), before)
    fresh, lse = regard.flex_attention(x, x, x, make(earlier), return_lse=True)
    torch.testing.assert_close(fresh, before, rtol=1e-5, atol=1e-5)
    assert torch.equal(lse, regard.flex_attention(x, x, x, make(earlier.clone()), return_lse=True)[1])


def test_export_does_not_poison_later_calls(traces):
    class Layer(torch.nn.Module):
        def forward(self, x):
            return regard.flex_attention(
                x, x, x, lambda s, b, h, q, k: s - (q - k).abs() * torch.exp2(-(h + 1.0))
            )

    x = torch.randn(1, 2, 9, 4)
    expected = Layer()(x)
    flex._CACHE = flex.RouteCache()
    torch.export.export(Layer(), (x,), strict=False)
    torch.testing.assert_close(Layer()(x), expected)


def test_functions_that_read_settings_have_no_fingerprint():
    assert fingerprint(lambda s, b, h, q, k: s * torch.get_num_threads()) is None
    assert fingerprint(lambda s, b, h, q, k: s * torch.backends.cudnn.deterministic) is None
    assert fingerprint(lambda s, b, h, q, k: s * eval("2")) is None
    assert fingerprint(lambda s, b, h, q, k: torch.where(q >= k, s.float(), -torch.inf)) is not None


@pytest.mark.parametrize(
    "slopes", [torch.rand(4, 3)[:, 0], torch.tensor([0.1]).expand(4), torch.rand(8)[::2]]
)
def test_captured_tensors_may_have_any_stride(slopes):
    x = torch.randn(1, 4, 6, 8)
    for _ in range(2):
        output = regard.flex_attention(x, x, x, score_mod=lambda s, b, h, q, k: s - slopes[h] * (q - k).abs())
        distance = (torch.arange(6)[:, None] - torch.arange(6)).abs()
        bias = -slopes[:, None, None] * distance
        torch.testing.assert_close(output, regard.attention(x, x, x, bias=bias))
