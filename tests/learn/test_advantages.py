from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.errors import BadInput
from outpace.learn.advantages import BASELINES, baseline, group_mean, is_uniform

rewards = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=64)


def test_the_mean_of_the_group_is_subtracted() -> None:
    assert group_mean([1.0, 0.0]).tolist() == [0.5, -0.5]


@given(rewards)
def test_advantages_are_float32_and_sum_to_nothing(values: list[float]) -> None:
    advantages = group_mean(values)
    assert advantages.dtype == np.float32
    assert abs(float(advantages.sum(dtype=np.float64))) <= 1e-4 * (1 + max(map(abs, values)))


@given(rewards, st.floats(-100, 100))
def test_a_constant_added_to_all_rewards_changes_nothing(values: list[float], constant: float) -> None:
    np.testing.assert_allclose(group_mean([v + constant for v in values]), group_mean(values), atol=1e-3)


def test_without_a_baseline_the_reward_is_the_advantage() -> None:
    assert baseline("none")([0.25, 1.0]).tolist() == [0.25, 1.0]


def test_an_unknown_baseline_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match=r"'median'.*group_mean"):
        baseline("median")
    assert set(BASELINES) == {"group_mean", "none"}


@pytest.mark.parametrize("size", [3, 5, 6, 7])
def test_rewards_that_are_equal_up_to_rounding_are_uniform(size: int) -> None:
    rounded = [float(np.float32(0.1))] * (size - 1) + [0.1]
    assert is_uniform(rounded, tolerance=1e-6)
    assert not is_uniform(rounded, tolerance=0.0)


def test_one_different_reward_makes_a_group_worth_training() -> None:
    assert not is_uniform([0.0] * 7 + [1.0], tolerance=1e-6)
    assert is_uniform([], tolerance=0.0)
