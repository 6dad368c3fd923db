"""Recurrent sequence-to-sequence models. s_t: the decoder's state; a_t: what it attended to; y_t: a word.

none:                   s_t = f(s_{t−1}, y_{t−1})                                    Sutskever et al. 2014
additive:               s_t = f(s_{t−1}, [y_{t−1}; a_t]), where s_{t−1} attends      Bahdanau et al. 2015
dot, general, concat:   s_t = f(s_{t−1}, y_{t−1}), where s_t attends; tanh(W [a_t; s_t])   Luong et al. 2015

Where no step needs what an earlier one attended to, the whole target is computed at once.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from regard._util.checks import check_int, check_number, check_type
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.mechanism.masks import Padding
from regard.mechanism.scores import Additive, Dot, General, Score
from regard.mechanism.torch_state import concrete
from regard.models.layers.embedding import Embedding
from regard.models.packed import Packed, check_batch, token_mask, reorder, reversed_order
from regard.models.recurrent_cells import (
    BahdanauDecoder,
    LuongDecoder,
    PlainDecoder,
    RecurrentEncoder,
    RecurrentState,
)
from regard.models.seq2seq import Seq2Seq, State, check_state, vocab_sizes

Cell = Literal["lstm", "gru"]
Kind = Literal["none", "additive", "dot", "general", "concat"]


@dataclass(frozen=True)
class RecurrentConfig:
    """What a recurrent sequence-to-sequence model is made of.

    width: of the vector of each token and of each state; each direction of an encoder of two has half of it.
    layers, cell: how many on top of each other, in the encoder and in the decoder; of "lstm" or "gru" cells.
    attention: "none" (Sutskever et al. 2014); "additive" (Bahdanau et al. 2015); "dot", "general" or "concat"
        (Luong et al. 2015, eq. 8).
    bidirectional: the encoder also reads from the end to the beginning (Schuster and Paliwal 1997).
    reverse: the source is read from its end (Sutskever et al. 2014, section 3.3).
    feeding: what was attended to goes into the next step (Luong et al. 2015, section 3.3).
    dropout: of embeddings, between layers, and of what is compared with the vocabulary.

    >>> from regard.models.recurrent import RecurrentConfig
    >>> RecurrentConfig(cell="gru", attention="additive").at_once  # each step waits for the one before it
    False
    >>> RecurrentConfig(attention="additive", input_feeding=True)
    Traceback (most recent call last):
    regard.errors.ArgumentError: RecurrentConfig got feeding=True and attention='additive'; ...
    """

    width: int = 256
    layers: int = 1
    cell: Cell = "lstm"
    attention: Kind = "general"
    bidirectional: bool = True
    reverse: bool = False
    input_feeding: bool = False
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_int("RecurrentConfig got width", self.width, min=1)
        check_int("RecurrentConfig got layers", self.layers, min=1)
        check_number("RecurrentConfig got dropout", self.dropout, min=0, below=1)
        for name, kinds in (("cell", get_args(Cell)), ("attention", get_args(Kind))):
            if getattr(self, name) not in kinds:
                raise ArgumentError(
                    f"RecurrentConfig got {name}={getattr(self, name)!r}; there are {', '.join(kinds)}."
                )
        for name in ("bidirectional", "reverse", "input_feeding"):
            if not isinstance(getattr(self, name), bool):
                raise DTypeError(f"RecurrentConfig got {name}={getattr(self, name)!r}; it is True or False.")
        if self.bidirectional and self.width % 2:
            raise ArgumentError(
                f"RecurrentConfig got width={self.width} and bidirectional=True; each direction has half of "
                f"the width, so give an even one: {self.width + 1}."
            )
        if self.input_feeding and self.attention in ("none", "additive"):
            why = "there is nothing to feed" if self.attention == "none" else "its steps are fed already"
            raise ArgumentError(
                f"RecurrentConfig got feeding=True and attention={self.attention!r}; {why}. Feeding is for "
                "dot, general and concat."
            )

    @property
    def at_once(self) -> bool:
        """Whether a known target is computed at once, not step by step."""
        return self.attention != "additive" and not self.input_feeding

    def make_decoder(self) -> PlainDecoder:
        """The decoder of this kind of attention."""
        sizes = self.cell, self.width, self.layers, self.dropout
        if self.attention == "none":
            return PlainDecoder(*sizes)
        if self.attention == "additive":
            return BahdanauDecoder(*sizes, start_width=self.width // (2 if self.bidirectional else 1))
        return LuongDecoder(*sizes, score=self._score(), input_feeding=self.input_feeding)

    def _score(self) -> Score:
        if self.attention == "dot":
            return Dot()
        return (General if self.attention == "general" else Additive)(self.width, self.width)


class RecurrentSeq2Seq(Seq2Seq):
    """A recurrent encoder and decoder, with the attention that the config says.

    vocabulary: its size, or a pair, that of the source and that of the target.
    share: one matrix for source, target and output (Press and Wolf 2017); needs one vocabulary for both.

    >>> import torch, regard
    >>> from regard.models import Packed
    >>> from regard.models.recurrent import RecurrentConfig, RecurrentSeq2Seq
    >>> model = RecurrentSeq2Seq((100, 200), RecurrentConfig(width=16, layers=2, attention="general"))
    >>> source, target = Packed.of([[5, 6, 7], [8, 9]]), Packed.of([[1, 5, 2], [1, 2]])
    >>> with regard.watch(model) as seen:
    ...     logits = model(source, target)
    >>> logits.shape
    torch.Size([5, 200])
    >>> seen["decoder.attention"].shape  # sentences × 1 × target × source
    torch.Size([2, 1, 3, 3])
    >>> model.loss(source, target).backward()
    """

    def __init__(
        self,
        vocabulary: int | tuple[int, int],
        config: RecurrentConfig = RecurrentConfig(),  # noqa: B008 (a frozen value)
        *,
        share: bool = False,
    ) -> None:
        super().__init__()
        check_type("RecurrentSeq2Seq got a config", config, RecurrentConfig, "RecurrentConfig(width=256)")
        source, target = vocab_sizes("RecurrentSeq2Seq", vocabulary, share)
        self.config = config
        self.source_embedding = None if share else Embedding(source, config.width)
        self.embedding = Embedding(target, config.width)
        self.encoder = RecurrentEncoder(
            config.cell, config.width, config.layers, config.dropout, bidirectional=config.bidirectional
        )
        self.decoder = config.make_decoder()
        self.dropout = nn.Dropout(config.dropout)
        self.matrix = None if share else nn.Parameter(torch.randn(target, config.width) * config.width**-0.5)
        self.bias = nn.Parameter(torch.zeros(target))

    @property
    def output_weight(self) -> Tensor:
        """The vocabulary matrix (V, m)."""
        return self.embedding.weight if self.matrix is None else self.matrix

    @property
    def output_bias(self) -> Tensor:
        """Added to the product with it, (V)."""
        return self.bias

    def hidden(
        self,
        source: Tensor | Packed,
        target: Tensor | Packed,
        *,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
    ) -> Tensor:
        """The vectors that are compared with the vocabulary's: the target's shape and m."""
        read = Sentences.of("source", source, source_lengths)
        known = Sentences.of("target", target, target_lengths)
        if len(read.tokens) != len(known.tokens):
            raise ShapeError(
                f"the source has {len(read.tokens)} sentences and the target {len(known.tokens)}; each "
                "target sentence belongs to one of the source."
            )
        # padding stands at the end, where it comes after all that is real
        return known.like(self._decode(known.tokens, self._read(read)))

    def start(self, source: Tensor | Packed, source_lengths: Tensor | None = None) -> RecurrentState:
        """Read the source: what `step` needs to write the target, one token after the other."""
        return self._read(Sentences.of("source", source, source_lengths))

    def step(self, tokens: Tensor, state: State) -> Tensor:
        """One more target token each, (b): the logits (b, V) of the next; the state moves on."""
        state = check_state(tokens, state, RecurrentState)
        x = self._decode(tokens[:, None], state)[:, 0]
        return self._logits(x)

    def _read(self, source: "Sentences") -> RecurrentState:
        embedding = self.embedding if self.source_embedding is None else self.source_embedding
        order = reversed_order(source.tokens, source.lengths) if self.config.reverse else None
        tokens = source.tokens if order is None else source.tokens.gather(1, order)
        x, last = self.encoder(self.dropout(embedding(tokens)), source.lengths)
        if order is not None:  # back again, so that weights show the source in its own order
            x = reorder(x, order)
        mask = None if source.lengths is None else Padding(source.lengths)
        return self.decoder.start(x, last, mask)

    def _decode(self, tokens: Tensor, state: RecurrentState) -> Tensor:
        return self.dropout(self.decoder(self.dropout(self.embedding(tokens)), state))


@dataclass(frozen=True)
class Sentences:
    """A padded batch (b, l), checked, with zeros for padding, and the form in which it was given.

    >>> import torch, regard.models
    >>> from regard.models.recurrent import Sentences
    >>> batch = Sentences.of("source", regard.models.Packed.of([[5, 6, 7], [8]]), None)
    >>> batch.tokens
    tensor([[5, 6, 7],
            [8, 0, 0]])
    >>> batch.like(batch.tokens)
    tensor([5, 6, 7, 8])
    """

    tokens: Tensor
    lengths: Tensor | None
    packed: Packed | None = None

    @classmethod
    def of(cls, name: str, tokens: Tensor | Packed, lengths: Tensor | None) -> "Sentences":
        """What was given as `name`, Packed or padded."""
        check_batch(tokens, lengths, name)
        if isinstance(tokens, Packed):
            return cls._of_packed(name, tokens)
        if 0 in tokens.shape:
            raise ShapeError(
                f"the {name} has the shape {tuple(tokens.shape)}; a recurrent model reads (b, l) with one "
                "sentence and one token at least."
            )
        if lengths is None:
            return cls(tokens, None)
        _check_empty(name, lengths)
        lengths = lengths.to(tokens.device)
        return cls(torch.where(token_mask(tokens, lengths), tokens, 0), lengths)

    @classmethod
    def _of_packed(cls, name: str, packed: Packed) -> "Sentences":
        if not len(packed):
            raise ShapeError(f"the {name} has no sentences; give one at least.")
        if packed.lengths.is_meta:
            raise ArgumentError(
                f"the {name} is Packed on the meta device, where its lengths have no values; give a "
                "padded batch (b, l)."
            )
        _check_empty(name, packed.lengths)
        return cls(packed.pad(packed.tokens), packed.lengths, packed)

    def like(self, x: Tensor) -> Tensor:
        """Of each place of the padded batch, in the form that was given: b l … -> n … if it was packed."""
        return x if self.packed is None else x[self.packed.sentences, self.packed.positions]


def _check_empty(name: str, lengths: Tensor) -> None:
    if concrete(lengths) and int(lengths.min()) < 1:
        which = int(lengths.argmin())
        raise ArgumentError(
            f"{name} sentence {which} has the length {int(lengths[which])}; every sentence needs one token "
            "at least. Leave it out, or give it an end mark."
        )
