"""Code shared by all export formats: checks, vocabulary files and the alignment head."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard._util.files import write_atomic
from regard.errors import ArgumentError
from regard.mechanism.normalizers import Softmax
from regard.models.layers.attention import MultiHeadAttention
from regard.models.layers.blocks import TransformerConfig
from regard.models.transformer import Transformer
from regard.translation.alignment.alignment_head import AlignmentHead
from regard.translation.alignment.cross_attention import layer_name
from regard.translation.pretrained.tokenizer import JsonTokenizer, SentencePieceTokenizer
from regard.translation.tokens import Tokenizer, TokenizerPair
from regard.translation.translator import Translator

Array = NDArray[numpy.float32]
MAX_POSITIONS = 2048  # rows in an exported table of sinusoidal positions; regard has no limit
SUPPRESSED = -1e9  # bias for tokens that are never generated


class Plan(NamedTuple):
    """A translator and the format to export it to."""

    model: Transformer
    tokens: TokenizerPair
    head: AlignmentHead
    target: str  # name of the format, for errors

    @classmethod
    def of(cls, translator: Translator, target: str) -> "Plan":
        """Create a plan; raise unless the model is a Transformer with softmax attention."""
        model = translator.model
        if not isinstance(model, Transformer):
            raise ArgumentError(
                f"{target} export needs a Transformer, got a {type(model).__name__}; train one with "
                "model.kind=transformer."
            )
        plan = cls(model, translator.tokens, translator.alignment_head, target)
        for config in plan.configs:
            plan.require("normalize", config.normalize, Softmax())
            plan.require("key_heads", config.key_heads or config.heads, config.heads)
        if translator.tokens.target.kind == "words":
            plan.require("tokens.kind", "words", "unigram", "bpe", "characters")
        return plan

    @property
    def configs(self) -> tuple[TransformerConfig, TransformerConfig]:
        """The configs of the encoder and the decoder."""
        return self.model.encoder.config, self.model.decoder.config

    def require(self, name: str, value: Any, *supported: Any) -> None:
        """Raise unless a setting has a value that the format can express."""
        if value not in supported:
            expected = " and ".join(str(option) for option in supported)
            raise ArgumentError(
                f"{self.target} cannot express {name}={value}; it supports only {expected}. Train a model "
                f"with {name}={supported[0]}, or export to another format."
            )

    def require_same(self, *names: str) -> None:
        """Raise unless the given settings are the same in encoder and decoder."""
        encoder, decoder = self.configs
        for name in names:
            if getattr(encoder, name) != getattr(decoder, name):
                raise ArgumentError(
                    f"{self.target} cannot express an encoder with {name}={getattr(encoder, name)} and a "
                    f"decoder with {name}={getattr(decoder, name)}; they must be equal. "
                    "Export to another format."
                )

    def output_bias(self) -> Array:
        """Return the bias to add to the logits; it is −1e9 for tokens that are never generated."""
        bias = self.model.output_bias
        values = torch.zeros(len(self.model.output_weight)) if bias is None else bias.detach().clone()
        values[list(self.tokens.special.never_generated)] = SUPPRESSED
        return array(values)

    def positions(self, side: str, rows: int | None = None) -> Array:
        """Return the position table that is added to the embeddings of "encoder" or "decoder"."""
        stack = getattr(self.model, side)
        config = stack.config
        rows = rows or (config.max_positions if config.positions == "learned" else MAX_POSITIONS)
        if self.model.max_length is not None:
            rows = min(rows, self.model.max_length)
        with torch.no_grad():
            return array(stack.positions(torch.arange(rows)))

    def alignment(self) -> tuple[int, list[int]]:
        """Return the layer and heads to read alignments from, counted from 0."""
        layer_name(self.model, self.head)  # raises if the head does not exist
        layers = len(self.model.decoder.blocks)
        heads = self.head.heads
        every = range(self.model.decoder.config.heads)
        return self.head.layer % layers, list(every if heads is None else heads)

    def pieces(self, side: str) -> list[str]:
        """Return the tokens of "source" or "target" by id."""
        return list(getattr(self.tokens, side).pieces())


def array(tensor: Tensor) -> Array:
    """Return a float32 array."""
    return tensor.detach().float().cpu().contiguous().numpy()


def first_heads(attention: MultiHeadAttention, heads: Sequence[int]) -> MultiHeadAttention:
    """Return a copy of a layer with the given heads first. The order of heads does not change the output."""
    order = [*heads, *(head for head in range(attention.heads) if head not in heads)]
    reordered = copy.deepcopy(attention)
    width = attention.head_width
    rows = torch.cat([torch.arange(head * width, (head + 1) * width) for head in order])
    size = attention.heads * width
    assert isinstance(reordered.in_proj, torch.nn.Linear)
    with torch.no_grad():
        for which in range(3):
            part = slice(which * size, (which + 1) * size)
            reordered.in_proj.weight[part] = reordered.in_proj.weight[part][rows].clone()
            if reordered.in_proj.bias is not None:
                reordered.in_proj.bias[part] = reordered.in_proj.bias[part][rows].clone()
        reordered.out_proj.weight.copy_(attention.out_proj.weight[:, rows])
    return reordered


def write_vocabulary(tokenizer: Tokenizer, path: Path) -> str:
    """Write the tokenizer to `path` with the suffix .spm or .json; return the file name."""
    if isinstance(tokenizer, JsonTokenizer):
        path = path.with_suffix(".json")
        write_atomic(path, tokenizer.to_json().encode())
    else:
        path = path.with_suffix(".spm")
        content = (
            tokenizer.serialized() if isinstance(tokenizer, SentencePieceTokenizer) else tokenizer.content
        )
        write_atomic(path, content)
    return path.name


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file."""
    write_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def check_output(folder: Path) -> None:
    """Raise unless a folder is new or empty."""
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"{str(folder)!r} is a file; choose a new folder for the export.")
    if folder.exists() and any(folder.iterdir()):
        raise ArgumentError(f"{str(folder)!r} exists and is not empty; choose a new folder for the export.")
