"""What sequence-to-sequence models share (draft)."""

from torch import Tensor, nn
from torch.nn import functional as F

from regard.models.loss import vocabulary_loss
from regard.models.packed import Packed


class State:
    """Draft."""

    def select(self, rows: Tensor) -> None:
        """Draft."""
        raise NotImplementedError


class Seq2Seq(nn.Module):
    """Draft."""

    output_bias: Tensor | None = None

    @property
    def output_weight(self) -> Tensor:
        """Draft."""
        raise NotImplementedError

    def hidden(
        self,
        source: Tensor | Packed,
        target: Tensor | Packed,
        *,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
    ) -> Tensor:
        """Draft."""
        raise NotImplementedError

    def forward(
        self,
        source: Tensor | Packed,
        target: Tensor | Packed,
        *,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
    ) -> Tensor:
        """Draft."""
        x = self.hidden(source, target, source_lengths=source_lengths, target_lengths=target_lengths)
        return F.linear(x, self.output_weight, self.output_bias)

    def loss(self, source: Packed, target: Packed, *, smoothing: float = 0.0) -> Tensor:
        """Draft."""
        x = self.hidden(source, target.inputs())
        labels = target.outputs().tokens
        return vocabulary_loss(x, self.output_weight, self.output_bias, labels, smoothing=smoothing)

    def start(self, source: Tensor | Packed, source_lengths: Tensor | None = None) -> State:
        """Draft."""
        raise NotImplementedError

    def step(self, tokens: Tensor, state: State) -> Tensor:
        """Draft."""
        raise NotImplementedError
