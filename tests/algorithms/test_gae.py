"""Generalized advantage estimation compared with its definition as a sum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.algorithms.advantages import compute_gae, discounted_sums

STEPS = st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), max_size=12)
SHARE = st.floats(0, 1)


@settings(deadline=None)
@given(STEPS, SHARE, SHARE)
def test_gae_is_the_discounted_sum_of_later_td_errors(
    steps: list[tuple[float, float]], gamma: float, lam: float
) -> None:
    rewards, values = [reward for reward, _ in steps], [value for _, value in steps] + [0.0]
    errors = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(len(steps))]
    expected = [sum((gamma * lam) ** (j - t) * errors[j] for j in range(t, len(steps))) for t in range(len(steps))]
    advantages, returns = compute_gae(np.array(rewards, dtype=np.float64), np.array(values[:-1]), gamma, lam)
    np.testing.assert_allclose(advantages, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(returns, np.array(expected) + np.array(values[:-1]), rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(STEPS, SHARE)
def test_with_lambda_one_returns_do_not_depend_on_the_values(steps: list[tuple[float, float]], gamma: float) -> None:
    rewards, values = np.array([reward for reward, _ in steps]), np.array([value for _, value in steps])
    expected = [sum(gamma ** (j - t) * rewards[j] for j in range(t, len(steps))) for t in range(len(steps))]
    np.testing.assert_allclose(compute_gae(rewards, values, gamma, 1.0)[1], expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(discounted_sums(rewards, gamma), expected, rtol=1e-9, atol=1e-9)


def test_with_lambda_zero_the_advantage_is_the_one_step_td_error() -> None:
    advantages, returns = compute_gae(np.array([0.0, 0.0, 1.0]), np.array([0.2, 0.5, 0.9]), 1.0, 0.0)
    assert advantages.tolist() == pytest.approx([0.3, 0.4, 0.1])
    assert returns.tolist() == pytest.approx([0.5, 0.9, 1.0])


def test_float32_values_are_computed_in_float64() -> None:
    advantages, returns = compute_gae(np.array([1.0]), np.array([0.1], dtype=np.float32), 1.0, 1.0)
    assert advantages.dtype == returns.dtype == np.float64
    assert returns.tolist() == [1.0]
