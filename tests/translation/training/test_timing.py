"""Speed and remaining time, measured with a fake clock."""

import pytest

from regard.translation.training import timing
from regard.translation.training.timing import RunningStats, measure_speed
from tests.translation.small import Recorder, small_config, small_trainer


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def __call__(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(timing.time, "monotonic", clock)
    return clock


def run_updates(stats: RunningStats, clock, updates: int, seconds: float) -> None:
    for _ in range(updates):
        clock.now += seconds
        stats.add(1.0, 100)


def test_the_time_left_follows_the_recent_speed(clock):
    """Slow first updates, or an earlier run on a busy machine, soon stop affecting the estimate."""
    stats = RunningStats(seconds=7200.0, seconds_per_update=0.1)
    assert stats.left(100, 0) == pytest.approx(10)
    run_updates(stats, clock, 20, 60.0)
    assert stats.left(100, 0) == pytest.approx(6000)
    run_updates(stats, clock, 700, 0.1)
    assert stats.left(100, 0) == pytest.approx(10, rel=0.01)


def test_validations_count_for_the_time_left_but_not_for_the_speed(clock):
    stats = RunningStats()
    run_updates(stats, clock, 20, 0.5)
    with stats.validation():
        clock.now += 30
    assert stats.seconds() == pytest.approx(10)
    assert stats.validation_seconds == 30
    run_updates(stats, clock, 20, 0.5)
    assert stats.take() == (1.0, pytest.approx(200))
    assert stats.left(40, 3) == pytest.approx(20 + 90)
    assert stats.updates_in(130, period=100) == pytest.approx(100 / 0.8, abs=1)


def test_the_first_batch_does_not_count_for_the_speed(clock):
    def batches():
        for seconds, size in [(9.0, 50), (1.0, 100), (1.0, 100)]:
            clock.now += seconds
            yield size

    assert measure_speed(batches()) == pytest.approx(1.05 * 9.0 / 50)  # too slow to measure another batch
    clock.now = 0.0
    quick = ((0.5, 50), (0.1, 100), (0.1, 100))

    def quick_batches():
        for seconds, size in quick:
            clock.now += seconds
            yield size

    assert measure_speed(quick_batches()) == pytest.approx(1.05 * 0.2 / 200)


def test_a_run_for_some_minutes_ends_in_time(tmp_path):
    """Updates follow the measured speed, the learning rate decays, and a resumed run stops at once."""
    recorder = Recorder()
    config = small_config("plain", "minutes=0.03", "updates=none", "validate_every=20", "schedule=cosine")
    result = small_trainer(tmp_path, config, callbacks=[recorder]).run()
    progress = result.progress
    assert result.finished
    assert progress.step > 1
    assert 0.5 < progress.seconds + progress.validation_seconds < 15
    assert recorder.reports[-1].step == progress.step
    assert recorder.reports[-1].learning_rate < 0.5 * config.training.learning_rate
    recorder = Recorder()
    again = small_trainer(tmp_path, config, callbacks=[recorder]).run()
    assert again.progress.step == progress.step
    assert any("training.minutes=0.03 is the total" in message for message in recorder.texts)
