"""Convert regard's Transformer to Hugging Face and to CTranslate2, with the same parameters."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.models import Transformer, TransformerConfig
from regard.models.layers.attention import MultiHeadAttention
from regard.translation.tokens import END, PADDING, START, UNKNOWN

MAX_POSITIONS = 512  # size of the position table; regard has no limit


def unsupported(model: nn.Module) -> str | None:
    """Return the reason why a model cannot be converted, or None if it can."""
    if not isinstance(model, Transformer):
        return f"{type(model).__name__} cannot be converted"
    config = model.encoder.config
    supported = TransformerConfig(
        width=config.width,
        heads=config.heads,
        layers=config.layers,
        ffn_dim=config.ffn_dim,
        norm_first=config.norm_first,
        dropout=config.dropout,
        max_positions=config.max_positions,
    )
    return None if config == supported else f"other libraries do not support {config}"


def to_hugging_face(model: Transformer) -> Any:
    """Convert to M2M100 (pre-norm) or Marian (post-norm)."""
    from transformers import M2M100Config, M2M100ForConditionalGeneration, MarianConfig, MarianMTModel

    config = model.encoder.config
    sizes = {
        "vocab_size": len(model.output_weight),
        "d_model": config.width,
        "max_position_embeddings": MAX_POSITIONS,
        "activation_function": "relu",
        "scale_embedding": True,
        "pad_token_id": PADDING,
        "bos_token_id": START,
        "eos_token_id": END,
        "decoder_start_token_id": START,
        "forced_eos_token_id": None,
    }
    for side in ("encoder", "decoder"):
        sizes |= {
            f"{side}_layers": config.layers,
            f"{side}_attention_heads": config.heads,
            f"{side}_ffn_dim": config.resolved_ffn_dim,
        }
    converted: Any = (
        M2M100ForConditionalGeneration(M2M100Config(**sizes))
        if config.norm_first
        else MarianMTModel(MarianConfig(**sizes))
    )
    converted.eval().requires_grad_(False)
    table = _position_table(model)
    for original, side in (
        (model.encoder, converted.model.encoder),
        (model.decoder, converted.model.decoder),
    ):
        embedding = model.embedding if side is converted.model.decoder else _source_embedding(model)
        side.embed_tokens.weight = nn.Parameter(embedding.weight, requires_grad=False)
        if config.norm_first:  # M2M100 numbers positions from PADDING + 1
            side.embed_positions.weights = torch.cat([table[: PADDING + 1] * 0, table])
            _copy(side.layer_norm, original.norm)
        else:
            side.embed_positions.weight = nn.Parameter(table, requires_grad=False)
        for block, layer in zip(original.blocks, side.layers, strict=True):
            for name, part in layer.named_children():
                _copy_child(part, block, name)
    converted.lm_head.weight = nn.Parameter(model.output_weight, requires_grad=False)
    return converted


def _copy_child(part: Any, block: Any, name: str) -> None:
    """Copy the parameters of one submodule of a layer, by its name."""
    if name in ("self_attn", "encoder_attn"):
        attention = block.attention if name == "self_attn" else block.cross
        for index, converted in enumerate((part.q_proj, part.k_proj, part.v_proj)):
            weight, bias = attention.projection(index)
            converted.weight.copy_(weight)
            converted.bias.copy_(bias)
        _copy(part.out_proj, attention.out_proj)
    paths = {
        "self_attn_layer_norm": "attention_residual.norm",
        "encoder_attn_layer_norm": "cross_residual.norm",
        "final_layer_norm": "feed_forward_residual.norm",
        "fc1": "feed_forward.in_proj",
        "fc2": "feed_forward.out_proj",
    }
    if name in paths:
        _copy(part, block.get_submodule(paths[name]))


def _copy(converted: Any, original: Any) -> None:
    converted.weight.copy_(original.weight)
    converted.bias.copy_(original.bias)


def to_ctranslate2(model: Transformer, folder: Path) -> None:
    """Save a model in CTranslate2's format; its tokens are token ids as text."""
    from ctranslate2.specs import TransformerSpec

    config = model.encoder.config
    layers = (config.layers, config.layers)
    spec = TransformerSpec.from_config(layers, config.heads, pre_norm=config.norm_first)
    spec.encoder.embeddings[0].weight = _source_embedding(model).weight.detach().numpy()
    spec.decoder.embeddings.weight = model.embedding.weight.detach().numpy()
    spec.decoder.projection.weight = model.output_weight.detach().numpy()
    for original, side in ((model.encoder, spec.encoder), (model.decoder, spec.decoder)):
        side.position_encodings.encodings = _position_table(model).numpy()
        if config.norm_first:
            _assign(side.layer_norm, original.norm)
        for block, layer in zip(original.blocks, side.layer, strict=True):
            for converted, linear in zip(layer.self_attention.linear, _linears(block.attention), strict=True):
                converted.weight, converted.bias = linear
            _assign(layer.self_attention.layer_norm, block.attention_residual.norm)
            if side is spec.decoder:
                for converted, linear in zip(
                    layer.attention.linear, _linears(block.cross, True), strict=True
                ):
                    converted.weight, converted.bias = linear
                _assign(layer.attention.layer_norm, block.cross_residual.norm)
            _assign(layer.ffn.linear_0, block.feed_forward.in_proj)
            _assign(layer.ffn.linear_1, block.feed_forward.out_proj)
            _assign(layer.ffn.layer_norm, block.feed_forward_residual.norm)
    for register, embedding in (
        (spec.register_source_vocabulary, _source_embedding(model)),
        (spec.register_target_vocabulary, model.embedding),
    ):
        register([str(token) for token in range(len(embedding.weight))])
    special = {"bos": START, "eos": END, "unk": UNKNOWN}
    for name, token in special.items():
        setattr(spec.config, f"{name}_token", str(token))
    spec.config.decoder_start_token = str(START)
    spec.validate()
    spec.save(str(folder))


def _linears(attention: MultiHeadAttention, cross: bool = False) -> Iterator[tuple[Any, Any]]:
    """Yield the weight and bias of each fused projection: q-k-v, or q and k-v (cross), then output."""
    assert isinstance(attention.in_proj, nn.Linear)
    first = attention.heads * attention.head_width if cross else 0
    for rows in (slice(0, first), slice(first, None)):
        if rows != slice(0, 0):
            yield tuple(x[rows].detach().numpy() for x in (attention.in_proj.weight, attention.in_proj.bias))
    yield attention.out_proj.weight.detach().numpy(), attention.out_proj.bias.detach().numpy()


def _assign(converted: Any, original: Any) -> None:
    names = ("gamma", "beta") if isinstance(original, nn.LayerNorm) else ("weight", "bias")
    for name, x in zip(names, (original.weight, original.bias), strict=True):
        setattr(converted, name, x.detach().numpy())


def _source_embedding(model: Transformer) -> nn.Embedding:
    return model.embedding if model.source_embedding is None else model.source_embedding


def _position_table(model: Transformer) -> Tensor:
    table: Tensor = model.encoder.positions(torch.arange(MAX_POSITIONS))  # type: ignore[misc]
    return table
