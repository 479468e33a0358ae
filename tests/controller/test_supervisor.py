from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from outpace.controller.supervisor import LONGEST_PAUSE_S, GiveUp, Restart, RestartPolicy, RestartSettings


def supervisor(restarts: int = 2, window_s: float = 100.0) -> RestartPolicy:
    return RestartPolicy(RestartSettings(restarts, window_s))


def test_a_dead_learner_ends_the_run_and_says_that_it_can_be_resumed() -> None:
    decision = supervisor().died("learner", "learner", 0.0)
    assert isinstance(decision, GiveUp)
    assert "resume" in decision.reason


def test_the_first_restart_is_immediate_and_the_next_ones_wait_longer() -> None:
    subject = supervisor(restarts=12)
    pauses = [subject.died("engine-0", "engine", float(n)) for n in range(12)]
    assert pauses[:4] == [Restart(0.0), Restart(0.5), Restart(1.0), Restart(2.0)]
    assert pauses[-1] == Restart(LONGEST_PAUSE_S)


def test_a_part_that_keeps_dying_is_given_up_and_the_reason_has_the_numbers() -> None:
    subject = supervisor()
    assert isinstance(subject.died("worker-0", "worker", 0.0), Restart)
    assert isinstance(subject.died("worker-0", "worker", 1.0), Restart)
    decision = subject.died("worker-0", "worker", 2.0)
    assert isinstance(decision, GiveUp)
    assert {"2", "100"} <= set(re.findall(r"\d+", decision.reason))


def test_deaths_are_forgotten_after_a_while_and_parts_do_not_share_a_budget() -> None:
    subject = supervisor()
    for now in (0.0, 1.0):
        subject.died("worker-0", "worker", now)
    assert subject.died("engine-0", "engine", 2.0) == Restart(0.0)
    assert subject.died("worker-0", "worker", 101.5) == Restart(0.0)


def test_without_restarts_the_first_death_ends_the_run() -> None:
    decision = supervisor(restarts=0).died("engine-0", "engine", 0.0)
    assert isinstance(decision, GiveUp)
    assert "supervise.restarts" in decision.reason


@given(st.integers(0, 5), st.lists(st.floats(0.01, 200), max_size=60))
def test_no_window_ever_holds_more_restarts_than_the_budget(restarts: int, pauses: list[float]) -> None:
    subject = supervisor(restarts)
    now, restarted = 0.0, []
    for pause in pauses:
        now += pause
        if isinstance(subject.died("engine-0", "engine", now), Restart):
            restarted.append(now)
    assert all(sum(at - 100.0 < other <= at for other in restarted) <= restarts for at in restarted)
    assert subject.restarts == len(restarted)
