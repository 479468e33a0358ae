"""Closing a group: what it came to, and the rows it leaves to the learner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.rollout.closing import ClosingRules, close_group, version_range
from outpace.types import OBSERVED, Episode, Trajectory

GROUP_MEAN = ClosingRules("group_mean", filter_uniform=True, uniform_tolerance=1e-6)
REWARDS = st.floats(-100, 100, width=32)


def trajectory(prompt: int = 2, versions: tuple[int, ...] = (4, 5)) -> Trajectory:
    count = prompt + len(versions)
    return Trajectory(
        tokens=np.arange(count, dtype=np.int32),
        mask=np.arange(count) >= prompt,
        logprobs=np.where(np.arange(count) >= prompt, np.float32(-0.5), np.float32(0)),
        versions=np.array([OBSERVED] * prompt + list(versions), np.int32),
    )


def episode(reward: float = 0.0, error: str | None = None, **changes: Any) -> Episode:
    return Episode(changes.pop("trajectories", [trajectory()]), reward=reward, error=error, **changes)


def test_advantages_are_rewards_less_their_mean_on_sampled_tokens_and_zero_elsewhere() -> None:
    verdict = close_group([episode(1.0), episode(0.0), episode(0.5)], GROUP_MEAN)
    assert verdict.outcome == "finished"
    assert [row.advantages.tolist() for row in verdict.rows] == [[0, 0, 0.5, 0.5], [0, 0, -0.5, -0.5], [0, 0, 0, 0]]


@settings(deadline=None)
@given(rewards=st.lists(REWARDS, min_size=2, max_size=8), lengths=st.lists(st.integers(0, 4), min_size=8, max_size=8))
def test_rows_are_the_trajectories_untouched_and_no_observed_token_has_an_advantage(
    rewards: list[float], lengths: list[int]
) -> None:
    rules = ClosingRules("group_mean", filter_uniform=False, uniform_tolerance=0)
    made = [trajectory(prompt=length, versions=(1,)) for length in lengths]
    verdict = close_group([episode(reward, trajectories=[made[i]]) for i, reward in enumerate(rewards)], rules)
    assert len(verdict.rows) == len(rewards)
    for row, source, reward in zip(verdict.rows, made, rewards, strict=False):
        assert row.tokens is source.tokens
        assert row.logprobs is source.logprobs
        assert row.versions is source.versions
        assert row.advantages.dtype == np.float32
        assert not row.advantages[~row.mask].any()
        expected = reward - sum(rewards) / len(rewards)
        assert row.advantages[row.mask].tolist() == pytest.approx([expected], rel=1e-5, abs=1e-4)


@settings(deadline=None)
@given(rewards=st.lists(REWARDS, min_size=2, max_size=8))
def test_a_group_is_filtered_exactly_when_no_two_rewards_differ(rewards: list[float]) -> None:
    verdict = close_group([episode(reward) for reward in rewards], GROUP_MEAN)
    assert (verdict.outcome == "filtered") == (max(rewards) - min(rewards) <= 1e-6)
    assert bool(verdict.rows) == (verdict.outcome == "finished")


def test_rewards_that_differ_by_rounding_alone_are_equal() -> None:
    verdict = close_group([episode(0.1 + 0.2), episode(0.3)], GROUP_MEAN)
    assert (verdict.outcome, verdict.reason) == ("filtered", "all rewards are 0.3")


def test_a_uniform_group_may_be_kept() -> None:
    rules = ClosingRules("none", filter_uniform=False, uniform_tolerance=1e-6)
    verdict = close_group([episode(1.0), episode(1.0)], rules)
    assert [row.advantages[-1] for row in verdict.rows] == [1.0, 1.0]


def test_failed_episodes_are_left_out_of_the_mean_and_of_the_rows() -> None:
    verdict = close_group([episode(9.0, error="boom"), episode(1.0), episode(0.0)], GROUP_MEAN)
    assert [row.advantages[-1] for row in verdict.rows] == [0.5, -0.5]


def test_one_survivor_has_nothing_to_be_compared_with() -> None:
    verdict = close_group([episode(1.0), episode(error="boom")], GROUP_MEAN)
    assert (verdict.outcome, verdict.reason) == ("failed", "one survivor has no baseline: boom")
    assert verdict.rows == []


def test_one_survivor_is_enough_without_a_baseline() -> None:
    rules = ClosingRules("none", filter_uniform=False, uniform_tolerance=1e-6)
    assert len(close_group([episode(1.0), episode(error="boom")], rules).rows) == 1


def test_without_survivors_the_group_says_what_happened_to_the_first() -> None:
    verdict = close_group([episode(error="first"), episode(error="second")], GROUP_MEAN)
    assert (verdict.outcome, verdict.reason, verdict.rows) == ("failed", "first", [])


def test_every_trajectory_of_an_episode_gets_its_advantage() -> None:
    verdict = close_group([episode(1.0, trajectories=[trajectory(), trajectory(0, (1,))]), episode(0.0)], GROUP_MEAN)
    assert [row.advantages[-1] for row in verdict.rows] == [0.5, 0.5, -0.5]


def test_a_trajectory_without_sampled_tokens_makes_no_row() -> None:
    silent = trajectory(versions=())
    verdict = close_group([episode(1.0, trajectories=[silent]), episode(0.0)], GROUP_MEAN)
    assert [row.advantages[-1] for row in verdict.rows] == [-0.5]


def test_a_group_that_sampled_nothing_fails() -> None:
    silent = [trajectory(versions=())]
    verdict = close_group([episode(1.0, trajectories=silent), episode(0.0, trajectories=silent)], GROUP_MEAN)
    assert (verdict.outcome, verdict.reason) == ("failed", "no token was sampled")


def test_versions_range_over_sampled_tokens_only() -> None:
    assert version_range([episode(trajectories=[trajectory(versions=(4, 7)), trajectory(versions=(5,))])]) == (4, 7)
    assert version_range([episode(trajectories=[trajectory(versions=())])]) == (OBSERVED, OBSERVED)
    assert version_range([]) == (OBSERVED, OBSERVED)
