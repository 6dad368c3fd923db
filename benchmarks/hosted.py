"""Hugging Face models on regard, compared with the same parameters on torch's SDPA."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Candidates, Comparison
from regard.inspection import huggingface

PROMPT, GENERATED = 2_048, 128


def hosted() -> Iterator[Comparison]:
    """An encoder of BERT-base size on short sentences; a Llama-like decoder with prompt and generation."""
    yield Comparison("hosted", "BERT-base, 32 × 20-60 tokens", _encoder, target=1.0)
    yield Comparison("hosted", "BERT-base, 32 × 60 tokens", partial(_encoder, min_length=60), target=1.0)
    yield Comparison("hosted", f"Llama-like, {GENERATED} tokens after {PROMPT:,}", _decoder, target=1.0)
    yield Comparison(
        "hosted", f"Llama-like, prompt of {PROMPT:,}", partial(_decoder, generated=1), target=1.0
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
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8_000,
        hidden_size=768,
        intermediate_size=2_048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=4_096,
        eos_token_id=None,
    )
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

    def create(name: str) -> Any:
        # _from_config stores the implementation in the config
        return LlamaForCausalLM._from_config(deepcopy(config), attn_implementation=name)

    return _compare(create, generate)


def _compare(create: Callable[[str], Any], run: Callable[[Any], Tensor]) -> Candidates:
    """Build the model on regard and on SDPA, sharing the parameters."""
    huggingface.enable()
    torch.manual_seed(0)
    regard_model, sdpa_model = create("regard").eval(), create("sdpa").eval()
    sdpa_model.load_state_dict(regard_model.state_dict(), assign=True)
    assert [model.config._attn_implementation for model in (regard_model, sdpa_model)] == ["regard", "sdpa"]
    return Candidates({"regard": partial(run, regard_model), "sdpa": partial(run, sdpa_model)}, "fused")
