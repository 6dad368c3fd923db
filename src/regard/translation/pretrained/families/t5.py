"""T5 (Raffel et al. 2020), T5 1.1 and mT5 (Xue et al. 2021)."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError
from regard.models.checkpoint_files import short
from regard.models.configs import Activation
from regard.models.generation import SpecialTokens
from regard.models.layers.blocks import TransformerConfig
from regard.translation.pretrained.choice import Choice
from regard.translation.pretrained.layout import EmbeddingNames, Layout, Mapped, attention, linear, norm
from regard.translation.pretrained.settings import Settings
from regard.translation.pretrained.tokenizer import (
    JsonTokenizer,
    PretrainedTokenizer,
    SentencePieceTokenizer,
    read_sentencepiece,
    read_tokenizer_json,
)
from regard.translation.tokens import TokenizerPair

FILES = ("tokenizer.json", "spiece.model", "tokenizer_config.json", "special_tokens_map.json")
_EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"  # in early T5 files
_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
    "gated-relu": "reglu",
    "gated-gelu": "geglu_tanh",  # the tanh approximation, despite its name
    "gated-silu": "swiglu",
}
_TASK = re.compile(r"translation_([a-z]+)_to_([a-z]+)")


def read_layout(settings: Settings) -> Layout:
    """Read the architecture: RMS pre-norm without biases, unscaled scores, relative positions."""
    projection = settings.get("feed_forward_proj", "relu")
    if not isinstance(projection, str) or projection not in _ACTIVATIONS:
        raise ArgumentError(
            f"{settings.path} has feed_forward_proj={short(projection)}; regard supports only "
            f"{', '.join(_ACTIVATIONS)}."
        )
    settings.require("is_gated_act", projection.startswith("gated-"))
    settings.require(
        "dense_act_fn", projection.removeprefix("gated-"), *(["gelu_new"] if "gelu" in projection else [])
    )
    tied = settings.flag("tie_word_embeddings", True)
    # mT5 never scales; since version 5, transformers writes tie_word_embeddings=true for it
    scaled = settings.flag("scale_decoder_outputs", tied) and settings.get("model_type") != "mt5"
    layers = settings.integer("num_layers", max=1024)
    shared: dict[str, Any] = {
        "width": settings.integer("d_model", max=65_536),
        "heads": settings.integer("num_heads", max=4096),
        "head_width": settings.integer("d_kv", 64, max=65_536),
        "ffn_dim": settings.integer("d_ff"),
        "activation": _ACTIVATIONS[projection],
        "norm": "rms",
        "eps": settings.number("layer_norm_epsilon", 1e-6),
        "linear_bias": False,
        "dropout": settings.number("dropout_rate", 0.1),
        "positions": "t5",
        "buckets": settings.integer("relative_attention_num_buckets", 32, min=4, max=65_536),
        "max_distance": settings.integer("relative_attention_max_distance", 128),
        "scale_scores": False,
        "scale_embedding": False,
    }
    decoder_layers = settings.integer("num_decoder_layers", layers, max=1024)
    encoder = settings.architecture(layers=layers, **shared)
    decoder = settings.architecture(layers=decoder_layers, **shared)
    size = settings.integer("vocab_size")

    def parameters() -> Iterator[Mapped]:
        yield from _map_stack("encoder", encoder, cross=False)
        yield from _map_stack("decoder", decoder, cross=True)

    return Layout(
        settings.path,
        "t5",
        encoder,
        decoder,
        (size, size),
        share=True,
        tie_output=tied,
        output_bias=False,
        output_scale=encoder.width**-0.5 if scaled else 1.0,
        embeddings=EmbeddingNames(*_EMBEDDINGS, tied, "shared.weight"),
        other_parameters=parameters,
        stacks=("encoder.block.", "decoder.block."),
        ignored=frozenset({_UNUSED}),
    )


def _map_stack(side: str, config: TransformerConfig, *, cross: bool) -> Iterator[Mapped]:
    """Yield the parameters of an encoder or a decoder."""
    bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    yield Mapped(f"{side}.positions.table", (bias,), (config.buckets, config.heads))
    gated = config.activation in ("reglu", "geglu_tanh", "swiglu")
    width, ffn_dim = config.width, config.resolved_ffn_dim
    for i in range(config.layers):
        ours, theirs = f"{side}.blocks.{i}", f"{side}.block.{i}.layer"
        names = ("q", "k", "v", "o")
        yield from attention(f"{ours}.attention", f"{theirs}.0.SelfAttention", config, names)
        yield from norm(f"{ours}.attention_residual.norm", f"{theirs}.0.layer_norm", config)
        if cross:
            yield from attention(f"{ours}.cross", f"{theirs}.1.EncDecAttention", config, names)
            yield from norm(f"{ours}.cross_residual.norm", f"{theirs}.1.layer_norm", config)
        last = f"{theirs}.{2 if cross else 1}"
        inputs = tuple(f"{last}.DenseReluDense.{name}" for name in (("wi_0", "wi_1") if gated else ("wi",)))
        yield from linear(f"{ours}.feed_forward.in_proj", inputs, (ffn_dim, width), config)
        output = (f"{last}.DenseReluDense.wo",)
        yield from linear(f"{ours}.feed_forward.out_proj", output, (width, ffn_dim), config)
        yield from norm(f"{ours}.feed_forward_residual.norm", f"{last}.layer_norm", config)
    yield from norm(f"{side}.norm", f"{side}.final_layer_norm", config)


def read_tokens(folder: Path, layout: Layout, choice: Choice) -> TokenizerPair:
    """Read tokenizer.json or spiece.model."""
    choice.check_no_forced_token()
    size, end = layout.vocab_sizes[0], choice.token("eos_token_id", 1)
    padding = choice.config.integer("pad_token_id", 0, min=0)
    special = SpecialTokens(
        padding=padding,
        start=choice.token("decoder_start_token_id", padding),
        end=end,
        unknown=2,
        suppressed=choice.suppressed(),
    )
    tokenizer: PretrainedTokenizer
    if (folder / "tokenizer.json").exists():
        json_tokenizer = read_tokenizer_json(folder / "tokenizer.json", size)
        tokenizer = JsonTokenizer(json_tokenizer, special, size)
    elif (folder / "spiece.model").exists():
        processor = read_sentencepiece(folder / "spiece.model")
        ids = {processor.id_to_piece(i): i for i in range(processor.get_piece_size())}
        if len(ids) > size:
            raise ArgumentError(
                f"{folder / 'spiece.model'} has {len(ids)} tokens, but config.json has vocab_size={size}; "
                "use the tokenizer and config.json of the same model."
            )
        tokenizer = SentencePieceTokenizer(processor, ids, special, size)
    else:
        raise ArgumentError(f"{folder} has no tokenizer; add tokenizer.json or spiece.model.")
    prefix = tuple(tokenizer.encode(_prefix(choice)))
    tokenizer.special = SpecialTokens(**{**vars(special), "source_prefix": prefix})
    return TokenizerPair(tokenizer, tokenizer)


def _prefix(choice: Choice) -> str:
    """Return the prefix of every source text, such as "translate English to German:"."""
    tasks = choice.config.get("task_specific_params", {})
    prefixes: dict[tuple[str, str], str] = {}
    for name, task in tasks.items() if isinstance(tasks, dict) else ():
        match = _TASK.fullmatch(name)
        if match and isinstance(task, dict) and isinstance(task.get("prefix"), str):
            prefixes[match[1], match[2]] = task["prefix"]
    pair = choice.source, choice.target
    if pair == (None, None):
        if len(prefixes) > 1:
            raise ArgumentError(
                f"{choice.folder} translates between several languages; choose one of "
                f"{', '.join(map('-'.join, prefixes))}. In Python: load_translator(folder, source=…, "
                "target=…); on the command line: --languages FROM-TO."
            )
        return next(iter(prefixes.values()), "")
    if pair in prefixes:
        return prefixes[pair]
    if None not in pair and all(name[:1].isupper() for name in pair if name):
        return f"translate {pair[0]} to {pair[1]}:"
    known = ", ".join(map("-".join, prefixes)) or "none"
    raise ArgumentError(
        f"{choice.folder} has no prefix for source={choice.source!r} and target={choice.target!r}; its "
        f"config.json has {known}. Choose one of them, or pass the English names of both languages, such as "
        "source='English', target='German'."
    )
