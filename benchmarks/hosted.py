"""Hugging Face models on regard, compared with the same parameters on torch's SDPA."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Candidates, Comparison
from regard.inspection import huggingface

PROMPT, GENERATED = 2_048, 128
STEPS = 8  # decoding steps after a long context


def hosted() -> Iterator[Comparison]:
    """A BERT-base encoder on short sentences; a Llama-like decoder with a prompt and generated tokens."""
    yield Comparison("hosted", "BERT-base, 32 × 20-60 tokens", _encoder, target=1.0)
    yield Comparison("hosted", "BERT-base, 32 × 60 tokens", partial(_encoder, min_length=60), target=1.0)
    yield Comparison("hosted", f"Llama-like, {GENERATED} tokens after {PROMPT:,}", _decoder, target=1.0)
    yield Comparison(
        "hosted", f"Llama-like, prompt of {PROMPT:,}", partial(_decoder, generated=1), target=1.0
    )
    for context in (2_048, 16_384):
        yield Comparison(
            "hosted",
            f"Llama-like, {STEPS} steps after {context:,}",
            partial(_decoding, context),
            target=1.0,
        )


def _encoder(min_length: int = 20) -> Candidates:
    from transformers import BertConfig, BertModel

    lengths = torch.linspace(min_length, 60, 32).long()
    mask = torch.arange(60) < lengths[:, None]
    tokens = torch.randint(5, 30_000, (32, 60), generator=torch.Generator().manual_seed(0))

    def encode(model: Any) -> Tensor:
        return model(input_ids=tokens, attention_mask=mask).last_hidden_state[mask]  # type: ignore[no-any-return]

    return _compare(lambda name: BertModel._from_config(BertConfig(), attn_implementation=name), encode)


def _decoder(generated: int = GENERATED) -> Candidates:
    prompt = torch.randint(5, 8_000, (1, PROMPT), generator=torch.Generator().manual_seed(0))

    def generate(model: Any) -> Tensor:
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=generated,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return output.logits[0]  # type: ignore[no-any-return]  # later steps may differ in their input

    return _compare(_llama, generate)


def _decoding(context: int) -> Candidates:
    """Decoding steps alone; the context's keys and values are random. regard also runs with an int8 cache."""
    from transformers import DynamicCache

    draw = torch.Generator().manual_seed(0)
    states = [[torch.randn(1, 4, context, 64, generator=draw) for _ in range(2)] for _ in range(8)]

    def fill(cache: Any) -> Any:
        for layer, (key, value) in enumerate(states):
            cache.update(key, value, layer)
        return cache

    def decode(cache: Any, model: Any) -> Tensor:
        """Run the steps, then drop their keys and values."""
        for step in range(STEPS):
            position = torch.tensor([[context + step]])
            logits = model(torch.tensor([[7]]), past_key_values=cache, position_ids=position).logits
        cache.crop(-STEPS)
        return logits  # type: ignore[no-any-return]

    calls = _compare(_llama, partial(decode, fill(DynamicCache()))).calls
    regard_model = calls["regard"].args[-1]  # type: ignore[attr-defined]
    int8_cache = fill(huggingface.quantized_cache(regard_model))

    def int8() -> None:  # returns nothing: its logits differ by the rounding of the keys
        decode(int8_cache, regard_model)

    return Candidates({**calls, "regard int8": int8}, "fused")


def _llama(attention: str) -> Any:
    """Return a decoder with 12 query heads and 4 key heads of width 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8_000,
        hidden_size=768,
        intermediate_size=2_048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=32_768,
        eos_token_id=None,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation=attention)


def _compare(create: Callable[[str], Any], run: Callable[[Any], Tensor]) -> Candidates:
    """Build the model on regard and on SDPA, sharing the parameters."""
    huggingface.enable()
    torch.manual_seed(0)
    regard_model, sdpa_model = create("regard").eval(), create("sdpa").eval()
    sdpa_model.load_state_dict(regard_model.state_dict(), assign=True)
    assert [model.config._attn_implementation for model in (regard_model, sdpa_model)] == ["regard", "sdpa"]
    return Candidates({"regard": partial(run, regard_model), "sdpa": partial(run, sdpa_model)}, "fused")
