"""Learning rate schedules."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.translation.training.training_config import TrainingConfig, learning_rate

schedules = st.sampled_from(["cosine", "inverse-sqrt", "constant"])
settings = st.tuples(schedules, st.integers(0, 60), st.integers(1, 100), st.floats(1e-6, 10))


def rates(schedule: str, warmup: int, steps: int, rate: float) -> list[float]:
    config = TrainingConfig(schedule=schedule, warmup=warmup, learning_rate=rate)
    return [learning_rate(config, step, steps) for step in range(steps)]


@given(settings)
def test_rates_rise_linearly_to_the_peak_and_never_again(case):
    _, warmup, steps, rate = case
    found = rates(*case)
    top = min(warmup, max(steps // 4, 1))  # a quarter of a short training
    rise = found[:top]
    assert rise == pytest.approx([rate * (step + 1) / top for step in range(top)])
    fall = found[max(top - 1, 0) :]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(fall))
    assert all(0 <= found_rate <= rate * (1 + 1e-12) for found_rate in found)


@given(settings)
def test_only_the_last_rate_may_be_zero(case):
    assert all(rate > 0 for rate in rates(*case)[:-1])


def test_the_end_of_each_schedule():
    assert rates("cosine", 10, 100, 2.0)[-1] == 0
    assert rates("cosine", 10, 100, 2.0)[54] == pytest.approx(1)  # halfway
    assert rates("constant", 10, 100, 2.0)[10:] == [2.0] * 90
    # Vaswani et al. 2017, eq. 3: step^-0.5 after warmup, so four times the steps halve the rate
    assert rates("inverse-sqrt", 10, 100, 2.0)[39] == pytest.approx(1)
