"""`generate` with an int8 cache equals `generate` with a cache of dequantized keys and values."""

import copy

import pytest
import torch

import regard
from regard.errors import ArgumentError
from regard.mechanism.quantized import Quantized, quantize
from tests.inspection import hosts
from tests.lazy import lazy_import

transformers = lazy_import("transformers")

MODELS = ("gpt2", "llama", "mistral", "gemma2", "gpt-oss")


@pytest.fixture(autouse=True)
def enabled(one_thread):
    regard.huggingface.enable()


def rounding_cache(model):
    """Create a float cache that rounds new keys and values to int8 precision."""
    cache = transformers.DynamicCache(config=model.config)
    for layer in cache.layers:
        update = layer.update
        layer.update = lambda key, value, *args, _update=update, **options: _update(
            quantize(key).dequantize(), quantize(value).dequantize(), *args, **options
        )
    return cache


def generate(model, cache, inputs, **options):
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, **options}
    return model.generate(
        **inputs, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **options
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_generation_equals_a_cache_of_rounded_floats(name):
    model = hosts.make(name, "regard")
    for side, options in (("left", {}), ("none", {"num_beams": 3, "max_new_tokens": 5})):
        inputs = hosts.batch(name, side)
        expected = generate(model, rounding_cache(model), inputs, **options)
        actual = generate(model, regard.huggingface.quantized_cache(model), inputs, **options)
        assert torch.equal(actual.sequences, expected.sequences)
        for ours, theirs in zip(actual.logits, expected.logits, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_the_division_into_forward_passes_does_not_matter():
    model = hosts.make("llama", "regard")
    tokens = hosts.batch("llama")["input_ids"]
    with torch.no_grad():
        logits = []
        for parts in ([9], [4, 5], [1] * 9):
            cache = regard.huggingface.quantized_cache(model)
            outputs = [model(part, past_key_values=cache).logits for part in tokens.split(parts, 1)]
            logits.append(torch.cat(outputs, 1))
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], atol=1e-4, rtol=1e-4)


def test_stored_as_int8_in_a_quarter_of_the_memory():
    model = hosts.make("llama", "regard", head_dim=64)
    cache = regard.huggingface.quantized_cache(model)
    with torch.no_grad():
        model(torch.randint(3, 50, (1, 60)), past_key_values=cache)
    layer = cache.layers[0]
    assert isinstance(layer.keys, Quantized)
    assert layer.keys.nbytes <= 0.27 * layer.keys.dequantize().nbytes
    buffer = torch.empty(0, dtype=torch.int8).set_(layer.keys.values.untyped_storage())
    assert buffer.numel() <= layer.keys.numel() * (60 + 64) / 60


def test_watch_joins_the_steps_of_generation():
    model, inputs = hosts.make("llama", "regard"), hosts.batch("llama")
    cache = regard.huggingface.quantized_cache(model)
    with regard.watch(model) as seen:
        tokens = generate(model, cache, inputs).sequences
    other = regard.huggingface.quantized_cache(model)
    with torch.no_grad():
        whole = model(tokens[:, :-1], past_key_values=other, output_attentions=True).attentions
    assert len(seen) == 2
    for number, expected in enumerate(whole):
        torch.testing.assert_close(seen[number].dense(), expected.dense(), atol=1e-4, rtol=1e-4)


def test_attentions_of_each_step_remain_valid():
    model, inputs = hosts.make("gpt2", "regard"), hosts.batch("gpt2", "left")
    outputs = [
        generate(model, cache(model), inputs, output_attentions=True)
        for cache in (regard.huggingface.quantized_cache, rounding_cache)
    ]
    for ours, theirs in zip(*(output.attentions for output in outputs), strict=True):
        for weights, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(weights.dense(), expected.dense(), atol=1e-4, rtol=1e-4)


def test_edit():
    model, inputs = hosts.make("llama", "regard"), hosts.batch("llama")
    for intervention in (regard.ZeroAblation(), regard.UniformAttention()):
        outputs = []
        for create in (regard.huggingface.quantized_cache, rounding_cache):
            with regard.edit(model, 1, 2, intervention):
                outputs.append(generate(model, create(model), inputs).logits)
        for ours, theirs in zip(*outputs, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_cache_operations():
    model = hosts.make("llama", "regard")
    tokens = hosts.batch("llama")["input_ids"]
    prefix, rest = tokens[:, :6], tokens[:, 6:]
    with torch.no_grad():
        cache = regard.huggingface.quantized_cache(model)
        expected = model(tokens, past_key_values=copy.deepcopy(cache)).logits[:, 6:]
        model(prefix, past_key_values=cache)
        model(rest.flip(1), past_key_values=cache)
        cache.crop(-3)  # the rejected tokens of assisted decoding
        assert cache.get_seq_length() == 6
        copied = copy.deepcopy(cache)
        torch.testing.assert_close(model(rest, past_key_values=cache).logits, expected, atol=1e-4, rtol=1e-4)
        copied.batch_repeat_interleave(2)
        copied.batch_select_indices(torch.tensor([0, 2, 4]))
        actual = model(rest, past_key_values=copied).logits
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
        copied.reset()
        assert copied.get_seq_length() == 0
        actual = model(tokens, past_key_values=copied).logits[:, 6:]
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_models_that_cannot_read_the_cache_are_refused():
    model = hosts.make("llama", "regard")
    cache = regard.huggingface.quantized_cache(model)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with pytest.raises(ArgumentError, match=f"LlamaForCausalLM uses '{implementation}' attention"):
            regard.huggingface.quantized_cache(model)
        with (
            torch.no_grad(),
            pytest.raises((TypeError, AttributeError), match=r"only regard\.attention and"),
        ):
            model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
        cache.reset()
    with pytest.raises(ArgumentError, match="encoder-decoder"):
        regard.huggingface.quantized_cache(hosts.make("bart", "regard"))
    with pytest.raises(ArgumentError, match="quantized_cache got a Linear"):
        regard.huggingface.quantized_cache(torch.nn.Linear(2, 2))
    sizes = {"hidden_size": 8, "n_layer": 1, "n_head": 2, "vocab_size": 9}
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(**sizes))
    with pytest.raises(ArgumentError, match="Bloom"):
        regard.huggingface.quantized_cache(bloom)
    config = transformers.Qwen3NextConfig(
        hidden_size=32, num_hidden_layers=2, vocab_size=50, num_experts=2, moe_intermediate_size=8
    )
    config._attn_implementation = "regard"
    hybrid = torch.nn.Module()
    hybrid.config = config
    with pytest.raises(ArgumentError, match="cannot be quantized"):
        regard.huggingface.quantized_cache(hybrid)


def test_changed_and_sliced_caches_are_copied():
    model, ids = hosts.make("llama", "regard"), torch.arange(16).view(2, 8) % 5 + 1
    for change in (lambda x: x[..., ::2, :], lambda x: x[:1]):
        caches = [regard.huggingface.quantized_cache(model) for _ in range(2)]
        with torch.no_grad():
            for cache in caches:
                model(ids, past_key_values=cache)
                for layer in cache.layers:
                    layer.keys, layer.values = change(layer.keys), change(layer.values)
            for layer in caches[1].layers:  # the same tokens, outside the buffer
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
            following = ids[: caches[0].layers[0].keys.shape[0], :1]
            outputs = [model(following, past_key_values=cache).logits for cache in caches]
        torch.testing.assert_close(*outputs)


def test_gradients_are_refused():
    model = hosts.make("llama", "regard")
    cache = regard.huggingface.quantized_cache(model)
    with pytest.raises(ArgumentError, match="does not support gradients"):
        model(torch.tensor([[1, 2, 3]]), past_key_values=cache)


def test_latent_caches_are_refused():
    with pytest.raises(ArgumentError, match="caches latent vectors"):
        regard.huggingface.quantized_cache(hosts.make("deepseek", "regard"))
