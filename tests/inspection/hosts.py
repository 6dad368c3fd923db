"""Tiny Hugging Face models of several architectures, in which every head matters."""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from tests.lazy import lazy_import

transformers = lazy_import("transformers")

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
_SIZES |= {"vocab_size": 50, "max_position_embeddings": 64}
_ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
_SLIDING = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, **_ENDS}
_EXPERTS: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1}
_EXPERTS |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_EXPERTS |= {"layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
_LATENT |= {"qk_nope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
_LATENT |= {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
_FIRST = {"decoder_start_token_id": 0}
_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 40}
_BOTH_SIDES = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in _SIDE.items()}


# one model per feature: grouped heads, windows, softcaps, sinks, biases, cross-attention, …
_CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _SIZES),
    "gpt2": ("GPT2", dict(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=64, **_ENDS)),
    "llama": ("Llama", dict(**_SIZES, num_key_value_heads=2, **_ENDS)),
    "mistral": ("Mistral", _SIZES | _SLIDING),
    "gemma2": ("Gemma2", dict(**_SIZES, **_SLIDING, attn_logit_softcapping=2.0)),
    "gpt-oss": ("GptOss", _SIZES | _SLIDING | _EXPERTS),
    "deepseek": ("DeepseekV3", _SIZES | _ENDS | _LATENT),
    "t5": ("T5", dict(d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, vocab_size=50, **_FIRST)),
    "bart": ("Bart", dict(d_model=32, vocab_size=50, max_position_embeddings=64, **_BOTH_SIDES)),
}


def configuration(name: str) -> Any:
    """Return the configuration of a model."""
    kind, options = _CONFIGURATIONS[name]
    return getattr(transformers, f"{kind}Config")(**options)


WRITERS = ("gpt2", "llama", "mistral", "gemma2", "gpt-oss", "deepseek", "t5", "bart")
PAIRS = ("t5", "bart")


def make(name: str, implementation: str = "eager", **more: Any) -> Any:
    """Create a model in evaluation mode."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = configuration(name)
    for option, value in more.items():
        setattr(config, option, value)
    kind = transformers.AutoModelForCausalLM
    if name in PAIRS:
        kind = transformers.AutoModelForSeq2SeqLM
    elif name == "bert":
        kind = transformers.AutoModelForMaskedLM
    model = kind.from_config(config, attn_implementation=implementation).eval()
    liven(model)
    return model


def liven(model: nn.Module) -> None:
    """Make the weights large enough for heads to distinguish keys."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)


def batch(name: str, side: str = "none", size: int = 3, length: int = 9) -> dict[str, Tensor]:
    """Return sentences of different lengths, padded on one side."""
    draw = torch.Generator().manual_seed(1)
    seen = torch.ones(size, length, dtype=torch.long)
    for i in range(1, size):
        if side == "right":
            seen[i, -2 * i :] = 0
        if side == "left":
            seen[i, : 2 * i] = 0
    inputs = {
        "input_ids": torch.randint(3, 50, (size, length), generator=draw),
        "attention_mask": seen,
    }
    if name in PAIRS:
        inputs["decoder_input_ids"] = torch.randint(3, 50, (size, 5), generator=draw)
    return inputs
