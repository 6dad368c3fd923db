"""Training settings, optimizer and learning rate. Importing this module does not import torch."""
# ruff: noqa: RUF009 (setting returns a dataclass field)

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from regard._util.settings import Section, setting
from regard._util.text import pluralize

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

Schedule = Literal["cosine", "inverse-sqrt", "constant"]
Precision = Literal["float32", "bfloat16"]
PrecisionSetting = Literal["auto", "float32", "bfloat16"]
Metric = Literal["bleu", "loss"]
_MAX_UPDATES = 10**12


@dataclass(frozen=True)
class TrainingConfig(Section):
    """Optimization and validation: the [training] section."""

    epochs: int = setting(20, "Passes over the training data.", min=1, max=_MAX_UPDATES)
    updates: int | None = setting(
        None, "Number of optimizer updates; overrides epochs.", min=1, max=_MAX_UPDATES
    )
    minutes: float = setting(
        0.0,
        "Training time in minutes, including validation; overrides epochs. 0: off.",
        min=0,
        max=10_000_000,
    )
    batch_tokens: int = setting(4096, "Batch size in tokens, source plus target.", min=1, max=100_000_000)
    accumulate: int = setting(1, "Batches per update (gradient accumulation).", min=1, max=100_000)
    learning_rate: float = setting(1e-3, "Peak learning rate.", above=0)
    schedule: Schedule = setting(
        "cosine", "Learning rate after warmup: cosine (to 0), inverse-sqrt (Vaswani et al. 2017) or constant."
    )
    warmup: int = setting(400, "Number of linear warmup updates.", min=0, max=_MAX_UPDATES)
    label_smoothing: float = setting(0.1, "Label smoothing.", min=0, below=1)
    weight_decay: float = setting(0.0, "AdamW weight decay.", min=0)
    max_grad_norm: float = setting(1.0, "Maximum gradient norm. 0: no clipping.", min=0)
    unknown_rate: float = setting(
        0.02,
        "Fraction of pairs with a token replaced by the unknown token, so the model learns to copy.",
        min=0,
        below=1,
    )
    subword_sampling: float = setting(
        0.0,
        "Fraction of words split into random subwords in each epoch (Kudo 2018); requires unigram tokens.",
        min=0,
        max=1,
    )
    guided_alignment_weight: float = setting(
        0.0,
        "Weight of the alignment loss on one head (Garg et al. 2019); 0.3 improves alignments. 0: off.",
        min=0,
    )
    precision: PrecisionSetting = setting(
        "auto", "Precision of matrix products: float32, bfloat16, or auto (bfloat16 if it is clearly faster)."
    )
    validate_every: int = setting(
        0,
        "Updates between validations. 0: once per epoch, at least 50 updates apart.",
        min=0,
        max=_MAX_UPDATES,
    )
    save_every: int = setting(
        0,
        "Updates between checkpoints; validations also save one. 0: once per epoch, at least 50 apart.",
        min=0,
        max=_MAX_UPDATES,
    )
    average_checkpoints: int = setting(
        1, "Number of most recent checkpoints whose parameters are averaged.", min=1, max=10_000
    )
    patience: int = setting(
        0, "Stop after this many validations without improvement. 0: never.", min=0, max=_MAX_UPDATES
    )
    metric: Metric = setting("bleu", "Validation metric that selects the best model: bleu or loss.")
    seed: int = setting(0, "Random seed.", min=0, max=2**32 - 1)
    threads: int = setting(0, "CPU threads. 0: torch's default.", min=0, max=4096)

    def duration(self) -> str:
        """Return the planned duration of training as text."""
        if self.minutes:
            return f"{self.minutes:g} minute{'s' * (self.minutes != 1)}"
        return pluralize(self.epochs, "epoch") if self.updates is None else pluralize(self.updates, "update")


def create_optimizer(config: TrainingConfig, parameters: "Iterable[nn.Parameter]") -> "Optimizer":
    """Create an AdamW optimizer with the betas of Vaswani et al. 2017, section 5.3."""
    from torch.optim import AdamW

    return AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(0.9, 0.98),
        eps=1e-9,
        weight_decay=config.weight_decay,
        fused=True,
    )


def learning_rate(config: TrainingConfig, step: int, steps: int) -> float:
    """Return the learning rate for update `step`, counted from 0: linear warmup, then the schedule.

    >>> from regard.translation.training.training_config import TrainingConfig, learning_rate
    >>> config = TrainingConfig(learning_rate=1.0, warmup=2, schedule="inverse-sqrt")
    >>> [round(learning_rate(config, step, 8), 2) for step in range(8)]
    [0.5, 1.0, 0.82, 0.71, 0.63, 0.58, 0.53, 0.5]
    >>> config = TrainingConfig(learning_rate=1.0, warmup=2, schedule="cosine")
    >>> [round(learning_rate(config, step, 8), 2) for step in range(8)]
    [0.5, 1.0, 0.93, 0.75, 0.5, 0.25, 0.07, 0.0]
    """
    peak, warmup = config.learning_rate, min(config.warmup, max(steps // 4, 1))  # at most 1/4 of all steps
    done = step + 1
    if done <= warmup:
        return peak * done / warmup
    if config.schedule == "inverse-sqrt":  # Vaswani et al. 2017, eq. 3
        return peak * math.sqrt(max(warmup, 1) / done)
    if config.schedule == "cosine":  # Loshchilov and Hutter 2017, eq. 5
        return peak * (1 + math.cos(math.pi * (done - warmup) / max(steps - warmup, 1))) / 2
    return peak


def dropout_seed(seed: int, step: int, rank: int, size: int) -> int:
    """Return torch's random seed for one update in process `rank` of `size`.

    Seeds are unique within a training run. torch's CPU generator uses only 32 bits: enough for 67 million
    updates with up to 64 processes, or for 4 million with 1,000.
    """
    # updates are at least 64 seeds apart, so seeds are the same for any number of processes up to 64
    return ((seed * 1_000_003 + step) * max(64, size) + rank) % 2**64
