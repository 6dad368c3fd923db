"""Settings and tensor names of BART (Lewis et al. 2020), which Marian, M2M-100 and mBART use."""

from collections.abc import Iterator
from typing import Any

from regard.models.layers.blocks import TransformerConfig
from regard.translation.pretrained.layout import EmbeddingNames, Layout, Mapped, attention, linear, norm
from regard.translation.pretrained.settings import Settings

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
STACKS = ("model.encoder.layers.", "model.decoder.layers.")
SHARED = "model.shared.weight"
SOURCE, TARGET = (f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder"))
BIAS = "final_logits_bias"


def read_stacks(
    settings: Settings, *, activation: str, scale_embedding: bool, **options: Any
) -> tuple[TransformerConfig, TransformerConfig]:
    """Return the configs of encoder and decoder.

    activation, scale_embedding: defaults of the family. options: additional settings for both configs.
    """
    for name, value in (("normalize_before", options["norm_first"]), ("add_bias_logits", False)):
        settings.require(name, value)
    settings.require("normalize_embedding", options.get("embedding_norm", False))
    settings.require("add_final_layer_norm", options["norm_first"])
    for name in ("extra_pos_embeddings", "force_bos_token_to_be_generated"):
        settings.get(name)  # set by early versions; no effect in these models
    shared: dict[str, Any] = {
        "width": settings.integer("d_model", max=65_536),
        "max_positions": settings.integer("max_position_embeddings", 1024, max=10_000_000),
        "activation": settings.activation("activation_function", activation),
        "dropout": settings.number("dropout", 0.1),
        "attention_dropout": settings.number("attention_dropout", 0.0),
        "activation_dropout": settings.number("activation_dropout", 0.0),
        "scale_embedding": settings.flag("scale_embedding", scale_embedding),
        **options,
    }
    sizes = [
        {
            "layers": settings.integer(f"{side}_layers", max=1024),
            "heads": settings.integer(f"{side}_attention_heads", max=4096),
            "ffn_dim": settings.integer(f"{side}_ffn_dim"),
        }
        for side in ("encoder", "decoder")
    ]
    encoder, decoder = (settings.architecture(**size, **shared) for size in sizes)
    return encoder, decoder


def shared_layout(
    settings: Settings, family: str, encoder: TransformerConfig, decoder: TransformerConfig, **options: Any
) -> Layout:
    """Return the layout of a model with one vocabulary for source and target.

    options: additional fields of `Layout`: output_bias, position_offset and ignored.
    """
    tied = settings.flag("tie_word_embeddings", True)
    size, width = settings.integer("vocab_size"), encoder.width

    def parameters() -> Iterator[Mapped]:
        if options["output_bias"]:
            yield Mapped("bias", (BIAS,), (1, size))
        for side in ("encoder", "decoder") if encoder.positions == "learned" else ():
            rows = encoder.max_positions + options["position_offset"]
            table = f"model.{side}.embed_positions.weight"
            yield Mapped(f"{side}.positions.vectors", (table,), (rows, width))
        yield from map_stacks(encoder, decoder)

    return Layout(
        settings.path,
        family,
        encoder,
        decoder,
        (size, size),
        share=True,
        tie_output=tied,
        embeddings=EmbeddingNames(SOURCE, TARGET, tied, SHARED),
        other_parameters=parameters,
        stacks=STACKS,
        max_length=encoder.max_positions,
        **options,
    )


def map_stack(side: str, config: TransformerConfig, *, cross: bool) -> Iterator[Mapped]:
    """Yield the parameters of one stack; `side` is "encoder" or "decoder"."""
    for i in range(config.layers):
        ours, theirs = f"{side}.blocks.{i}", f"model.{side}.layers.{i}"
        yield from attention(f"{ours}.attention", f"{theirs}.self_attn", config, _PROJECTIONS)
        yield from norm(f"{ours}.attention_residual.norm", f"{theirs}.self_attn_layer_norm", config)
        if cross:
            yield from attention(f"{ours}.cross", f"{theirs}.encoder_attn", config, _PROJECTIONS)
            yield from norm(f"{ours}.cross_residual.norm", f"{theirs}.encoder_attn_layer_norm", config)
        width, ffn_dim = config.width, config.resolved_ffn_dim
        yield from linear(f"{ours}.feed_forward.in_proj", (f"{theirs}.fc1",), (ffn_dim, width), config)
        yield from linear(f"{ours}.feed_forward.out_proj", (f"{theirs}.fc2",), (width, ffn_dim), config)
        yield from norm(f"{ours}.feed_forward_residual.norm", f"{theirs}.final_layer_norm", config)
    if config.norm_first:
        yield from norm(f"{side}.norm", f"model.{side}.layer_norm", config)
    if config.embedding_norm:
        yield from norm(f"{side}.embedding_norm", f"model.{side}.layernorm_embedding", config)


def map_stacks(encoder: TransformerConfig, decoder: TransformerConfig) -> Iterator[Mapped]:
    """Yield the parameters of both stacks."""
    yield from map_stack("encoder", encoder, cross=False)
    yield from map_stack("decoder", decoder, cross=True)
