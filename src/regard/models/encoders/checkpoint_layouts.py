"""Read checkpoints in Hugging Face format (config.json and safetensors) and validate them.

The supported models share BERT's encoder (Devlin et al. 2019) but have different tensor names; RoBERTa's
positions also start at a different index.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from regard._util.checks import check_number
from regard._util.text import pluralize
from regard.errors import ArgumentError
from regard.models.checkpoint_files import (
    check_tensor,
    open_tensors,
    read_json,
    read_tensor,
    short,
    short_list,
)
from regard.models.configs import Activation
from regard.models.layers.blocks import TransformerConfig

# our parameter name → names of the checkpoint tensors to concatenate
_BERT = {
    "attention.in_proj": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.out_proj": ("attention.output.dense",),
    "attention_residual.norm": ("attention.output.LayerNorm",),
    "feed_forward.in_proj": ("intermediate.dense",),
    "feed_forward.out_proj": ("output.dense",),
    "feed_forward_residual.norm": ("output.LayerNorm",),
}
_DISTILBERT = {
    "attention.in_proj": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attention.out_proj": ("attention.out_lin",),
    "attention_residual.norm": ("sa_layer_norm",),
    "feed_forward.in_proj": ("ffn.lin1",),
    "feed_forward.out_proj": ("ffn.lin2",),
    "feed_forward_residual.norm": ("output_layer_norm",),
}


@dataclass(frozen=True)
class Family:
    """The names that a model family uses in config.json and for its tensors."""

    sizes: Mapping[str, str]
    block: str
    parts: Mapping[str, tuple[str, ...]]
    padded_positions: bool = False  # positions start after the padding id
    token_types: bool = True
    bytes: bool = False  # byte-level BPE, not WordPiece


_SIZES = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "activation": "hidden_act",
    "dropout": "hidden_dropout_prob",
}
_DISTILBERT_SIZES = {
    "width": "dim",
    "layers": "n_layers",
    "heads": "n_heads",
    "ffn_dim": "hidden_dim",
    "activation": "activation",
    "dropout": "dropout",
}
_ROBERTA = Family(_SIZES, "encoder.layer", _BERT, padded_positions=True, bytes=True)
FAMILIES = {
    "bert": Family(_SIZES, "encoder.layer", _BERT),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": Family(_DISTILBERT_SIZES, "transformer.layer", _DISTILBERT, token_types=False),
}
_PREFIXES = ("", "bert.", "roberta.", "distilbert.")
_WORDS = "embeddings.word_embeddings.weight"
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_HEADS = {  # tensors of task heads, which are skipped
    *("pooler", "cls", "lm_head", "classifier", "pre_classifier", "qa_outputs"),
    *("vocab_transform", "vocab_layer_norm", "vocab_projector"),
}


@dataclass(frozen=True)
class CheckpointLayout:
    """Architecture and tensor names of a checkpoint, as given by its config.json."""

    path: Path
    family: Family
    config: TransformerConfig
    vocab_size: int
    token_types: int
    pad_id: int | None  # RoBERTa: positions start after the padding id

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens in a sentence."""
        return self.config.max_positions - (0 if self.pad_id is None else self.pad_id + 1)

    def tensors(self) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...]]]:
        """Yield our parameter name, its tensor names in the checkpoint, and the shape of each tensor."""
        width, ffn_dim = self.config.width, self.config.resolved_ffn_dim
        yield "words.weight", (_WORDS,), (self.vocab_size, width)
        positions = (self.config.max_positions, width)
        yield "positions.vectors", ("embeddings.position_embeddings.weight",), positions
        if self.token_types:
            yield "types", ("embeddings.token_type_embeddings.weight",), (self.token_types, width)
        for kind in ("weight", "bias"):
            yield f"norm.{kind}", (f"embeddings.LayerNorm.{kind}",), (width,)
        shapes = {"feed_forward.in_proj": (ffn_dim, width), "feed_forward.out_proj": (width, ffn_dim)}
        for i in range(self.config.layers):
            for ours, theirs in self.family.parts.items():
                weight = (width,) if ours.endswith("norm") else shapes.get(ours, (width, width))
                for kind, shape in (("weight", weight), ("bias", weight[:1])):
                    names = tuple(f"{self.family.block}.{i}.{part}.{kind}" for part in theirs)
                    yield f"blocks.{i}.{ours}.{kind}", names, shape


def read_layout(folder: Path) -> CheckpointLayout:
    """Read and validate config.json."""
    path = folder / "config.json"
    settings = read_json(path, max_bytes=2**20)
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ArgumentError(
            f"{path} has model_type={short(kind)}; load_encoder supports only {', '.join(FAMILIES)} (MiniLM "
            "is a BERT model)."
        )
    family = FAMILIES[kind]
    _check_supported(path, settings)
    sizes = (_integer(path, settings, family.sizes[name]) for name in ("width", "layers", "heads", "ffn_dim"))
    width, layers, heads, ffn_dim = sizes
    eps = 1e-12 if kind == "distilbert" else settings.get("layer_norm_eps", 1e-12)
    max_positions = _integer(path, settings, "max_position_embeddings")
    activation = _activation(path, settings, family.sizes["activation"])
    try:
        check_number("layer_norm_eps", eps, above=0, below=1)
        config = TransformerConfig(
            width=width,
            layers=layers,
            heads=heads,
            ffn_dim=ffn_dim,
            activation=activation,
            norm_first=False,
            eps=eps,
            dropout=settings.get(family.sizes["dropout"], 0.1),
            positions="learned",
            max_positions=max_positions,
        )
    except (ArgumentError, TypeError) as error:
        raise ArgumentError(f"{path} is invalid: {str(error)[:300]}") from None
    token_types = _integer(path, settings, "type_vocab_size", 2) if family.token_types else 0
    pad_id = _integer(path, settings, "pad_token_id", 1, min=0) if family.padded_positions else None
    if pad_id is not None and pad_id + 1 >= max_positions:
        raise ArgumentError(
            f"{path} has pad_token_id={pad_id} and max_position_embeddings={max_positions}; positions start "
            "after the padding id, so none are left. Use the config.json that belongs to the weights."
        )
    vocab_size = _integer(path, settings, "vocab_size")
    return CheckpointLayout(path, family, config, vocab_size, token_types, pad_id)


def _check_supported(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise an error unless the model is an encoder with learned positions and floating-point weights."""
    for name in ("is_decoder", "add_cross_attention", "is_encoder_decoder"):
        if settings.get(name):
            raise ArgumentError(
                f"{path} has {name}={short(settings[name])}; load_encoder supports only encoder models."
            )
    kind = settings.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ArgumentError(
            f"{path} has position_embedding_type={short(kind)}; load_encoder supports only "
            "'absolute' positions."
        )
    if settings.get("quantization_config"):
        raise ArgumentError(
            f"{path} has a quantization_config; load_encoder needs floating-point weights. Use the "
            "unquantized model."
        )


def _activation(path: Path, settings: Mapping[str, Any], name: str) -> Activation:
    value = settings.get(name, "gelu")
    if value in ("gelu", "relu"):
        return value
    raise ArgumentError(
        f"{path} has {name}={short(value)}; load_encoder supports only gelu (exact) and relu."
    )


def _integer(
    path: Path, settings: Mapping[str, Any], name: str, default: int | None = None, min: int = 1
) -> int:
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not min <= value < 2**31:
        problem = f"has {name}={short(value)}" if name in settings else f"lacks {name}"
        raise ArgumentError(
            f"{path} {problem}; it must be an integer of at least {min}. Use the config.json that belongs "
            "to the weights."
        )
    return value


def read_tensors(folder: Path, layout: CheckpointLayout) -> dict[str, Tensor]:
    """Return float32 parameters, keyed by our names. Names and shapes are validated before reading."""
    with open_tensors(folder) as slices:
        names = _encoder_names(folder, slices)
        _check_names(folder, names, layout)
        for _, theirs, shape in layout.tensors():
            for name in theirs:
                check_tensor(folder, name, slices[names[name]][1], shape)
        return {
            ours: read_tensor(folder, {names[name]: slices[names[name]][0] for name in theirs}, shape)
            for ours, theirs, shape in layout.tensors()
        }


def _encoder_names(folder: Path, slices: Mapping[str, Any]) -> dict[str, str]:
    """Map the encoder's tensor names, without the prefix of an enclosing model, to the names in the file."""
    prefix = next((prefix for prefix in _PREFIXES if prefix + _WORDS in slices), None)
    if prefix is None:
        names = short_list(sorted(slices)) if slices else "no tensors"
        raise ArgumentError(
            f"The weights in {folder} lack {_WORDS}, with or without the prefixes "
            f"{', '.join(_PREFIXES[1:])}; they have {names}. Use a BERT, RoBERTa or DistilBERT model."
        )
    names_in_file: dict[str, str] = {}
    for name in slices:
        plain = name.removeprefix(prefix)
        if name.startswith(prefix) and plain.partition(".")[0] not in _HEADS and plain not in _BUFFERS:
            # early BERT checkpoints use gamma and beta
            new = plain.replace("LayerNorm.gamma", "LayerNorm.weight")
            new = new.replace("LayerNorm.beta", "LayerNorm.bias")
            if new in names_in_file:
                raise ArgumentError(
                    f"{folder} has both {short(names_in_file[new])} and {short(name)}, two names for "
                    "the same tensor; remove one."
                )
            names_in_file[new] = name
    return names_in_file


def _check_names(folder: Path, names: Mapping[str, str], layout: CheckpointLayout) -> None:
    """Raise an error unless the names match the config.

    The number of layers is checked first, because a config may claim 10⁹ layers.
    """
    block = layout.family.block + "."
    numbers = {name.removeprefix(block).partition(".")[0] for name in names if name.startswith(block)}
    if len(numbers) != layout.config.layers:
        raise ArgumentError(
            f"{layout.path} has {layout.family.sizes['layers']}={layout.config.layers}, but the weights have "
            f"{pluralize(len(numbers), 'layer')}; use the config.json and weights of the same model."
        )
    expected = {name for _, theirs, _ in layout.tensors() for name in theirs}
    missing, extra = sorted(expected - names.keys()), sorted(names.keys() - expected)
    if missing:
        raise ArgumentError(f"The weights in {folder} lack {short_list(missing)}; copy the whole folder.")
    if extra:
        raise ArgumentError(
            f"The weights in {folder} have {short_list(extra)}, which regard does not support; the output "
            "would be wrong without them."
        )
