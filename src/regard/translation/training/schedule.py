"""Learning rate schedules."""

import math

from regard.translation.config import TrainingConfig


def learning_rate(config: TrainingConfig, step: int, steps: int) -> float:
    """The learning rate of update `step`, counted from 0: linear warmup, then the schedule.

    >>> from regard.translation.config import TrainingConfig
    >>> from regard.translation.training.schedule import learning_rate
    >>> config = TrainingConfig(learning_rate=1.0, warmup=2, schedule="inverse-sqrt")
    >>> [round(learning_rate(config, step, 8), 2) for step in range(8)]
    [0.5, 1.0, 0.82, 0.71, 0.63, 0.58, 0.53, 0.5]
    >>> config = TrainingConfig(learning_rate=1.0, warmup=2, schedule="cosine")
    >>> [round(learning_rate(config, step, 8), 2) for step in range(8)]
    [0.5, 1.0, 0.93, 0.75, 0.5, 0.25, 0.07, 0.0]
    """
    peak, warmup = config.learning_rate, min(config.warmup, max(steps // 4, 1))  # at most a quarter
    done = step + 1
    if done <= warmup:
        return peak * done / warmup
    if config.schedule == "inverse-sqrt":  # Vaswani et al. 2017, eq. 3
        return peak * math.sqrt(max(warmup, 1) / done)
    if config.schedule == "cosine":  # Loshchilov and Hutter 2017, eq. 5
        return peak * (1 + math.cos(math.pi * (done - warmup) / max(steps - warmup, 1))) / 2
    return peak
