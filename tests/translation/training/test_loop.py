"""Trainings: however they are cut off, they end where they would have ended."""

import errno
import json
import os
import random
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

from regard._util.files import CHECKSUMS
from regard.errors import ArgumentError
from regard.translation.data.batches import InMemoryPairs
from regard.translation.training.checkpoint import MODEL, OPTIMIZER, STATE, Checkpoint
from regard.translation.training.loop import Progress, Trainer, dropout_seed
from regard.translation.training.progress import Callback, Report, SampleTranslation, ValidationResult
from regard.translation.training.validation import DevScores
from tests.translation.killing import killed_after
from tests.translation.small import DEV, IDS, small_config, small_trainer, train_small
from tests.translation.training.test_checkpoint import content, no_file_larger_than

pytestmark = pytest.mark.usefixtures("one_thread")
WIDE = (
    "training.average_checkpoints=1",
    "training.accumulate=1",
    "training.save_every=5",
    "training.validate_every=7",
)
PATIENT = (
    "training.patience=1",
    "training.learning_rate=0.3",
    "training.updates=40",
)  # it is soon as good as it gets


class Told(Callback):
    """All that a training tells."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.judgements: list[ValidationResult] = []
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.texts: list[str] = []
        self.begun: list[tuple[int, int]] = []
        self.progress = Progress()

    def on_begin(self, about: str, step: int, steps: int) -> None:
        self.begun.append((step, steps))

    def on_report(self, report: Report) -> None:
        self.reports.append(report)

    def on_validation(self, judgement: ValidationResult) -> None:
        self.judgements.append(judgement)

    def on_save(self, step: int, path: str | os.PathLike[str]) -> None:
        self.weights[step] = load_file(Path(path) / MODEL)

    def on_message(self, text: str) -> None:
        self.texts.append(text)

    def on_end(self, text: str) -> None:
        self.texts.append(text)


def bits(folder: Path) -> dict[str, Any]:
    """All that a training leaves, but for the time that it took."""
    found: dict[str, Any] = content(folder)
    for name in found:
        if name.endswith(STATE):
            found[name] = json.loads(found[name]) | {"seconds": None}
        elif name.endswith(CHECKSUMS):
            found[name] = [line for line in found[name].decode().splitlines() if not line.endswith(STATE)]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """What a training leaves that nobody has cut off."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}

    def find(model: str, *settings: str) -> dict[str, Any]:
        if (model, *settings) not in known:
            folder = tmp_path_factory.mktemp("whole")
            killed_after(folder, model, settings)  # which nothing does
            known[model, *settings] = bits(folder)
        return known[model, *settings]

    return find


@pytest.mark.parametrize(
    ("model", "settings"),
    [("transformer", ()), ("recurrent", ()), ("plain", ()), ("transformer", WIDE), ("transformer", PATIENT)],
)
def test_a_training_that_is_killed_ends_with_the_same_bits(
    tmp_path: Path, whole: Callable[..., dict[str, Any]], model: str, settings: tuple[str, ...]
) -> None:
    """SIGKILL at changes of the folder: while it writes, renames and removes, as well as between."""
    chance = random.Random(f"{model} {settings}")
    kills = 0
    while killed_after(tmp_path, model, settings, events=chance.randint(1, 40) if kills < 4 else 0):
        kills += 1
    assert kills
    assert bits(tmp_path) == whole(model, *settings)


@pytest.mark.parametrize("model", ["transformer"])
def test_a_training_that_is_killed_at_any_time_ends_with_the_same_bits(
    tmp_path: Path, whole: Callable[..., dict[str, Any]], model: str
) -> None:
    """SIGKILL by the clock: while it computes, judges, or writes a file."""
    kills = 0
    while killed_after(tmp_path, model, (), seconds=random.uniform(0.05, 0.8) if kills < 4 else 0):
        kills += 1
    assert bits(tmp_path) == whole(model)


def test_a_training_is_another_with_another_seed(
    tmp_path: Path, whole: Callable[..., dict[str, Any]]
) -> None:
    train_small(tmp_path, small_config("transformer", "training.seed=1"))
    assert bits(tmp_path).keys() == whole("transformer").keys()
    assert bits(tmp_path) != whole("transformer")


class Interrupts(Told):
    """Presses Ctrl-C, or asks to end, at some moment."""

    def __init__(self, moment: str, step: int, number: signal.Signals = signal.SIGINT) -> None:
        super().__init__()
        self._moment, self._step, self._number = moment, step, number

    def on_save(self, step: int, path: str | os.PathLike[str]) -> None:
        super().on_save(step, path)
        self._press("on_save", step)

    def on_validation(self, judgement: ValidationResult) -> None:
        super().on_validation(judgement)
        self._press("on_validation", judgement.step)

    def _press(self, moment: str, step: int) -> None:
        if (moment, step) == (self._moment, self._step):
            signal.raise_signal(self._number)


@pytest.mark.parametrize(
    ("moment", "step", "stops", "number"),
    [
        ("on_save", 3, 4, signal.SIGINT),  # a step at which it is judged
        ("on_save", 6, 7, signal.SIGINT),
        ("on_validation", 8, 8, signal.SIGINT),
        ("on_save", 4, 5, signal.SIGTERM),
    ],
)
def test_ctrl_c_saves_and_going_on_ends_with_the_same_bits(
    tmp_path: Path,
    whole: Callable[..., dict[str, Any]],
    moment: str,
    step: int,
    stops: int,
    number: signal.Signals,
) -> None:
    told = Interrupts(moment, step, number)
    before = signal.getsignal(number)
    outcome = small_trainer(tmp_path, callbacks=[told]).run()
    assert not outcome.finished
    assert outcome.progress.step == stops == Checkpoint.all(tmp_path)[-1].step
    assert told.texts == ["stopping after this update …", f"stopped after update {stops}; all is saved."]
    assert signal.getsignal(number) is before
    again = Told()
    assert small_trainer(tmp_path, callbacks=[again]).run().finished
    assert again.begun == [(stops, 10)]
    assert bits(tmp_path) == whole("transformer")


def test_a_training_that_is_interrupted_in_each_update_ends_with_the_same_bits(
    tmp_path: Path, whole: Callable[..., dict[str, Any]]
) -> None:
    for step in range(1, 10):
        trainer = small_trainer(tmp_path)
        trainer._stop = True
        outcome = trainer.run()
        assert (outcome.finished, outcome.progress.step) == (False, step)
    assert small_trainer(tmp_path).run().finished
    assert bits(tmp_path) == whole("transformer")


def test_ctrl_c_in_the_last_update_is_too_late(tmp_path: Path, whole: Callable[..., dict[str, Any]]) -> None:
    assert small_trainer(tmp_path, callbacks=[Interrupts("on_validation", 10)]).run().finished
    assert bits(tmp_path) == whole("transformer")


def test_a_second_ctrl_c_ends_at_once_and_loses_nothing_that_was_saved(
    tmp_path: Path, whole: Callable[..., dict[str, Any]]
) -> None:
    class Twice(Interrupts):
        def _press(self, moment: str, step: int) -> None:
            super()._press(moment, step)
            super()._press(moment, step)

    with pytest.raises(KeyboardInterrupt):
        small_trainer(tmp_path, callbacks=[Twice("on_validation", 8)]).run()
    assert [one.step for one in Checkpoint.all(tmp_path)][-1] == 6
    assert train_small(tmp_path).finished
    assert bits(tmp_path) == whole("transformer")


def test_a_thread_that_is_not_the_main_one_trains_as_well(
    tmp_path: Path, whole: Callable[..., dict[str, Any]]
) -> None:
    thread = threading.Thread(target=train_small, args=(tmp_path,))
    thread.start()
    thread.join()
    assert bits(tmp_path) == whole("transformer")


def test_what_others_compute_is_not_disturbed(tmp_path: Path) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    torch.set_num_threads(2)
    train_small(tmp_path)
    assert torch.equal(torch.rand(3), wanted)
    assert torch.get_num_threads() == 2


def test_a_finished_training_has_nothing_left_to_do(tmp_path: Path) -> None:
    train_small(tmp_path)
    before = content(tmp_path)
    assert train_small(tmp_path).finished
    assert content(tmp_path) == before


def test_patience_ends_a_training_and_it_stays_ended(tmp_path: Path) -> None:
    config = small_config("transformer", *PATIENT)
    outcome = train_small(tmp_path, config)
    assert outcome.finished
    assert outcome.progress.step == outcome.progress.best_step + 4 < 40
    before = content(tmp_path)
    assert train_small(tmp_path, config) == outcome
    assert content(tmp_path) == before


@pytest.mark.parametrize("average", [1, 3])
def test_the_weights_to_translate_with_are_the_mean_of_the_last(tmp_path: Path, average: int) -> None:
    told = Told()
    config = small_config("transformer", f"training.average_checkpoints={average}")
    outcome = small_trainer(tmp_path, config, callbacks=[told]).run()
    assert outcome.progress.best_step == 10
    assert list(told.weights) == [3, 4, 6, 8, 9, 10]
    last = list(told.weights.values())[-average:]
    for name, tensor in load_file(tmp_path / MODEL).items():
        torch.testing.assert_close(tensor, torch.stack([one[name] for one in last]).mean(0))


def test_the_best_weights_are_kept_and_no_worse_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {4: 3.0, 8: 3.0, 10: 2.0}  # as good as the best is not better

    def validate(*given: Any) -> DevScores:
        return DevScores(values[told.progress.step], 1.0, 0.0, 0.0, SampleTranslation("", "", ""))

    monkeypatch.setattr("regard.translation.training.loop.validate", validate)
    told = Told()
    trainer = small_trainer(
        tmp_path, small_config("transformer", "training.average_checkpoints=1"), callbacks=[told]
    )
    told.progress = trainer.progress
    outcome = trainer.run()
    assert (outcome.progress.best, outcome.progress.best_step) == (3.0, 4)
    assert outcome.progress.without_improvement == 2
    assert [one.best for one in told.judgements] == [True, False, False]
    found = load_file(tmp_path / MODEL)
    assert all(torch.equal(found[name], tensor) for name, tensor in told.weights[4].items())


class Merged:
    """The batches of another, so many of them at a time in one."""

    def __init__(self, batches: Any, many: int) -> None:
        self._batches, self._many = batches, many
        self.pairs, self.get = batches.pairs, batches.get

    def from_step(self, step: int) -> Iterator[tuple[int, int, Any]]:
        coming = self._batches.from_step(step * self._many)
        while True:
            some = list(islice(coming, self._many))
            yield some[0][0], 0, numpy.concatenate([places for _, _, places in some])


@pytest.mark.parametrize("model", ["transformer", "recurrent", "plain"])
def test_gradients_that_are_added_up_are_those_of_one_large_batch(tmp_path: Path, model: str) -> None:
    calm = ("model.dropout=0", "training.unknown_rate=0", "training.average_checkpoints=1")
    three = small_trainer(tmp_path / "three", small_config(model, *calm, "training.accumulate=3"))
    one = small_trainer(tmp_path / "one", small_config(model, *calm, "training.accumulate=1"))
    one.batches = Merged(three.batches, 3)  # type: ignore[assignment]
    for trainer in (three, one):
        trainer.callbacks = told = Told()
        trainer.run()
        trainer.told = told  # type: ignore[attr-defined]
    for a, b in zip(three.told.judgements, one.told.judgements, strict=True):  # type: ignore[attr-defined]
        assert a.loss == pytest.approx(b.loss, abs=1e-3)
    assert three.told.reports[-1].loss == pytest.approx(one.told.reports[-1].loss, abs=1e-3)  # type: ignore[attr-defined]


def test_a_model_learns(tmp_path: Path) -> None:
    told = Told()
    settings = (
        "training.updates=60",
        "training.validate_every=15",
        "training.save_every=60",
        "training.average_checkpoints=1",
    )
    small_trainer(tmp_path, small_config("transformer", *settings), callbacks=[told]).run()
    losses = [one.loss for one in told.judgements]
    assert losses[-1] < 0.75 * losses[0]
    assert [report.step for report in told.reports] == [15, 30, 45, 50, 60]  # whenever it is judged, too
    assert told.reports[-1].epoch == pytest.approx(60 * 2 * 8 / len(IDS.sizes), rel=0.2)  # 8 pairs a batch
    assert told.reports[-1].learning_rate < told.reports[0].learning_rate <= 0.01


def test_bfloat16_learns_nearly_the_same(tmp_path: Path) -> None:
    losses = {}
    for precision in ("float32", "bfloat16"):
        told = Told()
        config = small_config("transformer", f"training.precision={precision}")
        small_trainer(tmp_path / precision, config, callbacks=[told]).run()
        losses[precision] = told.judgements[-1].loss
        weights = load_file(tmp_path / precision / MODEL)
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.05)
    assert losses["bfloat16"] != losses["float32"]


def test_a_disk_that_is_full_leaves_the_last_checkpoint(
    tmp_path: Path, whole: Callable[..., dict[str, Any]]
) -> None:
    class Fills(Told):
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
    assert [one.step for one in Checkpoint.all(tmp_path)][-1] == 6
    assert not list(tmp_path.rglob("*.part"))
    assert train_small(tmp_path).finished
    assert bits(tmp_path) == whole("transformer")


def test_a_gradient_that_is_not_finite_ends_the_training(tmp_path: Path) -> None:
    calm = small_config("transformer", "training.updates=3")
    train_small(tmp_path, calm)
    before = content(tmp_path)
    rare = (
        "training.validate_every=100",
        "training.save_every=100",
        "training.warmup=0",
        "training.max_grad_norm=0",
    )
    wild = small_config("transformer", "training.learning_rate=1e30", *rare)
    with pytest.raises(
        ArgumentError, match=r"of update 5 is not finite; .*rate, which is 1e\+30, .*clip, which is 0"
    ):
        train_small(tmp_path, wild)
    assert content(tmp_path) == before


def test_weights_that_are_not_finite_are_never_kept(tmp_path: Path) -> None:
    wild = (
        "training.learning_rate=1e39",
        "training.schedule=constant",
        "training.warmup=0",
        "training.updates=1",
        "training.metric=bleu",
    )
    with pytest.raises(ArgumentError, match="dev loss after update 1 is not finite"):
        train_small(tmp_path, small_config("transformer", *wild))
    assert not (tmp_path / MODEL).exists()
    assert not Checkpoint.all(tmp_path)


@pytest.mark.parametrize("harm", [MODEL, OPTIMIZER, STATE])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_there(
    tmp_path: Path, whole: Callable[..., dict[str, Any]], harm: str
) -> None:
    small_trainer(tmp_path, callbacks=[Interrupts("on_save", 8)]).run()
    last = Checkpoint.all(tmp_path)[-1]
    os.truncate(last.path / harm, 5)
    with pytest.raises(ArgumentError, match=f"{last.path.name}' is damaged"):
        train_small(tmp_path)
    for path in last.path.iterdir():
        path.unlink()
    last.path.rmdir()
    assert Checkpoint.all(tmp_path)
    train_small(tmp_path)
    assert bits(tmp_path) == whole("transformer")


@pytest.mark.parametrize("setting", ["model.width=32", "model.layers=2", "model.ffn_dim=7"])
def test_a_checkpoint_of_another_plan_is_refused(tmp_path: Path, setting: str) -> None:
    train_small(tmp_path, small_config("transformer", "training.updates=3"))
    with pytest.raises(
        ArgumentError, match=r"step-00000003' does not fit the config of its folder .*; remove it"
    ):
        train_small(tmp_path, small_config("transformer", setting))


@pytest.mark.parametrize(("error", "shown"), [(ValueError(), "ValueError"), (KeyError("best"), "'best'")])
def test_an_error_without_words_is_told_by_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, shown: str
) -> None:
    train_small(tmp_path, small_config("transformer", "training.updates=3"))

    def fail(*given: Any) -> None:
        raise error

    monkeypatch.setattr("regard.translation.training.loop.Progress.of", fail)
    with pytest.raises(ArgumentError, match=rf"does not fit the config of its folder \({shown}\); remove it"):
        train_small(tmp_path)


@pytest.mark.parametrize("state", ["{}", "[]", '{"best": null, "steps": 1}', "null", '"x"', "3"])
def test_a_state_that_is_none_is_refused(tmp_path: Path, state: str) -> None:
    train_small(tmp_path, small_config("transformer", "training.updates=3"))
    (Checkpoint.all(tmp_path)[-1].path / STATE).write_text(state)
    with pytest.raises(ArgumentError, match="step-00000003"):
        train_small(tmp_path)


@pytest.mark.parametrize("pairs", [1, 2, 5])
@pytest.mark.parametrize("tokens", [1, 4096])
def test_small_corpora_and_batches_of_one_pair(tmp_path: Path, pairs: int, tokens: int) -> None:
    few = InMemoryPairs([IDS[place] for place in range(pairs)])
    config = small_config(
        "recurrent", f"training.batch_tokens={tokens}", "training.updates=none", "training.epochs=2"
    )
    outcome = small_trainer(tmp_path, config, pairs=few).run()
    assert outcome.finished
    assert outcome.progress.step == 2 * max(1, (pairs if tokens == 1 else 1) // 2)  # two batches an update
    assert (tmp_path / MODEL).exists()


def test_a_training_that_is_shorter_than_its_intervals_is_judged_and_saved(tmp_path: Path) -> None:
    told = Told()
    config = small_config(
        "transformer", "training.updates=3", "training.validate_every=100", "training.save_every=50"
    )
    small_trainer(tmp_path, config, callbacks=[told]).run()
    assert [one.step for one in told.judgements] == list(told.weights) == [3]
    assert [report.step for report in told.reports] == [3]
    assert "update 3" in told.texts[-1]
    assert (tmp_path / MODEL).exists()


@pytest.mark.parametrize(
    ("apart", "epochs", "judged"), [(1, 3, [4, 8, 12]), (6, 5, [8, 16, 20]), (50, 15, [52, 60])]
)
def test_once_an_epoch_of_some_length_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: int, epochs: int, judged: list[int]
) -> None:
    monkeypatch.setattr("regard.translation.training.loop._APART", apart)
    told = Told()
    config = small_config(
        "transformer",
        *(
            "training.validate_every=0",
            "training.save_every=0",
            "training.updates=none",
            f"training.epochs={epochs}",
        ),
    )
    trainer = small_trainer(tmp_path, config, callbacks=[told])
    trainer.run()
    assert trainer.epoch == 4  # 60 pairs of 8 tokens, 64 tokens a batch, two batches an update
    assert [one.step for one in told.judgements] == list(told.weights) == judged
    assert told.reports[-1].epoch == epochs


@pytest.mark.parametrize("progress", [Progress(), Progress(5, 2.5, -1.25, 4, 2)])
def test_progress_comes_back_from_what_it_writes(progress: Progress) -> None:
    assert Progress.of(json.loads(json.dumps(progress.state))) == progress


def test_dev_data_are_not_trained_on(tmp_path: Path) -> None:
    """Other dev data, and the same weights."""
    for name, dev in (("a", DEV), ("b", DEV[:2])):
        config = small_config("transformer", "training.average_checkpoints=1")
        small = small_trainer(tmp_path / name, config)
        Trainer(tmp_path / name, config, small.tokens, IDS, dev).run()
    last = [content(Checkpoint.all(tmp_path / name)[-1].path)[MODEL] for name in ("a", "b")]
    assert last[0] == last[1]


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 100, 1000])
def test_no_two_updates_or_processes_draw_the_same_dropout(size: int) -> None:
    """torch's generator reads the lowest 32 bits of a seed."""
    for seed in (0, 1, 2**32 - 1):
        seeds = [dropout_seed(seed, step, rank, size) for step in range(300) for rank in range(size)]
        assert len({one % 2**32 for one in seeds}) == len(seeds)
        assert all(0 <= one < 2**64 for one in seeds)


def test_layers_of_a_thousand_processes_draw_different_dropout() -> None:
    drawn = []
    with torch.random.fork_rng(devices=[]):
        for step in range(3):
            for rank in range(1000):
                torch.manual_seed(dropout_seed(0, step, rank, 1000))
                drawn += [int(torch.randint(2**63 - 1, ())) for _ in range(4)]  # as `Dropout` does
    assert len(set(drawn)) == len(drawn)


def test_trainings_of_few_processes_keep_their_dropout() -> None:
    """So that what was begun with an earlier version goes on with the same bits."""
    for size in (1, 2, 64):
        for rank in range(size):
            assert dropout_seed(5, 7, rank, size) == (5 * 1_000_003 + 7) * 64 + rank


def test_a_slow_training_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports come after 50 updates, or after half a minute, by a clock that goes on whenever it is read."""
    clock = iter(range(0, 10**6, 2))
    monkeypatch.setattr("regard.translation.training.loop.time.monotonic", lambda: next(clock))
    told = Told()
    config = small_config(
        "plain", "training.updates=40", "training.validate_every=100", "training.save_every=100"
    )
    small_trainer(tmp_path, config, callbacks=[told]).run()
    steps = [0, *(report.step for report in told.reports)]
    assert steps[-1] == 40
    assert max(after - before for before, after in pairwise(steps)) <= 16
