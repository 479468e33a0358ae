"""Overlong penalty: the reward lost by attempts close to the token limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.config.sections import RewardsConfig
from outpace.rewards.grading import OVERLONG_REWARD, apply_overlong_penalty, overlong_penalty
from outpace.types import Episode, Trajectory

LIMIT = 10
REWARDS = RewardsConfig(overlong_buffer=4, overlong_penalty=2.0)


def trajectory(tokens: int, **more: Any) -> Trajectory:
    """One observed token, then `tokens` sampled ones."""
    mask = np.arange(tokens + 1) > 0
    return Trajectory(mask.astype(np.int32), mask, mask.astype(np.float32), mask.astype(np.int32), **more)


def episode(*tokens: int, **more: Any) -> Episode:
    return Episode([trajectory(count) for count in tokens], **more)


@settings(deadline=None)
@given(limit=st.integers(1, 500), tokens=st.integers(0, 500), penalty=st.floats(0.1, 10), data=st.data())
def test_the_penalty_follows_its_formula_up_to_the_limit(
    limit: int, tokens: int, penalty: float, data: st.DataObject
) -> None:
    buffer, tokens = data.draw(st.integers(1, limit)), min(tokens, limit)
    expected = min(-(tokens - (limit - buffer)) / buffer * penalty, 0)
    assert overlong_penalty(
        tokens, limit, RewardsConfig(overlong_buffer=buffer, overlong_penalty=penalty)
    ) == pytest.approx(expected)


@pytest.mark.parametrize(("tokens", "loss"), [(0, 0.0), (6, 0.0), (7, -0.5), (10, -2.0), (11, -2.0), (1000, -2.0)])
def test_the_penalty_starts_at_the_buffer_and_is_bounded(tokens: int, loss: float) -> None:
    assert overlong_penalty(tokens, LIMIT, REWARDS) == loss


def test_all_sampled_tokens_of_the_episode_count_and_the_penalty_is_reported_as_a_reward() -> None:
    found = apply_overlong_penalty(episode(5, 4, reward=1.0, rewards={"right": 1.0}), LIMIT, REWARDS)
    assert (found.reward, found.rewards) == (-0.5, {"right": 1.0, OVERLONG_REWARD: -1.5})


def test_an_attempt_without_a_penalty_reports_zero() -> None:
    found = apply_overlong_penalty(episode(3, reward=1.0), LIMIT, REWARDS)
    assert (found.reward, found.rewards) == (1.0, {OVERLONG_REWARD: 0.0})


def test_trajectories_with_their_own_rewards_get_the_same_penalty() -> None:
    found = apply_overlong_penalty(Episode([trajectory(4, reward=3.0), trajectory(4)], reward=1.0), LIMIT, REWARDS)
    assert [kept.reward for kept in found.trajectories] == [2.0, None]
    assert found.reward == 0.0


def test_without_a_penalty_rule_or_a_reward_nothing_changes() -> None:
    long, failed = episode(10, reward=1.0), episode(10, error="boom")
    assert apply_overlong_penalty(long, LIMIT, RewardsConfig()) is long
    assert apply_overlong_penalty(failed, LIMIT, REWARDS) is failed
