"""`watch`, `edit` and regard interpret the keywords of transformers' attention functions in the same way."""

import sys

import pytest
import torch
from torch.nn import functional as F

import regard
from regard.inspection.hooks.interface_call import parse
from regard.inspection.huggingface.attention import hosted_attention
from tests.inspection import hosts
from tests.lazy import lazy_import

lazy_import("transformers")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def register():
    """Register attention functions under a name, with the masks of another implementation."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    names = []

    def add(name, function, masks):
        names.append(name)
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[masks])

    yield add
    for name in names:
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)


def flash(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **kwargs):
    """Emulate a flash kernel: causality aligned to the end of the keys, a window, padding (b, k)."""
    q, k = query.shape[2], key.shape[2]
    position, number = torch.arange(q)[:, None] + k - q, torch.arange(k)
    visible = number <= position
    if sliding_window is not None:
        visible = visible & (number > position - sliding_window)
    visible = visible.expand(len(query), 1, q, k)
    if attention_mask is not None:
        visible = visible & attention_mask[:, None, None].bool()
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = (query @ key.mT * scaling).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ value).transpose(1, 2).contiguous(), None


@torch.no_grad()
@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_flash_kernels_can_be_watched_and_edited(name, side, register):
    register("flash_test", flash, "flash_attention_2")
    model, inputs = hosts.make(name), hosts.batch(name, side)
    real = inputs["attention_mask"].bool()
    expected = model(**inputs, output_attentions=True)
    model.config._attn_implementation_internal = "flash_test"  # set_attn_implementation would import a kernel
    before = model(**inputs).logits
    torch.testing.assert_close(before[real], expected.logits[real], atol=1e-4, rtol=1e-4)
    with regard.watch(model) as seen:
        model(**inputs)
    for weights, right in zip(seen.values(), expected.attentions, strict=True):
        assert ((weights.dense() - right).abs() * real[:, None, :, None]).max() < 1e-5
    with regard.edit(model, None, None, regard.ReplaceWeights(lambda weights: weights)):
        torch.testing.assert_close(model(**inputs).logits[real], before[real], atol=1e-4, rtol=1e-4)


def warm(module, query, key, value, attention_mask, temperature=1.0, scaling=None, **kwargs):
    output = F.scaled_dot_product_attention(
        query, key, value, attention_mask, is_causal=attention_mask is None, scale=scaling / temperature
    )
    return output.transpose(1, 2).contiguous(), None


@torch.no_grad()
def test_unknown_keywords_of_the_running_function_are_refused(register):
    register("warm", warm, "sdpa")
    model, inputs = hosts.make("gpt2", "warm"), hosts.batch("gpt2")
    model(**inputs)
    with regard.watch(model) as seen:  # an ordinary call, without the keyword
        model(**inputs)
    assert seen[0].shape == (3, 4, 9, 9)
    before = model(**inputs, temperature=2.0).logits
    with regard.watch(model) as seen:
        assert torch.equal(model(**inputs, temperature=2.0).logits, before)
    with pytest.raises(regard.ArgumentError, match=r"h\.0\.attn: warm takes temperature=…, which"):
        _ = seen[0]
    with regard.edit(model, 0, None, regard.ZeroAblation()):  # does not need weights
        assert not torch.equal(model(**inputs, temperature=2.0).logits, before)
    same = regard.ReplaceWeights(lambda weights: weights)
    with (
        pytest.raises(regard.ArgumentError, match="takes temperature=…"),
        regard.edit(model, 0, None, same),
    ):
        model(**inputs, temperature=2.0)


@torch.no_grad()
def test_a_generation_that_cannot_be_read_is_one_error_per_layer(monkeypatch):
    def refuse(*arguments):
        raise regard.ArgumentError("cannot be read")

    model, inputs = hosts.make("gpt2"), hosts.batch("gpt2", "none")
    with regard.watch(model) as seen:
        model(**inputs)
        layers = len(seen)
        monkeypatch.setattr("regard.inspection.hooks.transformers.check_keywords", refuse)
        model.generate(**inputs, max_new_tokens=3)
    assert len(seen) == 2 * layers
    assert seen[layers - 1].shape == (3, 4, 9, 9)
    with pytest.raises(regard.ArgumentError, match=r"h\.0\.attn: cannot be read"):
        _ = seen[layers]


def test_unknown_keywords_of_eager_attention_are_refused(monkeypatch):
    attention = hosts.make("llama").model.layers[0].self_attn
    x = torch.randn(1, 4, 3, 8)
    hosted_attention(attention, x, x[:, :2], x[:, :2], temperature=2.0)  # ignored by eager attention
    monkeypatch.setattr(sys.modules[type(attention).__module__], "eager_attention_forward", warm)
    with pytest.raises(regard.ArgumentError, match="warm takes temperature=…, which regard does not support"):
        hosted_attention(attention, x, x[:, :2], x[:, :2], temperature=2.0)


@pytest.mark.parametrize("mask", ["none", "boolean", "additive"])
def test_keys_that_an_indexer_selects(mask):
    x, indices = torch.zeros(1, 1, 3, 2), torch.tensor([[[0, 2], [1, 0], [2, 0]]])
    causal = torch.ones(3, 3, dtype=torch.bool).tril()
    masks = {"none": None, "boolean": causal, "additive": torch.zeros(3, 3).masked_fill(~causal, -torch.inf)}
    call = parse("regard", torch.nn.Identity(), x, x, x, masks[mask], is_causal=True, indices=indices)
    visible = call.mask if call.mask.dtype is torch.bool else call.mask == 0
    assert not call.causal
    assert visible[0, 0].tolist() == [[True, False, False], [True, True, False], [True, False, True]]


def test_eager_attention_is_causal_only_by_its_mask():
    x = torch.zeros(1, 1, 3, 2)
    calls = {name: parse(name, torch.nn.Identity(), x, x, x, is_causal=True) for name in ("eager", "sdpa")}
    assert {name: call.causal for name, call in calls.items()} == {"eager": False, "sdpa": True}
    assert not parse("sdpa", torch.nn.Identity(), x[:, :, :1], x, x, is_causal=True).causal  # one query


def test_a_learned_scale_is_part_of_the_query():
    x, scale = torch.ones(1, 2, 3, 2), torch.tensor([0.5, 2.0])[:, None, None]
    call = parse("sdpa", torch.nn.Identity(), x, x, x, scaling=scale)
    assert call.scale == 1.0
    assert torch.equal(call.query, x * scale)
