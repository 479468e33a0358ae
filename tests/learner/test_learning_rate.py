from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.learner.optimizer import Schedule, learning_rate


def rates(schedule: Schedule, total: int | None, warmup: int, steps: int) -> list[float]:
    return [learning_rate(1.0, step, total, schedule, warmup) for step in range(steps)]


def test_a_constant_rate_is_constant() -> None:
    assert rates("constant", 10, 0, 12) == [1.0] * 12


def test_warmup_rises_to_the_peak_and_does_not_start_at_zero() -> None:
    assert rates("constant", None, 3, 5) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_a_linear_rate_falls_to_zero_just_after_the_last_step() -> None:
    assert rates("linear", 4, 0, 6) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_a_cosine_rate_is_half_the_peak_at_half_the_steps() -> None:
    assert rates("cosine", 4, 0, 5) == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)


def test_without_a_step_limit_the_rate_stays_at_its_peak() -> None:
    assert rates("cosine", None, 0, 100) == [1.0] * 100


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(1, 50), st.integers(0, 60), st.integers(0, 99))
def test_a_rate_never_exceeds_the_peak_nor_falls_below_zero(
    schedule: Schedule, total: int, warmup: int, step: int
) -> None:
    assert 0.0 <= learning_rate(3e-4, step, total, schedule, warmup) <= 3e-4
