"""Cross-attention weights for known sentence pairs (forced decoding).

source [END]  ┐
[START] target┴ model → weights (heads, 1 + target, source + 1) → selected heads, without special tokens
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from regard._util.text import pluralize
from regard.errors import ArgumentError
from regard.mechanism.weights.weights import Weights
from regard.models.generation import SpecialTokens
from regard.models.layers.attention import Attends, is_cross_attention, watch_layers
from regard.models.layers.dropout import eval_mode
from regard.models.packed import Packed, as_padded
from regard.models.seq2seq import Seq2Seq

Shift = Literal["input", "output"]

_BATCH_TOKENS = 8192  # tokens per batch, source plus target, including padding


@dataclass(frozen=True)
class AlignmentHead:
    """The attention heads from which word alignments are read.

    layer: decoder layer, counted from 0; −1 is the last. heads: heads to average; None for all.
    shift: the decoding step whose weights align a token. "output": the step that predicts it; "input": the
        next step, which reads it. "input" aligns better in a Transformer (Chen et al. 2020). Bahdanau
        attention is computed before the token is read, so it needs "output".

    >>> from regard.translation.alignment.cross_attention import AlignmentHead
    >>> AlignmentHead(layer=1, heads=(0, 2)).to_dict()
    {'layer': 1, 'heads': [0, 2], 'shift': 'input'}
    >>> AlignmentHead.from_dict({"layer": -1, "heads": None, "shift": "output"})
    AlignmentHead(layer=-1, heads=None, shift='output')
    """

    layer: int = -1
    heads: tuple[int, ...] | None = None
    shift: Shift = "input"

    def __post_init__(self) -> None:
        if type(self.layer) is not int:  # also rejects bool
            raise ArgumentError(
                f"AlignmentHead got layer={self.layer!r}; pass an integer, such as −1 for the last layer."
            )
        if self.heads is not None and not (
            isinstance(self.heads, tuple)
            and self.heads
            and all(type(head) is int and head >= 0 for head in self.heads)
        ):
            raise ArgumentError(
                f"AlignmentHead got heads={self.heads!r}; pass a tuple of head indices, counted from 0, such "
                "as (0, 2), or None for all heads."
            )
        if self.shift not in get_args(Shift):
            raise ArgumentError(
                f"AlignmentHead got shift={self.shift!r}; it must be {' or '.join(get_args(Shift))}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-serializable values."""
        heads = None if self.heads is None else list(self.heads)
        return {"layer": self.layer, "heads": heads, "shift": self.shift}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "AlignmentHead":
        """Restore the result of `to_dict`."""
        if not isinstance(values, Mapping) or not values.keys() <= {"layer", "heads", "shift"}:
            raise ArgumentError(
                f"{values!r} is not an alignment head; pass a dictionary such as {cls().to_dict()}."
            )
        heads = values.get("heads")
        return cls(**{**values, "heads": tuple(heads) if isinstance(heads, list) else heads})


@torch.no_grad()
def cross_weights(
    model: Seq2Seq,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    alignment_head: AlignmentHead = AlignmentHead(),  # noqa: B008 (a frozen value)
) -> list[Tensor]:
    """Compute the cross-attention weights (target tokens, source tokens) of each sentence pair.

    sources, targets: token ids without special tokens. The weight on the source's end token is dropped
    without renormalization, so rows sum to at most 1.
    """
    name, shift, special = layer_name(model, alignment_head), alignment_head.shift, model.special_tokens
    results: dict[int, Tensor] = {}
    for batch, recorded in watch_forced_decoding(model, sources, targets, [name]):
        weights = torch.cat([_mean(call, alignment_head.heads) for call in recorded[name]], -2)
        for i, matrix in zip(batch, weights, strict=True):
            weights_of_tokens = drop_special_tokens(matrix, len(targets[i]), len(sources[i]), shift, special)
            results[i] = weights_of_tokens.clone()
    return [results[i] for i in range(len(sources))]


def drop_special_tokens(
    weights: Tensor,
    target: int,
    source: int,
    shift: Shift,
    special: SpecialTokens = SpecialTokens(),  # noqa: B008 (a frozen value)
) -> Tensor:
    """Drop the rows and columns of special tokens: (…, 1 + target, source + 1) → (…, target, source).

    Row i belongs to the step that reads token i − 1 (or the start token) and predicts token i.
    """
    first = len(special.target_prefix) + (1 if shift == "input" else 0)
    column = len(special.source_prefix)
    return weights[..., first : first + target, column : column + source]


def watch_forced_decoding(
    model: Seq2Seq, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], names: Sequence[str]
) -> Iterator[tuple[list[int], dict[str, list[Weights]]]]:
    """Yield, for each batch, the indices of its pairs and the weights of each call to the layers in `names`.

    The weights of one call have shape (b, heads, steps, longest source + 1). A recurrent model may make one
    call per step. Together, the calls to a layer cover 1 + longest target steps.
    """
    if len(sources) != len(targets):
        raise ArgumentError(
            f"Got {pluralize(len(sources), 'source sentence')} and "
            f"{pluralize(len(targets), 'target sentence')}; pass one target per source."
        )
    device = model.output_weight.device
    for batch in _batches(sources, targets):
        recorded: dict[str, list[Weights]] = {name: [] for name in names}

        def record(name: str, weights: Weights, recorded: dict[str, list[Weights]] = recorded) -> None:
            if name in recorded:
                recorded[name].append(weights)

        special = model.special_tokens
        source, source_lengths = as_padded(Packed.of([special.source(sources[i]) for i in batch], device))
        inputs = [special.target_inputs(targets[i]) for i in batch]
        target, target_lengths = as_padded(Packed.of(inputs, device))
        with torch.no_grad(), eval_mode(model), watch_layers(model, record):
            # padded, not packed, to get one dense tensor of weights per batch; a recurrent model pads anyway
            model.hidden(source, target, source_lengths=source_lengths, target_lengths=target_lengths)
        yield batch, recorded


def cross_attention_layers(model: Seq2Seq) -> dict[str, int]:
    """Return the names and head counts of the model's cross-attention layers, in order."""
    layers = _find_layers(model)
    if not layers:
        raise ArgumentError(
            f"This {type(model).__name__} has no cross-attention, so it cannot align words. Train a model "
            "with attention: transformer or recurrent."
        )
    return layers


def has_cross_attention(model: Seq2Seq) -> bool:
    """Return whether a model has cross-attention."""
    return bool(_find_layers(model))


def _find_layers(model: Seq2Seq) -> dict[str, int]:
    return {
        name: int(getattr(module, "heads", 1))
        for name, module in ((n.replace("_orig_mod.", ""), m) for n, m in model.named_modules())
        if isinstance(module, Attends) and is_cross_attention(name)
    }


def layer_name(model: Seq2Seq, alignment_head: AlignmentHead) -> str:
    """Return the name of an alignment head's layer; raise if the model does not have this layer or head."""
    layers = cross_attention_layers(model)
    layer, heads = alignment_head.layer, alignment_head.heads
    if not -len(layers) <= layer < len(layers):
        raise ArgumentError(
            f"Layer {layer} is out of range: the model has "
            f"{pluralize(len(layers), 'cross-attention layer')}, counted from 0; −1 is the last."
        )
    name = list(layers)[layer]
    if heads is not None and max(heads) >= layers[name]:
        raise ArgumentError(
            f"Head {max(heads)} is out of range: the layer has {pluralize(layers[name], 'head')}, counted "
            "from 0. For the mean of all heads, use None (--heads all)."
        )
    return name


def _mean(weights: Weights, heads: tuple[int, ...] | None) -> Tensor:
    """Average over heads: b h t s → b t s, on the CPU."""
    selected = weights if heads is None else weights.heads(list(heads))
    return selected.mean("heads").dense().float().cpu()


def _batches(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Group pairs of similar length to minimize padding."""
    lengths = [(len(target) + 1, len(source) + 1) for source, target in zip(sources, targets, strict=True)]
    batch: list[int] = []
    longest = (0, 0)
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        padded = max(longest[0], lengths[i][0]), max(longest[1], lengths[i][1])
        if batch and sum(padded) * (len(batch) + 1) > _BATCH_TOKENS:
            yield batch
            batch, padded = [], lengths[i]
        batch.append(i)
        longest = padded
    if batch:
        yield batch
