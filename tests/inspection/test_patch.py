import itertools
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regard
from tests.cases import looped

THEIRS = F.scaled_dot_product_attention
OURS = regard.scaled_dot_product_attention


def test_patch_and_restore():
    with regard.patched():
        assert F.scaled_dot_product_attention is OURS
        with regard.patched():
            assert F.scaled_dot_product_attention is OURS
        assert F.scaled_dot_product_attention is OURS
    assert F.scaled_dot_product_attention is THEIRS


def test_restored_after_an_exception():
    with pytest.raises(ZeroDivisionError), regard.patched():
        _ = 1 / 0
    assert F.scaled_dot_product_attention is THEIRS


def test_patch_and_unpatch_count():
    regard.patch()
    regard.patch()
    regard.unpatch()
    assert F.scaled_dot_product_attention is OURS
    regard.unpatch()
    regard.unpatch()
    assert F.scaled_dot_product_attention is THEIRS
    regard.patch()
    assert F.scaled_dot_product_attention is OURS
    regard.unpatch()


def test_modules_that_imported_it_by_name_are_patched(monkeypatch):
    module = types.ModuleType("custom_attention")
    module.sdpa, module.other = THEIRS, F.softmax
    monkeypatch.setitem(sys.modules, "custom_attention", module)
    with regard.patched():
        assert module.sdpa is OURS
        assert module.other is F.softmax
    assert module.sdpa is THEIRS


def test_other_replacements_stay(monkeypatch):
    def another(*args):
        return THEIRS(*args)

    with regard.patched():
        F.scaled_dot_product_attention = another
    try:
        assert F.scaled_dot_product_attention is another
    finally:
        F.scaled_dot_product_attention = THEIRS


def counted(monkeypatch):
    """Count the calls to regard."""
    from regard.mechanism import sdpa

    calls, original = [], sdpa.attention
    monkeypatch.setattr(sdpa, "attention", lambda *a, **k: calls.append(1) or original(*a, **k))
    return calls


@pytest.mark.parametrize("training", [True, False])
def test_torchs_transformer_computes_the_same(training, monkeypatch):
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 2, 2, 32, dropout=0.0, batch_first=True).train(training)
    source, target = torch.randn(2, 7, 16), torch.randn(2, 5, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    expected = model(source, target, tgt_mask=mask, tgt_is_causal=True)
    calls = counted(monkeypatch)
    with regard.patched():
        result = model(source, target, tgt_mask=mask, tgt_is_causal=True)
    assert len(calls) == 6
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


class Attention(nn.Module):
    """Attention in the style of vision models."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(query, key, value)
        return self.proj(x.transpose(1, 2).flatten(-2))


def test_a_custom_module_and_its_gradients(monkeypatch):
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 5, 16, requires_grad=True)
    expected = model(x)
    (theirs,) = torch.autograd.grad(expected.square().sum(), x)
    calls = counted(monkeypatch)
    with regard.patched():
        result = model(x)
    (ours,) = torch.autograd.grad(result.square().sum(), x)
    assert calls
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@looped("entered, left", itertools.product(itertools.permutations(range(3)), repeat=2), sampled=5)
def test_patches_removed_in_any_order_leave_nothing_behind(entered, left):
    """patch, watch and edit wrap torch's function only while they are active."""
    model, x = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True), torch.randn(1, 3, 8)
    original = torch.nn.functional.scaled_dot_product_attention
    blocks = [regard.watch(model), regard.edit(model, 0, [0], regard.ZeroAblation()), regard.patched()]
    for number in entered:
        blocks[number].__enter__()
    model(x)
    for number in left:
        blocks[number].__exit__(None, None, None)
    assert torch.nn.functional.scaled_dot_product_attention is original
    assert "attention" in vars(regard.models.Attends)
    assert torch.nn.MultiheadAttention.forward.__module__ == "torch.nn.modules.activation"
    assert not hasattr(torch.nn.MultiheadAttention.forward, "__wrapped__")


def test_a_patched_model_can_be_watched():
    model, x = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True), torch.randn(1, 3, 8)
    with regard.watch(model) as seen, regard.patched():
        model(x)
    assert list(seen) == ["self_attn"]
