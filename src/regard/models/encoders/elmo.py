"""Contextual word vectors from a forward and a backward language model (ELMo, Peters et al. 2018).

log p(w_k | w_1 … w_{k−1}) + log p(w_k | w_{k+1} … w_n)      maximized, section 3.1
h_0 = [x; x],  h_j = [forward_j; backward_j]                 layers
γ Σ_j softmax(s)_j h_j                                       task-specific mix, eq. 1
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard._util.checks import check_int, check_number
from regard._util.text import pluralize
from regard.errors import ShapeError
from regard.models.encoders.pretraining import LearnedEncoder
from regard.models.encoders.words import Vocabulary
from regard.models.loss import IGNORE, vocabulary_loss
from regard.models.packed import Packed, as_padded, reorder, reversed_order, token_mask
from regard.models.recurrent_cells import run_rnn


class ScalarMix(nn.Module):
    """Weighted sum of layers, γ Σ_j softmax(s)_j h_j (Peters et al. 2018, eq. 1), initialized to their mean.

    >>> import torch
    >>> from regard.models.encoders.elmo import ScalarMix
    >>> ScalarMix(3)(torch.tensor([[1.0], [2.0], [6.0]]))
    tensor([3.], grad_fn=...)
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        check_int("ScalarMix got layers", layers, min=1)
        self.scores = nn.Parameter(torch.zeros(layers))
        self.gamma = nn.Parameter(torch.ones(()))

    def forward(self, vectors: Tensor) -> Tensor:
        """Combine the layers: (layers, …) → (…)."""
        if len(vectors) != len(self.scores):
            raise ShapeError(
                f"ScalarMix({len(self.scores)}) got {pluralize(len(vectors), 'layer')}; pass "
                f"{len(self.scores)}, or use ScalarMix({len(vectors)})."
            )
        return self.gamma * torch.tensordot(self.scores.softmax(0), vectors, 1)

    def extra_repr(self) -> str:
        return f"{len(self.scores)}"


class LSTMStack(nn.Module):
    """LSTM layers with residual connections, starting at the second layer.

    >>> import torch
    >>> from regard.models.encoders.elmo import LSTMStack
    >>> LSTMStack(8, layers=2)(torch.randn(3, 5, 8)).shape
    torch.Size([2, 3, 5, 8])
    """

    def __init__(self, width: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.lstms = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of all layers: (b, l, m) → (layers, b, l, m)."""
        outputs: list[Tensor] = []
        for lstm in self.lstms:
            output = self.dropout(run_rnn(lstm, x)[0])
            x = output + x if outputs else output
            outputs.append(x)
        return torch.stack(outputs)


class ElmoEncoder(LearnedEncoder):
    """Word vectors from the states of a forward and a backward LSTM language model.

    vocabulary: created by `Vocabulary.of(sentences, special_tokens=ElmoEncoder.special_tokens)`.
    width: dimension of each direction; word vectors have dimension 2 × width.
    layers: number of LSTM layers; the embeddings are an additional vector layer.
    dropout: dropout probability for the inputs and outputs of the LSTMs.

    Both directions share the embedding and the output layer. `learn` does not train `mix`; it is trained with
    the task that uses `forward`.

    >>> from regard.models import ElmoEncoder, Vocabulary
    >>> vocabulary = Vocabulary.of(
    ...     ["dogs bark", "the bark of trees"], special_tokens=ElmoEncoder.special_tokens
    ... )
    >>> encoder = ElmoEncoder(vocabulary, width=8, layers=2)
    >>> encoder.embed("Trees have no bark")[0]
    WordVectors('Trees have no bark': 4 words × 3 layers × 16)
    >>> encoder.loss(["dogs bark", "trees"]).shape
    torch.Size([])
    """

    format = "elmo 2"

    def __init__(
        self, vocabulary: Vocabulary, width: int = 128, layers: int = 2, *, dropout: float = 0.1
    ) -> None:
        super().__init__(vocabulary)
        check_int("ElmoEncoder got width", width, min=1)
        check_int("ElmoEncoder got layers", layers, min=1)
        check_number("ElmoEncoder got dropout", dropout, min=0, below=1)
        self.width, self.layers = width, layers + 1
        self.embedding = nn.Embedding(len(vocabulary), width)
        self.dropout = nn.Dropout(dropout)
        self.forward_lm = LSTMStack(width, layers, dropout)
        self.backward_lm = LSTMStack(width, layers, dropout)
        self.output = nn.Linear(width, len(vocabulary))
        self.mix = ScalarMix(layers + 1)

    @property
    def options(self) -> dict[str, Any]:
        return {"width": self.width, "layers": self.layers - 1, "dropout": self.dropout.p}

    def trained_parameters(self) -> Iterator[nn.Parameter]:
        """Return all parameters except those of the mix."""
        return (parameter for name, parameter in self.named_parameters() if not name.startswith("mix."))

    def forward(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> Tensor:
        """Return the mix of all layers: (…, 2m) for tokens (b, l) or packed (n), including special tokens."""
        return self.mix(self.states(tokens, lengths))

    def states(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> Tensor:
        """Return all vector layers: (layers, …, 2m) for tokens (b, l) or packed (n)."""
        padded, sizes = _padded(tokens, lengths)
        x, forward, backward = self._encode(padded, sizes)
        both = torch.cat([torch.cat([x, x], -1)[None], torch.cat([forward, backward], -1)])
        return both[:, token_mask(padded, sizes)] if isinstance(tokens, Packed) else both

    def _encode(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the embeddings (b, l, m) and the layers of each direction (layers, b, l, m)."""
        x = self.embedding(tokens)
        inputs = self.dropout(x)
        order = reversed_order(tokens, lengths)
        backward = self.backward_lm(reorder(inputs, order))
        return x, self.forward_lm(inputs), reorder(backward, order.expand(len(backward), -1, -1))

    def loss(self, tokens: Tensor | Packed | str | Sequence[str], lengths: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy of the tokens, averaged over both directions."""
        if not isinstance(tokens, Tensor | Packed):
            tokens = self.pack(tokens)
        padded, sizes = _padded(tokens, lengths)
        _, forward, backward = self._encode(padded, sizes)
        # padding is ignored rather than removed, so shapes do not depend on the lengths
        labels = padded.masked_fill(~token_mask(padded, sizes), IGNORE)
        previous = labels[:, :-1].masked_fill(labels[:, 1:] == IGNORE, IGNORE)
        states = torch.stack([forward[-1][:, :-1], backward[-1][:, 1:]])
        labels = torch.stack([labels[:, 1:], previous])
        return vocabulary_loss(states, self.output.weight, self.output.bias, labels)

    def extra_repr(self) -> str:
        return f"{len(self.vocabulary)} words, width {self.width}, {self.layers - 1} layers"


def _padded(tokens: Tensor | Packed, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convert a batch to padded tokens (b, l) and lengths. Raises an error if the batch is empty."""
    padded, sizes = as_padded(tokens, lengths)
    if 0 in padded.shape:
        raise ShapeError(
            f"The batch has {pluralize(padded.shape[0], 'sentence')} of up to "
            f"{pluralize(padded.shape[1], 'token')}; ElmoEncoder needs at least one sentence with at least "
            "one token."
        )
    return padded, sizes
