"""Export to CTranslate2: model.bin, config.json, vocabularies and SentencePiece models."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
from torch import nn

from regard._util.extras import require
from regard.models.layers.attention import MultiHeadAttention
from regard.translation.export.plan import Array, Plan, array, first_heads, write_vocabulary

_ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "gelu_tanh": "GELUTanh",
    "silu": "SWISH",
    "reglu": "RELU",
    "geglu": "GELU",
    "geglu_tanh": "GELUTanh",
    "swiglu": "SWISH",
}
_GATED = ("reglu", "geglu", "geglu_tanh", "swiglu")


def export_ctranslate2(plan: Plan, folder: Path) -> None:
    """Write a model that `ctranslate2.Translator` can load."""
    _check(plan)
    require("ctranslate2", "export --to ctranslate2")
    common_spec, transformer_spec = (
        import_module(f"ctranslate2.specs.{name}") for name in ("common_spec", "transformer_spec")
    )
    layer, heads = plan.alignment()
    options: list[dict[str, Any]] = []
    for config in plan.configs:
        options.append(
            {
                "num_layers": config.layers,
                "num_heads": config.heads,
                "pre_norm": config.norm_first,
                "activation": getattr(common_spec.Activation, _ACTIVATIONS[config.activation]),
                "layernorm_embedding": config.embedding_norm,
                "relative_attention_bias": config.positions == "t5",
                "ffn_glu": config.activation in _GATED,
                "rms_norm": config.norm == "rms",
            }
        )
    spec = transformer_spec.TransformerSpec(
        transformer_spec.TransformerEncoderSpec(**options[0]),
        transformer_spec.TransformerDecoderSpec(
            **options[1], alignment_layer=layer, alignment_heads=len(heads)
        ),
    )
    _fill_stack(plan, spec.encoder, "encoder")
    _fill_stack(plan, spec.decoder, "decoder")
    model = plan.model
    spec.decoder.projection.weight = array(model.output_weight)
    spec.decoder.projection.bias = plan.output_bias()
    if model.output_scale != 1:
        spec.decoder.scale_outputs = model.output_scale
    spec.register_source_vocabulary(plan.pieces("source"))
    spec.register_target_vocabulary(plan.pieces("target"))
    _set_config(plan, spec.config)
    spec.validate()
    spec.save(str(folder))
    for side in ("source", "target"):
        write_vocabulary(getattr(plan.tokens, side), folder / side)


def _check(plan: Plan) -> None:
    for config in plan.configs:
        plan.require("positions", config.positions, "sinusoidal", "learned", "t5")
        plan.require("norm", config.norm, "layer", "rms")
        plan.require("heads * head_width", config.resolved_head_width * config.heads, config.width)
        if config.norm == "rms" or config.positions == "t5":
            plan.require("norm_first", config.norm_first, True)
    plan.require_same("eps", "norm", "positions")


def _set_config(plan: Plan, config: Any) -> None:
    special, target = plan.tokens.special, plan.tokens.target
    config.bos_token = config.decoder_start_token = target.piece(special.start)
    config.eos_token = target.piece(special.end)
    config.unk_token = target.piece(special.unknown)
    config.add_source_eos = special.source([]) == [special.end]
    config.layer_norm_epsilon = plan.configs[1].eps


def _fill_stack(plan: Plan, spec: Any, side: str) -> None:
    stack, config = getattr(plan.model, side), getattr(plan.model, side).config
    embedding = plan.model.embedding
    if side == "encoder":
        embedding = plan.model.source_embedding or embedding
    target = spec.embeddings[0] if isinstance(spec.embeddings, list) else spec.embeddings
    target.weight = array(embedding.weight)
    spec.scale_embeddings = config.width**0.5 if config.scale_embedding else 1.0
    if config.positions != "t5":
        spec.position_encodings.encodings = plan.positions(side)
    if config.norm_first:
        _set_norm(spec.layer_norm, stack.norm)
    if config.embedding_norm:
        _set_norm(spec.layernorm_embedding, stack.embedding_norm)
    aligned, heads = plan.alignment()
    for i, (block, layer) in enumerate(zip(stack.blocks, spec.layer, strict=True)):
        _set_attention(layer.self_attention, block.attention, block.attention_residual.norm, cross=False)
        if config.positions == "t5":
            layer.self_attention.relative_attention_bias = array(stack.positions.table)
            layer.self_attention.relative_attention_max_distance = numpy.int32(config.max_distance)
        if side == "decoder":
            cross = first_heads(block.cross, heads) if i == aligned else block.cross
            _set_attention(layer.attention, cross, block.cross_residual.norm, cross=True)
        _set_feed_forward(layer.ffn, block.feed_forward, gated=config.activation in _GATED)
        _set_norm(layer.ffn.layer_norm, block.feed_forward_residual.norm)


def _set_attention(spec: Any, attention: MultiHeadAttention, norm: nn.Module, *, cross: bool) -> None:
    for linear, (weight, bias) in zip(spec.linear, _projections(attention, cross), strict=True):
        linear.weight = weight
        if bias is not None:
            linear.bias = bias
    if type(attention.score).__name__ == "Dot":
        spec.queries_scale = numpy.float32(1.0)
    _set_norm(spec.layer_norm, norm)


def _projections(attention: MultiHeadAttention, cross: bool) -> Iterator[tuple[Array, Array | None]]:
    """Yield the weight and bias of each fused projection: q-k-v, or q and k-v (cross), then output."""
    assert isinstance(attention.in_proj, nn.Linear)
    size = attention.heads * attention.head_width
    parts = (slice(0, size), slice(size, None)) if cross else (slice(None),)
    for rows in parts:
        bias = attention.in_proj.bias
        yield array(attention.in_proj.weight[rows]), None if bias is None else array(bias[rows])
    bias = attention.out_proj.bias
    yield array(attention.out_proj.weight), None if bias is None else array(bias)


def _set_feed_forward(spec: Any, feed_forward: Any, *, gated: bool) -> None:
    if not gated:
        _set_linear(spec.linear_0, feed_forward.in_proj.weight, feed_forward.in_proj.bias)
    else:
        weights = feed_forward.in_proj.weight.chunk(2)
        bias = feed_forward.in_proj.bias
        biases = (None, None) if bias is None else bias.chunk(2)
        _set_linear(spec.linear_0, weights[0], biases[0])
        _set_linear(spec.linear_0_noact, weights[1], biases[1])
    _set_linear(spec.linear_1, feed_forward.out_proj.weight, feed_forward.out_proj.bias)


def _set_linear(spec: Any, weight: Any, bias: Any) -> None:
    spec.weight = array(weight)
    if bias is not None:
        spec.bias = array(bias)


def _set_norm(spec: Any, norm: Any) -> None:
    spec.gamma = array(norm.weight)
    if isinstance(norm, nn.LayerNorm):
        spec.beta = array(norm.bias)
