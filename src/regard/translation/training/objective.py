"""The training loss."""

from torch import Tensor, nn

from regard.models.seq2seq import Seq2Seq
from regard.translation.alignment.guided_loss import default_guided_head, guide_head
from regard.translation.data.batches import Batch
from regard.translation.training.training_config import TrainingConfig


class Objective(nn.Module):
    """The training loss on one process's part of a batch.

    The loss is the mean over the labels of the whole batch, plus the alignment loss of one head if the batch
    has links (Garg et al. 2019).
    """

    def __init__(self, model: Seq2Seq, config: TrainingConfig) -> None:
        super().__init__()
        self.model, self.config = model, config

    def forward(self, batch: Batch, labels: int) -> Tensor:
        """Return the loss on this part; `labels` is the number of labels in all parts."""
        weight, smoothing = self.config.guided_alignment_weight, self.config.label_smoothing
        if not weight or not batch.links:
            loss = self.model.loss(batch.source, batch.target, label_smoothing=smoothing)
        else:
            with guide_head(self.model, default_guided_head(self.model)) as guide:
                loss = self.model.loss(batch.source, batch.target, label_smoothing=smoothing)
                loss = loss + weight * guide.loss(batch.source, batch.target, batch.links)
        return loss * (batch.labels / labels)
