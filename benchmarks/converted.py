"""A Transformer of regard's as others run it: its weights in Hugging Face's and in CTranslate2's form."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.models import Transformer, TransformerConfig
from regard.models.layers.attention import MultiHeadAttention
from regard.translation.tokens import END, PADDING, START, UNKNOWN

POSITIONS = 512  # that are written down; regard's have no end


def refusal(model: nn.Module) -> str | None:
    """Why others do not have this model; None if they do."""
    if not isinstance(model, Transformer):
        return f"there is no such model elsewhere: {type(model).__name__}"
    config = model.encoder.config
    usual = TransformerConfig(
        width=config.width,
        heads=config.heads,
        layers=config.layers,
        ffn_dim=config.ffn_dim,
        norm_first=config.norm_first,
        dropout=config.dropout,
        max_positions=config.max_positions,
    )
    return None if config == usual else f"others do not have all of {config}"


def hugging_face(model: Transformer) -> Any:
    """As M2M100, whose norms are before each part, or as Marian, whose norms are after it."""
    from transformers import M2M100Config, M2M100ForConditionalGeneration, MarianConfig, MarianMTModel

    config = model.encoder.config
    sizes = {
        "vocab_size": len(model.output_weight),
        "d_model": config.width,
        "max_position_embeddings": POSITIONS,
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
    theirs: Any = (
        M2M100ForConditionalGeneration(M2M100Config(**sizes))
        if config.norm_first
        else MarianMTModel(MarianConfig(**sizes))
    )
    theirs.eval().requires_grad_(False)
    table = _positions(model)
    for ours, side in ((model.encoder, theirs.model.encoder), (model.decoder, theirs.model.decoder)):
        embedding = model.embedding if side is theirs.model.decoder else _source_embedding(model)
        side.embed_tokens.weight = nn.Parameter(embedding.weight, requires_grad=False)
        if config.norm_first:  # their first position comes after those of padding
            side.embed_positions.weights = torch.cat([table[: PADDING + 1] * 0, table])
            _copy(side.layer_norm, ours.norm)
        else:
            side.embed_positions.weight = nn.Parameter(table, requires_grad=False)
        for block, layer in zip(ours.blocks, side.layers, strict=True):
            for name, part in layer.named_children():
                _set(part, block, name)
    theirs.lm_head.weight = nn.Parameter(model.output_weight, requires_grad=False)
    return theirs


def _set(part: Any, block: Any, name: str) -> None:
    """A part of one of their layers, by its name."""
    if name in ("self_attn", "encoder_attn"):
        attention = block.attention if name == "self_attn" else block.cross
        for which, theirs in enumerate((part.q_proj, part.k_proj, part.v_proj)):
            weight, bias = attention.projection(which)
            theirs.weight.copy_(weight)
            theirs.bias.copy_(bias)
        _copy(part.out_proj, attention.out_proj)
    ours = {
        "self_attn_layer_norm": "attention_residual.norm",
        "encoder_attn_layer_norm": "cross_residual.norm",
        "final_layer_norm": "feed_forward_residual.norm",
        "fc1": "feed_forward.in_proj",
        "fc2": "feed_forward.out_proj",
    }
    if name in ours:
        _copy(part, block.get_submodule(ours[name]))


def _copy(theirs: Any, ours: Any) -> None:
    theirs.weight.copy_(ours.weight)
    theirs.bias.copy_(ours.bias)


def ctranslate2(model: Transformer, folder: Path) -> None:
    """In a folder that CTranslate2 reads; tokens are their numbers as text."""
    from ctranslate2.specs import TransformerSpec

    config = model.encoder.config
    layers = (config.layers, config.layers)
    spec = TransformerSpec.from_config(layers, config.heads, pre_norm=config.norm_first)
    spec.encoder.embeddings[0].weight = _source_embedding(model).weight.detach().numpy()
    spec.decoder.embeddings.weight = model.embedding.weight.detach().numpy()
    spec.decoder.projection.weight = model.output_weight.detach().numpy()
    for ours, side in ((model.encoder, spec.encoder), (model.decoder, spec.decoder)):
        side.position_encodings.encodings = _positions(model).numpy()
        if config.norm_first:
            _write(side.layer_norm, ours.norm)
        for block, layer in zip(ours.blocks, side.layer, strict=True):
            for theirs, linear in zip(layer.self_attention.linear, _linears(block.attention), strict=True):
                theirs.weight, theirs.bias = linear
            _write(layer.self_attention.layer_norm, block.attention_residual.norm)
            if side is spec.decoder:
                for theirs, linear in zip(layer.attention.linear, _linears(block.cross, True), strict=True):
                    theirs.weight, theirs.bias = linear
                _write(layer.attention.layer_norm, block.cross_residual.norm)
            _write(layer.ffn.linear_0, block.feed_forward.in_proj)
            _write(layer.ffn.linear_1, block.feed_forward.out_proj)
            _write(layer.ffn.layer_norm, block.feed_forward_residual.norm)
    for register, embedding in (
        (spec.register_source_vocabulary, _source_embedding(model)),
        (spec.register_target_vocabulary, model.embedding),
    ):
        register([str(token) for token in range(len(embedding.weight))])
    marks = {"bos": START, "eos": END, "unk": UNKNOWN}
    for name, token in marks.items():
        setattr(spec.config, f"{name}_token", str(token))
    spec.config.decoder_start_token = str(START)
    spec.validate()
    spec.save(str(folder))


def _linears(attention: MultiHeadAttention, cross: bool = False) -> Iterator[tuple[Any, Any]]:
    """In one product what reads the same: query, key and value, or of two sources the query alone."""
    assert isinstance(attention.in_proj, nn.Linear)
    first = attention.heads * attention.head_width if cross else 0
    for rows in (slice(0, first), slice(first, None)):
        if rows != slice(0, 0):
            yield tuple(x[rows].detach().numpy() for x in (attention.in_proj.weight, attention.in_proj.bias))
    yield attention.out_proj.weight.detach().numpy(), attention.out_proj.bias.detach().numpy()


def _write(theirs: Any, ours: Any) -> None:
    names = ("gamma", "beta") if isinstance(ours, nn.LayerNorm) else ("weight", "bias")
    for name, x in zip(names, (ours.weight, ours.bias), strict=True):
        setattr(theirs, name, x.detach().numpy())


def _source_embedding(model: Transformer) -> nn.Embedding:
    return model.embedding if model.source_embedding is None else model.source_embedding


def _positions(model: Transformer) -> Tensor:
    table: Tensor = model.encoder.positions(torch.arange(POSITIONS))  # type: ignore[misc]
    return table
