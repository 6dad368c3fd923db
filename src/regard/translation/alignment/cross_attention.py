"""Cross-attention weights for known sentence pairs (forced decoding).

source [END]  ┐
[START] target┴ model → weights (heads, 1 + target, source + 1) → selected heads, without special tokens
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from regard._util.text import pluralize
from regard.errors import ArgumentError
from regard.mechanism.weights.weights import Weights
from regard.models.layers.attention import Attends, is_cross_attention, watch_layers
from regard.models.layers.dropout import eval_mode
from regard.models.packed import Packed, as_padded
from regard.models.seq2seq import Seq2Seq
from regard.translation.alignment.alignment_head import AlignmentHead, drop_special_tokens

_BATCH_TOKENS = 8192  # tokens per batch, source plus target, including padding


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
