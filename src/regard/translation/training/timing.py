"""Training time: mean loss and throughput since the last report, the remaining time, and speed estimates."""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from regard.models.inference.quantization import runs_bfloat16
from regard.models.packed import Packed
from regard.translation.config import TranslationConfig
from regard.translation.data.batches import Batch
from regard.translation.training.objective import Objective
from regard.translation.training.precision import PRECISIONS, autocast, time_steps
from regard.translation.training.training_config import Precision, create_optimizer

_WINDOW = 60.0  # seconds of training over which the recent speed is measured
_MIN_UPDATES = 10  # minimum number of updates in this measurement
TIMED_BATCHES, _MAX_TIMED = 5, 3.0  # maximum batches and seconds for measuring the speed before training
_TRIAL_TOKENS = 2500  # tokens in a batch of random sentences; larger batches are hardly faster per token
_TRIAL_STEPS, _TRIAL_SECONDS = 4, 1.5  # maximum number of training steps, and of seconds before the last one
_OPTIMIZER = 1.05  # time of an update, relative to its forward and backward passes


class RunningStats:
    """Mean loss and throughput since the last report, excluding validation time.

    seconds, validation_seconds: time spent in training and in validation, including earlier runs.
    seconds_per_update: an estimate, used until enough updates have been counted.

    >>> from regard.translation.training.timing import RunningStats
    >>> stats = RunningStats(seconds=3600.0, seconds_per_update=0.5)  # resumed after an hour
    >>> stats.left(updates=100, validations=0)
    50.0
    """

    def __init__(
        self, seconds: float = 0.0, validation_seconds: float = 0.0, seconds_per_update: float = 0.0
    ) -> None:
        self._before, self._start = seconds, time.monotonic()
        self.validation_seconds = validation_seconds
        self._estimate = seconds_per_update
        self._reported, self._size = seconds, 0
        self._losses: list[float] = []
        self._recent: deque[float] = deque([seconds])  # the training time after each recent update
        self._last_validation = 0.0  # duration in seconds

    def add(self, loss: float, size: int) -> None:
        """Count an update."""
        self._losses.append(loss)
        self._size += size
        now = self.seconds()
        self._recent.append(now)
        while len(self._recent) > _MIN_UPDATES + 1 and now - self._recent[1] > _WINDOW:
            self._recent.popleft()

    def seconds(self) -> float:
        """Return the training time, including earlier runs."""
        return self._before + time.monotonic() - self._start

    def silence(self) -> float:
        """Return the seconds since the last report."""
        return self.seconds() - self._reported

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Pause the training clock, and measure the validation time instead."""
        seconds, start = self.seconds(), time.monotonic()
        yield
        self._last_validation = time.monotonic() - start
        self.validation_seconds += self._last_validation
        self._before, self._start = seconds, time.monotonic()

    def take(self) -> tuple[float, float]:
        """Return the mean loss and tokens per second since the last report, and reset them."""
        now = self.seconds()
        result = sum(self._losses) / len(self._losses), self._size / max(now - self._reported, 1e-9)
        self._losses, self._size, self._reported = [], 0, now
        return result

    def left(self, updates: int, validations: float) -> float:
        """Estimate the seconds for a number of updates and validations, at the recent speed."""
        return updates * self.seconds_per_update() + validations * self._last_validation

    def seconds_per_update(self) -> float:
        """Return the mean duration of the recent updates; 0 if unknown."""
        updates = len(self._recent) - 1
        measured = (self._recent[-1] - self._recent[0]) / max(updates, 1)
        if self._estimate and updates < _MIN_UPDATES:  # the first updates are slow
            return self._estimate
        return measured

    def updates_in(self, seconds: float, period: int) -> int:
        """Return how many updates fit into `seconds`, validating every `period` updates and at the end."""
        cost = self.seconds_per_update() + self._last_validation / period
        return max(int((seconds - self._last_validation) / max(cost, 1e-9)), 0)


def measure_speed(batches: Iterable[int]) -> float:
    """Return the seconds per token.

    batches: an iterator that runs a batch at each step and yields its number of tokens. The first batch is
        slower and does not count, unless it is the only one that fits into three seconds.
    """
    times, sizes = [time.monotonic()], []
    for size in batches:
        times.append(time.monotonic())
        sizes.append(size)
        if times[-1] - times[0] > _MAX_TIMED:
            break
    first = 1 if len(sizes) > 1 else 0
    return _OPTIMIZER * (times[-1] - times[first]) / max(sum(sizes[first:]), 1)


def tokens_per_second(config: TranslationConfig, length: int) -> float:
    """Measure how many source and target tokens are processed in a second of training on this machine.

    length: number of tokens in each sentence. With the precision "auto", the faster precision counts.
    The measurement uses `training.threads` threads.

    >>> from regard.translation import TranslationConfig
    >>> from regard.translation.training.timing import tokens_per_second
    >>> tokens_per_second(TranslationConfig.preset("tiny"), 10) > 100
    True
    """
    training, size = config.training, config.tokens.size
    count = max(min(training.batch_tokens, _TRIAL_TOKENS) // (2 * length), 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = config.model.build(size if config.tokens.shared else (size, size))
        source, target = (Packed.of(torch.randint(size, (count, length)).tolist()) for _ in range(2))
    diagonal = (
        torch.arange(max(length - 2, 0)).repeat(2, 1).T
    )  # links equal positions, except the start and end tokens
    batch = Batch(source, target, (diagonal,) * count if config.model.kind == "transformer" else ())
    objective, optimizer = Objective(model, training), create_optimizer(training, model.parameters())

    def run_step(precision: Precision) -> None:
        with autocast(precision, torch.device("cpu")):
            loss = objective(batch, batch.labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()

    threads = torch.get_num_threads()
    torch.set_num_threads(training.threads or threads)
    try:
        seconds = time_steps(
            run_step, rounds=_TRIAL_STEPS, seconds=_TRIAL_SECONDS, precisions=_precisions(training.precision)
        )
    finally:
        torch.set_num_threads(threads)
    return 2 * count * length / min(seconds)


def _precisions(setting: str) -> Sequence[Precision]:
    if setting == "auto":
        return PRECISIONS if runs_bfloat16(torch.device("cpu")) else PRECISIONS[:1]
    return [precision for precision in PRECISIONS if precision == setting]


def format_minutes(seconds: float) -> str:
    """Format a duration in the most readable unit.

    >>> from regard.translation.training.timing import format_minutes
    >>> [format_minutes(seconds) for seconds in (3, 50, 900, 7200, 200_000)]
    ['10 seconds', '50 seconds', '15 minutes', '2.0 hours', '2.3 days']
    """
    if seconds < 90:
        return f"{max(round(seconds, -1), 10):.0f} seconds"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 2 * 86400 else f"{seconds / 86400:.1f} days"
