"""Encoder, attention and decoders for recurrent sequence-to-sequence models."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard.mechanism.masks.by_length import Padding
from regard.mechanism.scores import Additive, Prepared, Score
from regard.mechanism.torch_state import concrete, private
from regard.models.layers.attention import Attends
from regard.models.layers.kv_cache import KeyValues, RowMap
from regard.models.seq2seq import State

Cells = tuple[Tensor, ...]  # states of all layers, (layers, b, m): one tensor for GRUs, two for LSTMs


@dataclass
class RecurrentState(State):
    """Decoder state: RNN states, projected source, source mask, and the vector fed into the next step.

    >>> import torch, regard
    >>> from regard.models.recurrent import RecurrentSeq2Seq
    >>> state = RecurrentSeq2Seq(100).start(torch.tensor([[5, 6], [7, 8]]))
    >>> state.select(torch.tensor([1, 1, 0]))
    >>> len(state)
    3
    """

    cells: Cells
    source: KeyValues | None = None
    mask: Padding | None = None
    feed: Tensor | None = None  # b 1 m; only with input_feeding

    def select(self, rows: Tensor) -> None:
        """Keep only the given batch rows, in the given order. All rows of a sentence share one source."""
        if self.source is not None:
            row_map = RowMap(len(self)) if self.source.row_map is None else self.source.row_map
            row_map, kept = row_map.select(rows)
            if kept is not None:
                self.source = self.source.select(kept)
                self.mask = None if self.mask is None else Padding(self.mask.lengths[kept])
            self.source = self.source._replace(row_map=row_map)
        self.cells = tuple(cell[:, rows] for cell in self.cells)
        self.feed = None if self.feed is None else self.feed[rows]

    def __len__(self) -> int:
        return self.cells[0].shape[1]


class RecurrentEncoder(nn.Module):
    """Recurrent encoder, bidirectional by default (Bahdanau et al. 2015, section 3.2).

    >>> import torch
    >>> from regard.models.recurrent_cells import RecurrentEncoder
    >>> x, last = RecurrentEncoder("gru", 16, layers=2)(torch.randn(3, 5, 16), torch.tensor([5, 2, 4]))
    >>> x.shape, last[0].shape
    (torch.Size([3, 5, 16]), torch.Size([2, 3, 16]))
    """

    def __init__(
        self, cell: str, width: int, layers: int = 1, dropout: float = 0.0, *, bidirectional: bool = True
    ) -> None:
        super().__init__()
        self.directions = 2 if bidirectional else 1
        self.rnn = _rnn(cell, width, width // self.directions, layers, dropout, bidirectional)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Cells]:
        """Return outputs (b, s, m), zero for padding, and the last states. Directions are concatenated."""
        if lengths is None or lengths.is_meta or _full(x, lengths):
            x, last = run_rnn(self.rnn, x)
        else:  # the backward direction must start at the last word, not in the padding
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            packed, last = run_rnn(self.rnn, packed)
            x, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        return x, tuple(self._concatenate(cell) for cell in (last if isinstance(last, tuple) else (last,)))

    def _concatenate(self, cell: Tensor) -> Tensor:
        return torch.cat(cell.unflatten(0, (-1, self.directions)).unbind(1), -1)  # (l 2) b m/2 -> l b m


class SourceAttention(Attends):
    """Single-head attention from decoder states to the source (Luong et al. 2015, eq. 7 and 8).

    score: Dot, General or Additive. Luong et al. call the last one, vᵀ tanh(W [query; key]), "concat".

    >>> import torch, regard
    >>> from regard.models.recurrent_cells import SourceAttention
    >>> attention = SourceAttention(16, regard.Additive(16, 16))
    >>> source = attention.project_source(torch.randn(3, 7, 16))
    >>> attention(torch.randn(3, 1, 16), source, regard.Padding([7, 2, 5])).shape
    torch.Size([3, 1, 16])
    """

    def __init__(self, width: int, score: Score) -> None:
        super().__init__()
        self.head_width = self.head_value_width = width
        self.score = score

    def project_source(self, source: Tensor) -> KeyValues:
        """Return the keys and values (b, 1, s, ·) of a source (b, s, m).

        The key map of an additive score is already applied to the keys.
        """
        value = source.unsqueeze(-3)
        key = F.linear(value, self.score.key_map) if isinstance(self.score, Additive) else value
        return KeyValues(key, value)

    def forward(self, query: Tensor, source: KeyValues, mask: Padding | None = None) -> Tensor:
        """Attend to the source: (b, t, m) → (b, t, m)."""
        score = _MappedKeys(self.score) if isinstance(self.score, Additive) else self.score
        queries = source.group(query.unsqueeze(-3))
        output = self.attention(queries, source.key, source.value, score=score, mask=mask)
        return source.ungroup(output).squeeze(-3)


@dataclass(frozen=True)
class _MappedKeys(Score):
    """vᵀ tanh(W query + key), for keys already multiplied by U."""

    additive: Additive

    def __repr__(self) -> str:
        return repr(self.additive)

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        query = query @ self.additive.query_map.to(query.dtype).mT
        return Prepared(query, key, "tanh", self.additive.vector.to(query.dtype))


class PlainDecoder(nn.Module):
    """s_t = f(s_{t−1}, y_{t−1}), initialized with the last encoder state (Sutskever et al. 2014).

    decoder(x, state) runs one step per position of x (b, t, m) and updates the state.

    >>> import torch
    >>> from regard.models.recurrent_cells import PlainDecoder, RecurrentState
    >>> state = RecurrentState((torch.zeros(1, 2, 16),))
    >>> PlainDecoder("gru", 16)(torch.randn(2, 5, 16), state).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self, cell: str, width: int, layers: int = 1, dropout: float = 0.0, *, inputs: int | None = None
    ) -> None:
        super().__init__()
        self.rnn = _rnn(cell, width if inputs is None else inputs, width, layers, dropout)

    def start(self, source: Tensor, last: Cells, mask: Padding | None) -> RecurrentState:
        """Return the initial state from the encoder outputs `source` and the last encoder states `last`."""
        return RecurrentState(last)

    def forward(self, x: Tensor, state: RecurrentState) -> Tensor:
        """Decode all steps: (b, t, m) → (b, t, m)."""
        return self.run(x, state)

    def run(self, x: Tensor, state: RecurrentState) -> Tensor:
        """Run the RNN: (b, t, m) → states of the last layer, (b, t, m)."""
        x, cells = run_rnn(self.rnn, x, state.cells if isinstance(self.rnn, nn.LSTM) else state.cells[0])
        state.cells = cells if isinstance(cells, tuple) else (cells,)
        return x


class LuongDecoder(PlainDecoder):
    """tanh(W [a_t; s_t]), where s_t is the query for a_t ("global attention", Luong et al. 2015, eq. 5).

    With `input_feeding`, this vector is fed into the next step together with the word (section 3.3).

    >>> import torch, regard
    >>> from regard.models.recurrent_cells import LuongDecoder
    >>> decoder = LuongDecoder("gru", 16, score=regard.Dot())
    >>> state = decoder.start(torch.randn(2, 7, 16), (torch.zeros(1, 2, 16),), regard.Padding([7, 3]))
    >>> decoder(torch.randn(2, 5, 16), state).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        cell: str,
        width: int,
        layers: int = 1,
        dropout: float = 0.0,
        *,
        score: Score,
        input_feeding: bool = False,
    ) -> None:
        super().__init__(cell, width, layers, dropout, inputs=2 * width if input_feeding else width)
        self.input_feeding = input_feeding
        self.attention = SourceAttention(width, score)
        self.combine = nn.Linear(2 * width, width, bias=False)

    def start(self, source: Tensor, last: Cells, mask: Padding | None) -> RecurrentState:
        """Return the initial state."""
        feed = torch.zeros_like(source[:, :1]) if self.input_feeding else None
        return RecurrentState(last, self.attention.project_source(source), mask, feed)

    def forward(self, x: Tensor, state: RecurrentState) -> Tensor:
        """Decode all steps, (b, t, m) → (b, t, m), in one attention call unless input_feeding is set."""
        if not self.input_feeding:
            return self._attend(self.run(x, state), state)
        steps = []
        for word in x.split(1, 1):
            assert state.feed is not None
            state.feed = self._attend(self.run(torch.cat([word, state.feed], -1), state), state)
            steps.append(state.feed)
        return torch.cat(steps, 1)

    def _attend(self, s: Tensor, state: RecurrentState) -> Tensor:
        assert state.source is not None
        attended = self.attention(s, state.source, state.mask)
        return torch.tanh(self.combine(torch.cat([attended, s], -1)))


class BahdanauDecoder(PlainDecoder):
    """s_t = f(s_{t−1}, [y_{t−1}; a_t]), with query s_{t−1} for a_t (Bahdanau et al. 2015, section 3.1).

    a_t is called c_i in the paper, eq. 5. The initial state is tanh(W ←h_1), where ←h_1 is the encoder's
    backward state at the first word. The output is a maxout layer of s_t, y_{t−1} and a_t (appendix A.2.2,
    but with s_t instead of s_{t−1}, as in eq. 4).

    >>> import torch, regard
    >>> from regard.models.recurrent_cells import BahdanauDecoder
    >>> decoder = BahdanauDecoder("gru", 16, start_width=8)
    >>> state = decoder.start(torch.randn(2, 7, 16), (torch.zeros(1, 2, 16),), regard.Padding([7, 3]))
    >>> decoder(torch.randn(2, 5, 16), state).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self, cell: str, width: int, layers: int = 1, dropout: float = 0.0, *, start_width: int
    ) -> None:
        super().__init__(cell, width, layers, dropout, inputs=2 * width)
        self.layers, self.start_width = layers, start_width
        self.first = nn.Linear(start_width, layers * width)
        self.attention = SourceAttention(width, Additive(width, width))
        self.readout = nn.Linear(3 * width, 2 * width)

    def start(self, source: Tensor, last: Cells, mask: Padding | None) -> RecurrentState:
        """Return the initial state. The cell state of an LSTM starts at zero."""
        backward = last[0][-1][:, -self.start_width :]
        first = torch.tanh(self.first(backward)).unflatten(-1, (self.layers, -1)).transpose(0, 1).contiguous()
        cells = (first, *(torch.zeros_like(first) for _ in last[1:]))
        return RecurrentState(cells, self.attention.project_source(source), mask)

    def forward(self, x: Tensor, state: RecurrentState) -> Tensor:
        """Decode step by step: (b, t, m) → (b, t, m)."""
        assert state.source is not None
        states, attended = [], []
        for word in x.split(1, 1):
            query = state.cells[0][-1][:, None]  # s_{t−1}
            attended.append(self.attention(query, state.source, state.mask))
            states.append(self.run(torch.cat([word, attended[-1]], -1), state))
        output = self.readout(torch.cat([torch.cat(states, 1), x, torch.cat(attended, 1)], -1))
        return output.unflatten(-1, (-1, 2)).amax(-1)


def run_rnn(rnn: Any, x: Any, state: Any = None) -> tuple[Any, Any]:
    """Run rnn(x, state), in the parameters' dtype if this CPU does not support LSTMs in the autocast dtype.

    >>> import torch
    >>> from regard.models.recurrent_cells import run_rnn
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     run_rnn(torch.nn.LSTM(4, 4), torch.randn(3, 2, 4))[0].shape
    torch.Size([3, 2, 4])
    """
    weight = rnn.weight_hh_l0
    if not isinstance(rnn, nn.LSTM) or weight.device.type != "cpu" or _lstm_runs_under_autocast():
        return rnn(x, state)
    with torch.autocast("cpu", enabled=False):
        return rnn(x.to(weight.dtype), None if state is None else tuple(s.to(weight.dtype) for s in state))


def _lstm_runs_under_autocast() -> bool:
    """Whether CPU autocast is off, or oneDNN supports LSTMs in the autocast dtype (not on AVX2)."""
    if not torch.is_autocast_enabled("cpu"):
        return True
    short = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(torch.get_autocast_dtype("cpu"))
    supported = private(f"ops.mkldnn._is_mkldnn_{short}_supported")
    return supported is not None and supported()


def _rnn(
    cell: str, inputs: int, width: int, layers: int, dropout: float, bidirectional: bool = False
) -> nn.LSTM | nn.GRU:
    kind = nn.LSTM if cell == "lstm" else nn.GRU
    between = dropout if layers > 1 else 0.0
    return kind(inputs, width, layers, batch_first=True, dropout=between, bidirectional=bidirectional)


def _full(x: Tensor, lengths: Tensor) -> bool:
    """Whether the batch has no padding."""
    return concrete(lengths) and int(lengths.min()) == x.shape[1]
