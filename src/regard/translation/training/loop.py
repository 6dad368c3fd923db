"""Training: updates, looks at the dev data, checkpoints; the same run from wherever it was cut off.

Everything that an update does follows from its number: the batch, the learning rate, and the seed of its
dropout. So a training that is killed and goes on from a checkpoint ends where it would have ended.
"""

import math
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, get_type_hints

import numpy
import torch
from numpy.typing import NDArray
from torch import nn

from regard.errors import ArgumentError, RegardError
from regard.translation.config import TranslationConfig
from regard.translation.data.batches import Batch, Batches, Pairs
from regard.translation.data.pairs import Pair
from regard.translation.tokens import TokenizerPair
from regard.translation.training.checkpoint import Checkpoint
from regard.translation.training.distributed import Candidate, Objective, SingleProcess, World
from regard.translation.training.progress import Callback, CallbackList, Report
from regard.translation.training.rendezvous import brief, lost
from regard.translation.training.schedule import learning_rate
from regard.translation.training.validation import DevSet, validate

_REPORT = 50  # updates between two reports
_SILENCE = 30.0  # seconds after which there is a report in any case
_APART = 50  # updates between two looks at the dev data, at least, if the config does not say how many


@dataclass
class Progress:
    """Where a training stands, beside its parameters; saved with each checkpoint."""

    step: int = 0
    seconds: float = 0.0
    best: float = -math.inf
    best_step: int = 0
    without_improvement: int = 0

    @property
    def state(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self) | {"best": None if math.isinf(self.best) else self.best}

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Progress":
        """What `state` gave."""
        found = cls(**state | {"best": -math.inf if state["best"] is None else state["best"]})
        for name, kind in get_type_hints(cls).items():
            value = getattr(found, name)
            if type(value) not in (kind, int) or (name != "best" and value < 0) or math.isnan(value):
                raise ValueError(f"its {name} is {value!r}")
        return found


class TrainingResult(NamedTuple):
    """How a training ended: where it stands, and whether there is nothing left to do.

    progress: the updates made, and the best of them.
    finished: False for one that was interrupted; `resume=True` goes on with it.
    signal: the number of the signal that interrupted it; 0 if none did.

    >>> from regard.translation.training.loop import TrainingResult, Progress
    >>> outcome = TrainingResult(Progress(step=500, best_step=400), finished=True)
    >>> outcome.progress.best_step, outcome.finished
    (400, True)
    """

    progress: Progress
    finished: bool
    signal: int = 0


class Trainer:
    """Trains a model of a config on pairs of token numbers, in a model folder, from its last checkpoint on.

    `Trainer(...).run()` returns when the config is fulfilled, or after Ctrl-C, when all is saved.

    anew: the updates after which patience begins anew, as the training was made longer there.
    """

    def __init__(
        self,
        folder: Path,
        config: TranslationConfig,
        tokens: TokenizerPair,
        pairs: Pairs,
        dev: Sequence[Pair],
        *,
        links: Pairs | None = None,
        callbacks: Sequence[Callback] = (),
        world: World | None = None,
        anew: Collection[int] = (),
    ) -> None:
        self.folder, self.config, self.tokens, self.anew = folder, config, tokens, anew
        self.world = world or SingleProcess()
        # the first process speaks for all
        self.callbacks = CallbackList(callbacks if self.world.rank == 0 else ())
        training = config.training
        self.batches = Batches(
            pairs, training.batch_tokens, training.seed, training.unknown_rate, tokens.shared, links
        )
        self.epoch = max(1, len(self.batches.epoch(0)) // training.accumulate)  # in updates
        self.steps = training.updates or training.epochs * self.epoch
        # of a tiny corpus, several epochs: looking takes longer than learning there
        self.period = self.epoch * -(-_APART // self.epoch)
        self.dev = DevSet.from_pairs(dev, tokens)
        self.progress = Progress()
        self._stop, self._signal = False, 0

    def run(self) -> TrainingResult:
        """Train until the config is fulfilled."""
        with torch.random.fork_rng(devices=[]), _threads(self.config.training.threads), self._interruptible():
            self._begin()
            self.callbacks.on_begin(self._about(), self.progress.step, self.steps)
            finished = self._loop()
        return TrainingResult(self.progress, finished, 0 if finished else self._signal)

    def _begin(self) -> None:
        """A new model, or that of the last checkpoint."""
        training = self.config.training
        torch.manual_seed(training.seed)
        self.model, self.objective = self.world.build(self._make)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=training.learning_rate,
            betas=(0.9, 0.98),
            eps=1e-9,
            weight_decay=training.weight_decay,
            fused=True,
        )
        found = Checkpoint.all(self.folder)
        step = int(self.world.total(found[-1].step if found and self.world.rank == 0 else 0))
        if step:
            self._restore(Checkpoint.at(self.folder, step))
            self._tidy()  # if it was killed before it could

    def _make(self) -> Objective:
        model = self.config.model.build(self.tokens.sizes())
        return Objective(
            model, self.config.training.label_smoothing, self.config.training.guided_alignment_weight
        )

    def _restore(self, saved: Checkpoint) -> None:
        try:
            with self.world.agreed():
                self.progress = Progress.of(saved.state())
            self.world.restore(saved, self.model, self.optimizer)
        except RegardError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            if lost(error):
                raise
            raise ArgumentError(
                f"the checkpoint {str(saved.path)!r} does not fit the config of its folder "
                f"({brief(error)}); remove it, or train in a new folder."
            ) from None

    def _loop(self) -> bool:
        """Update after update; whether the config is fulfilled."""
        training, progress = self.config.training, self.progress
        coming = self.batches.from_step(progress.step * training.accumulate)
        since, silent = Since(progress.seconds), False
        while progress.step < self.steps:
            if progress.step in self.anew:  # here, and not in the checkpoint, which may be older than that
                progress.without_improvement = 0
            if self._patience_ended():
                return self._end("no improvement any more")
            batches = [(epoch, places) for epoch, _, places in islice(coming, training.accumulate)]
            loss, size = self._update(batches)
            progress.step += 1
            since.add(loss, size)
            progress.seconds = since.seconds()
            last = progress.step == self.steps
            judged = self._due(training.validate_every) or last
            if progress.step % _REPORT == 0 or judged or silent:
                self.callbacks.on_report(self._report(since))
            if judged:
                self._judge()
                since.pause(progress.seconds)
            # all processes, if one was told to stop, or has been silent for long
            stop, silent = (n > 0 for n in self.world.totals([self._stop, since.silence() > _SILENCE]))
            if last or self._due(training.save_every) or self._due(training.validate_every) or stop:
                self._save()
            if stop and not last:
                self.callbacks.on_end(f"stopped after update {progress.step}; all is saved.")
                return False
        return self._end("all updates are done")

    def _update(self, batches: Sequence[tuple[int, NDArray[numpy.int64]]]) -> tuple[float, int]:
        """One update by the gradient of these batches; this process's share of the loss, and their tokens."""
        training, world = self.config.training, self.world
        torch.manual_seed(dropout_seed(training.seed, self.progress.step, world.rank, world.size))
        parts = [self._part(epoch, places) for epoch, places in batches]
        mine = [
            sum(part.labels * weight for part, weight in parts),
            sum(part.size * weight for part, weight in parts),
        ]
        labels, size = map(int, world.totals(mine))
        loss = 0.0
        for number, (part, weight) in enumerate(parts, 1):
            with nullcontext() if number == len(parts) else world.apart(self.objective):
                with self._precision():
                    share = self.objective(part, labels) * weight
                share.backward()
            loss += float(share.detach())
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(training, self.progress.step, self.steps)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), training.max_grad_norm or math.inf)
        self._check_finite(float(norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, size

    def _part(self, epoch: int, places: NDArray[numpy.int64]) -> tuple[Batch, int]:
        """This process's part of a batch; if there is none, any pair, that counts 0 times."""
        mine = places[self.world.rank :: self.world.size]
        batch = self.batches.get(mine if len(mine) else places[:1], epoch)
        return batch.to(self.world.device), 1 if len(mine) else 0

    def _precision(self) -> Any:
        if self.config.training.precision == "float32":
            return nullcontext()
        return torch.autocast(self.world.device.type, torch.bfloat16)

    def _check_finite(self, norm: float) -> None:
        if math.isfinite(norm):
            return
        with self.world.agreed():
            raise self._not_finite(f"the gradient of update {self.progress.step + 1}")

    def _not_finite(self, what: str) -> ArgumentError:
        training = self.config.training
        saved = (
            "the last checkpoint is as it was"
            if Checkpoint.all(self.folder)
            else "there is no checkpoint yet"
        )
        return ArgumentError(
            f"{what} is not finite; {saved}. Lower training.learning_rate, which is {training.learning_rate:g}, or set "
            f"training.max_grad_norm, which is {training.max_grad_norm:g}, and train in a new folder."
        )

    def _due(self, every: int) -> bool:
        return self.progress.step % (every or self.period) == 0

    def _judge(self) -> None:
        """Look at the dev data with the average of the last checkpoints; keep it if it is the best."""
        progress, value = self.progress, 0.0
        others = self._averaged_with()
        with self.world.candidate(self.folder, self.model, others) as candidate, self.world.agreed():
            if candidate is not None:
                value = self._look(candidate)
        value = self.world.total(value)  # which the first process alone knows
        if value > progress.best:
            progress.best, progress.best_step, progress.without_improvement = value, progress.step, 0
        else:
            progress.without_improvement += 1

    def _look(self, candidate: Candidate) -> float:
        """Validate a model, and keep its parameters if they are the best."""
        found = validate(candidate.model, self.tokens, self.dev, self.config.training.metric)
        if not math.isfinite(found.loss):
            raise self._not_finite(f"the dev loss after update {self.progress.step}")
        better = found.value > self.progress.best
        if better:
            candidate.keep()
        self.callbacks.on_validation(found.judgement(self.progress.step, better))
        return found.value

    def _averaged_with(self) -> list[Checkpoint]:
        """The checkpoints with which the parameters to translate with are averaged."""
        others = self.config.training.average_checkpoints - 1
        return self._regular()[-others:] if others else []

    def _regular(self) -> list[Checkpoint]:
        """The checkpoints before this step that the config asked for, and not Ctrl-C."""
        training = self.config.training
        every = [training.save_every or self.period, training.validate_every or self.period]
        return [
            one
            for one in Checkpoint.all(self.folder)
            if one.step < self.progress.step and any(one.step % each == 0 for each in every)
        ]

    def _save(self) -> None:
        """Write a checkpoint."""
        progress, world = self.progress, self.world
        one = world.write(self.folder, progress.step, self.model, self.optimizer, progress.state)
        self._tidy()
        self.callbacks.on_save(progress.step, one.path)

    def _tidy(self) -> None:
        """Remove all checkpoints but that of this step, and those before it that are needed."""
        if self.world.rank == 0:
            before = self._regular()[-max(1, self.config.training.average_checkpoints - 1) :]
            Checkpoint.tidy(self.folder, [*before, Checkpoint.at(self.folder, self.progress.step)])

    def _patience_ended(self) -> bool:
        patience = self.config.training.patience
        return bool(patience) and self.progress.without_improvement >= patience

    def _end(self, why: str) -> bool:
        best = f"the best parameters are those of update {self.progress.best_step}"
        self.callbacks.on_end(f"{why} after {self.progress.step} updates; {best}.")
        return True

    def _report(self, since: "Since") -> Report:
        progress = self.progress
        loss, tokens_per_second = since.take()
        loss = self.world.total(loss)
        return Report(
            step=progress.step,
            steps=self.steps,
            epoch=progress.step / self.epoch,
            loss=loss,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            tokens_per_second=tokens_per_second,
            seconds=progress.seconds,
            left=(self.steps - progress.step) * progress.seconds / progress.step,
        )

    def _about(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        pairs = len(self.batches.pairs.sizes)
        told = f"{self.config.model.kind}, {parameters / 1e6:.1f} M parameters, {pairs:,} pairs"
        model, training = self.config.model, self.config.training
        parts = ["dropout"] if model.dropout else []
        parts += [f"labels smoothed by {training.label_smoothing:g}"] if training.label_smoothing else []
        parts += ["what the guided head is taught"] if training.guided_alignment_weight else []
        if parts:
            told += f"\nloss is that of the training, with {', '.join(parts)}; dev loss is without"
        return told

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C, or a request to end, lets the update finish and saves; a second one ends at once.

        So does a terminal that is closed, unless `nohup` has said that this is to be ignored.
        """

        def stop(number: int, frame: FrameType | None) -> None:
            if self._stop and number == hangup:  # some terminals send it twice
                return
            if self._stop:
                raise KeyboardInterrupt
            self._stop, self._signal = True, number
            with suppress(RuntimeError, OSError):  # if it comes while something is printed; no terminal
                self.callbacks.on_message("stopping after this update …")

        # torchrun passes Ctrl-C on to all processes; it asks them to end when one is lost, and then no update
        # can be finished any more
        numbers = [signal.SIGINT] if self.world.size > 1 else [signal.SIGINT, signal.SIGTERM]
        hangup = getattr(signal, "SIGHUP", None)  # not every system has it
        if self.world.size == 1 and hangup and signal.getsignal(hangup) != signal.SIG_IGN:
            numbers.append(hangup)
        try:
            before = {number: signal.signal(number, stop) for number in numbers}
        except ValueError:  # not in the main thread, where signals do not arrive
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """So many for torch, unless it is 0."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def dropout_seed(seed: int, step: int, rank: int, size: int) -> int:
    """The seed of torch's random numbers for one update in one process of `size`.

    No two updates or processes of a training share one. torch's CPU generator reads the lowest 32 bits only:
    that suffices for 67 million updates of up to 64 processes, or for 4 million of 1,000.

    >>> from regard.translation.training.loop import dropout_seed
    >>> [dropout_seed(0, step, rank, size=2) for step in (0, 1) for rank in (0, 1)]
    [0, 1, 64, 65]
    """
    # at least 64 apart: then the number of processes does not matter, up to 64 of them
    return ((seed * 1_000_003 + step) * max(64, size) + rank) % 2**64


class Since:
    """Loss and speed since the last report; the time of looks at the dev data does not count."""

    def __init__(self, seconds: float) -> None:
        self._before, self._begun = seconds, time.monotonic()
        self._reported = seconds
        self._losses: list[float] = []
        self._size = 0

    def add(self, loss: float, size: int) -> None:
        """One more update."""
        self._losses.append(loss)
        self._size += size

    def seconds(self) -> float:
        """Of training, over all resumes."""
        return self._before + time.monotonic() - self._begun

    def silence(self) -> float:
        """Seconds since the last report."""
        return self.seconds() - self._reported

    def pause(self, seconds: float) -> None:
        """Go on counting from here."""
        self._before, self._begun = seconds, time.monotonic()

    def take(self) -> tuple[float, float]:
        """The mean loss, and source and target tokens per second; the next report counts from here."""
        now = self.seconds()
        found = sum(self._losses) / len(self._losses), self._size / max(now - self._reported, 1e-9)
        self._losses, self._size, self._reported = [], 0, now
        return found
