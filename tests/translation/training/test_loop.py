"""The training loop: an interrupted run gives the same final result."""

import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file

from regard.errors import ArgumentError
from regard.translation.data.batches import InMemoryPairs
from regard.translation.model_folder import MODEL, OPTIMIZER, STATE
from regard.translation.training.callbacks import SampleTranslation, ValidationResult
from regard.translation.training.checkpoint import Checkpoint
from regard.translation.training.distributed.rendezvous import first_sentence
from regard.translation.training.loop import Progress
from regard.translation.training.objective import Objective
from regard.translation.training.training_config import dropout_seed
from tests.translation.folders import content, no_file_larger_than
from tests.translation.killing import train_killed
from tests.translation.small import (
    DEV,
    IDS,
    PATIENT,
    Interrupts,
    Recorder,
    bits,
    small_config,
    small_trainer,
    train_small,
)

pytestmark = pytest.mark.usefixtures("one_thread")
WIDE = ("average_checkpoints=1", "accumulate=1", "save_every=5", "validate_every=7")
Whole = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return the files of an uninterrupted training run."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}

    def find(model: str = "transformer", *settings: str) -> dict[str, Any]:
        if (model, *settings) not in known:
            folder = tmp_path_factory.mktemp("whole")
            train_small(folder, small_config(model, *settings))
            known[model, *settings] = bits(folder)
        return known[model, *settings]

    return find


@pytest.fixture(scope="module")
def three_updates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("short")
    train_small(folder, small_config("transformer", "updates=3"))
    return folder


@pytest.fixture
def short(three_updates: Path, tmp_path: Path) -> Path:
    """Return a copy of a training run of three updates."""
    return Path(shutil.copytree(three_updates, tmp_path / "short"))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "settings", "at"),
    [
        ("transformer", (), "changes"),
        pytest.param("transformer", (), "times", marks=SLOW),
        pytest.param("recurrent", (), "changes", marks=SLOW),
        pytest.param("transformer", PATIENT, "changes", marks=SLOW),
        pytest.param("plain", (), "changes", marks=SLOW),
        pytest.param("transformer", WIDE, "changes", marks=SLOW),
    ],
)
def test_a_killed_run_ends_with_the_same_bits(tmp_path, whole, model, settings, at):
    """The run is killed while writing, renaming or removing files, or at random times."""
    train_killed(tmp_path, model, settings, at=at)
    assert bits(tmp_path) == whole(model, *settings)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("transformer", ()),
        ("recurrent", ()),
        ("transformer", PATIENT),
        pytest.param("plain", (), marks=SLOW),
        pytest.param("transformer", WIDE, marks=SLOW),
    ],
)
def test_a_run_interrupted_in_each_update_ends_with_the_same_bits(tmp_path, whole, model, settings):
    wanted, finished, step = whole(model, *settings), False, 0
    while not finished:
        trainer = small_trainer(tmp_path, small_config(model, *settings))
        trainer._stop = True
        finished, step, before = (result := trainer.run()).finished, result.progress.step, step
        assert finished or step == before + 1
    assert bits(tmp_path) == wanted


def test_another_seed_gives_another_model(tmp_path, whole):
    train_small(tmp_path, small_config("transformer", "seed=1"))
    assert bits(tmp_path).keys() == whole().keys()
    assert bits(tmp_path) != whole()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("moment", "step", "stops", "number"),
    [
        ("on_save", 3, 4, signal.SIGINT),  # a validation step
        ("on_validation", 8, 8, signal.SIGINT),
        ("on_save", 4, 5, signal.SIGTERM),
    ],
)
def test_ctrl_c_saves_and_resuming_ends_with_the_same_bits(tmp_path, whole, moment, step, stops, number):
    recorder = Interrupts(moment, step, number)
    before = signal.getsignal(number)
    result = small_trainer(tmp_path, callbacks=[recorder]).run()
    assert not result.finished
    assert result.progress.step == stops == Checkpoint.all(tmp_path)[-1].step
    assert recorder.texts == [
        "stopping after this update …",
        f"Stopped after update {stops}; checkpoint saved.",
    ]
    assert signal.getsignal(number) is before
    again = Recorder()
    assert small_trainer(tmp_path, callbacks=[again]).run().finished
    assert again.begun == [(stops, 10)]
    assert bits(tmp_path) == whole()


def test_ctrl_c_in_the_last_update_has_no_effect(tmp_path, whole):
    assert small_trainer(tmp_path, callbacks=[Interrupts("on_validation", 10)]).run().finished
    assert bits(tmp_path) == whole()


def test_a_second_ctrl_c_stops_immediately_and_keeps_checkpoints(tmp_path, whole):
    class Twice(Interrupts):
        def _press(self, moment: str, step: int) -> None:
            super()._press(moment, step)
            super()._press(moment, step)

    with pytest.raises(KeyboardInterrupt):
        small_trainer(tmp_path, callbacks=[Twice("on_validation", 8)]).run()
    assert [checkpoint.step for checkpoint in Checkpoint.all(tmp_path)][-1] == 6
    assert train_small(tmp_path).finished
    assert bits(tmp_path) == whole()


def test_training_works_in_any_thread_and_keeps_the_random_state_and_the_threads(tmp_path, whole):
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    torch.set_num_threads(2)
    thread = threading.Thread(target=train_small, args=(tmp_path,))
    thread.start()
    thread.join()
    assert torch.equal(torch.rand(3), wanted)
    assert torch.get_num_threads() == 2
    assert bits(tmp_path) == whole()
    before = content(tmp_path)
    assert train_small(tmp_path).finished  # already finished
    assert content(tmp_path) == before


def test_patience_ends_training_for_good(tmp_path):
    config = small_config("transformer", *PATIENT)
    result = train_small(tmp_path, config)
    assert result.finished
    assert result.progress.step == result.progress.best_step + 4 < 40
    before = content(tmp_path)
    assert train_small(tmp_path, config) == result
    assert content(tmp_path) == before


def test_the_model_is_the_mean_of_the_last_checkpoints(tmp_path, monkeypatch):
    def validate(model: Any, tokens: Any, dev: Any, step: int) -> ValidationResult:
        return ValidationResult(step, -step, 0.0, 0.0, SampleTranslation("", "", ""))  # always better

    monkeypatch.setattr("regard.translation.training.loop.validate", validate)
    recorder = Recorder()
    result = small_trainer(tmp_path, callbacks=[recorder]).run()
    assert result.progress.best_step == 10
    assert list(recorder.weights) == [3, 4, 6, 8, 9, 10]
    last = list(recorder.weights.values())[-3:]
    for name, tensor in load_file(tmp_path / MODEL).items():
        torch.testing.assert_close(tensor, torch.stack([weights[name] for weights in last]).mean(0))


def test_only_the_best_weights_are_kept(tmp_path, monkeypatch):
    losses = {4: -3.0, 8: -3.0, 10: -2.0}  # equal is not better

    def validate(model: Any, tokens: Any, dev: Any, step: int) -> ValidationResult:
        return ValidationResult(step, losses[step], 0.0, 0.0, SampleTranslation("", "", ""))

    monkeypatch.setattr("regard.translation.training.loop.validate", validate)
    recorder = Recorder()
    trainer = small_trainer(
        tmp_path, small_config("transformer", "average_checkpoints=1"), callbacks=[recorder]
    )
    result = trainer.run()
    assert (result.progress.best, result.progress.best_step) == (3.0, 4)
    assert result.progress.without_improvement == 2
    assert [result.best for result in recorder.validations] == [True, False, False]
    found = load_file(tmp_path / MODEL)
    assert all(torch.equal(found[name], tensor) for name, tensor in recorder.weights[4].items())


class Merged:
    """Merges several consecutive batches into one."""

    def __init__(self, batches: Any, n: int) -> None:
        self._batches, self._n = batches, n
        self.pairs, self.get = batches.pairs, batches.get

    def from_step(self, step: int) -> Iterator[tuple[int, Any]]:
        remaining = self._batches.from_step(step * self._n)
        while True:
            batches = list(islice(remaining, self._n))
            yield batches[0][0], numpy.concatenate([indices for _, indices in batches])


@pytest.mark.parametrize("model", ["transformer", "plain", "recurrent"])
@pytest.mark.sampled(2)
def test_accumulated_gradients_equal_those_of_one_large_batch(tmp_path, model):
    calm = ("model.dropout=0", "unknown_rate=0", "average_checkpoints=1", "updates=4")
    recorders = {n: Recorder() for n in (3, 1)}
    three, single = (
        small_trainer(tmp_path / f"{n}", small_config(model, *calm, f"accumulate={n}"), callbacks=[recorder])
        for n, recorder in recorders.items()
    )
    single.batches = Merged(three.batches, 3)
    three.run(), single.run()
    for a, b in zip(recorders[3].validations, recorders[1].validations, strict=True):
        assert a.loss == pytest.approx(b.loss, abs=1e-3)
    assert recorders[3].reports[-1].loss == pytest.approx(recorders[1].reports[-1].loss, abs=1e-3)


def test_a_model_learns(tmp_path):
    recorder = Recorder()
    settings = ("updates=60", "validate_every=15", "save_every=60", "average_checkpoints=1")
    small_trainer(tmp_path, small_config("transformer", *settings), callbacks=[recorder]).run()
    losses = [result.loss for result in recorder.validations]
    assert losses[-1] < 0.75 * losses[0]
    assert [report.step for report in recorder.reports] == [15, 30, 45, 50, 60]  # also at validations
    assert recorder.reports[-1].epoch == pytest.approx(
        60 * 2 * 8 / len(IDS.sizes), rel=0.2
    )  # 8 pairs per batch
    assert recorder.reports[-1].learning_rate < recorder.reports[0].learning_rate <= 0.01


def test_a_diverged_run_is_reported(tmp_path):
    recorder = Recorder()
    settings = ("updates=60", "learning_rate=3", "warmup=40", "max_grad_norm=0", "validate_every=10")
    small_trainer(tmp_path, small_config("transformer", *settings), callbacks=[recorder]).run()
    assert sum("Training has diverged" in text for text in recorder.texts) == 1


def test_bfloat16_gives_nearly_the_same_loss(tmp_path):
    losses = {}
    for precision in ("float32", "bfloat16"):
        recorder = Recorder()
        config = small_config("transformer", f"precision={precision}", "updates=5")
        small_trainer(tmp_path / precision, config, callbacks=[recorder]).run()
        losses[precision] = recorder.validations[-1].loss
        weights = load_file(tmp_path / precision / MODEL)
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.05)
    assert losses["bfloat16"] != losses["float32"]


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, whole):
    class Fills(Recorder):
        def on_save(self, step: int, path: str | os.PathLike[str]) -> None:
            super().on_save(step, path)
            if step == 6:
                full.__enter__()

    full = no_file_larger_than(2000)
    try:
        with pytest.raises(OSError, match=r"model\.safetensors|step-0000000") as refused:
            small_trainer(tmp_path, callbacks=[Fills()]).run()
    finally:
        full.__exit__(None, None, None)
    assert refused.value.errno == errno.EFBIG
    assert [checkpoint.step for checkpoint in Checkpoint.all(tmp_path)][-1] == 6
    assert not list(tmp_path.rglob("*.part"))
    assert train_small(tmp_path).finished
    assert bits(tmp_path) == whole()


def test_a_nonfinite_gradient_ends_training(short):
    before = content(short)
    rare = ("validate_every=100", "save_every=100", "warmup=0", "max_grad_norm=0")
    wild = small_config("transformer", "learning_rate=1e30", *rare)
    with pytest.raises(
        ArgumentError,
        match=r"The gradient of update 5 is not finite\. .*rate \(now 1e\+30\), .*max_grad_norm \(now 0\)",
    ):
        train_small(short, wild)
    assert content(short) == before


def test_nonfinite_weights_are_never_kept(tmp_path):
    wild = ("learning_rate=1e39", "schedule=constant", "warmup=0", "updates=1", "metric=bleu")
    with pytest.raises(ArgumentError, match="The validation loss after update 1 is not finite"):
        train_small(tmp_path, small_config("transformer", *wild))
    assert not (tmp_path / MODEL).exists()
    assert not Checkpoint.all(tmp_path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("harm", [MODEL, OPTIMIZER, STATE])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_kept(tmp_path, whole, harm):
    small_trainer(tmp_path, callbacks=[Interrupts("on_save", 8)]).run()
    last = Checkpoint.all(tmp_path)[-1]
    os.truncate(last.path / harm, 5)
    with pytest.raises(ArgumentError, match=f"{last.path.name}' is corrupted"):
        train_small(tmp_path)
    for path in last.path.iterdir():
        path.unlink()
    last.path.rmdir()
    assert Checkpoint.all(tmp_path)
    train_small(tmp_path)
    assert bits(tmp_path) == whole()


@pytest.mark.parametrize("setting", ["model.width=32", "model.layers=2", "model.ffn_dim=7"])
def test_a_checkpoint_of_another_config_is_rejected(short, setting):
    with pytest.raises(
        ArgumentError, match=r"step-00000003' does not match the config of its folder .*\. Remove it"
    ):
        train_small(short, small_config("transformer", setting))


def test_an_error_without_a_message_is_reported_by_type():
    assert first_sentence(ValueError()) == "ValueError"
    assert first_sentence(KeyError("best")) == "'best'"
    assert first_sentence(RuntimeError("[a/b.cc:7] Connection lost. More.\nStack")) == "Connection lost"


@pytest.mark.parametrize("state", ["{}", "[]", '{"best": null, "steps": 1}', "null", '"x"', "3"])
def test_an_invalid_state_is_rejected(short, state):
    (Checkpoint.all(short)[-1].path / STATE).write_text(state)
    with pytest.raises(ArgumentError, match="step-00000003"):
        train_small(short)


@pytest.mark.parametrize(("pairs", "tokens"), [(1, 1), (2, 4096), (5, 1)])
def test_small_corpora_and_batches_of_one_pair(tmp_path, pairs, tokens):
    few = InMemoryPairs([IDS[index] for index in range(pairs)])
    config = small_config("recurrent", f"batch_tokens={tokens}", "updates=none", "epochs=2")
    result = small_trainer(tmp_path, config, pairs=few).run()
    assert result.finished
    assert result.progress.step == 2 * max(1, (pairs if tokens == 1 else 1) // 2)  # two batches per update
    assert (tmp_path / MODEL).exists()


def test_a_short_run_is_validated_and_saved(tmp_path):
    recorder = Recorder()
    config = small_config("transformer", "updates=3", "validate_every=100", "save_every=50")
    small_trainer(tmp_path, config, callbacks=[recorder]).run()
    assert [result.step for result in recorder.validations] == list(recorder.weights) == [3]
    assert [report.step for report in recorder.reports] == [3]
    assert "update 3" in recorder.texts[-1]
    assert (tmp_path / MODEL).exists()


@pytest.mark.parametrize(("period", "epochs", "validated"), [(1, 2, [4, 8]), (6, 3, [8, 12])])
def test_validation_is_once_per_epoch_with_a_minimum_period(tmp_path, monkeypatch, period, epochs, validated):
    monkeypatch.setattr("regard.translation.training.loop._MIN_PERIOD", period)
    recorder = Recorder()
    config = small_config(
        "transformer", *("validate_every=0", "save_every=0", "updates=none", f"epochs={epochs}")
    )
    trainer = small_trainer(tmp_path, config, callbacks=[recorder])
    trainer.run()
    assert trainer.epoch_updates == 4  # 60 pairs of 8 tokens, 64 tokens per batch, two batches per update
    assert [result.step for result in recorder.validations] == list(recorder.weights) == validated
    assert recorder.reports[-1].epoch == epochs


@pytest.mark.parametrize("progress", [Progress(), Progress(5, 2.5, -1.25, 4, 2)])
def test_progress_round_trips(progress):
    assert Progress.from_state(json.loads(json.dumps(progress.state))) == progress


def test_dev_data_is_not_trained_on(tmp_path):
    """Different dev data leads to the same weights."""
    for name, dev in (("a", DEV), ("b", DEV[:2])):
        config = small_config("plain", "average_checkpoints=1", "updates=5")
        small_trainer(tmp_path / name, config, dev=dev).run()
    last = [content(Checkpoint.all(tmp_path / name)[-1].path)[MODEL] for name in ("a", "b")]
    assert last[0] == last[1]


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 1000])
def test_dropout_seeds_are_unique(size):
    """torch's generator uses 32 bits of the seed."""
    for seed in (0, 1, 2**32 - 1):
        seeds = [dropout_seed(seed, step, rank, size) for step in range(100) for rank in range(size)]
        assert len({seed % 2**32 for seed in seeds}) == len(seeds)
        assert all(0 <= seed < 2**64 for seed in seeds)


def test_dropout_differs_between_layers_of_a_thousand_processes():
    drawn, generator = [], torch.Generator()
    for step in range(3):
        for rank in range(1000):
            generator.manual_seed(dropout_seed(0, step, rank, 1000))
            drawn += torch.randint(2**63 - 1, (4,), generator=generator).tolist()  # as `Dropout` does
    assert len(set(drawn)) == len(drawn)


def test_each_update_has_its_own_stable_dropout_seed(tmp_path, monkeypatch):
    """A run that was started by an earlier version resumes with bit-identical results."""
    used: list[int] = []
    forward = Objective.forward
    monkeypatch.setattr(
        Objective, "forward", lambda *given: used.append(torch.initial_seed()) or forward(*given)
    )
    train_small(tmp_path, small_config("plain", "updates=3", "seed=5", "accumulate=1"))
    assert used[-3:] == [(5 * 1_000_003 + step) * 64 for step in range(3)]  # after the speed measurement
    for size in (1, 2, 64):
        assert [dropout_seed(5, 7, rank, size) - 64 * (5 * 1_000_003 + 7) for rank in range(size)] == [
            *range(size)
        ]


def test_a_slow_run_reports_regularly(tmp_path, monkeypatch):
    """Reports are made every 50 updates or 30 seconds; the clock advances whenever it is read."""
    clock = iter(range(0, 10**6, 2))
    monkeypatch.setattr("regard.translation.training.timing.time.monotonic", lambda: next(clock))
    recorder = Recorder()
    config = small_config("plain", "updates=40", "validate_every=100", "save_every=100", "accumulate=1")
    small_trainer(tmp_path, config, callbacks=[recorder]).run()
    steps = [0, *(report.step for report in recorder.reports)]
    assert steps[-1] == 40
    assert max(after - before for before, after in pairwise(steps)) <= 16
