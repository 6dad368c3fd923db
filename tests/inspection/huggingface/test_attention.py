import sys

import numpy as np
import pytest
import torch

import regard
from regard.errors import ArgumentError, StaleError
from regard.inspection.calls import mask_reading
from regard.inspection.huggingface.attention import hosted_attention, hosted_mask
from tests.cases import looped
from tests.inspection import hosts
from tests.lazy import lazy_import

transformers = lazy_import("transformers")

KINDS = ("bert", *hosts.WRITERS)


@pytest.fixture(autouse=True)
def enabled(one_thread):
    regard.huggingface.enable()


def attentions_of(output):
    names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    return [weights for name in names for weights in getattr(output, name, None) or ()]


def both(model, run):
    """Return the results of a function when the model runs on eager attention, and on regard."""
    results = []
    for implementation in ("eager", "regard"):
        model.set_attn_implementation(implementation)
        results.append(run())
    return results


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sampled(3)
def test_outputs_and_weights_equal_eager_attention(name, side):
    model, inputs = hosts.make(name), hosts.batch(name, side)
    with torch.no_grad():
        theirs, ours = both(model, lambda: model(**inputs, output_attentions=True))
    # ignore outputs at padding
    real = inputs["attention_mask"].bool() if name not in hosts.PAIRS else torch.ones(3, 5, dtype=torch.bool)
    torch.testing.assert_close(ours.logits[real], theirs.logits[real], atol=1e-4, rtol=1e-4)
    assert len(attentions_of(theirs)) == len(attentions_of(ours)) > 0
    for expected, weights in zip(attentions_of(theirs), attentions_of(ours), strict=True):
        assert isinstance(weights, regard.Weights)
        assert weights.shape == expected.shape
        seen = (
            inputs["attention_mask"].bool() if weights.shape[-2] == 9 else torch.ones(3, 5, dtype=torch.bool)
        )
        apart = (weights.dense() - expected).abs() * seen[:, None, :, None]
        assert apart.max() < 1e-5


def generate(model, tokens, **options):
    return model.generate(
        **options,
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        disable_compile=True,
        return_dict_in_generate=True,
    )


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", hosts.WRITERS)
@pytest.mark.sampled(3)
def test_generation_equals_eager_attention(name, cache):
    model, inputs = hosts.make(name), hosts.batch(name, "left")
    inputs.pop("decoder_input_ids", None)
    theirs, ours = both(
        model, lambda: generate(model, 8, **inputs, cache_implementation=cache, output_logits=True)
    )
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), atol=1e-4, rtol=1e-4)


def test_weights_of_a_generation_survive_overwriting_a_static_cache():
    model, inputs = hosts.make("llama"), hosts.batch("llama", "left")
    options = {"cache_implementation": "static", "output_attentions": True}
    theirs, ours = both(model, lambda: generate(model, 3, **inputs, **options).attentions[1:])
    for steps in zip(theirs, ours, strict=True):
        for expected, weights in zip(*steps, strict=True):
            torch.testing.assert_close(weights.dense(), expected, atol=1e-5, rtol=0)


@looped("name", ["bert", "llama", "mistral", "gpt-oss", "gemma2", "t5"])
def test_gradients_equal_eager_attention(name):
    # eager softmax is in float32: rows without visible keys, e.g. windows in padding, become NaN
    side = "none" if name in ("mistral", "gemma2") else "right"
    model, inputs = hosts.make(name), hosts.batch(name, side)
    exact = name != "gpt-oss"  # gpt-oss experts do not support float64
    model = model.double() if exact else model
    real = inputs["attention_mask"].bool() if name not in hosts.PAIRS else slice(None)

    def gradients():
        model.zero_grad()
        model(**inputs).logits[real].square().mean().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    theirs, ours = both(model, gradients)
    assert theirs.keys() == ours.keys()
    for parameter, expected in theirs.items():
        scale = expected.abs().max().item()
        torch.testing.assert_close(ours[parameter], expected, atol=1e-5 * max(scale, 1e-3), rtol=1e-5)


def test_packed_sequences_do_not_attend_to_each_other():
    model = hosts.make("llama", "regard")
    ids = hosts.batch("llama")["input_ids"][:1]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
        parts = [model(part).logits for part in (ids[:, :4], ids[:, 4:])]
    torch.testing.assert_close(packed, torch.cat(parts, 1), atol=1e-5, rtol=1e-5)


def test_a_prompt_in_two_pieces_equals_one():
    model = hosts.make("mistral", "regard")
    ids = hosts.batch("mistral")["input_ids"]
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :6], use_cache=True)
        second = model(ids[:, 6:], past_key_values=first.past_key_values)
    torch.testing.assert_close(second.logits, whole[:, 6:], atol=1e-5, rtol=1e-5)


def test_dropout_drops_in_training_only():
    model, inputs = hosts.make("bert", "regard", attention_probs_dropout_prob=0.5), hosts.batch("bert")
    model.config.hidden_dropout_prob = 0.0
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and "dropout" in module._get_name().lower():
            module.p = module.p if module.p == 0.5 else 0.0
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, model(**inputs).logits)
        model.train()
        assert not torch.equal(model(**inputs).logits, model(**inputs).logits)


def test_from_pretrained_and_a_call_without_weights(tmp_path):
    hosts.make("llama").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="regard")
    assert model.config._attn_implementation == "regard"
    inputs = hosts.batch("llama")
    assert model(**inputs).attentions is None
    attention = model.model.layers[0].self_attn
    x = torch.randn(1, 4, 3, 8)
    assert hosted_attention(attention, x, x[:, :2], x[:, :2], None)[1] is None


def test_a_custom_additive_mask_is_added_to_the_scores():
    model, inputs = hosts.make("llama"), hosts.batch("llama")
    mask = torch.randn(3, 1, 9, 9)
    with torch.no_grad():
        theirs, ours = both(model, lambda: model(inputs["input_ids"], attention_mask=mask).logits)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_half_precision_runs():
    model, inputs = hosts.make("llama", "regard").bfloat16(), hosts.batch("llama", "left")
    with torch.no_grad():
        ours = model(**inputs).logits
        model.set_attn_implementation("sdpa")
        theirs = model(**inputs).logits
    real = inputs["attention_mask"].bool()
    assert ours.dtype is torch.bfloat16
    torch.testing.assert_close(ours[real], theirs[real], atol=0.1, rtol=0.1)


def test_transformers_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)
    with pytest.raises(
        ArgumentError, match=r"requires transformers 5\.3 or newer: pip install \"regard\[hf\]"
    ):
        regard.huggingface.enable()


def test_enable_twice_and_disable():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    regard.huggingface.enable()
    assert "regard" in ALL_ATTENTION_FUNCTIONS
    regard.huggingface.disable()
    assert "regard" not in ALL_ATTENTION_FUNCTIONS
    with pytest.raises(ValueError, match="regard"):
        hosts.make("bert").set_attn_implementation("regard")


# Models whose `is_causal` flags do not replace the causal mask

PAIR = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
    "vocab_size": 50, "max_position_embeddings": 32,
}  # fmt: skip
SERIES = {
    "prediction_length": 4, "context_length": 6, "lags_sequence": [1, 2], "num_time_features": 2,
    **{name: PAIR[name] for name in PAIR if name not in ("vocab_size", "max_position_embeddings")},
}  # fmt: skip
READERS_OF_MASKS = {
    "nllb-moe": lambda: transformers.NllbMoeModel(transformers.NllbMoeConfig(**PAIR, num_experts=2)),
    "bigbird_pegasus": lambda: transformers.BigBirdPegasusModel(
        transformers.BigBirdPegasusConfig(**PAIR, attention_type="original_full")
    ),
    "pegasus_x": lambda: transformers.PegasusXModel(transformers.PegasusXConfig(**PAIR, block_size=4)),
    "informer": lambda: transformers.InformerModel(
        transformers.InformerConfig(**SERIES, attention_type="full")
    ),
    "time_series_transformer": lambda: transformers.TimeSeriesTransformerModel(
        transformers.TimeSeriesTransformerConfig(**SERIES)
    ),
    "whisper": lambda: transformers.WhisperModel(
        transformers.WhisperConfig(
            **{
                **PAIR,
                "max_source_positions": 12,
                "max_target_positions": 32,
                "num_mel_bins": 8,
                "pad_token_id": 0,
            }
        )
    ),
}


def reader_of_masks(name):
    torch.manual_seed(0)
    model = READERS_OF_MASKS[name]().eval()
    hosts.liven(model)
    hosts.liven(model)
    return model


def to_read(name, side):
    inputs = hosts.batch("bart", side, length=8)
    if name == "whisper":
        return {"input_features": torch.randn(3, 8, 24), "decoder_input_ids": inputs["decoder_input_ids"]}
    if name not in ("informer", "time_series_transformer"):
        return inputs
    draw = torch.Generator().manual_seed(1)

    def numbers(*size):
        return torch.randn(*size, generator=draw)

    seen = inputs["attention_mask"].float()
    return {
        "past_values": numbers(3, 8), "past_time_features": numbers(3, 8, 2), "past_observed_mask": seen,
        "future_values": numbers(3, 4), "future_time_features": numbers(3, 4, 2),
    }  # fmt: skip


def on(model, implementation, inputs):
    model.set_attn_implementation(implementation)
    torch.manual_seed(2)  # informer samples the keys it attends to
    with torch.no_grad():
        return model(**inputs)[0]


@looped("side", ["none", "right", "left"])
@looped("name", READERS_OF_MASKS)
def test_models_that_rely_on_their_masks_equal_eager(name, side):
    torch.manual_seed(1)
    model, inputs = reader_of_masks(name), to_read(name, side)
    expected = on(model, "eager", inputs)
    torch.testing.assert_close(on(model, "regard", inputs), expected, atol=1e-4, rtol=1e-4)


@looped("name", [*READERS_OF_MASKS, *hosts.WRITERS])
def test_no_output_depends_on_later_tokens(name):
    torch.manual_seed(1)
    if name in READERS_OF_MASKS:
        model, inputs = reader_of_masks(name), to_read(name, "none")
    else:
        model, inputs = hosts.make(name), hosts.batch(name)
    last = next(n for n in ("future_values", "decoder_input_ids", "input_ids") if n in inputs)
    # a time series model receives each value one step later and does not use the last one
    position = -2 if last == "future_values" else -1
    changed = inputs[last].clone()
    changed[:, position] = (
        changed[:, position] + 1 if changed.is_floating_point() else (changed[:, position] + 1) % 50
    )
    before, after = (on(model, "regard", {**inputs, last: x}) for x in (inputs[last], changed))
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_check_finds_a_missing_mask(monkeypatch):
    from regard.inspection.huggingface import attention

    model = reader_of_masks("nllb-moe")
    regard.huggingface.check(model)
    assert model.config._attn_implementation != "regard"  # restored after the check
    monkeypatch.setattr(attention, "_flags_suffice", lambda model: True)
    with pytest.raises(
        ArgumentError,
        match="NllbMoeModel attends to future tokens with regard: changing the last token changes",
    ):
        regard.huggingface.check(model)
    assert model.config._attn_implementation != "regard"


def test_check_finds_a_wrong_output():
    from transformers.modeling_utils import AttentionInterface

    def doubled(*args, **kwargs):
        output, weights = hosted_attention(*args, **kwargs)
        return 2 * output, weights

    AttentionInterface.register("regard", doubled)
    with pytest.raises(
        ArgumentError,
        match=r"BertForMaskedLM with regard and with eager attention differ by .*; the largest output is",
    ):
        regard.huggingface.check(hosts.make("bert"))


# Masks


def asked_by(model, *sizes, **options):
    """Return the mask for a model: hosted_mask finds the calling model on the stack."""

    def ask(self):
        return hosted_mask(*sizes, **options)

    return ask(model)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_masks_are_none_if_nothing_is_masked(name):
    model = hosts.make(name)
    assert asked_by(model, 2, 5, 5) is None
    assert asked_by(model, 2, 1, 9, q_offset=8) is None
    assert asked_by(model, 2, 5, 5, attention_mask=torch.ones(2, 5, dtype=torch.bool)) is None


def test_masks_are_dense_if_no_flag_says_causal():
    expected = torch.ones(5, 5, dtype=torch.bool).tril()
    for mask in (hosted_mask(2, 5, 5), asked_by(reader_of_masks("nllb-moe"), 2, 5, 5)):
        assert torch.equal((mask == 0)[0, 0], expected)


@looped("seed", range(20))
def test_compact_masks_equal_the_dense_mask(seed):
    draw = np.random.default_rng(seed)
    b, h, q, k = draw.integers(1, 4, 4)
    if seed % 2:  # intervals, some empty
        start, stop = np.sort(draw.integers(0, k + 1, (2, b, h, q, 1)), 0)
        seen = torch.from_numpy((np.arange(k) >= start) & (np.arange(k) < stop))
    else:
        seen = torch.from_numpy(draw.random((b, h, q, k)) < 0.6)
    mask, span = mask_reading.compact(seen)
    if isinstance(mask, regard.Mask):
        assert torch.equal(mask.dense(q, k, (b, h)), seen)
    else:
        assert seen.all() if mask is None else torch.equal(mask, seen)
    if span is not None:
        assert torch.equal(seen, ((torch.arange(k) >= span[0]) & (torch.arange(k) < span[1])).expand_as(seen))


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_read_once_as_lengths(side):
    seen = torch.arange(7) < torch.tensor([2, 7, 0, 5])[:, None]
    seen = seen if side == "right" else seen.flip(-1)
    mask = asked_by(
        hosts.make("bert"),
        4,
        7,
        7,
        attention_mask=seen,
        mask_function=transformers.masking_utils.bidirectional_mask_function,
        allow_is_bidirectional_skip=True,
    )
    read = mask_reading.read(mask)
    assert isinstance(read.mask, regard.Padding)
    assert read.mask.side == side
    assert mask_reading.read(mask) is read
    assert torch.equal(read.mask.dense(7, 7, (4, 1)), mask)


def test_a_modified_mask_is_read_again():
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    before = mask_reading.read(mask)
    mask[..., 0, 2] = True
    after = mask_reading.read(mask)
    assert before.exact
    assert not after.exact


def test_rows_hidden_by_finite_numbers_have_uniform_weights():
    low = torch.finfo(torch.float32).min
    mask = torch.tensor([[0.0, low], [low, low]])[None, None]
    x = torch.randn(1, 1, 2, 4)
    output = hosted_attention(torch.nn.Identity(), x, x, x, mask)[0]
    torch.testing.assert_close(output[0, 1, 0], x[0, 0].mean(0))
    hidden = hosted_attention(torch.nn.Identity(), x, x, x, mask == 0)[0]
    assert torch.equal(hidden[0, 1, 0], torch.zeros(4))


# The weights of a hosted model


@pytest.mark.parametrize("groups", [4, 2])
def test_gradients_pass_through_the_weights(groups):
    query = torch.randn(2, 4, 5, 8, requires_grad=True)
    key, value = (torch.randn(2, groups, 5, 8, requires_grad=True) for _ in range(2))
    output, weights = hosted_attention(torch.nn.Identity(), query, key, value, output_attentions=True)
    again = (weights.dense() @ value.repeat_interleave(4 // groups, 1)).transpose(1, 2)
    expected = torch.autograd.grad(output.square().sum(), (query, key, value))
    result = torch.autograd.grad(again.square().sum(), (query, key, value))
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-4)


def test_weights_of_a_modified_query_raise():
    x = torch.randn(1, 2, 3, 4)
    module = torch.nn.Identity()
    _, weights = hosted_attention(module, x, x, x, None, output_attentions=True)
    x.zero_()
    with pytest.raises(StaleError):
        weights.dense()


def test_check_finds_models_that_ignore_the_implementation():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    regard.huggingface.check(transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=8)))
    falcon = transformers.FalconModel(transformers.FalconConfig(**sizes))
    with pytest.raises(regard.ArgumentError, match="The attention of FalconAttention cannot"):
        regard.huggingface.check(falcon)
