"""Races of Hugging Face models that run on regard against the same weights on torch's SDPA."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Lineup, Race
from regard.inspection import huggingface

PROMPT, GENERATED = 2_048, 128


def hosted() -> Iterator[Race]:
    """A BERT-base-sized encoder on short sentences, and a Llama-like decoder that reads and writes."""
    yield Race("hosted", "BERT-base, 32 × 20-60 tokens", _encoder, target=1.0)
    yield Race("hosted", "BERT-base, 32 × 60 tokens", partial(_encoder, shortest=60), target=1.0)
    yield Race("hosted", f"Llama-like, {GENERATED} tokens after {PROMPT:,}", _decoder, target=1.0)
    yield Race("hosted", f"Llama-like, prompt of {PROMPT:,}", partial(_decoder, generated=1), target=1.0)


def _encoder(shortest: int = 20) -> Lineup:
    from transformers import BertConfig, BertModel

    lengths = torch.linspace(shortest, 60, 32).long()
    seen = torch.arange(60) < lengths[:, None]
    tokens = torch.randint(5, 30_000, (32, 60), generator=torch.Generator().manual_seed(0))

    def encode(model: Any) -> Tensor:
        return model(input_ids=tokens, attention_mask=seen).last_hidden_state[seen]  # type: ignore[no-any-return]

    return _both(lambda name: BertModel._from_config(BertConfig(), attn_implementation=name), encode)


def _decoder(generated: int = GENERATED) -> Lineup:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = LlamaConfig(
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

    def write(model: Any) -> Tensor:
        found = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=generated,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return found.logits[0]  # type: ignore[no-any-return]  # later ones may follow another token

    def make(name: str) -> Any:
        return LlamaForCausalLM._from_config(
            deepcopy(sizes), attn_implementation=name
        )  # which notes it there

    return _both(make, write)


def _both(make: Callable[[str], Any], use: Callable[[Any], Tensor]) -> Lineup:
    """One model twice, with the same weights in memory."""
    huggingface.enable()
    torch.manual_seed(0)
    ours, theirs = make("regard").eval(), make("sdpa").eval()
    theirs.load_state_dict(ours.state_dict(), assign=True)
    assert [model.config._attn_implementation for model in (ours, theirs)] == ["regard", "sdpa"]
    return Lineup({"regard": partial(use, ours), "sdpa": partial(use, theirs)}, "fused")
