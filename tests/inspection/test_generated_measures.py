"""Measures of recordings made in Hugging Face's `generate`."""

import pytest
import torch

import regard
from regard.errors import ArgumentError
from tests.inspection.test_watch_hub import build, inputs

OPTIONS = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "disable_compile": True}


def full_arguments(model, arguments, sequences) -> dict[str, torch.Tensor]:
    """Return the arguments of one forward pass over the generated tokens."""
    if model.config.is_encoder_decoder:
        return {**arguments, "decoder_input_ids": sequences[:, :-1]}
    return {"input_ids": sequences[:, :-1]}


def prepared(name: str):
    model = build(name)
    arguments = inputs(model)
    arguments.pop("decoder_input_ids", None)
    if not model.config.is_encoder_decoder:
        arguments.pop("attention_mask")
    model.set_attn_implementation("sdpa")
    return model, arguments


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama", "bart", "bloom"])
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 3}], ids=str)
def test_norms_in_generate_equal_those_of_one_pass(name: str, options: dict) -> None:
    if name == "bloom" and options.get("cache_implementation"):
        pytest.skip("bloom has no static cache")
    if name == "bloom":
        from transformers import AutoModelForCausalLM, BloomConfig

        torch.manual_seed(0)
        config = BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2)
        model, arguments = (
            AutoModelForCausalLM.from_config(config).eval(),
            {"input_ids": torch.arange(12).view(2, 6)},
        )
    else:
        model, arguments = prepared(name)
    with regard.watch(model, values=True) as seen:
        sequences = model.generate(**arguments, **OPTIONS, **options)
    with regard.watch(model, values=True) as whole:
        model(**full_arguments(model, arguments, sequences))
    assert list(seen) == list(whole)
    norms, expected = seen.norms(), whole.norms()
    for layer in seen:
        if "num_beams" in options and "encoder.layers" in layer:
            continue
        length = seen[layer].shape[-2]
        torch.testing.assert_close(
            norms[layer].dense(), expected[layer].dense()[..., :length, :], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("function", ["gradients", "relevance"])
def test_gradients_of_a_generation_name_the_cure(function: str) -> None:
    model, arguments = prepared("gpt2")
    with regard.watch(model, gradients=True) as seen:
        sequences = model.generate(**arguments, **OPTIONS)
    with pytest.raises(ArgumentError, match=r"generate, which runs without gradients.*model\(sequences\)"):
        getattr(seen, function)()
    with regard.watch(model, gradients=True) as seen:  # the fix named in the error
        model(sequences).logits.sum().backward()
    assert getattr(seen, function)() is not None


@torch.no_grad()
def test_generation_without_values_holds_none() -> None:
    model, arguments = prepared("llama")
    with regard.watch(model) as seen:
        model.generate(**arguments, **OPTIONS)
    assert not seen._records
    with pytest.raises(ArgumentError, match="values=True"):
        seen.norms()
