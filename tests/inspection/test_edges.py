"""Knockout, value zeroing and patching: compared with dense computations, with caches, in linear memory."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regard
from regard.errors import ArgumentError, DTypeError, ShapeError
from tests.cases import looped
from tests.inspection import hosts
from tests.inspection.memory import SQUARE, peak_at_16384_tokens
from tests.inspection.test_interventions import MODELS

HEADS = (0, 3)


@pytest.fixture(autouse=True)
def quiet(one_thread):
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Direct(nn.Module):
    """Attention that calls SDPA, with an optional cache of keys."""

    def __init__(self, causal=True):
        super().__init__()
        self.causal, self.keys = causal, None

    def forward(self, x):
        heads = x.unflatten(-1, (4, -1)).transpose(-3, -2)
        keys = heads if self.keys is None else torch.cat([self.keys, heads], -2)
        mask = regard.Causal().dense(heads.shape[-2], keys.shape[-2]) if self.causal else None
        output = F.scaled_dot_product_attention(heads, keys, keys, attn_mask=mask)
        return output.transpose(-3, -2).flatten(-2)


def direct():
    model, x = nn.Sequential(Direct(), nn.Linear(16, 16), Direct(causal=False)), torch.randn(2, 5, 16)
    return model, lambda: model(x)


ALL = {**MODELS, "direct calls of SDPA": direct}


@pytest.fixture(params=list(ALL))
def pair(request):
    return ALL[request.param]()


def hide(queries, keys):
    """Dense equivalent of Block: remove weights, then renormalize the rest."""

    def function(weights):
        hidden = torch.zeros(weights.shape[-2:], dtype=torch.bool)
        hidden[torch.tensor(queries)[:, None], torch.tensor(keys)] = True
        weights = weights.masked_fill(hidden, 0.0)
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)

    return regard.ReplaceWeights(function)


@pytest.mark.sampled(2)
def test_a_knockout_equals_dense_weights_without_the_edges(pair):
    """Renormalizing is exact here because none of these models has sinks."""
    model, run = pair
    before = run()
    for heads in (None, HEADS):
        with regard.edit(model, 0, heads, hide([1, 2], [0, 2])):
            expected = run()
        with regard.edit(model, 0, heads, regard.Block([1, 2], [0, 2])):
            blocked = run()
        torch.testing.assert_close(blocked, expected, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(blocked, before, atol=1e-6)


@pytest.mark.sampled(2)
def test_zero_values_equal_dense_weights_without_the_keys(pair):
    model, run = pair

    def zero(weights):
        weights = weights.clone()
        weights[..., 1:, 1] = 0.0
        return weights

    with regard.edit(model, 0, HEADS, regard.ReplaceWeights(zero)):
        expected = run()
    with regard.edit(model, 0, HEADS, regard.ZeroValues(keys=1, queries=slice(1, None))):
        actual = run()
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_rows_outside_the_edges_keep_their_bits():
    model, x = Direct(), torch.randn(2, 5, 16)
    before = model(x)
    with regard.edit(model, None, [1], regard.Block(queries=range(3, 5), keys=[0, 2])):
        after = model(x)
    changed = (after != before).any(-1)
    assert torch.equal(changed, torch.tensor([[False, False, False, True, True]]).expand(2, 5))
    heads = (after != before).unflatten(-1, (4, -1)).any(-1).flatten(0, 1).any(0)
    assert heads.tolist() == [False, True, False, False]


def test_nested_blocks_hide_the_union():
    model, x = Direct(), torch.randn(2, 5, 16)
    with (
        regard.edit(model, None, [0, 1], regard.Block(4, [0])),
        regard.edit(model, None, [1], regard.Block(4, [2, 3])),
    ):
        nested = model(x)
    with (
        regard.edit(model, None, [0], regard.Block(4, [0])),
        regard.edit(model, None, [1], regard.Block(4, [0, 2, 3])),
    ):
        expected = model(x)
    torch.testing.assert_close(nested, expected)


def test_a_query_without_keys_outputs_zero():
    model, x = Direct(), torch.randn(1, 5, 16)
    with regard.edit(model, None, None, regard.Block(queries=2)):
        output = model(x)
    assert not output[:, 2].any()
    assert bool(output[:, 3].any())


@pytest.mark.parametrize("name", ["llama", "mistral", "bart", "gpt2"])
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.sampled(3)
def test_positions_are_absolute_while_a_model_generates(name, cache):
    """Generating with a cache equals one pass over the text with the same edges blocked."""
    if cache == "static" and name in ("bart", "gpt2"):
        pytest.skip("these have no static cache")
    model = hosts.make(name, "sdpa")
    prompt = torch.randint(3, 50, (2, 6))
    block = regard.Block(queries=slice(7, None), keys=[5, 6, 7])
    layers = None if name != "bart" else "*decoder*self_attn"
    options = {} if cache is None else {"cache_implementation": cache}
    with regard.edit(model, layers, [0, 2], block):
        output = model.generate(
            prompt, max_new_tokens=11, min_new_tokens=11, do_sample=False, output_logits=True,
            return_dict_in_generate=True, num_beams=1, **options,
        )  # fmt: skip
        steps = torch.stack(output.logits, 1)
        written = output.sequences
        inputs = {"input_ids": written[:, :-1]}
        if name == "bart":
            inputs = {"input_ids": prompt, "decoder_input_ids": written[:, :-1]}
        whole = model(**inputs).logits[:, -steps.shape[1] :]
    torch.testing.assert_close(steps, whole, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(model(**inputs).logits[:, -steps.shape[1] :], whole, atol=1e-4)


def test_cross_attention_counts_the_steps_of_the_decoder():
    model = hosts.make("bart", "sdpa")
    prompt = torch.randint(3, 50, (2, 6))
    with regard.edit(model, "*encoder_attn", None, regard.Block(queries=[3], keys=slice(0, 4))):
        output = model.generate(
            prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False, output_logits=True,
            return_dict_in_generate=True, num_beams=1,
        )  # fmt: skip
        steps = torch.stack(output.logits, 1)
        whole = model(input_ids=prompt, decoder_input_ids=output.sequences[:, :-1]).logits
    torch.testing.assert_close(steps, whole, atol=1e-4, rtol=1e-4)


def test_positions_of_own_code_with_a_cache():
    model, x = Direct(), torch.randn(1, 5, 16)
    block = regard.Block(queries=4, keys=[0, 3])
    with regard.edit(model, None, None, block):
        whole = model(x)[:, -1:]
        model.keys = x[:, :4].unflatten(-1, (4, -1)).transpose(-3, -2)
        step = model(x[:, 4:])
    torch.testing.assert_close(step, whole)


@pytest.mark.parametrize("arguments", [{"queries": -1}, {"keys": [0, -2]}, {"keys": slice(-3, None)}])
def test_negative_positions_raise(arguments):
    with pytest.raises(ArgumentError, match="count from the start"):
        regard.Block(**arguments)


def test_positions_are_integers():
    with pytest.raises(DTypeError, match=r"got the position 1\.5"):
        regard.Block(keys=[1.5])


# Patching


@pytest.mark.sampled(2)
def test_patching_every_output_of_a_layer_restores_the_other_run(pair):
    """Patching all heads of layer 0 with a clean run reproduces the clean output."""
    model, run = pair
    clean = regard.Capture(weights=True)
    with regard.edit(model, 0, None, clean):
        before = run()
    with (
        regard.edit(model, 0, None, regard.Patch(clean)),
        regard.edit(model, 0, [0], regard.Patch(clean, weights=True)),
    ):
        after = run()
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)
    with regard.edit(model, 0, None, regard.ZeroAblation()), regard.edit(model, 0, None, regard.Patch(clean)):
        assert torch.equal(run(), before)


def test_patched_weights_read_the_values_of_this_run():
    model, x, y = Direct(), torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    run = regard.Capture(weights=True)
    with regard.edit(model, None, None, run), regard.watch(model) as seen:
        model(x)
    with regard.edit(model, None, [1], regard.Patch(run, weights=True)):
        output = model(y).unflatten(-1, (4, -1)).transpose(1, 2)
    expected = seen[0].dense()[:, 1] @ y.unflatten(-1, (4, -1)).transpose(1, 2)[:, 1]
    torch.testing.assert_close(output[:, 1], expected)
    torch.testing.assert_close(output[:, 0], model(y).unflatten(-1, (4, -1)).transpose(1, 2)[:, 0])


def test_patched_positions_only():
    model, x, y = Direct(), torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    run = regard.Capture()
    with regard.edit(model, None, None, run):
        clean = model(x)
    with regard.edit(model, None, None, regard.Patch(run, positions=[3])):
        output = model(y)
    assert torch.equal(output[:, 3], clean[:, 3])
    assert torch.equal(output[:, :3], model(y)[:, :3])


def test_a_captured_text_is_patched_into_a_generation():
    """The steps of generate take their rows, by position, from one captured pass."""
    model, text = hosts.make("llama", "sdpa"), torch.randint(3, 50, (2, 12))
    run = regard.Capture()
    with regard.edit(model, None, None, run):
        clean = model(input_ids=text).logits
    with regard.edit(model, None, None, regard.Patch(run)):
        cache = model(input_ids=text[:, :7], use_cache=True)
        step = model(input_ids=text[:, 7:8], past_key_values=cache.past_key_values).logits
    torch.testing.assert_close(step[:, 0], clean[:, 7], atol=1e-5, rtol=1e-4)


@looped("name", ["llama", "t5"])
def test_captured_weights_are_patched_into_a_generation(name):
    """Generation with the weights of another text equals one pass over all tokens with these weights."""
    model, head = hosts.make(name, "sdpa"), [1]
    text, other = torch.randint(3, 50, (2, 1, 9)).unbind()
    layers = "decoder.*" if name == "t5" else None

    def call(tokens):
        texts = {"input_ids": text, "decoder_input_ids": tokens} if name == "t5" else {"input_ids": tokens}
        return model(**texts).logits

    run, whole = regard.Capture(weights=True), regard.Capture(weights=True)
    with torch.no_grad():
        with regard.edit(model, layers, None, run):
            call(other)
        with regard.edit(model, layers, head, regard.Patch(run, weights=True)):
            prompt = {"decoder_input_ids": text[:, :4]} if name == "t5" else {}
            steps = model.generate(
                text if name == "t5" else text[:, :4], **prompt, max_new_tokens=5, do_sample=False,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        tokens = steps.sequences[:, :-1]
        with regard.edit(model, layers, None, whole):
            call(other[:, : tokens.shape[1]])
        with regard.edit(model, layers, head, regard.Patch(whole, weights=True)):
            expected = call(tokens)[:, -5:]
        logits = torch.stack(steps.logits, 1)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(logits, call(tokens)[:, -5:], atol=1e-3)


def test_captured_weights_on_keys_that_this_run_lacks_raise():
    model, x, run = Direct(causal=False), torch.randn(2, 5, 16), regard.Capture(weights=True)
    with regard.edit(model, None, None, run):
        model(x)
    with (
        pytest.raises(ShapeError, match="must have all keys that the captured queries attend to"),
        regard.edit(model, None, None, regard.Patch(run, weights=True)),
    ):
        model(x[:, :3])


def test_wrong_patches_raise():
    model, x = Direct(), torch.randn(2, 5, 16)
    with pytest.raises(DTypeError, match="pass a Capture"):
        regard.Patch("run")
    run = regard.Capture()
    with (
        pytest.raises(ArgumentError, match="was not captured"),
        regard.edit(model, None, None, regard.Patch(run)),
    ):
        model(x)
    with regard.edit(model, None, [0, 1], run):
        model(x)
    for heads, y, error, match in (
        ([2], x, ArgumentError, "head 2"),
        ([0], x[:, :2].repeat(1, 4, 1), ShapeError, "positions 0 to 7"),
        ([0], x[:1].repeat(3, 1, 1), ShapeError, "same batch size"),
    ):
        with pytest.raises(error, match=match), regard.edit(model, None, heads, regard.Patch(run)):
            model(y)
    with (
        pytest.raises(ArgumentError, match=r"Capture\(weights=True\)"),
        regard.edit(model, None, [0], regard.Patch(run, weights=True)),
    ):
        model(x)


def test_resampled_heads_come_from_another_text():
    model, x = Direct(), torch.randn(3, 5, 16)
    before = model(x).unflatten(-1, (4, -1))
    with regard.edit(model, None, [2], regard.ResampleAblation()):
        after = model(x).unflatten(-1, (4, -1))
    assert torch.equal(after[..., 2, :], before[..., 2, :].roll(-1, 0))
    assert torch.equal(after[..., :2, :], before[..., :2, :])
    with (
        pytest.raises(ArgumentError, match="needs a batch"),
        regard.edit(model, None, [2], regard.ResampleAblation()),
    ):
        model(x[:1])


# Memory


EDITS = {
    "block": "regard.Block(queries=range(10, n - 9, 3), keys=range(0, n, 5))",
    "zero values": "regard.ZeroValues(keys=range(0, n, 5))",
    "patched weights": "regard.Patch(run, weights=True)",
    "dense": "regard.ReplaceWeights(lambda weights: weights)",
}
LINES = """
x, run = torch.randn(1, n, 16), regard.Capture(weights=True)
layer = regard.models.MultiHeadAttention(16, 2).eval()
with torch.no_grad(), regard.edit(layer, None, None, run):
    layer(x)
with torch.no_grad(), regard.edit(layer, None, [1], EDIT):
    layer(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize("edit", list(EDITS))
def test_edits_of_16384_tokens_need_no_square_memory(edit):
    used = peak_at_16384_tokens(LINES.replace("EDIT", EDITS[edit]))
    assert (used < SQUARE / 4) == (edit != "dense")
