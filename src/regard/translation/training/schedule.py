"""Learning rates over a training."""

import math

from regard.translation.config import TrainingConfig


def learning_rate(config: TrainingConfig, step: int, steps: int) -> float:
    """The rate of an update, counted from 0: a rise of `warmup` updates, then what the schedule says.

    >>> from regard.translation.config import TrainingConfig
    >>> from regard.translation.training.schedule import learning_rate
    >>> config = TrainingConfig(learning_rate=1.0, warmup=2, schedule="inverse-sqrt")
    >>> [round(learning_rate(config, step, 8), 2) for step in range(8)]
    [0.5, 1.0, 0.82, 0.71, 0.63, 0.58, 0.53, 0.5]
    >>> config = TrainingConfig(learning_rate=1.0, warmup=2, schedule="cosine")
    >>> [round(learning_rate(config, step, 8), 2) for step in range(8)]
    [0.5, 1.0, 0.93, 0.75, 0.5, 0.25, 0.07, 0.0]
    """
    warmup = min(config.warmup, max(steps // 4, 1))  # of a short training, a quarter
    done = step + 1
    if done <= warmup:
        return config.learning_rate * done / warmup
    if config.schedule == "inverse-sqrt":  # Vaswani et al. 2017, eq. 3
        return config.learning_rate * math.sqrt(max(warmup, 1) / done)
    if config.schedule == "cosine":  # Loshchilov and Hutter 2017, eq. 5
        return config.learning_rate * (1 + math.cos(math.pi * (done - warmup) / max(steps - warmup, 1))) / 2
    return config.learning_rate
