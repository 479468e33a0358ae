from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from outpace.controller.supervisor import LONGEST_PAUSE_S, GiveUp, RestartPolicy
from outpace.runtime.components import RestartSettings


def restart_policy(restarts: int = 2, window_s: float = 100.0) -> RestartPolicy:
    return RestartPolicy(RestartSettings(restarts, window_s))


def test_a_component_without_a_restart_policy_ends_the_run_and_the_reason_mentions_resuming() -> None:
    decision = RestartPolicy(None).died("learner", 0.0)
    assert isinstance(decision, GiveUp)
    assert "resume" in decision.reason


def test_the_first_restart_is_immediate_and_later_ones_back_off_up_to_a_limit() -> None:
    policy = restart_policy(restarts=12)
    pauses = [policy.died("engine-0", float(n)) for n in range(12)]
    assert pauses[:4] == [0.0, 0.5, 1.0, 2.0]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_a_component_that_keeps_dying_is_given_up_and_the_reason_states_budget_and_window() -> None:
    policy = restart_policy()
    assert isinstance(policy.died("worker-0", 0.0), float)
    assert isinstance(policy.died("worker-0", 1.0), float)
    decision = policy.died("worker-0", 2.0)
    assert isinstance(decision, GiveUp)
    assert {"2", "100"} <= set(re.findall(r"\d+", decision.reason))


def test_deaths_outside_the_window_do_not_count_and_components_do_not_share_a_budget() -> None:
    policy = restart_policy()
    for now in (0.0, 1.0):
        policy.died("worker-0", now)
    assert policy.died("engine-0", 2.0) == 0.0
    assert policy.died("worker-0", 101.5) == 0.0


def test_with_zero_restarts_the_first_death_ends_the_run() -> None:
    decision = restart_policy(restarts=0).died("engine-0", 0.0)
    assert isinstance(decision, GiveUp)
    assert "supervise.restarts" in decision.reason


@given(st.integers(0, 5), st.lists(st.floats(0.01, 200), max_size=60))
def test_no_window_ever_holds_more_restarts_than_the_budget(restarts: int, pauses: list[float]) -> None:
    policy = restart_policy(restarts)
    now, restarted = 0.0, []
    for pause in pauses:
        now += pause
        if isinstance(policy.died("engine-0", now), float):
            restarted.append(now)
    assert all(sum(at - 100.0 < other <= at for other in restarted) <= restarts for at in restarted)
    assert policy.restarts == len(restarted)
