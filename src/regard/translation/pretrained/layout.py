"""Architecture of a pretrained translator, and the names of its tensors."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
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
_CHUNKS = 64  # compares large matrices in parts, to save memory
_CONVERT = "AutoModelForSeq2SeqLM"  # the class that converts pickled weights


class Mapped(NamedTuple):
    """A parameter: our name, the names of the tensors to concatenate, and the shape of each tensor."""

    ours: str
    theirs: tuple[str, ...]
    shape: Shape


@dataclass(frozen=True)
class EmbeddingNames:
    """Names of the embedding matrices in the file.

    source, target: the embeddings of encoder and decoder. output: the output matrix.
    shared: the matrix that replaces source or target if the file lacks it; None: it replaces nothing.
    tied: whether config.json ties the output matrix to the target embeddings.
    """

    source: str
    target: str
    tied: bool
    shared: str | None = None
    output: str = "lm_head.weight"

    def __iter__(self) -> Iterator[str]:
        yield from (self.source, self.target, self.output, *([self.shared] if self.shared else []))

    def find(self, tensors: Collection[str]) -> dict[str, str]:
        """Return for each matrix the tensor that holds it; tied matrices may be stored under one name."""
        same = [self.shared, self.target, self.source] if self.shared else [self.target]
        same += [self.output] if self.tied else []
        found = {
            name: next((other for other in [name, *(same if name in same else [])] if other in tensors), name)
            for name in (self.source, self.target, self.output)
        }
        return {**found, self.shared: found[self.source]} if self.shared else found


@dataclass(frozen=True)
class Layout:
    """Architecture and tensor names, as given by config.json.

    path: config.json, for error messages. family: the model type, such as "marian".
    encoder, decoder: the two stacks. vocab_sizes: source and target.
    share, tie_output, output_bias, output_scale: see `Transformer`.
    embeddings: names of the embedding matrices.
    other_parameters: yields all parameters except these matrices; called after checking the number of layers.
    stacks: name prefixes of the encoder and decoder layers, up to the layer number.
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
    embeddings: EmbeddingNames
    other_parameters: Callable[[], Iterator[Mapped]]
    stacks: tuple[str, str]
    ignored: frozenset[str] = frozenset()
    output_scale: float = 1.0
    max_length: int | None = None
    position_offset: int = 0

    def parameters(self) -> Iterator[Mapped]:
        """Yield our parameters and their names in the file."""
        names, (source, target), width = self.embeddings, self.vocab_sizes, self.encoder.width
        if self.share:
            assert names.shared is not None
            yield Mapped("embedding.weight", (names.shared,), (target, width))
        else:
            yield Mapped("source_embedding.weight", (names.source,), (source, width))
            yield Mapped("embedding.weight", (names.target,), (target, width))
        if not self.tie_output:
            yield Mapped("matrix", (names.output,), (target, width))
        yield from self.other_parameters()

    def separate(self, folder: Path) -> "Layout":
        """Return the layout in which embedding matrices are separate if the file has different values.

        transformers 5 does the same, even if config.json ties them: it writes tie_word_embeddings=true for
        T5 1.1 and mT5, whose output matrix is separate.
        """
        names = self.embeddings
        with open_tensors(folder, convert=_CONVERT) as slices:
            found = names.find(slices)
            target = found[names.target]
            share = self.share and _equal(slices, found[names.source], target)
            tie_output = self.tie_output and _equal(slices, found[names.output], target)
        return replace(self, share=share, tie_output=tie_output)

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
        source = {**{name: name for name in names}, **self.embeddings.find(slices)}
        missing = sorted(name for name in names if source[name] not in slices)
        if missing:
            raise ArgumentError(f"The weights in {folder} lack {short_list(missing)}; copy the whole folder.")
        extra = sorted(slices.keys() - names - {*self.embeddings} - self.ignored)
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


def _equal(slices: Mapping[str, Any], *names: str) -> bool:
    """Whether two tensors are equal; True if one is missing, which `Layout.load` reports."""
    if len({*names}) == 1 or not slices.keys() >= {*names}:
        return True
    first, second = (slices[name][1] for name in names)
    shape = first.get_shape()
    if (shape, first.get_dtype()) != (second.get_shape(), second.get_dtype()):
        return False
    size = max(1, math.ceil(shape[0] / _CHUNKS)) if shape else 0
    parts = [slice(i * size, (i + 1) * size) for i in range(_CHUNKS) if shape and i * size < shape[0]]
    return all(torch.equal(first[part], second[part]) for part in parts)


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
