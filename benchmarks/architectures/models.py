"""Small models of every Hugging Face model type, with random parameters."""

from typing import Any

import torch

MAX_PARAMETERS = 100_000_000


def _sizes(names: str, value: int) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


# Sizes of the small models; each config uses the ones it defines.
SMALL = {
    **_sizes("hidden_size d_model n_embd dim embedding_size word_embed_proj_dim projection_dim emb_dim", 32),
    **_sizes("encoder_hidden_size decoder_hidden_size text_hidden_size hidden_dim", 32),
    **_sizes("intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim mlp_dim", 48),
    **_sizes("n_inner moe_intermediate_size shared_expert_intermediate_size", 24),
    **_sizes("num_hidden_layers n_layer n_layers num_layers num_decoder_layers num_encoder_layers", 2),
    **_sizes("encoder_layers decoder_layers num_key_value_heads num_experts_per_tok depth", 2),
    **_sizes("num_attention_heads n_head n_heads num_heads", 4),
    **_sizes("encoder_attention_heads decoder_attention_heads num_attention_heads_decoder", 4),
    **_sizes("num_local_experts num_experts n_routed_experts", 4),
    **_sizes("head_dim d_kv patch_size", 8),
    **_sizes("vocab_size max_position_embeddings n_positions", 64),
    "image_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_SPEECH = {
    "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
_DEEPSEEK = {
    "topk_method": "greedy", "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4, "n_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
_WINDOW = {"sliding_window": 4}


def _each(names: str, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(names.split(), options)


# Lists with one value per layer, which the config derives from the number of layers
_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type", "intermediate_size")

# Options of individual types, in addition to the sizes above
OPTIONS: dict[str, dict[str, Any]] = {
    **_each("mistral mixtral gemma3_text gpt_oss", _WINDOW),
    **_each("deepseek_v2 deepseek_v3", _DEEPSEEK),
    **_each("t5 mt5 umt5 longt5 switch_transformers", {"is_encoder_decoder": True}),
    **_each("wav2vec2 hubert wavlm unispeech unispeech-sat data2vec-audio sew", _SPEECH),
    **_each("gptj codegen", {"rotary_dim": 8}),
    "modernbert": {"local_attention": 4},
    "ministral": {**_WINDOW, "head_dim": 8},
    "gemma2": {**_WINDOW, "attn_logit_softcapping": 5.0},
    "nemotron": {"num_key_value_heads": 2},
    "whisper": {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "longformer": {"attention_window": [4, 4], "max_position_embeddings": 70},
    "led": {
        "attention_window": [4, 4],
        "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64,
    },
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
}


def build(name: str, implementation: str | None = None) -> Any:
    """Build a model with fixed random parameters, large enough for clearly non-uniform weights."""
    import transformers

    config = small_config(name)
    auto: Any = transformers.AutoModel
    torch.manual_seed(0)
    if type(config) in auto._model_mapping:
        create = auto.from_config
    else:  # the text part of a text-image model
        class_name = type(config).__name__.removesuffix("Config")
        create = getattr(transformers, f"{class_name}Model", None) or getattr(transformers, class_name)
        create = create._from_config
    options = {} if implementation is None else {"attn_implementation": implementation}
    with torch.device("meta"):
        size = sum(p.numel() for p in create(config, **options).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size:,} parameters with the small sizes")
    torch.manual_seed(0)
    model = create(small_config(name), **options).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "norm" not in parameter_name:
            torch.nn.init.normal_(parameter, std=0.25 * min(1.0, (32 / parameter.shape[-1]) ** 0.5))
    return model


def small_config(name: str) -> Any:
    """Create the config of a model type with small sizes, including its sub-configs."""
    from transformers import AutoConfig

    options = _small_options(AutoConfig.for_model(name)) | OPTIONS.get(name, {})
    return AutoConfig.for_model(name, **options)


def _small_options(config: Any) -> dict[str, Any]:
    options: dict[str, Any] = {key: value for key, value in SMALL.items() if _settable(config, key)}
    if isinstance(depths := getattr(config, "depths", None), list | tuple):  # stages whose sizes must match
        return {"depths": [1] * len(depths)}
    for key in getattr(config, "sub_configs", {}):
        part = getattr(config, key, None)
        if hasattr(part, "model_type"):
            known = {k: v for k, v in OPTIONS.get(part.model_type, {}).items() if hasattr(part, k)}
            defaults = {k: v for k, v in part.to_diff_dict().items() if k not in _PER_LAYER}
            options[key] = {
                **defaults,
                **_small_options(part),
                **known,
                "model_type": part.model_type,
            }
    return options


def _settable(config: Any, name: str) -> bool:
    """Return whether a config stores this attribute, rather than deriving it from others."""
    try:
        value = getattr(config, name, None)
    except (ValueError, AttributeError):  # one value per layer
        return False
    return isinstance(value, int) and not isinstance(getattr(type(config), name, None), property)
