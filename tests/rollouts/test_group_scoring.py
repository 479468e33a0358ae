"""Closing a group: what it came to, and the rows it leaves to the learner."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.algorithms.token_advantages import advantage_settings
from outpace.config.algorithm import AlgorithmConfig, configured_advantage
from outpace.rollouts.group_scoring import GroupFilter, ScoringRules, score_group, version_range
from outpace.types import OBSERVED, Episode, Trajectory
from support import naming

REWARDS = st.floats(-100, 100, width=32)


def rules(advantage: str = "dr_grpo", credit: Any = None, gamma: float | None = None, **filters: Any) -> ScoringRules:
    estimator = configured_advantage(AlgorithmConfig(advantage=advantage))
    return ScoringRules(advantage_settings(estimator, credit, gamma), GroupFilter(**filters))


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


def test_advantages_are_rewards_less_their_mean_on_sampled_tokens_and_zero_elsewhere() -> None:
    verdict = score_group([episode(1.0), episode(0.0), episode(0.5)], GROUP_MEAN)
    assert verdict.outcome == "finished"
    assert [row.advantages.tolist() for row in verdict.rows] == [[0, 0, 0.5, 0.5], [0, 0, -0.5, -0.5], [0, 0, 0, 0]]


@settings(deadline=None)
@given(rewards=st.lists(REWARDS, min_size=2, max_size=8), lengths=st.lists(st.integers(0, 4), min_size=8, max_size=8))
def test_rows_are_the_trajectories_untouched_and_no_observed_token_has_an_advantage(
    rewards: list[float], lengths: list[int]
) -> None:
    made = [trajectory(prompt=length, versions=(1,)) for length in lengths]
    verdict = score_group(
        [episode(reward, trajectories=[made[i]]) for i, reward in enumerate(rewards)], rules(uniform=False)
    )
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
    verdict = score_group([episode(reward) for reward in rewards], GROUP_MEAN)
    assert (verdict.outcome == "filtered") == (max(rewards) - min(rewards) <= 1e-6)
    assert bool(verdict.rows) == (verdict.outcome == "finished")


def test_rewards_that_differ_by_rounding_alone_are_equal() -> None:
    verdict = score_group([episode(0.1 + 0.2), episode(0.3)], GROUP_MEAN)
    assert verdict.outcome == "filtered"
    assert re.search(naming("reward", "0.3"), verdict.reason)


def test_a_uniform_group_may_be_kept() -> None:
    verdict = score_group([episode(1.0), episode(1.0)], rules("none", uniform=False))
    assert [row.advantages[-1] for row in verdict.rows] == [1.0, 1.0]


def test_failed_episodes_are_left_out_of_the_mean_and_of_the_rows() -> None:
    verdict = score_group([episode(9.0, error="boom"), episode(1.0), episode(0.0)], GROUP_MEAN)
    assert [row.advantages[-1] for row in verdict.rows] == [0.5, -0.5]


def test_a_group_with_too_few_survivors_fails_and_says_why() -> None:
    verdict = score_group([episode(1.0), episode(error="boom")], GROUP_MEAN)
    assert verdict.outcome == "failed"
    assert re.search(naming("1", "2", "filter.min_group", "boom"), verdict.reason)
    assert verdict.rows == []
    three = [episode(1.0), episode(0.0), episode(error="boom")]
    assert score_group(three, rules(min_group=3)).outcome == "failed"
    assert score_group(three, rules(min_group=2)).outcome == "finished"


def test_one_survivor_is_enough_where_nothing_is_compared() -> None:
    group = [episode(1.0), episode(error="boom")]
    verdict = score_group(group, rules("none", uniform=False, min_group=1))
    assert [row.advantages.tolist() for row in verdict.rows] == [[0, 0, 1, 1]]


def test_without_survivors_the_group_says_what_happened_to_the_first() -> None:
    verdict = score_group([episode(error="first"), episode(error="second")], GROUP_MEAN)
    assert (verdict.outcome, verdict.reason, verdict.rows) == ("failed", "first", [])


def test_every_trajectory_of_an_episode_gets_its_advantage() -> None:
    verdict = score_group([episode(1.0, trajectories=[trajectory(), trajectory(0, (1,))]), episode(0.0)], GROUP_MEAN)
    assert [row.advantages[-1] for row in verdict.rows] == [0.5, 0.5, -0.5]


def test_a_trajectory_without_sampled_tokens_makes_no_row() -> None:
    silent = trajectory(versions=())
    verdict = score_group([episode(1.0, trajectories=[silent]), episode(0.0)], GROUP_MEAN)
    assert [row.advantages[-1] for row in verdict.rows] == [-0.5]


def test_a_group_that_sampled_nothing_fails() -> None:
    silent = [trajectory(versions=())]
    verdict = score_group([episode(1.0, trajectories=silent), episode(0.0, trajectories=silent)], GROUP_MEAN)
    assert verdict.outcome == "failed"
    assert "token" in verdict.reason


def test_versions_range_over_sampled_tokens_only() -> None:
    assert version_range([episode(trajectories=[trajectory(versions=(4, 7)), trajectory(versions=(5,))])]) == (4, 7)
    assert version_range([episode(trajectories=[trajectory(versions=())])]) == (OBSERVED, OBSERVED)
    assert version_range([]) == (OBSERVED, OBSERVED)


# ------------------------------------------------------------------------------------------- where advantages came from


def test_a_row_says_which_episode_and_role_it_is_of_and_what_it_was_given() -> None:
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


def test_turn_rewards_reach_the_turns_they_are_for() -> None:
    group = [episode(1.0, trajectories=[two_turns(2, 0)]), episode(0.0, trajectories=[two_turns(0, 0)])]
    verdict = score_group(group, rules(credit="turn", gamma=0.5))
    assert [row.advantages.tolist() for row in verdict.rows] == [[0, 1.25, 0, 0.5], [0, -1.25, 0, -0.5]]


def test_two_solvers_and_a_judge_have_the_baselines_of_their_roles() -> None:
    def played(judged: float, *solved: float) -> Episode:
        solvers = [trajectory(0, (1,), role="solver", reward=reward) for reward in solved]
        return episode(judged, trajectories=[*solvers, trajectory(0, (1,), role="judge")])

    verdict = score_group([played(1.0, 3.0, 1.0), played(0.0, 2.0, 2.0)], GROUP_MEAN)
    assert [float(row.advantages[0]) for row in verdict.rows] == [1.0, -1.0, 0.5, 0.0, 0.0, -0.5]


def test_a_row_whose_advantages_are_all_zero_is_kept() -> None:
    verdict = score_group([episode(1.0), episode(0.0), episode(0.5)], GROUP_MEAN)
    assert len(verdict.rows) == 3
    assert not verdict.rows[2].advantages.any()


def test_a_critic_makes_the_advantages_later() -> None:
    verdict = score_group([episode(1.0), episode(1.0)], rules("gae", uniform=False))
    assert [row.advantages.tolist() for row in verdict.rows] == [[0, 0, 0, 0]] * 2


# ----------------------------------------------------------------------------------------------------------- uniformity


def test_a_group_is_uniform_only_if_every_role_is() -> None:
    def played(judged: float, solved: float) -> Episode:
        return episode(judged, trajectories=[trajectory(role="judge"), trajectory(role="solver", reward=solved)])

    same = score_group([played(1.0, 0.5), played(1.0, 0.5)], GROUP_MEAN)
    assert same.outcome == "filtered"
    assert "reward" in same.reason
    assert score_group([played(1.0, 0.0), played(1.0, 0.5)], GROUP_MEAN).outcome == "finished"
    assert score_group([played(1.0, 0.5), played(0.0, 0.5)], GROUP_MEAN).outcome == "finished"


def test_turn_rewards_that_cancel_out_are_uniform_as_a_whole_but_not_by_turn() -> None:
    group = [episode(1.0, trajectories=[two_turns(1, 0)]), episode(1.0, trajectories=[two_turns(0, 1)])]
    assert score_group(group, GROUP_MEAN).outcome == "filtered"
    by_turn = score_group(group, rules(credit="turn"))
    assert [row.advantages.tolist() for row in by_turn.rows] == [[0, 0, 0, -0.5], [0, 0, 0, 0.5]]
    assert score_group(group, rules(credit="token")).outcome == "finished"


def test_single_rewards_that_add_up_to_the_same_are_worth_training_for_an_estimator_that_looks_at_them() -> None:
    group = [episode(1.0, rewards={"a": 1.0, "b": 0.0}), episode(1.0, rewards={"a": 0.0, "b": 1.0})]
    assert score_group(group, GROUP_MEAN).outcome == "filtered"
    assert score_group(group, rules("gdpo")).outcome == "finished"


def test_rewards_within_the_tolerance_are_equal() -> None:
    group = [episode(1.0), episode(1.05)]
    assert score_group(group, rules(tolerance=0.1)).outcome == "filtered"
    assert score_group(group, rules(tolerance=0.01)).outcome == "finished"


# ------------------------------------------------------------------------------------------------------- not trained on


def test_attempts_that_were_cut_off_are_masked_and_still_count_for_the_baseline() -> None:
    group = [episode(1.0), episode(0.0, stop="length"), episode(0.5)]
    assert len(score_group(group, GROUP_MEAN).rows) == 3
    masked = score_group(group, rules(truncated="mask")).rows
    assert [(row.episode, float(row.advantages[-1])) for row in masked] == [(0, 0.5), (2, 0.0)]


def test_attempts_that_are_too_long_are_masked_and_still_count_for_the_baseline() -> None:
    long = episode(1.0, trajectories=[trajectory(), trajectory(0, (1,))])
    masked = score_group([long, episode(0.0)], rules(longer_than=2)).rows
    assert [(row.episode, float(row.advantages[-1])) for row in masked] == [(1, -0.5)]
    assert len(score_group([long, episode(0.0)], rules(longer_than=3)).rows) == 3


def test_a_group_of_which_nothing_is_left_to_train_on_is_filtered() -> None:
    group = [episode(1.0, stop="length"), episode(0.0, stop="length")]
    verdict = score_group(group, rules(truncated="mask"))
    assert (verdict.outcome, verdict.rows) == ("filtered", [])
    assert verdict.reason
    assert score_group(group, rules(longer_than=1)).outcome == "filtered"
