"""Checkpoints in Hugging Face's layout: a config.json and safetensors, checked before anything is allocated.

These models share the encoder of BERT (Devlin et al. 2019) and differ in the names of their tensors;
RoBERTa also in where its positions begin.
"""

import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard._util.checks import check_number
from regard._util.text import format_bytes
from regard.errors import ArgumentError
from regard.models.layers.blocks import Activation, TransformerConfig

LARGEST_JSON = 64 * 2**20  # the largest tokenizer.json of today has some 17 MB

# Our names, and those of the tensors they are made of: several are stacked.
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
    """How one kind of model names its sizes and its tensors."""

    sizes: Mapping[str, str]
    block: str
    parts: Mapping[str, tuple[str, ...]]
    padded_positions: bool = False  # positions begin behind the number of the padding mark
    types: bool = True
    bytes: bool = False  # tokens are pieces of bytes, not of words


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
    "distilbert": Family(_DISTILBERT_SIZES, "transformer.layer", _DISTILBERT, types=False),
}
_PREFIXES = ("", "bert.", "roberta.", "distilbert.")
_WORDS = "embeddings.word_embeddings.weight"
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_HEADS = {
    *("pooler", "cls", "lm_head", "classifier", "pre_classifier", "qa_outputs"),
    *("vocab_transform", "vocab_layer_norm", "vocab_projector"),
}


@dataclass(frozen=True)
class CheckpointLayout:
    """What a config.json says: the family, the blocks, and the sizes of the embeddings."""

    path: Path
    family: Family
    config: TransformerConfig
    vocabulary: int
    types: int
    padding: int | None  # RoBERTa's padding mark: positions begin behind its number

    @property
    def longest(self) -> int:
        """How many tokens a sentence may have."""
        return self.config.max_positions - (0 if self.padding is None else self.padding + 1)

    def tensors(self) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...]]]:
        """Our name of each parameter, the tensors it is made of, and the shape of each of those."""
        width, ffn_dim = self.config.width, self.config.resolved_ffn_dim
        yield "words.weight", (_WORDS,), (self.vocabulary, width)
        yield "positions.vectors", ("embeddings.position_embeddings.weight",), (self.config.max_positions, width)
        if self.types:
            yield "types", ("embeddings.token_type_embeddings.weight",), (self.types, width)
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
    """Read and check config.json; nothing in it chooses code."""
    path = folder / "config.json"
    settings = read_json(path, most=2**20)
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ArgumentError(
            f"{path} says model_type={_short(kind)}; load_encoder reads {', '.join(FAMILIES)} "
            "(MiniLM is a bert)."
        )
    family = FAMILIES[kind]
    _check_plain(path, settings)
    sizes = (_whole(path, settings, family.sizes[name]) for name in ("width", "layers", "heads", "ffn_dim"))
    width, layers, heads, ffn_dim = sizes
    eps = 1e-12 if kind == "distilbert" else settings.get("layer_norm_eps", 1e-12)
    max_positions = _whole(path, settings, "max_position_embeddings")
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
        raise ArgumentError(f"{path} describes no model: {str(error)[:300]}") from None
    types = _whole(path, settings, "type_vocab_size", 2) if family.types else 0
    padding = _whole(path, settings, "pad_token_id", 1, least=0) if family.padded_positions else None
    if padding is not None and padding + 1 >= max_positions:
        raise ArgumentError(
            f"{path} says pad_token_id={padding} and max_position_embeddings={max_positions}; positions begin "
            "behind the number of the padding mark, so that none is left."
        )
    return CheckpointLayout(path, family, config, _whole(path, settings, "vocab_size"), types, padding)


def _check_plain(path: Path, settings: Mapping[str, Any]) -> None:
    """Only encoders with learned positions."""
    for name in ("is_decoder", "add_cross_attention", "is_encoder_decoder"):
        if settings.get(name):
            raise ArgumentError(
                f"{path} says {name}={_short(settings[name])}; load_encoder reads encoders, in which every "
                "word sees all others and no second sentence."
            )
    kind = settings.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ArgumentError(
            f"{path} says position_embedding_type={_short(kind)}; load_encoder reads models with learned "
            "positions, 'absolute'."
        )
    if settings.get("quantization_config"):
        raise ArgumentError(
            f"{path} has a quantization_config; load_encoder reads floating point weights: save the model "
            "before it is quantized."
        )


def _activation(path: Path, settings: Mapping[str, Any], name: str) -> Activation:
    value = settings.get(name, "gelu")
    if value in ("gelu", "relu"):
        return value
    raise ArgumentError(
        f"{path} says {name}={_short(value)}; load_encoder knows gelu (the exact one) and relu."
    )


def _whole(
    path: Path, settings: Mapping[str, Any], name: str, default: int | None = None, least: int = 1
) -> int:
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        lacks = "lacks" if name not in settings else f"says {name}={_short(value)} for"
        raise ArgumentError(
            f"{path} {lacks} {name}, which is a whole number from {least} on; take config.json from the "
            "folder that the weights come from."
        )
    return value


def read_json(path: Path, most: int = LARGEST_JSON) -> dict[str, Any]:
    """The object in a JSON file of bounded size."""
    try:
        found = json.loads(read_text(path, most))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"{path} is no JSON: {_short(str(error))}. Copy or download it again.") from None
    if not isinstance(found, dict):
        raise ArgumentError(f"{path} holds a {type(found).__name__}; it should be an object, {{…}}.")
    return found


def read_text(path: Path, most: int = LARGEST_JSON) -> str:
    """The text in a file of bounded size."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(0, "it is no file")  # a pipe would be waited for
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise ArgumentError(
            f"{path} cannot be read: {error.strerror}. A folder needs config.json, safetensors and "
            "a tokenizer."
        ) from None
    if len(content) > most:
        raise ArgumentError(
            f"{path} has more than {format_bytes(most)}, the most that regard reads of such a file."
        )
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ArgumentError(f"{path} is no UTF-8 text. Copy or download it again.") from None


def read_tensors(folder: Path, layout: CheckpointLayout) -> dict[str, Tensor]:
    """The parameters by our names, in float32; names and shapes are checked before the first one is read."""
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        slices: dict[str, Any] = {}
        for path in _files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
                slices |= {name: (file, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, OSError, RuntimeError, MemoryError) as error:  # no room to map it
                raise ArgumentError(
                    f"{path} is no whole safetensors file, or too large for the memory: "
                    f"{_short(str(error))}. Copy or download it again."
                ) from None
        names = _named(folder, slices)
        _check_names(folder, names, layout)
        for _, theirs, shape in layout.tensors():
            for name in theirs:
                _check_tensor(folder, name, slices[names[name]][1], shape)
        try:
            return {
                ours: _read(folder, {names[name]: slices[names[name]][0] for name in theirs}, shape)
                for ours, theirs, shape in layout.tensors()
            }
        except (SafetensorError, RuntimeError, MemoryError) as error:
            raise ArgumentError(
                f"the weights in {folder} cannot be read: {_short(str(error))}. Is there memory for them?"
            ) from None


def _read(folder: Path, files: Mapping[str, Any], shape: tuple[int, ...]) -> Tensor:
    """Tensors of one shape, stacked: each goes from its file to its place, without a copy between."""
    whole = torch.empty(len(files) * shape[0], *shape[1:], dtype=torch.float32, device="cpu")
    for (name, file), part in zip(files.items(), whole.split(shape[0]), strict=True):
        part.copy_(file.get_tensor(name))
        if not all(math.isfinite(bound) for bound in part.aminmax()):
            raise ArgumentError(
                f"{name} in {folder} has numbers that are NaN or infinite; the training or the conversion "
                "that wrote it went wrong. Take an earlier checkpoint."
            )
    return whole


def _files(folder: Path) -> list[Path]:
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        return _shards(folder, index)
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if len(found) == 1:
        return found
    if found:
        raise ArgumentError(
            f"{folder} has {len(found)} safetensors files, no model.safetensors and no index; leave one of "
            "them there, or add model.safetensors.index.json."
        )
    pickled = [path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern)]
    if pickled:
        raise ArgumentError(
            f"{folder} has its weights in {pickled[0]}, a pickle, which can run any code; regard reads "
            "safetensors alone. Convert it where you trust it: transformers' save_pretrained writes "
            "model.safetensors."
        )
    raise ArgumentError(f"{folder} has no weights; load_encoder reads model.safetensors beside config.json.")


def _shards(folder: Path, index: Path) -> list[Path]:
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
        raise ArgumentError(f"{index} has no weight_map from the names of tensors to those of files.")
    names = sorted(set(where.values()))
    for name in names:
        if Path(name).name != name or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
            raise ArgumentError(
                f"{index} points to {_short(name)}; it may name safetensors files beside it alone."
            )
    paths = [folder / name for name in names]
    for path in paths:
        if not path.is_file():
            raise ArgumentError(
                f"{index} points to {_short(path.name)}, which is not there; take the folder whole."
            )
    return paths


def _named(folder: Path, slices: Mapping[str, Any]) -> dict[str, str]:
    """The encoder's tensors, from names without the prefix of a model around it to those in the file."""
    prefix = next((prefix for prefix in _PREFIXES if prefix + _WORDS in slices), None)
    if prefix is None:
        names = ", ".join(sorted(slices)[:3]) or "none at all"
        raise ArgumentError(
            f"the weights in {folder} lack {_WORDS}, also behind {', '.join(_PREFIXES[1:])}; there are "
            f"{_short(names)}, … Is this a BERT, RoBERTa or DistilBERT?"
        )
    found: dict[str, str] = {}
    for name in slices:
        plain = name.removeprefix(prefix)
        if name.startswith(prefix) and plain.partition(".")[0] not in _HEADS and plain not in _BUFFERS:
            old = plain.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
                "LayerNorm.beta", "LayerNorm.bias"
            )
            if old in found:
                both = f"{_short(found[old])} and {_short(name)}"
                raise ArgumentError(f"{folder} has both {both}, which are one; leave one of them away.")
            found[old] = name  # the first BERTs call them gamma and beta
    return found


def _check_names(folder: Path, names: Mapping[str, str], layout: CheckpointLayout) -> None:
    """The very tensors that the config asks for; counted first, as it may ask for 10⁹ layers."""
    block = layout.family.block + "."
    numbers = {name.removeprefix(block).partition(".")[0] for name in names if name.startswith(block)}
    if len(numbers) != layout.config.layers:
        raise ArgumentError(
            f"{layout.path} says {layout.family.sizes['layers']}={layout.config.layers} and the weights have "
            f"{len(numbers)} layers; take both from the same folder."
        )
    wanted = {name for _, theirs, _ in layout.tensors() for name in theirs}
    missing, extra = sorted(wanted - names.keys()), sorted(names.keys() - wanted)
    if missing:
        raise ArgumentError(f"the weights in {folder} lack {_some(missing)}; take the folder whole.")
    if extra:
        raise ArgumentError(
            f"the weights in {folder} have {_some(extra)}, which is no part of such an encoder; it would "
            "give other numbers without them."
        )


def _check_tensor(folder: Path, name: str, part: Any, shape: tuple[int, ...]) -> None:
    if tuple(part.get_shape()) != shape:
        raise ArgumentError(
            f"{name} in {folder} has the shape {tuple(part.get_shape())} and config.json asks for {shape}; "
            "take both from the same folder."
        )
    if part.get_dtype() not in ("F64", "F32", "F16", "BF16"):
        raise ArgumentError(
            f"{name} in {folder} is of {part.get_dtype()}; load_encoder reads floating point weights: save "
            "the model before it is quantized."
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(_short(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _short(value: object) -> str:
    """A value of a file that may be hostile, in a line."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 120
    return short.repr(value)
