"""Group scoring: the outcome of a group and its rows for the learner."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.algorithms.token_advantages import advantage_settings
from outpace.config.algorithm import AdvantageConfig, configured_advantage
from outpace.rollouts.group_scoring import ScoringRules, score_group, version_range
from outpace.types import OBSERVED, Episode, Trajectory
from rollouts_support import group_filter
from support import naming

REWARDS = st.floats(-100, 100, width=32)


def rules(advantage: str = "dr_grpo", credit: Any = None, gamma: float | None = None, **filters: Any) -> ScoringRules:
    estimator = configured_advantage(AdvantageConfig(name=advantage))
    return ScoringRules(advantage_settings(estimator, credit, gamma), group_filter(**filters))


GROUP_MEAN = rules()


def trajectory(prompt: int = 2, versions: tuple[int, ...] = (4, 5), **more: Any) -> Trajectory:
    count = prompt + len(versions)
    return Trajectory(
        tokens=np.arange(count, dtype=np.int32),
        mask=np.arange(count) >= prompt,
        logprobs=np.where(np.arange(count) >= prompt, np.float32(-0.5), np.float32(0)),
        versions=np.array([OBSERVED] * prompt + list(versions), np.int32),
        **more,
    )


def two_turns(*turn_rewards: float, **more: Any) -> Trajectory:
    """Two turns of one token each."""
    mask = np.array([False, True, False, True])
    return Trajectory(
        tokens=np.arange(4, dtype=np.int32),
        mask=mask,
        logprobs=np.where(mask, np.float32(-0.5), np.float32(0)),
        versions=np.where(mask, 3, OBSERVED).astype(np.int32),
        turn_rewards=np.array(turn_rewards, np.float32),
        **more,
    )


def episode(reward: float = 0.0, error: str | None = None, **changes: Any) -> Episode:
    return Episode(changes.pop("trajectories", [trajectory()]), reward=reward, error=error, **changes)


def test_advantages_are_rewards_minus_their_mean_on_sampled_tokens_and_zero_elsewhere() -> None:
    scored = score_group([episode(1.0), episode(0.0), episode(0.5)], GROUP_MEAN)
    assert scored.outcome == "finished"
    assert [row.advantages.tolist() for row in scored.rows] == [[0, 0, 0.5, 0.5], [0, 0, -0.5, -0.5], [0, 0, 0, 0]]


@settings(deadline=None)
@given(rewards=st.lists(REWARDS, min_size=2, max_size=8), lengths=st.lists(st.integers(0, 4), min_size=8, max_size=8))
def test_rows_share_the_trajectory_arrays_and_observed_tokens_have_zero_advantage(
    rewards: list[float], lengths: list[int]
) -> None:
    made = [trajectory(prompt=length, versions=(1,)) for length in lengths]
    scored = score_group(
        [episode(reward, trajectories=[made[i]]) for i, reward in enumerate(rewards)], rules(uniform=False)
    )
    assert len(scored.rows) == len(rewards)
    for row, source, reward in zip(scored.rows, made, rewards, strict=False):
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
    scored = score_group([episode(reward) for reward in rewards], GROUP_MEAN)
    assert (scored.outcome == "filtered") == (max(rewards) - min(rewards) <= 1e-6)
    assert bool(scored.rows) == (scored.outcome == "finished")


def test_rewards_that_differ_only_by_rounding_count_as_equal() -> None:
    scored = score_group([episode(0.1 + 0.2), episode(0.3)], GROUP_MEAN)
    assert scored.outcome == "filtered"
    assert re.search(naming("reward", "0.3"), scored.reason)


def test_a_group_with_equal_rewards_can_be_kept() -> None:
    scored = score_group([episode(1.0), episode(1.0)], rules("none", uniform=False))
    assert [row.advantages[-1] for row in scored.rows] == [1.0, 1.0]


def test_failed_episodes_are_left_out_of_the_mean_and_of_the_rows() -> None:
    scored = score_group([episode(9.0, error="boom"), episode(1.0), episode(0.0)], GROUP_MEAN)
    assert [row.advantages[-1] for row in scored.rows] == [0.5, -0.5]


def test_a_group_below_min_group_fails_and_names_the_reason() -> None:
    scored = score_group([episode(1.0), episode(error="boom")], GROUP_MEAN)
    assert scored.outcome == "failed"
    assert re.search(naming("1", "2", "filter.min_group", "boom"), scored.reason)
    assert scored.rows == []
    three = [episode(1.0), episode(0.0), episode(error="boom")]
    assert score_group(three, rules(min_group=3)).outcome == "failed"
    assert score_group(three, rules(min_group=2)).outcome == "finished"


def test_one_surviving_episode_is_enough_without_a_group_baseline() -> None:
    group = [episode(1.0), episode(error="boom")]
    scored = score_group(group, rules("none", uniform=False, min_group=1))
    assert [row.advantages.tolist() for row in scored.rows] == [[0, 0, 1, 1]]


def test_a_group_without_survivors_reports_the_first_error() -> None:
    scored = score_group([episode(error="first"), episode(error="second")], GROUP_MEAN)
    assert (scored.outcome, scored.reason, scored.rows) == ("failed", "first", [])


def test_every_trajectory_of_an_episode_gets_its_advantage() -> None:
    scored = score_group([episode(1.0, trajectories=[trajectory(), trajectory(0, (1,))]), episode(0.0)], GROUP_MEAN)
    assert [row.advantages[-1] for row in scored.rows] == [0.5, 0.5, -0.5]


def test_a_trajectory_without_sampled_tokens_makes_no_row() -> None:
    silent = trajectory(versions=())
    scored = score_group([episode(1.0, trajectories=[silent]), episode(0.0)], GROUP_MEAN)
    assert [row.advantages[-1] for row in scored.rows] == [-0.5]


def test_a_group_that_sampled_nothing_fails() -> None:
    silent = [trajectory(versions=())]
    scored = score_group([episode(1.0, trajectories=silent), episode(0.0, trajectories=silent)], GROUP_MEAN)
    assert scored.outcome == "failed"
    assert "token" in scored.reason


def test_the_version_range_covers_sampled_tokens_only() -> None:
    assert version_range([trajectory(versions=(4, 7)), trajectory(versions=(5,))]) == (4, 7)
    assert version_range([trajectory(versions=())]) == (OBSERVED, OBSERVED)
    assert version_range([]) == (OBSERVED, OBSERVED)


# -------------------------------------------------------------------------------------------------- rows and advantages


def test_a_row_records_its_episode_role_reward_and_turn_rewards() -> None:
    own = trajectory(role="solver", reward=2.0)
    group = [episode(error="boom"), episode(1.0), episode(0.0, trajectories=[two_turns(0.5, 1.5), own])]
    rows = score_group(group, GROUP_MEAN).rows
    assert [(row.episode, row.role, row.reward) for row in rows] == [
        (0, "policy", None),
        (1, "policy", None),
        (1, "solver", 2.0),
    ]
    assert [row.turn_rewards.tolist() for row in rows] == [[], [0.5, 1.5], []]
    assert {row.turn_rewards.dtype for row in rows} == {np.dtype(np.float32)}


def test_turn_rewards_are_credited_to_their_turns() -> None:
    group = [episode(1.0, trajectories=[two_turns(2, 0)]), episode(0.0, trajectories=[two_turns(0, 0)])]
    scored = score_group(group, rules(credit="turn", gamma=0.5))
    assert [row.advantages.tolist() for row in scored.rows] == [[0, 1.25, 0, 0.5], [0, -1.25, 0, -0.5]]


def test_advantages_use_a_separate_baseline_for_each_role() -> None:
    def played(judged: float, *solved: float) -> Episode:
        solvers = [trajectory(0, (1,), role="solver", reward=reward) for reward in solved]
        return episode(judged, trajectories=[*solvers, trajectory(0, (1,), role="judge")])

    scored = score_group([played(1.0, 3.0, 1.0), played(0.0, 2.0, 2.0)], GROUP_MEAN)
    assert [float(row.advantages[0]) for row in scored.rows] == [1.0, -1.0, 0.5, 0.0, 0.0, -0.5]


def test_a_row_whose_advantages_are_all_zero_is_kept() -> None:
    scored = score_group([episode(1.0), episode(0.0), episode(0.5)], GROUP_MEAN)
    assert len(scored.rows) == 3
    assert not scored.rows[2].advantages.any()


def test_group_scoring_leaves_out_advantages_for_gae() -> None:
    scored = score_group([episode(1.0), episode(1.0)], rules("gae", uniform=False))
    assert [row.advantages.tolist() for row in scored.rows] == [[], []]


# -------------------------------------------------------------------------------------------------------- equal rewards


def test_a_group_is_filtered_only_if_the_rewards_of_every_role_are_equal() -> None:
    def played(judged: float, solved: float) -> Episode:
        return episode(judged, trajectories=[trajectory(role="judge"), trajectory(role="solver", reward=solved)])

    same = score_group([played(1.0, 0.5), played(1.0, 0.5)], GROUP_MEAN)
    assert same.outcome == "filtered"
    assert "reward" in same.reason
    assert score_group([played(1.0, 0.0), played(1.0, 0.5)], GROUP_MEAN).outcome == "finished"
    assert score_group([played(1.0, 0.5), played(0.0, 0.5)], GROUP_MEAN).outcome == "finished"


def test_turn_rewards_with_equal_sums_are_filtered_except_with_turn_or_token_credit() -> None:
    group = [episode(1.0, trajectories=[two_turns(1, 0)]), episode(1.0, trajectories=[two_turns(0, 1)])]
    assert score_group(group, GROUP_MEAN).outcome == "filtered"
    by_turn = score_group(group, rules(credit="turn"))
    assert [row.advantages.tolist() for row in by_turn.rows] == [[0, 0, 0, -0.5], [0, 0, 0, 0.5]]
    assert score_group(group, rules(credit="token")).outcome == "finished"


def test_equal_reward_sums_are_kept_for_an_estimator_that_uses_per_function_rewards() -> None:
    group = [episode(1.0, rewards={"a": 1.0, "b": 0.0}), episode(1.0, rewards={"a": 0.0, "b": 1.0})]
    assert score_group(group, GROUP_MEAN).outcome == "filtered"
    assert score_group(group, rules("gdpo")).outcome == "finished"


def test_rewards_within_the_tolerance_count_as_equal() -> None:
    group = [episode(1.0), episode(1.05)]
    assert score_group(group, rules(tolerance=0.1)).outcome == "filtered"
    assert score_group(group, rules(tolerance=0.01)).outcome == "finished"


# ------------------------------------------------------------------------------------------------------ masked attempts


def test_truncated_attempts_are_masked_and_still_count_for_the_baseline() -> None:
    group = [episode(1.0), episode(0.0, stop="length"), episode(0.5)]
    assert len(score_group(group, GROUP_MEAN).rows) == 3
    masked = score_group(group, rules(truncated="mask")).rows
    assert [(row.episode, float(row.advantages[-1])) for row in masked] == [(0, 0.5), (2, 0.0)]


def test_overlong_attempts_are_masked_and_still_count_for_the_baseline() -> None:
    long = episode(1.0, trajectories=[trajectory(), trajectory(0, (1,))])
    masked = score_group([long, episode(0.0)], rules(longer_than=2)).rows
    assert [(row.episode, float(row.advantages[-1])) for row in masked] == [(1, -0.5)]
    assert len(score_group([long, episode(0.0)], rules(longer_than=3)).rows) == 3


def test_a_group_with_every_attempt_masked_is_filtered() -> None:
    group = [episode(1.0, stop="length"), episode(0.0, stop="length")]
    scored = score_group(group, rules(truncated="mask"))
    assert (scored.outcome, scored.rows) == ("filtered", [])
    assert scored.reason
    assert score_group(group, rules(longer_than=1)).outcome == "filtered"
