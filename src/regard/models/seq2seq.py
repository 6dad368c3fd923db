"""Interface for sequence-to-sequence models: teacher forcing, loss, step-by-step decoding.

training:   source, target → hidden → logits = hidden · output_weightᵀ + output_bias
decoding:   state = start(source); logits = step(tokens, state); logits = step(tokens, state); …
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._util.checks import check_int
from regard._util.text import pluralize
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.mechanism.torch_state import concrete
from regard.models.generation import DecodingDefaults, SpecialTokens
from regard.models.layers.dropout import eval_mode
from regard.models.loss import IGNORE, vocabulary_loss
from regard.models.packed import Packed, check_batch, token_mask

INT8_OUTPUT = "int8_output"  # name of the module that replaces output_weight and output_bias; see `quantize`
StateType = TypeVar("StateType", bound="State")


class State:
    """Decoder state, updated in place by `step`. Each model has its own subclass.

    >>> import torch, regard
    >>> from regard.models.recurrent import RecurrentConfig, RecurrentSeq2Seq
    >>> model = RecurrentSeq2Seq(100, RecurrentConfig(width=16))
    >>> state = model.start(torch.tensor([[5, 6], [7, 8]]))
    >>> state.select(torch.tensor([1, 1, 0]))
    >>> model.step(torch.tensor([3, 4, 3]), state).shape
    torch.Size([3, 100])
    """

    def select(self, rows: Tensor) -> None:
        """Keep only the given batch rows, in the given order. Rows may be repeated (for beam search)."""
        raise NotImplementedError(f"{type(self).__name__} must implement select(rows)")

    def record_queries(self, layer: int) -> bool:
        """Record the queries of a cross-attention layer from now on; return False if this is not possible."""
        return False

    def queries(self, rows: Tensor) -> Tensor:
        """Return the recorded queries of the given rows: (rows, steps, heads · d)."""
        raise NotImplementedError(f"{type(self).__name__} does not record queries")

    def weights(self, sentences: Tensor, queries: Tensor) -> Tensor:
        """Return the weights (…, heads, steps, s) of recorded queries (…, steps, heads · d).

        sentences: for each item, the index of its source in the batch passed to `start`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not record queries")

    def __len__(self) -> int:
        """Return the number of batch rows."""
        raise NotImplementedError(f"{type(self).__name__} must implement __len__()")


class Seq2Seq(nn.Module):
    """Base class for encoder-decoder models.

    Sentences are `Packed`, or padded token ids (b, l) with `source_lengths` and `target_lengths` (b). A
    target begins with a start token. For `loss`, it also ends with an end token. Subclasses implement
    `hidden`, `output_weight`, `start` and `step`.

    >>> import torch, regard
    >>> from regard.models import Packed
    >>> from regard.models.recurrent import RecurrentConfig, RecurrentSeq2Seq
    >>> model = RecurrentSeq2Seq(100, RecurrentConfig(width=16))
    >>> source, target = Packed.of([[5, 6, 7], [8, 9]]), Packed.of([[1, 5, 2], [1, 6, 7, 2]])
    >>> model.loss(source, target, label_smoothing=0.1).backward()
    >>> [len(sentence) <= 4 for sentence in model.eval().greedy(source, start=1, end=2, max_new_tokens=4)]
    [True, True]
    """

    max_length: int | None = None  # maximum number of tokens per sentence, including the start or end token
    special_tokens = SpecialTokens()  # pretrained models have different special tokens
    decoding: DecodingDefaults | None = None  # beam search defaults of a pretrained model

    @property
    def output_weight(self) -> Tensor:
        """Output embedding matrix (V, m)."""
        raise NotImplementedError(f"{type(self).__name__} must implement output_weight")

    @property
    def output_bias(self) -> Tensor | None:
        """Output bias (V), or None."""
        return None

    def hidden(
        self,
        source: Tensor | Packed,
        target: Tensor | Packed,
        *,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
    ) -> Tensor:
        """Return decoder outputs before the vocabulary projection: (…, m) for a target of shape (…)."""
        raise NotImplementedError(f"{type(self).__name__} must implement hidden(source, target)")

    def forward(
        self,
        source: Tensor | Packed,
        target: Tensor | Packed,
        *,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
    ) -> Tensor:
        """Return next-token logits at each target position (teacher forcing): (…, V)."""
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
        """Return the mean cross-entropy of all target tokens except the first of each sentence."""
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
        return vocabulary_loss(
            x, self.output_weight, self.output_bias, labels, label_smoothing=label_smoothing
        )

    def start(self, source: Tensor | Packed, source_lengths: Tensor | None = None) -> State:
        """Encode the source and return the initial decoder state."""
        raise NotImplementedError(f"{type(self).__name__} must implement start(source, source_lengths)")

    def step(self, tokens: Tensor, state: State) -> Tensor:
        """Feed one target token per row, (b); return next-token logits (b, V) and update the state."""
        raise NotImplementedError(f"{type(self).__name__} must implement step(tokens, state)")

    def _logits(self, x: Tensor) -> Tensor:
        """Project to the vocabulary: (…, m) → (…, V)."""
        int8_output = self._modules.get(INT8_OUTPUT)
        if int8_output is not None:
            logits: Tensor = int8_output(x)
            return logits
        return F.linear(x, self.output_weight, self.output_bias)

    @torch.no_grad()
    def greedy(
        self,
        source: Tensor | Packed,
        *,
        start: int | Sequence[int],
        end: int,
        max_new_tokens: int,
        source_lengths: Tensor | None = None,
    ) -> list[list[int]]:
        """Decode greedily until `end` or `max_new_tokens`. The results contain neither `start` nor `end`.

        start: the start token, or several tokens that start every target.
        """
        first = list(start) if isinstance(start, Sequence) else [start]
        for name, value in (
            *(("start", token) for token in first),
            ("end", end),
            ("max_new_tokens", max_new_tokens),
        ):
            check_int(f"greedy got {name}", value)
        with eval_mode(self):
            state, outputs = self.start(source, source_lengths), [list[int]() for _ in range(len(source))]
            active = list(range(len(outputs)))  # sentence index of each unfinished row
            for token in first[:-1]:
                self.step(torch.full((len(outputs),), token, device=self.output_weight.device), state)
            tokens = torch.full((len(outputs),), first[-1], device=self.output_weight.device)
            for _ in range(max_new_tokens):
                tokens = self.step(tokens, state).argmax(-1)
                unfinished = (tokens != end).nonzero().squeeze(1)
                if len(unfinished) < len(active):
                    if not len(unfinished):
                        break
                    tokens, active = tokens[unfinished], [active[i] for i in unfinished.tolist()]
                    state.select(unfinished)
                for sentence, token in zip(active, tokens.tolist(), strict=True):
                    outputs[sentence].append(token)
        return outputs


def _check_target(target: Tensor | Packed, lengths: Tensor | None) -> None:
    """Raise an error unless each target has at least two tokens: an input and a label."""
    check_batch(target, lengths, "target")
    if isinstance(target, Packed):
        lengths = target.lengths
    elif lengths is None and target.shape[1] < 2:
        raise ShapeError(
            f"target has shape {tuple(target.shape)}; the loss needs at least two tokens per sentence: "
            "start and end."
        )
    if lengths is not None and concrete(lengths) and lengths.numel() and int(lengths.min()) < 2:
        shortest = int(lengths.argmin())
        raise ArgumentError(
            f"Target sentence {shortest} has length {int(lengths[shortest])}; the loss needs at least two "
            "tokens: start and end."
        )


def vocab_sizes(model: str, vocab_size: int | tuple[int, int], share: bool) -> tuple[int, int]:
    """Return the source and target vocabulary sizes, which must be equal for shared embeddings."""
    sizes = vocab_size if isinstance(vocab_size, tuple) else (vocab_size, vocab_size)
    if len(sizes) != 2:
        raise ArgumentError(f"{model} got vocab_size={sizes}; pass one size, or a pair (source, target).")
    source, target = sizes
    if share and source != target:
        raise ArgumentError(
            f"{model} got vocabularies of {source} and {target} tokens and share=True; shared embeddings "
            "need one vocabulary."
        )
    return source, target


def check_state(tokens: Tensor, state: State, kind: type[StateType]) -> StateType:
    """Return `state` if it is an instance of `kind` with one row per token; otherwise raise an error."""
    if not isinstance(state, kind):
        raise DTypeError(
            f"step got a state of type {type(state).__name__}; pass the {kind.__name__} returned by this "
            "model's start()."
        )
    if not isinstance(tokens, Tensor):
        raise DTypeError(f"step got tokens of type {type(tokens).__name__}; pass a tensor (b).")
    if tokens.shape != (len(state),):
        raise ShapeError(
            f"step got tokens of shape {tuple(tokens.shape)} and a state of {pluralize(len(state), 'row')}; "
            f"pass one token per row, ({len(state)},)."
        )
    return state
