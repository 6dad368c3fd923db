"""The training loop: updates, validation and checkpoints.

The batch, the learning rate and the dropout seed of an update depend only on its number. A run that is
killed and resumed from a checkpoint therefore gives the same result as an uninterrupted one.
"""

import math
import signal
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy
import torch
from numpy.typing import NDArray
from torch import nn

from regard._util.text import pluralize
from regard.errors import ArgumentError, RegardError
from regard.translation.config import TranslationConfig
from regard.translation.data.batches import Batch, Batches
from regard.translation.data.copied_words import find_copyable
from regard.translation.data.subword_sampling import SubwordSampler
from regard.translation.pretrained.origin import build_model
from regard.translation.training.callbacks import Callback, CallbackList, Report
from regard.translation.training.checkpoint import Checkpoint
from regard.translation.training.distributed.rendezvous import first_sentence, is_connection_error
from regard.translation.training.distributed.world import Candidate, World
from regard.translation.training.initialization import load_initial
from regard.translation.training.objective import Objective
from regard.translation.training.precision import TOKENS, autocast, choose_precision
from regard.translation.training.preparation import TrainingData
from regard.translation.training.timing import TIMED_BATCHES, RunningStats, format_minutes, measure_speed
from regard.translation.training.training_config import (
    Precision,
    create_optimizer,
    dropout_seed,
    learning_rate,
)
from regard.translation.training.validation import DevSet, DivergenceMonitor, OverfittingMonitor, validate

_REPORT_EVERY = 50  # updates between reports
_MAX_SILENCE = 30.0  # maximum seconds between reports
_COMPLETE = 0.9  # a run that used this fraction of training.minutes counts as complete
_MIN_PERIOD = 50  # minimum number of updates between validations, unless validate_every is set


@dataclass
class Progress:
    """Progress of a training run; saved with each checkpoint."""

    step: int = 0
    seconds: float = 0.0
    best: float = -math.inf
    best_step: int = 0
    without_improvement: int = 0
    validation_seconds: float = 0.0
    steps: int = 0  # planned number of updates if training.minutes is set
    precision: str = ""  # chosen at the start if training.precision is "auto"

    @property
    def state(self) -> dict[str, Any]:
        """Return JSON-serializable values."""
        return asdict(self) | {"best": None if math.isinf(self.best) else self.best}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Progress":
        """Restore the progress from `state`; raise ValueError for impossible values."""
        progress = cls(**state | {"best": -math.inf if state["best"] is None else state["best"]})
        if progress.precision not in ("", *get_args(Precision)):
            raise ValueError(f"precision is {progress.precision!r}")
        for name, kind in get_type_hints(cls).items():
            value = getattr(progress, name)
            if kind is str:
                continue
            if type(value) not in (kind, int) or (name != "best" and value < 0) or math.isnan(value):
                raise ValueError(f"{name} is {value!r}")
        return progress


class TrainingResult(NamedTuple):
    """Result of a training run.

    progress: number of updates, and the best update.
    finished: False if training was interrupted; continue with `resume=True`.
    signal: number of the signal that interrupted it, or 0.
    example: a source sentence from the validation set, to try the model on.

    >>> from regard.translation.training.loop import TrainingResult, Progress
    >>> result = TrainingResult(Progress(step=500, best_step=400), finished=True)
    >>> result.progress.best_step, result.finished
    (400, True)
    """

    progress: Progress
    finished: bool
    signal: int = 0
    example: str = ""


class Trainer:
    """Trains a model in a model folder, starting from its last checkpoint if there is one.

    `run` returns when training has finished, or after Ctrl-C, once a checkpoint is saved.

    extended_at: updates at which training was extended; each one resets patience.
    """

    def __init__(
        self,
        folder: Path,
        config: TranslationConfig,
        data: TrainingData,
        *,
        callbacks: Sequence[Callback] = (),
        world: World | None = None,
        extended_at: Collection[int] = (),
    ) -> None:
        self.folder, self.config, self.extended_at = folder, config, extended_at
        self.tokens = tokens = data.tokens
        self.world = world or World()
        self.callbacks = CallbackList(callbacks if self.world.rank == 0 else ())
        training = config.training
        pieces = [[piece for piece, _ in side.scored_pieces()] for side in tokens]
        self.batches = Batches(
            data.pairs,
            training.batch_tokens,
            training.seed,
            training.unknown_rate,
            tokens.shared,
            data.links,
            SubwordSampler.create_pair(tokens, training.subword_sampling),
            tokens.special,
            find_copyable(*pieces) if training.unknown_rate else None,
        )
        self.epoch_updates = max(1, len(self.batches.epoch(0)) // training.accumulate)
        self.steps = training.updates or training.epochs * self.epoch_updates
        # several epochs if the corpus is tiny: otherwise validation would take longer than training
        self.period = self.epoch_updates * -(-_MIN_PERIOD // self.epoch_updates)
        self.dev = DevSet.from_pairs(data.dev, tokens)
        self.progress = Progress()
        self.overfitting, self.divergence = OverfittingMonitor(config), DivergenceMonitor(config)
        self._stop, self._signal = False, 0
        self._precision = "float32"

    def run(self) -> TrainingResult:
        """Train until finished or interrupted."""
        with torch.random.fork_rng(devices=[]), _threads(self.config.training.threads), self._interruptible():
            self._start()
            self._set_precision()
            self._plan()
            self.callbacks.on_begin(self._describe(), self.progress.step, self.steps)
            finished = self._loop()
        return TrainingResult(self.progress, finished, 0 if finished else self._signal)

    def _start(self) -> None:
        """Build the model and restore the last checkpoint."""
        training = self.config.training
        torch.manual_seed(training.seed)
        self.model, self.objective = self.world.build(self._build)
        self.optimizer = create_optimizer(training, self.model.parameters())
        checkpoints = Checkpoint.all(self.folder)
        step = int(self.world.sum(checkpoints[-1].step if checkpoints and self.world.rank == 0 else 0))
        if step:
            self._restore(Checkpoint.at(self.folder, step))
            self._prune()  # the run may have been killed before pruning

    def _set_precision(self) -> None:
        """Use the configured precision; for "auto", the checkpoint's precision, if any, or the faster one."""
        progress, configured = self.progress, self.config.training.precision
        self._about_precision = ""
        if configured != "auto":
            self._precision, progress.precision = configured, ""
        elif progress.precision:
            self._precision = progress.precision
            self._about_precision = f"matrix products in {progress.precision}, as before"
        elif progress.step < self.steps:
            choice = choose_precision(
                self._run_few_tokens,
                width=self.config.model.width,
                parameters=sum(parameter.numel() for parameter in self.model.parameters()),
                device=self.world.device,
                sums=self.world.sums,
            )
            self.model.zero_grad()
            self._precision = progress.precision = choice.precision
            self._about_precision = str(choice)

    def _run_few_tokens(self, precision: Precision) -> None:
        """Run a part of the first batch forward and backward, to measure the speed."""
        self._precision = precision
        epoch, indices = next(self.batches.from_step(0))
        n = len(indices) * TOKENS // self.config.training.batch_tokens
        self._try_batch(epoch, indices[: max(n, 1)])

    def _plan(self) -> None:
        """Measure the speed, and plan the number of updates if the duration is given in minutes."""
        progress, minutes = self.progress, self.config.training.minutes
        if minutes and progress.steps:  # planned by an earlier run
            self.steps = progress.steps
        speed = self._measure_speed()
        self.stats = RunningStats(progress.seconds, progress.validation_seconds, speed)
        elapsed = progress.seconds + progress.validation_seconds
        if minutes and speed and not progress.steps:
            self._fit_steps()
        elif progress.step >= progress.steps > 0 and elapsed < _COMPLETE * 60 * minutes:  # extended run
            self.steps = max(progress.step + 1, round(progress.steps * 60 * minutes / max(elapsed, 1.0)))

    def _measure_speed(self) -> float:
        """Estimate the seconds per update from a few forward and backward passes; 0 if unknown."""
        if self.world.size > 1 or self.progress.step >= self.steps:
            return 0.0
        batches = islice(self.batches.from_step(0), TIMED_BATCHES)
        per_token = measure_speed(self._try_batch(epoch, indices) for epoch, indices in batches)
        self.model.zero_grad()
        return per_token * self.config.training.batch_tokens * self.config.training.accumulate

    def _try_batch(self, epoch: int, indices: NDArray[numpy.int64]) -> int:
        """Run a batch forward and backward; return its number of tokens."""
        part, _ = self._part(epoch, indices)
        with autocast(self._precision, self.world.device):
            loss = self.objective(part, part.labels)
        loss.backward()
        float(loss.detach())  # waits for the device
        return part.size

    def _fit_steps(self) -> None:
        """Set the number of updates so that training ends after training.minutes."""
        progress = self.progress
        elapsed = progress.seconds + progress.validation_seconds
        left = 60 * self.config.training.minutes - elapsed
        period = self.config.training.validate_every or self.period
        steps = progress.step + self.stats.updates_in(left, period)
        self.steps = progress.steps = max(int(self.world.sum(steps if self.world.rank == 0 else 0)), 1)

    def _build(self) -> Objective:
        model = build_model(self.config.model, self.tokens)
        load_initial(self.folder, model)
        return Objective(model, self.config.training)

    def _restore(self, checkpoint: Checkpoint) -> None:
        try:
            with self.world.sync_errors():
                self.progress = Progress.from_state(checkpoint.state())
            self.world.restore(checkpoint, self.model, self.optimizer)
        except RegardError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            if is_connection_error(error):
                raise
            raise ArgumentError(
                f"The checkpoint {str(checkpoint.path)!r} does not match the config of its folder "
                f"({first_sentence(error)}). Remove it, or train in a new folder."
            ) from None

    def _loop(self) -> bool:
        """Run the updates; return whether training has finished."""
        training, progress = self.config.training, self.progress
        batches = self.batches.from_step(progress.step * training.accumulate)
        stats, silent = self.stats, False
        if training.minutes and progress.step >= self.steps:
            minutes = (progress.seconds + progress.validation_seconds) / 60
            self.callbacks.on_message(
                f"already trained for {minutes:.1f} minutes; training.minutes={training.minutes:g} is the "
                "total. Choose a larger value to train longer."
            )
        while progress.step < self.steps:
            if progress.step in self.extended_at:  # the checkpoint may precede the extension
                progress.without_improvement = 0
            if 0 < training.patience <= progress.without_improvement:
                return self._finish("No further improvement")
            loss, size = self._update(list(islice(batches, training.accumulate)))
            progress.step += 1
            stats.add(loss, size)
            progress.seconds = stats.seconds()
            if training.minutes and (self.world.size == 1 or progress.step % _REPORT_EVERY == 0):
                self._fit_steps()
            last = progress.step >= self.steps
            validate_now = self._due(training.validate_every) or last
            if progress.step % _REPORT_EVERY == 0 or validate_now or silent:
                report = self._report(stats)
                self.callbacks.on_report(report)
                if advice := self.divergence.check(report.step, report.loss):
                    self.callbacks.on_message(advice)
            if validate_now:
                with stats.validation():
                    self._validate()
                progress.validation_seconds = stats.validation_seconds
            # if one process has to stop or report, all do
            stop, silent = (n > 0 for n in self.world.sums([self._stop, stats.silence() > _MAX_SILENCE]))
            if last or self._due(training.save_every) or self._due(training.validate_every) or stop:
                self._save()
            if stop and not last:
                self.callbacks.on_end(f"Stopped after update {progress.step}; checkpoint saved.")
                return False
        return self._finish("Finished")

    def _update(self, batches: Sequence[tuple[int, NDArray[numpy.int64]]]) -> tuple[float, int]:
        """Run one update; return this process's part of the loss, and the number of tokens."""
        training, world = self.config.training, self.world
        torch.manual_seed(dropout_seed(training.seed, self.progress.step, world.rank, world.size))
        parts = [self._part(epoch, indices) for epoch, indices in batches]
        counts = [
            sum(part.labels * weight for part, weight in parts),
            sum(part.size * weight for part, weight in parts),
        ]
        labels, size = map(int, world.sums(counts))
        loss = 0.0
        for number, (part, weight) in enumerate(parts, 1):
            with nullcontext() if number == len(parts) else world.no_sync(self.objective):
                with autocast(self._precision, self.world.device):
                    part_loss = self.objective(part, labels) * weight
                part_loss.backward()
            loss += float(part_loss.detach())
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(training, self.progress.step, self.steps)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), training.max_grad_norm or math.inf)
        if not math.isfinite(float(norm)):
            with self.world.sync_errors():
                raise self._divergence(f"The gradient of update {self.progress.step + 1}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, size

    def _part(self, epoch: int, indices: NDArray[numpy.int64]) -> tuple[Batch, int]:
        """Return this process's part of a batch, and the weight 1.

        If the part is empty, return any pair and the weight 0.
        """
        part = indices[self.world.rank :: self.world.size]
        batch = self.batches.get(part if len(part) else indices[:1], epoch)
        return batch.to(self.world.device), 1 if len(part) else 0

    def _divergence(self, quantity: str) -> ArgumentError:
        training = self.config.training
        exists = Checkpoint.all(self.folder)
        saved = "The last checkpoint is unchanged" if exists else "There is no checkpoint yet"
        return ArgumentError(
            f"{quantity} is not finite. {saved}. Lower training.learning_rate (now "
            f"{training.learning_rate:g}), or set training.max_grad_norm (now {training.max_grad_norm:g}), "
            "and train in a new folder."
        )

    def _due(self, every: int) -> bool:
        return self.progress.step % (every or self.period) == 0

    def _validate(self) -> None:
        """Validate the average of the last checkpoints; keep it if it is the best."""
        progress, value = self.progress, 0.0
        earlier = self.config.training.average_checkpoints - 1
        others = self._regular()[-earlier:] if earlier else []
        with self.world.candidate(self.folder, self.model, others) as candidate, self.world.sync_errors():
            if candidate is not None:
                value = self._validate_candidate(candidate)
        value = self.world.sum(value)  # 0 except on rank 0
        if value > progress.best:
            progress.best, progress.best_step, progress.without_improvement = value, progress.step, 0
        else:
            progress.without_improvement += 1

    def _validate_candidate(self, candidate: Candidate) -> float:
        result = validate(candidate.model, self.tokens, self.dev, self.progress.step)
        if not math.isfinite(result.loss):
            raise self._divergence(f"The validation loss after update {self.progress.step}")
        value = result.score(self.config.training.metric)
        best = value > self.progress.best
        if best:
            candidate.keep()
        self.callbacks.on_validation(result._replace(best=best))
        if advice := self.overfitting.check(result):
            self.callbacks.on_message(advice)
        return value

    def _regular(self) -> list[Checkpoint]:
        """Return the earlier scheduled checkpoints, excluding those saved on interruption."""
        training = self.config.training
        every = [training.save_every or self.period, training.validate_every or self.period]
        return [
            checkpoint
            for checkpoint in Checkpoint.all(self.folder)
            if checkpoint.step < self.progress.step and any(checkpoint.step % n == 0 for n in every)
        ]

    def _save(self) -> None:
        progress, world = self.progress, self.world
        checkpoint = world.save(self.folder, progress.step, self.model, self.optimizer, progress.state)
        self._prune()
        self.callbacks.on_save(progress.step, checkpoint.path)

    def _prune(self) -> None:
        """Remove all checkpoints except the current one and those needed for averaging."""
        if self.world.rank == 0:
            earlier = self._regular()[-max(1, self.config.training.average_checkpoints - 1) :]
            Checkpoint.prune(self.folder, [*earlier, Checkpoint.at(self.folder, self.progress.step)])

    def _finish(self, reason: str) -> bool:
        step, best = self.progress.step, self.progress.best_step
        self.callbacks.on_end(f"{reason} after {pluralize(step, 'update')}; best model: update {best}.")
        return True

    def _report(self, stats: RunningStats) -> Report:
        progress = self.progress
        loss, tokens_per_second = stats.take()
        loss = self.world.sum(loss)
        return Report(
            step=progress.step,
            steps=self.steps,
            epoch=progress.step / self.epoch_updates,
            loss=loss,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            tokens_per_second=tokens_per_second,
            seconds=progress.seconds,
            left=self._left(),
        )

    def _left(self) -> float:
        """Return the estimated remaining seconds."""
        updates = max(self.steps - self.progress.step, 0)
        validations = math.ceil(updates / (self.config.training.validate_every or self.period))
        return self.stats.left(updates, validations)

    def _describe(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        pairs = len(self.batches.pairs.sizes)
        model, training = self.config.model, self.config.training
        text = f"{model.kind}, {parameters / 1e6:.1f} M parameters, {pairs:,} pairs"
        if left := self._left():
            text += f", about {format_minutes(left)} on this machine"
        text += f"\n{self._about_precision}" if self._about_precision else ""
        parts = ["dropout"] if model.dropout else []
        parts += [f"label smoothing {training.label_smoothing:g}"] if training.label_smoothing else []
        parts += ["the alignment loss"] if training.guided_alignment_weight else []
        return f"{text}\nloss includes {', '.join(parts)}; dev loss does not" if parts else text

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """On SIGINT, SIGTERM or SIGHUP, finish the update and save a checkpoint.

        A second signal stops immediately. SIGHUP is ignored under `nohup`.
        """

        def stop(number: int, frame: FrameType | None) -> None:
            if self._stop and number == hangup:  # sent twice by some terminals
                return
            if self._stop:
                raise KeyboardInterrupt
            self._stop, self._signal = True, number
            with suppress(RuntimeError, OSError):  # raised during another print, or if the terminal is closed
                self.callbacks.on_message("stopping after this update …")

        # torchrun forwards Ctrl-C to all processes. It sends SIGTERM when a process has died; then no
        # update can finish.
        numbers = [signal.SIGINT] if self.world.size > 1 else [signal.SIGINT, signal.SIGTERM]
        hangup = getattr(signal, "SIGHUP", None)  # not available on every system
        if self.world.size == 1 and hangup and signal.getsignal(hangup) != signal.SIG_IGN:
            numbers.append(hangup)
        try:
            before = {number: signal.signal(number, stop) for number in numbers}
        except ValueError:  # not in the main thread
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Set the number of torch threads, unless it is 0."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
