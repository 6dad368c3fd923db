"""Learning rates: up to the highest, and never above it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.translation.config import TrainingConfig
from regard.translation.training.schedule import learning_rate

schedules = st.sampled_from(["cosine", "inverse-sqrt", "constant"])
settings = st.tuples(schedules, st.integers(0, 60), st.integers(1, 100), st.floats(1e-6, 10))


def rates(schedule: str, warmup: int, steps: int, rate: float) -> list[float]:
    config = TrainingConfig(schedule=schedule, warmup=warmup, learning_rate=rate)
    return [learning_rate(config, step, steps) for step in range(steps)]


@given(settings)
def test_rates_rise_to_the_highest_and_then_do_not_rise(given: tuple[str, int, int, float]) -> None:
    _, warmup, steps, rate = given
    found = rates(*given)
    top = min(warmup, max(steps // 4, 1))  # a quarter of a short training
    rise = found[:top]
    assert rise == pytest.approx([rate * (step + 1) / top for step in range(top)])
    fall = found[max(top - 1, 0) :]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(fall))
    assert all(0 <= one <= rate * (1 + 1e-12) for one in found)


@given(settings)
def test_no_update_before_the_last_is_without_effect(given: tuple[str, int, int, float]) -> None:
    assert all(one > 0 for one in rates(*given)[:-1])


def test_each_schedule_ends_as_it_should() -> None:
    assert rates("cosine", 10, 100, 2.0)[-1] == 0
    assert rates("cosine", 10, 100, 2.0)[54] == pytest.approx(1)  # half way down
    assert rates("constant", 10, 100, 2.0)[10:] == [2.0] * 90
    # Vaswani et al. 2017, eq. 3: step^-0.5 after the warm-up, so four times the steps are half the rate
    assert rates("inverse-sqrt", 10, 100, 2.0)[39] == pytest.approx(1)
