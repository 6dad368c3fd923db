"""What all sequence-to-sequence models share: teacher forcing, the loss, and decoding step by step.

training:   source, target → hidden → logits = hidden · output_weightᵀ + output_bias
decoding:   state = start(source); logits = step(tokens, state); logits = step(tokens, state); …
"""

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._util.checks import check_int
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.mechanism.torch_state import concrete
from regard.models.layers.dropout import eval_mode
from regard.models.loss import IGNORE, vocabulary_loss
from regard.models.packed import Packed, check_batch, token_mask

Kind = TypeVar("Kind", bound="State")


class State:
    """All that decoding goes on with; `step` advances it in place. Each model has a kind of its own.

    >>> import torch, regard
    >>> from regard.models.recurrent import RecurrentConfig, RecurrentSeq2Seq
    >>> model = RecurrentSeq2Seq(100, RecurrentConfig(width=16))
    >>> state = model.start(torch.tensor([[5, 6], [7, 8]]))
    >>> state.select(torch.tensor([1, 1, 0]))
    >>> model.step(torch.tensor([3, 4, 3]), state).shape
    torch.Size([3, 100])
    """

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order, as often as they are named: what beam search does."""
        raise NotImplementedError(f"{type(self).__name__} needs a method select(rows)")

    def __len__(self) -> int:
        """How many rows there are."""
        raise NotImplementedError(f"{type(self).__name__} needs a method __len__()")


class Seq2Seq(nn.Module):
    """Base of the models that write a target sentence while they look at a source sentence.

    Sentences are `Packed`, or a padded batch (b, l) with its lengths: `source_lengths` and `target_lengths`,
    (b). `tokens` are numbers of the vocabulary. A target begins with a start mark; for
    `loss` it also ends with an end mark. Subclasses give `hidden`, `output_weight`, `start` and `step`.

    >>> import torch, regard
    >>> from regard.models import Packed
    >>> from regard.models.recurrent import RecurrentConfig, RecurrentSeq2Seq
    >>> model = RecurrentSeq2Seq(100, RecurrentConfig(width=16))
    >>> source, target = Packed.of([[5, 6, 7], [8, 9]]), Packed.of([[1, 5, 2], [1, 6, 7, 2]])
    >>> model.loss(source, target, label_smoothing=0.1).backward()
    >>> [len(sentence) <= 4 for sentence in model.eval().greedy(source, start=1, end=2, max_new_tokens=4)]
    [True, True]
    """

    @property
    def output_weight(self) -> Tensor:
        """The vocabulary matrix (V, m): `forward` gives its product with `hidden`."""
        raise NotImplementedError(f"{type(self).__name__} needs a property output_weight")

    @property
    def output_bias(self) -> Tensor | None:
        """Added to that product, (V); not all models have one."""
        return None

    def hidden(
        self,
        source: Tensor | Packed,
        target: Tensor | Packed,
        *,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
    ) -> Tensor:
        """The vectors that are compared with the vocabulary's: the target's shape and m."""
        raise NotImplementedError(f"{type(self).__name__} needs a method hidden(source, target)")

    def forward(
        self,
        source: Tensor | Packed,
        target: Tensor | Packed,
        *,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token at each place of the target, which is all known: its shape and V."""
        x = self.hidden(source, target, source_lengths=source_lengths, target_lengths=target_lengths)
        return self._logits(x)

    def loss(
        self,
        source: Tensor | Packed,
        target: Tensor | Packed,
        *,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """The mean cross entropy of each target token but the first, given the source and those before it."""
        _check_target(target, target_lengths)
        inputs: Tensor | Packed
        if isinstance(target, Packed):
            inputs, labels = target.inputs(), target.labels().tokens
        else:
            inputs, labels = target[:, :-1], target[:, 1:]
            if target_lengths is not None:
                target_lengths = target_lengths - 1
                labels = torch.where(token_mask(labels, target_lengths), labels, IGNORE)
        x = self.hidden(source, inputs, source_lengths=source_lengths, target_lengths=target_lengths)
        return vocabulary_loss(x, self.output_weight, self.output_bias, labels, label_smoothing=label_smoothing)

    def start(self, source: Tensor | Packed, source_lengths: Tensor | None = None) -> State:
        """Read the source: what `step` needs to write the target, one token after the other."""
        raise NotImplementedError(f"{type(self).__name__} needs a method start(source, source_lengths)")

    def step(self, tokens: Tensor, state: State) -> Tensor:
        """One more target token each, (b): the logits (b, V) of the next; the state moves on."""
        raise NotImplementedError(f"{type(self).__name__} needs a method step(tokens, state)")

    def _logits(self, x: Tensor) -> Tensor:
        """Hidden vectors (…, m) times the vocabulary matrix: (…, V)."""
        return F.linear(x, self.output_weight, self.output_bias)

    @torch.no_grad()
    def greedy(
        self,
        source: Tensor | Packed,
        *,
        start: int,
        end: int,
        max_new_tokens: int,
        source_lengths: Tensor | None = None,
    ) -> list[list[int]]:
        """The likeliest token each time, until the end mark or for `max_new_tokens` tokens; without the two marks."""
        for name, value in (("start", start), ("end", end), ("max_new_tokens", max_new_tokens)):
            check_int(f"greedy got {name}", value)
        with eval_mode(self):
            state, found = self.start(source, source_lengths), [list[int]() for _ in range(len(source))]
            running = list(range(len(found)))  # the sentence of each row that has not ended
            tokens = torch.full((len(found),), start, device=self.output_weight.device)
            for _ in range(max_new_tokens):
                tokens = self.step(tokens, state).argmax(-1)
                going = (tokens != end).nonzero().squeeze(1)
                if len(going) < len(running):
                    if not len(going):
                        break
                    tokens, running = tokens[going], [running[i] for i in going.tolist()]
                    state.select(going)
                for sentence, token in zip(running, tokens.tolist(), strict=True):
                    found[sentence].append(token)
        return found


def _check_target(target: Tensor | Packed, lengths: Tensor | None) -> None:
    """Something to read and something to answer in each sentence."""
    check_batch(target, lengths, "target")
    if isinstance(target, Packed):
        lengths = target.lengths
    elif lengths is None and target.shape[1] < 2:
        raise ShapeError(
            f"the target has the shape {tuple(target.shape)}; a loss needs (b, l) with a start mark and one "
            "more token at least in each sentence."
        )
    if lengths is not None and concrete(lengths) and lengths.numel() and int(lengths.min()) < 2:
        which = int(lengths.argmin())
        raise ArgumentError(
            f"target sentence {which} has the length {int(lengths[which])}; a loss needs a start mark "
            "and one more token at least: an end mark."
        )


def vocab_sizes(model: str, vocabulary: int | tuple[int, int], share: bool) -> tuple[int, int]:
    """The sizes of the source's and of the target's vocabulary, which a shared matrix needs to be one."""
    sizes = vocabulary if isinstance(vocabulary, tuple) else (vocabulary, vocabulary)
    if len(sizes) != 2:
        raise ArgumentError(
            f"{model} got {len(sizes)} sizes of vocabularies, {sizes}; give one, or a pair: that of the "
            "source and that of the target."
        )
    source, target = sizes
    if share and source != target:
        raise ArgumentError(
            f"{model} got vocabularies of {source} and {target} tokens and share=True; a shared matrix needs "
            "one vocabulary for both."
        )
    return source, target


def check_state(tokens: Tensor, state: State, kind: type[Kind]) -> Kind:
    """What `step` got: a state of the model's own kind, and one token for each of its rows."""
    if not isinstance(state, kind):
        raise DTypeError(
            f"step got a state of {type(state).__name__}; give what this model's start returned, a "
            f"{kind.__name__}."
        )
    if not isinstance(tokens, Tensor):
        raise DTypeError(f"step got tokens that are a {type(tokens).__name__}; give a tensor (b).")
    if tokens.shape != (len(state),):
        raise ShapeError(
            f"step got tokens of shape {tuple(tokens.shape)} and a state of {len(state)} sentences; give "
            f"one token for each, ({len(state)},)."
        )
    return state
