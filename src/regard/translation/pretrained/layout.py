"""Architecture of a pretrained translator, and the names of its tensors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._util.text import pluralize
from regard.errors import ArgumentError
from regard.models.checkpoint_files import check_tensor, open_tensors, read_tensor, short, short_list
from regard.models.layers.blocks import TransformerConfig
from regard.models.parameters import meta_device
from regard.models.transformer import Transformer

Shape = tuple[int, ...]
_CONVERT = "AutoModelForSeq2SeqLM"  # the class that converts pickled weights


class Mapped(NamedTuple):
    """A parameter: our name, the names of the tensors to concatenate, and the shape of each tensor."""

    ours: str
    theirs: tuple[str, ...]
    shape: Shape


@dataclass(frozen=True)
class Layout:
    """Architecture and tensor names, as given by config.json.

    path: config.json, for error messages. family: the model type, such as "marian".
    encoder, decoder: the two stacks. vocab_sizes: source and target.
    share, tie_output, output_bias, output_scale: see `Transformer`.
    parameters: yields our parameters and their names in the file; called after checking the number of layers.
    stacks: name prefixes of the encoder and decoder layers, up to the layer number.
    copies: alternative tensor names that files may contain: name → the name in `parameters`.
    ignored: names that files may contain, but that the model does not use.
    max_length: maximum number of tokens per sentence.
    position_offset: unused rows at the beginning of a learned position table.
    """

    path: Path
    family: str
    encoder: TransformerConfig
    decoder: TransformerConfig
    vocab_sizes: tuple[int, int]
    share: bool
    tie_output: bool
    output_bias: bool
    parameters: Callable[[], Iterator[Mapped]]
    stacks: tuple[str, str]
    copies: Mapping[str, str]
    ignored: frozenset[str] = frozenset()
    output_scale: float = 1.0
    max_length: int | None = None
    position_offset: int = 0

    def build(self, dropout: float | None = None) -> Transformer:
        """Build the model. dropout: replaces the config's dropout probability, for training."""
        encoder, decoder = self.encoder, self.decoder
        if dropout is not None:
            encoder, decoder = replace(encoder, dropout=dropout), replace(decoder, dropout=dropout)
        model = Transformer(
            self.vocab_sizes[0] if self.share else self.vocab_sizes,
            encoder,
            share=self.share,
            decoder_config=decoder,
            tie_output=self.tie_output,
            output_bias=self.output_bias,
            output_scale=self.output_scale,
        )
        model.max_length = self.max_length
        return model

    def load(self, folder: Path) -> Transformer:
        """Build the model and read its parameters from safetensors."""
        with open_tensors(folder, convert=_CONVERT) as slices:
            self._check_layers(slices)
            tensors = self._read(folder, slices)
        with meta_device():  # allocates nothing: the tensors become the parameters
            model = self.build()
        model.load_state_dict(tensors, assign=True)
        return model.eval()

    def _check_layers(self, slices: Mapping[str, Any]) -> None:
        """Raise unless the file has as many layers as the config; a forged config may claim 10⁹."""
        for stack, config in zip(self.stacks, (self.encoder, self.decoder), strict=True):
            numbers = {name[len(stack) :].partition(".")[0] for name in slices if name.startswith(stack)}
            if len(numbers) != config.layers:
                raise ArgumentError(
                    f"{self.path} has {pluralize(config.layers, 'layer')}, but the weights have "
                    f"{len(numbers)} named {stack}…; use the config.json and weights of the same model."
                )

    def _read(self, folder: Path, slices: Mapping[str, Any]) -> dict[str, Tensor]:
        parameters = list(self.parameters())
        names = {name for _, theirs, _ in parameters for name in theirs}
        available = {name: file for name, (file, _) in slices.items()}
        source = {name: name for name in names}
        for copy, name in self.copies.items():
            if name in names and name not in slices and copy in slices:
                source[name] = copy  # the file contains the tensor only under its other name
        missing = sorted(name for name in names if source[name] not in slices)
        if missing:
            raise ArgumentError(f"The weights in {folder} lack {short_list(missing)}; copy the whole folder.")
        extra = sorted(slices.keys() - names - self.copies.keys() - self.ignored)
        if extra:
            raise ArgumentError(
                f"The weights in {folder} have {short_list(extra)}, which regard does not support; the "
                "output would be wrong without them."
            )
        for _, theirs, shape in parameters:
            for name in theirs:
                check_tensor(folder, source[name], slices[source[name]][1], shape)
        tensors = {
            ours: self._adapt(
                ours, read_tensor(folder, {source[name]: available[source[name]] for name in theirs}, shape)
            )
            for ours, theirs, shape in parameters
        }
        self._check_copies(folder, slices, source)
        self._check_positions(folder, slices)
        return tensors

    def _check_positions(self, folder: Path, slices: Mapping[str, Any]) -> None:
        """Raise if a stored table of sinusoidal positions differs from the one that regard computes."""
        if self.encoder.positions != "sinusoidal":
            return
        for name in self.ignored & slices.keys():
            file, part = slices[name]
            shape = part.get_shape()
            if shape[1:] != [self.encoder.width] or shape[0] > 2**20:
                raise ArgumentError(
                    f"{short(name)} in {folder} has shape {tuple(shape)}; config.json requires "
                    f"{self.encoder.width} columns. Use the config.json and weights of the same model."
                )
            first = 2 if self.encoder.sinusoids == "fairseq" else 0  # rows that are never used
            computed = self.encoder.make_positions(causal=False)(torch.arange(max(shape[0] - first, 0)))
            stored = file.get_tensor(name)[first:]
            rounding = torch.finfo(stored.dtype).eps if stored.is_floating_point() else 0.0
            if not torch.allclose(stored.float(), computed, atol=max(1e-4, rounding)):
                raise ArgumentError(
                    f"{short(name)} in {folder} is not a table of sinusoidal positions, which config.json "
                    "requires; use the config.json and weights of the same model."
                )

    def _adapt(self, ours: str, tensor: Tensor) -> Tensor:
        """Convert a tensor to the shape of our parameter."""
        if ours.endswith(".positions.vectors"):
            return tensor[self.position_offset :].clone()
        return tensor.flatten() if ours == "bias" else tensor

    def _check_copies(self, folder: Path, slices: Mapping[str, Any], source: Mapping[str, str]) -> None:
        """Raise if a copy of a shared tensor differs from the original."""
        for copy, name in self.copies.items():
            original = source.get(name)
            if copy not in slices or original is None or original == copy:
                continue
            first, second = (slices[key][0].get_tensor(key) for key in (original, copy))
            if first.shape != second.shape or not torch.equal(first, second):
                reason = (
                    f"but {self.path} ties them; use the config.json and weights of the same model."
                    if self.tie_output
                    else "which regard supports only in Marian models with "
                    "share_encoder_decoder_embeddings=false."
                )
                raise ArgumentError(f"{short(copy)} and {short(original)} in {folder} differ, {reason}")


def attention(ours: str, theirs: str, config: TransformerConfig, names: tuple[str, ...]) -> Iterator[Mapped]:
    """Yield the parameters of an attention layer.

    names: tensor names of the query, key, value and output projections.
    """
    inner, width = config.heads * config.resolved_head_width, config.width
    for kind, shapes in (("weight", ((inner, width), (width, inner))), ("bias", ((inner,), (width,)))):
        if kind == "weight" or config.linear_bias:
            inputs = tuple(f"{theirs}.{name}.{kind}" for name in names[:3])
            yield Mapped(f"{ours}.in_proj.{kind}", inputs, shapes[0])
            yield Mapped(f"{ours}.out_proj.{kind}", (f"{theirs}.{names[3]}.{kind}",), shapes[1])


def norm(ours: str, theirs: str, config: TransformerConfig) -> Iterator[Mapped]:
    """Yield the parameters of a norm."""
    for kind in ("weight", "bias") if config.norm == "layer" else ("weight",):
        yield Mapped(f"{ours}.{kind}", (f"{theirs}.{kind}",), (config.width,))


def linear(
    ours: str, theirs: tuple[str, ...], shape: tuple[int, int], config: TransformerConfig
) -> Iterator[Mapped]:
    """Yield the parameters of a linear layer, which may be the concatenation of two."""
    yield Mapped(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), shape)
    if config.linear_bias:
        yield Mapped(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), shape[:1])
