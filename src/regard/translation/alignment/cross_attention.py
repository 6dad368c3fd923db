"""What the tokens of a target look at in the source while a model reads both: its cross-attention.

source [END]  ┐
[START] target┴ model → weights (heads, 1 + target, source + 1) → tokens alone, of the heads that were chosen

The target is known, whoever wrote it ("forced decoding").
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.mechanism.weights.matrix import Weights
from regard.models.layers.attention import Attends, watch_layers
from regard.models.layers.dropout import eval_mode
from regard.models.packed import Packed, as_padded
from regard.models.seq2seq import Seq2Seq
from regard.translation.tokens import END, START

Shift = Literal["input", "output"]

_CROSS = re.compile(r"(^|\.)decoder\.(blocks\.\d+\.cross|attention)$")
_TOKENS = 8192  # of both sides in a batch, with padding


@dataclass(frozen=True)
class AlignmentHead:
    """Which of a model's attentions says where words came from.

    layer: of the decoder, from 0; −1 is the last, −2 the one before it.
    heads: the mean of these; None is the mean of all.
    shift: "output", at the step that wrote a token, when it was not yet known; or "input", at the step that
        reads it. The latter aligns better in a Transformer (Chen et al. 2020); Bahdanau's attention looks
        before it reads, so that "output" suits it.

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
        if type(self.layer) is not int:  # True is one, too
            raise ArgumentError(
                f"AlignmentHead got layer={self.layer!r}; a layer is a whole number, −1 is the last."
            )
        if self.heads is not None and not (
            isinstance(self.heads, tuple)
            and self.heads
            and all(type(h) is int and h >= 0 for h in self.heads)
        ):
            raise ArgumentError(
                f"AlignmentHead got heads={self.heads!r}; give the numbers of heads from 0, (0, 2), or None for all."
            )
        if self.shift not in get_args(Shift):
            raise ArgumentError(
                f"AlignmentHead got shift={self.shift!r}; there are {', '.join(get_args(Shift))}."
            )

    def to_dict(self) -> dict[str, Any]:
        """As numbers and lists, for a JSON file."""
        heads = None if self.heads is None else list(self.heads)
        return {"layer": self.layer, "heads": heads, "shift": self.shift}

    @classmethod
    def from_dict(cls, choice: Mapping[str, Any]) -> "AlignmentHead":
        """What `to_dict` gave."""
        if not isinstance(choice, Mapping) or not choice.keys() <= {"layer", "heads", "shift"}:
            raise ArgumentError(
                f"{choice!r} is no choice of attention; it has layer, heads and shift: {AlignmentHead().to_dict()}."
            )
        heads = choice.get("heads")
        return cls(**{**choice, "heads": tuple(heads) if isinstance(heads, list) else heads})


@torch.no_grad()
def cross_weights(
    model: Seq2Seq,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    choice: AlignmentHead = AlignmentHead(),  # noqa: B008 (a frozen value)
) -> list[Tensor]:
    """What each target token looked at, (target tokens × source tokens), while the model read the pair.

    Tokens are given and answered without marks. What went to the source's end mark is left out, and the rest
    is not scaled up, so that rows sum to at most 1.

    >>> from regard.models import TransformerConfig, Transformer
    >>> from regard.translation.alignment.cross_attention import cross_weights
    >>> model = Transformer(100, TransformerConfig(width=16, heads=2))
    >>> [tuple(weights.shape) for weights in cross_weights(model, [[5, 6, 7], [8]], [[5, 6], [7, 8]])]
    [(2, 3), (2, 1)]
    """
    name = layer_name(model, choice)
    found: dict[int, Tensor] = {}
    for some, seen in watch_forced_decoding(model, sources, targets, [name]):
        weights = torch.cat([_mean(one, choice.heads) for one in seen[name]], -2)
        for i, part in zip(some, weights, strict=True):
            found[i] = drop_special_tokens(part, len(targets[i]), len(sources[i]), choice.shift).clone()
    return [found[i] for i in range(len(sources))]


def drop_special_tokens(weights: Tensor, target: int, source: int, shift: Shift) -> Tensor:
    """The rows and columns of tokens, of weights (…, 1 + target, source + 1) that also have those of marks.

    Row i is that of the step which reads token i − 1 (the start mark first) and writes token i.
    """
    first = 1 if shift == "input" else 0
    return weights[..., first : first + target, :source]


def watch_forced_decoding(
    model: Seq2Seq, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], names: Sequence[str]
) -> Iterator[tuple[list[int], dict[str, list[Weights]]]]:
    """Batch after batch: which pairs, and the weights of the attentions of these names, of each call.

    Each has the shape (b, heads, steps, longest source + 1); the calls of a recurrent model may be one for
    each step. All steps together are 1 + the longest target.
    """
    if len(sources) != len(targets):
        raise ArgumentError(
            f"there are {len(sources)} source sentences and {len(targets)} target sentences; each target "
            "belongs to one source."
        )
    for some in _batches(sources, targets):
        yield some, _watch([sources[i] for i in some], [targets[i] for i in some], model, names)


@torch.no_grad()
def _watch(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], model: Seq2Seq, names: Sequence[str]
) -> dict[str, list[Weights]]:
    device = model.output_weight.device
    source, source_lengths = as_padded(Packed.of([[*tokens, END] for tokens in sources], device))
    target, target_lengths = as_padded(Packed.of([[START, *tokens] for tokens in targets], device))
    seen: dict[str, list[Weights]] = {name: [] for name in names}

    def report(name: str, weights: Weights) -> None:
        if name in seen:
            seen[name].append(weights)

    with eval_mode(model), watch_layers(model, report):
        # padded, not packed: a recurrent model pads anyway, and the weights of a batch are one dense tensor
        model.hidden(source, target, source_lengths=source_lengths, target_lengths=target_lengths)
    return seen


def cross_attention_layers(model: Seq2Seq) -> dict[str, int]:
    """The names of a model's attentions to the source, the first layer first, and their numbers of heads.

    >>> from regard.models import TransformerConfig, Transformer
    >>> from regard.translation.alignment.cross_attention import cross_attention_layers
    >>> cross_attention_layers(Transformer(100, TransformerConfig(width=16, heads=2, layers=2)))
    {'decoder.blocks.0.cross': 2, 'decoder.blocks.1.cross': 2}
    """
    found = _crossing(model)
    if not found:
        raise ArgumentError(
            f"this {type(model).__name__} does not attend to the source, so that it cannot say which word "
            "came from which; train one with attention: a transformer, or recurrent."
        )
    return found


def has_cross_attention(model: Seq2Seq) -> bool:
    """Whether a model attends to the source at all; a plain one does not.

    >>> from regard.models import RecurrentConfig, RecurrentSeq2Seq
    >>> from regard.translation.alignment.cross_attention import has_cross_attention
    >>> [has_cross_attention(RecurrentSeq2Seq(9, RecurrentConfig(8, attention=kind))) for kind in ("none", "additive")]
    [False, True]
    """
    return bool(_crossing(model))


def _crossing(model: Seq2Seq) -> dict[str, int]:
    return {
        name: int(getattr(module, "heads", 1))
        for name, module in ((n.replace("_orig_mod.", ""), m) for n, m in model.named_modules())
        if isinstance(module, Attends) and _CROSS.search(name)
    }


def layer_name(model: Seq2Seq, choice: AlignmentHead) -> str:
    """The name of the attention that was chosen, if the model has it."""
    layers = cross_attention_layers(model)
    if not -len(layers) <= choice.layer < len(layers):
        raise ArgumentError(
            f"the choice is layer {choice.layer}, and the model attends to the source in {len(layers)}; give "
            f"0 to {len(layers) - 1}, or −1 for the last."
        )
    name = list(layers)[choice.layer]
    if choice.heads is not None and max(choice.heads) >= layers[name]:
        raise ArgumentError(
            f"the choice is head {max(choice.heads)}, and the attention has {layers[name]}; give 0 to "
            f"{layers[name] - 1}, or None (--heads all) for the mean of all."
        )
    return name


def _mean(weights: Weights, heads: tuple[int, ...] | None) -> Tensor:
    """b h t s → b t s, on the CPU."""
    some = weights if heads is None else weights.heads(list(heads))
    return some.mean("heads").dense().float().cpu()


def _batches(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Pairs of similar lengths, so that little is padded."""
    lengths = [(len(target) + 1, len(source) + 1) for source, target in zip(sources, targets, strict=True)]
    batch: list[int] = []
    longest = (0, 0)
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        padded = max(longest[0], lengths[i][0]), max(longest[1], lengths[i][1])
        if batch and sum(padded) * (len(batch) + 1) > _TOKENS:
            yield batch
            batch, padded = [], lengths[i]
        batch.append(i)
        longest = padded
    if batch:
        yield batch
