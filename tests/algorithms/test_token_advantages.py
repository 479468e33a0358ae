"""Token advantages: which attempts share a baseline, and which advantage each token gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.algorithms import ADVANTAGES
from outpace.algorithms.advantages import Doubles, GroupReturns, dr_grpo
from outpace.algorithms.registry import REGISTRATION_ATTRIBUTE, ConfiguredFunction, advantage
from outpace.algorithms.token_advantages import (
    AdvantageSettings,
    advantage_settings,
    attempt_returns,
    compared_returns,
    critic_advantages,
    group_advantages,
    turn_numbers,
)
from outpace.config.algorithm import AdvantageConfig, configured_advantage
from outpace.errors import BadInput
from outpace.types import OBSERVED, Row


def row(*turns: int, episode: int = 0, turn_rewards: Sequence[float] = (), **rest: Any) -> Row:
    """A prompt of two tokens, then `turns` sampled tokens per turn, each turn followed by one observed token."""
    pieces = [[False, False]] + [[True] * turn + [False] for turn in turns]
    mask = np.array([sampled for piece in pieces for sampled in piece])
    return Row(
        tokens=np.arange(len(mask), dtype=np.int32),
        mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        versions=np.where(mask, 3, OBSERVED).astype(np.int32),
        advantages=np.zeros(len(mask), np.float32),
        episode=episode,
        turn_rewards=np.array(turn_rewards, np.float32),
        **rest,
    )


def using(name: str = "dr_grpo", **values: Any) -> AdvantageSettings:
    weights = values.pop("weights", {})
    config = AdvantageConfig(name=name, **values)
    chosen = advantage_settings(configured_advantage(config), config.credit, config.gamma)
    return AdvantageSettings(chosen.estimator, chosen.credit, chosen.gamma, weights)


def lists(arrays: Sequence[Doubles]) -> list[list[float]]:
    return [array.tolist() for array in arrays]


def close(found: Sequence[Doubles], expected: Sequence[Sequence[float]]) -> None:
    assert [len(array) for array in found] == [len(values) for values in expected]
    for array, values in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, values, rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------------------------------------------------- settings


def test_the_default_credit_is_the_first_of_the_estimator_without_discount() -> None:
    assert (using("dr_grpo").credit, using("reinforce_pp").credit, using("gae").credit) == ("episode", "token", "token")
    assert (using("dr_grpo").gamma, using("dr_grpo", credit="turn", gamma=0.0).gamma) == (1.0, 0.0)


@pytest.mark.parametrize(("name", "credit"), [("gdpo", "turn"), ("grpo", "token"), ("pass_at_k", "turn")])
def test_a_credit_that_the_estimator_does_not_support_is_an_assertion_error(name: str, credit: Any) -> None:
    with pytest.raises(AssertionError):
        advantage_settings(configured_advantage(AdvantageConfig(name=name)), credit)


def test_only_additive_estimators_declare_token_credit() -> None:
    for name in ADVANTAGES.built_in:
        registration = ADVANTAGES.find(name)
        assert registration.additive or "token" not in registration.credits


# ------------------------------------------------------------------------------------------------------ attempts, roles


def test_every_trained_token_gets_the_advantage_of_its_attempt() -> None:
    found = group_advantages([row(2), row(1, 2, episode=1)], [1.0, 0.0], [], using())
    assert lists(found) == [[0.5, 0.5], [-0.5, -0.5, -0.5]]


def test_trajectories_of_one_attempt_share_its_advantage_and_count_once() -> None:
    rows = [row(1), row(2), row(1), row(1, episode=1)]
    assert lists(group_advantages(rows, [1.0, 0.0], [], using())) == [[0.5], [0.5, 0.5], [0.5], [-0.5]]


def test_each_role_has_its_own_baseline() -> None:
    """Each of two episodes has two solvers with their own rewards and a judge that gets the episode reward."""
    rows = [
        row(1, role="solver", reward=4.0),
        row(1, role="solver", reward=0.0),
        row(1, role="judge"),
        row(1, role="solver", reward=1.0, episode=1),
        row(1, role="solver", reward=3.0, episode=1),
        row(1, role="judge", episode=1),
    ]
    found = group_advantages(rows, [10.0, 20.0], [], using())
    assert lists(found) == [[2.0], [-2.0], [-5.0], [-1.0], [1.0], [5.0]]


def test_trajectories_with_the_same_attempt_number_count_once() -> None:
    first, second = {"role": "solver", "reward": 2.0, "attempt": 0}, {"role": "solver", "reward": 1.0, "attempt": 1}
    rows = [row(1, **first), row(1, **first), row(1, **second), row(1, role="solver", reward=0.0, episode=1)]
    assert lists(group_advantages(rows, [0.0, 0.0], [], using())) == [[1.0], [1.0], [0.0], [-1.0]]


def test_trajectories_of_a_role_without_their_own_rewards_are_one_attempt_per_episode() -> None:
    rows = [row(1, role="solver"), row(1, role="solver"), row(1, role="solver", episode=1), row(1, role="judge")]
    found = group_advantages(rows, [1.0, 0.0], [], using())
    assert lists(found) == [[0.5], [0.5], [-0.5], [0.0]], "a single judge has no other attempt to compare with"


def test_a_lone_attempt_gets_its_return_from_an_estimator_without_a_baseline() -> None:
    assert lists(group_advantages([row(2)], [3.0], [], using("none"))) == [[3.0, 3.0]]


def test_attempt_returns_lists_the_full_return_of_each_attempt_once() -> None:
    rows = [row(1), row(1), row(2, turn_rewards=[2], episode=1), row(1, role="judge", reward=7.0, episode=1)]
    assert attempt_returns(rows, [1.0, 0.0, 5.0]).tolist() == [1.0, 2.0, 7.0, 5.0]
    assert attempt_returns(rows[:1], [1.0], [np.array([0.25])]).tolist() == [0.75]
    assert attempt_returns([], []).tolist() == []


def test_an_episode_without_rows_keeps_its_position_so_that_sums_round_identically() -> None:
    assert attempt_returns([row(1, episode=1)], [1.0, 0.0, 5.0]).tolist() == [1.0, 0.0, 5.0]


def test_an_episode_without_rows_counts_for_the_baseline() -> None:
    assert lists(group_advantages([row(1, episode=1)], [1.0, 0.0], [], using())) == [[-0.5]]
    assert lists(group_advantages([row(1, episode=1)], [1.0, 0.0], [], using("opo"))) == [[0.0]], "it has no tokens"


def test_an_episode_without_rows_does_not_count_where_trajectories_have_their_own_rewards() -> None:
    rows = [row(1, reward=1.0), row(1, reward=0.0, episode=1)]
    assert lists(group_advantages(rows, [9.0, 9.0, 9.0], [], using())) == [[0.5], [-0.5]]


def test_opo_uses_the_lengths_of_whole_attempts() -> None:
    rows = [row(1), row(1, 1), row(2, episode=1)]
    close(group_advantages(rows, [1.0, 0.0], [], using("opo")), [[0.4], [0.4, 0.4], [-0.6, -0.6]])


def test_a_row_without_trained_tokens_counts_for_the_baseline_and_gets_no_advantages() -> None:
    assert lists(group_advantages([row(), row(1, episode=1)], [1.0, 0.0], [], using())) == [[], [-0.5]]
    assert lists(group_advantages([], [], [], using())) == []


# ------------------------------------------------------------------------------------------------- rewards per function


def test_rewards_per_function_reach_the_estimator_with_their_weights() -> None:
    parts = [{"right": 1.0, "short": 0.0}, {"right": 0.0}, {"right": 0.0, "short": 1.0}]
    rows = [row(1, episode=index) for index in range(3)]
    found = group_advantages(rows, [2.0, 0.0, 1.0], parts, using("gdpo", weights={"right": 2.0}))
    right = np.array([2, -1, -1]) / 3 / (3**-0.5 + 1e-4)
    short = np.array([-0.5, 0, 0.5]) / (0.5**0.5 + 1e-4)
    close(found, [[value] for value in 2 * right + short])


def test_turn_and_trajectory_rewards_count_as_separate_reward_functions() -> None:
    rows = [row(1, 1, turn_rewards=[1, 2]), row(1, 1, episode=1, turn_rewards=[0, 0])]
    unit = 0.5 / (0.5**0.5 + 1e-4)
    steep = 1.5 / (4.5**0.5 + 1e-4)
    found = group_advantages(rows, [1.0, 0.0], [{"right": 1.0}, {"right": 0.0}], using("gdpo"))
    close(found, [[unit + steep] * 2, [-unit - steep] * 2])
    own = [row(1, reward=1.0), row(1, reward=0.0, episode=1)]
    close(group_advantages(own, [0.0, 0.0], [{"right": 0.0}] * 2, using("gdpo")), [[unit], [-unit]])


# ----------------------------------------------------------------------------------------------------- rewards per turn


def test_a_turn_is_an_unbroken_run_of_trained_tokens() -> None:
    assert turn_numbers(row(2, 1, 3).mask).tolist() == [0, 0, 1, 2, 2, 2]
    assert turn_numbers(np.array([True, True, False, False, True])).tolist() == [0, 0, 1]
    assert turn_numbers(np.zeros(3, dtype=np.bool_)).tolist() == []


def test_the_return_is_the_sum_of_episode_and_turn_rewards() -> None:
    rows = [row(2, 1, turn_rewards=[1, 2]), row(1, episode=1)]
    assert lists(group_advantages(rows, [1.0, 0.0], [], using())) == [[2.0] * 3, [-2.0]]


def test_with_turn_credit_a_turn_is_compared_with_the_same_turn_of_other_attempts() -> None:
    rows = [row(2, 1, turn_rewards=[1, 2]), row(1, 1, 1, episode=1, turn_rewards=[0, 4, 0]), row(1, episode=2)]
    found = group_advantages(rows, [1.0, 0.0, 3.0], [], using(credit="turn", gamma=0.5))
    # Returns: 1 + (2 + 1) / 2 and 3; 0 + 4 / 2, 4 and 0; 3.
    first, second = [2.5, 2.0, 3.0], [3.0, 4.0]
    expected_first = [value - sum(first) / 3 for value in first]
    expected_second = [value - sum(second) / 2 for value in second]
    close(
        found,
        [
            [expected_first[0], expected_first[0], expected_second[0]],
            [expected_first[1], expected_second[1], 0.0],
            [expected_first[2]],
        ],
    )


def test_with_turn_credit_opo_uses_the_length_of_the_turn() -> None:
    rows = [row(3, 9), row(2, episode=1)]
    close(group_advantages(rows, [1.0, 0.0], [], using("opo", credit="turn")), [[0.4] * 3 + [0.0] * 9, [-0.6] * 2])


def test_the_turns_of_an_attempt_continue_in_its_next_trajectory() -> None:
    split = [row(1, turn_rewards=[1]), row(1, turn_rewards=[2]), row(1, 1, episode=1, turn_rewards=[5, 7])]
    whole = [row(1, 1, turn_rewards=[1, 2]), row(1, 1, episode=1, turn_rewards=[5, 7])]
    for options in ({"credit": "turn"}, {"credit": "token"}):
        apart = group_advantages(split, [1.0, 0.0], [], using(gamma=0.5, **options))
        together = group_advantages(whole, [1.0, 0.0], [], using(gamma=0.5, **options))
        close([np.concatenate(apart[:2]), apart[2]], lists(together))


def test_with_token_credit_the_return_to_go_replaces_the_full_return() -> None:
    rows = [row(2, 1, turn_rewards=[1, 2]), row(1, episode=1)]
    found = group_advantages(rows, [1.0, 0.0], [], using(credit="token"))
    assert lists(found) == [[2.0, 2.0, 1.0], [-2.0]], "4, 4, 3 and 0, less the mean of 4 and 0"
    slow = group_advantages(rows, [1.0, 0.0], [], using(credit="token", gamma=0.5))
    assert lists(slow) == [[(1 + 3 / 2) / 2 - 2, 1 + 3 / 2 - 2, 3.0 - 2], [-2.0]]


@settings(deadline=None)
@given(rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=5), data=st.data())
def test_without_turn_rewards_and_discount_every_credit_gives_the_same_advantages(
    rewards: list[float], data: st.DataObject
) -> None:
    rows = [row(data.draw(st.integers(1, 4)), episode=index) for index in range(len(rewards))]
    for name in ("dr_grpo", "rloo", "none", "reinforce_pp_baseline"):
        whole = lists(group_advantages(rows, rewards, [], using(name, credit="episode")))
        close(group_advantages(rows, rewards, [], using(name, credit="turn")), whole)
        close(group_advantages(rows, rewards, [], using(name, credit="token")), whole)


@settings(deadline=None)
@given(
    turns=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    gamma=st.floats(0, 1),
    reward=st.floats(-5, 5),
    data=st.data(),
)
def test_returns_to_go_follow_their_definition(
    turns: list[int], gamma: float, reward: float, data: st.DataObject
) -> None:
    """The estimator `none` returns the returns unchanged."""
    given_rewards = data.draw(st.lists(st.floats(-5, 5, width=32), min_size=len(turns), max_size=len(turns)))
    count = sum(turns)
    costs = data.draw(st.lists(st.floats(-1, 1), min_size=count, max_size=count))
    single, penalties = row(*turns, turn_rewards=given_rewards), [np.array(costs)]
    arriving: list[float] = []
    by_turn: list[float] = []
    for length, gained in zip(turns, given_rewards, strict=True):
        piece = [-cost for cost in costs[len(arriving) : len(arriving) + length]]
        piece[-1] += gained
        arriving += piece
        by_turn.append(sum(piece))
    arriving[-1] += reward
    by_turn[-1] += reward
    per_token = [sum(gamma ** (j - t) * arriving[j] for j in range(t, count)) for t in range(count)]
    per_turn = [sum(gamma ** (j - k) * by_turn[j] for j in range(k, len(turns))) for k in range(len(turns))]
    per_turn_tokens = [value for value, length in zip(per_turn, turns, strict=True) for _ in range(length)]
    close(group_advantages([single], [reward], [], using("none", credit="token", gamma=gamma), penalties), [per_token])
    close(
        group_advantages([single], [reward], [], using("none", credit="turn", gamma=gamma), penalties),
        [per_turn_tokens],
    )
    close(group_advantages([single], [reward], [], using("none"), penalties), [[sum(arriving)] * count])


def test_critic_advantages_run_across_the_consecutive_rows_of_an_attempt() -> None:
    """Two rows of one attempt, and a row with its own reward; with zero values the advantages equal the returns."""
    rows = [row(2), row(1, turn_rewards=[5]), row(1, reward=7.0)]
    nothing = [np.zeros(2), np.zeros(1), np.zeros(1)]
    advantages, returns = critic_advantages(rows, [1.0], nothing, gamma=1.0, lam=1.0)
    assert lists(advantages) == lists(returns) == [[6.0, 6.0], [6.0], [7.0]]
    penalties = [np.array([0.5, 0.0]), np.zeros(1), np.zeros(1)]
    advantages, _ = critic_advantages(rows, [1.0], nothing, gamma=0.5, lam=1.0, penalties=penalties)
    assert lists(advantages) == [[-0.5 + 0.25 * 6, 0.5 * 6], [6.0], [7.0]]
    values = [np.array([1.0, 2.0]), np.array([3.0]), np.array([4.0])]
    advantages, returns = critic_advantages(rows, [1.0], values, gamma=1.0, lam=0.0)
    assert lists(advantages) == [[1.0, 1.0], [3.0], [3.0]]
    assert lists(returns) == [[2.0, 3.0], [6.0], [7.0]]


def test_a_lone_attempt_gets_zero_advantage_at_every_token() -> None:
    alone = [row(2, 1, turn_rewards=[1, 0])]
    assert lists(group_advantages(alone, [0.0], [], using("dr_grpo", credit="token"))) == [[0.0, 0.0, 0.0]]
    assert lists(group_advantages(alone, [0.0], [], using("none", credit="token"))) == [[1.0, 1.0, 0.0]]


# ------------------------------------------------------------------------------------------------------------ penalties


def test_penalties_lower_the_returns_and_with_them_the_baseline() -> None:
    rows, costs = [row(1, 1), row(1, episode=1)], [np.array([1.0, 2.0]), np.array([5.0])]
    assert lists(group_advantages(rows, [1.0, 0.0], [], using(), costs)) == [[1.5, 1.5], [-1.5]]
    assert lists(group_advantages(rows, [1.0, 0.0], [], using(credit="turn"), costs)) == [[1.5, 0.0], [-1.5]]
    assert lists(group_advantages(rows, [1.0, 0.0], [], using(credit="token"), costs)) == [[1.5, 2.5], [-1.5]]


def test_penalties_cannot_be_combined_with_rewards_per_function() -> None:
    with pytest.raises(AssertionError, match="penalty"):
        group_advantages([row(1)], [1.0], [], using("gdpo"), [np.zeros(1)])


def test_arguments_are_not_modified() -> None:
    rows, costs = [row(2, turn_rewards=[1]), row(1, episode=1)], [np.ones(2), np.ones(1)]
    group_advantages(rows, [1.0, 0.0], [], using(credit="token"), costs)
    assert rows[0].turn_rewards.tolist() == [1.0]
    assert lists(costs) == [[1.0, 1.0], [1.0]]
    assert not rows[0].advantages.any()


# ----------------------------------------------------------------------------------------------------- compared returns


def compared(rows: list[Row], rewards: list[float], chosen: AdvantageSettings, parts: Any = ()) -> list[list[float]]:
    return lists(list(compared_returns(rows, rewards, parts, chosen)))


def test_full_returns_are_compared_within_each_role() -> None:
    rows = [row(1), row(1, role="judge", reward=3.0), row(1, episode=1, turn_rewards=[2])]
    assert compared(rows, [1.0, 0.0], using()) == [[1.0, 2.0], [3.0]]
    assert compared([row(1)], [1.0, 0.0], using("gae")) == [[1.0, 0.0]]


def test_with_turn_credit_returns_are_compared_at_every_turn() -> None:
    rows = [row(1, 1, turn_rewards=[1, 0]), row(1, episode=1)]
    assert compared(rows, [1.0, 2.0], using(credit="turn")) == [[2.0, 2.0], [1.0]]


def test_with_token_credit_turns_with_rewards_are_compared() -> None:
    early, late = row(1, 1, turn_rewards=[1, 0]), row(1, 1, episode=1, turn_rewards=[0, 1])
    assert compared([early, late], [0.0, 0.0], using(credit="token")) == [[1.0, 1.0], [1.0, 1.0], [0.0, 1.0]]
    assert compared([row(1, 1), row(1, 1, episode=1)], [1.0, 0.0], using(credit="token")) == [[1.0, 0.0]]


def test_an_estimator_of_rewards_per_function_compares_each_function() -> None:
    parts, rows = [{"a": 1.0}, {"a": 0.0, "b": 1.0}], [row(1), row(1, episode=1)]
    assert compared(rows, [1.0, 1.0], using("gdpo"), parts) == [[1.0, 0.0], [1.0]]
    assert compared(rows, [1.0, 0.0], using("gdpo")) == [[1.0, 0.0]]
    assert compared(rows, [1.0, 1.0], using("dr_grpo"), parts) == [[1.0, 1.0]]


# ---------------------------------------------------------------------------------------------- user-defined estimators


@advantage()
def too_short(group: GroupReturns) -> Doubles:
    return group.returns_G[:1]


@advantage()
def divides_by_zero(group: GroupReturns) -> Doubles:
    return np.full(len(group.returns_G), np.inf)


@advantage()
def a_list(group: GroupReturns) -> list[float]:
    return [2.0 * value for value in dr_grpo(group)]


def own(function: Any) -> AdvantageSettings:
    return advantage_settings(ConfiguredFunction(getattr(function, REGISTRATION_ATTRIBUTE), {}))


def test_a_user_defined_estimator_may_return_a_list() -> None:
    rows = [row(1), row(1, episode=1)]
    assert lists(group_advantages(rows, [1.0, 0.0], [], own(a_list))) == [[1.0], [-1.0]]


@pytest.mark.parametrize(
    ("function", "message"),
    [(too_short, r"too_short\b.*\(1,\).*\b2\b"), (divides_by_zero, r"divides_by_zero\b.*finite")],
)
def test_an_estimator_with_an_invalid_result_is_named_in_the_error(function: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        group_advantages([row(1), row(1, episode=1)], [1.0, 0.0], [], own(function))


def test_an_estimator_that_needs_several_attempts_is_not_called_for_a_lone_attempt() -> None:
    assert lists(group_advantages([row(2)], [1.0], [], own(divides_by_zero))) == [[0.0, 0.0]]
