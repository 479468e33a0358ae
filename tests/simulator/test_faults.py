"""Whatever dies, hangs, leaves and joins: nothing is lost, nothing happens twice, nobody waits for ever."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from outpace.controller.events import Action, Admit, CloseBatch
from outpace.controller.scheduler import SchedulerSettings
from outpace.simulator.conductor import SimulationObserver
from outpace.simulator.run import SimulatedRun, StartState, scheduler_settings
from outpace.simulator.settings import SimulationSettings
from simulator.books import Books
from support import names

seeds = st.integers(0, 2**31)
RESTARTS = 10**6
"""Enough to outlive any of these runs."""


@st.composite
def any_cluster(draw: st.DrawFn, **fixed: Any) -> SimulationSettings:
    """Episodes of about a second, and parts that die every so often."""
    max_lag = draw(st.sampled_from([0, 1, 2, 4]))
    deterministic = draw(st.booleans())
    mtbf = st.sampled_from([None, 60.0, 200.0])
    drawn: dict[str, dict[str, Any]] = {
        "cluster": {
            "devices": draw(st.integers(3, 6)),
            "training": draw(st.integers(1, 2)),
            "workers": draw(st.integers(1, 3)),
        },
        "engine": {
            "slots": draw(st.integers(1, 6)),
            "step_s": 0.01,
            "sequence_s": 0.001,
            "load_s": draw(st.sampled_from([0.0, 0.5, 2.0])),
            "slow_share": draw(st.sampled_from([0.0, 0.5])),
            "slow_factor": 3.0,
        },
        "learner": {
            "token_s": draw(st.sampled_from([1e-5, 1e-3])),
            "step_s": draw(st.sampled_from([0.0, 1.0])),
            "publish_s": 0.1,
        },
        "workload": {
            "group_size": draw(st.integers(1, 3)),
            "mean_tokens": 50.0,
            "max_tokens": 600,
            "turns": draw(st.sampled_from([1, 1, 3])),
            "turn_s": draw(st.sampled_from([0.0, 1.0])),
            "filtered": draw(st.sampled_from([0.0, 0.3])),
            "failed": draw(st.sampled_from([0.0, 0.1])),
        },
        "pacing": {
            "max_lag": max_lag,
            "depth": draw(st.sampled_from([0.0, 1.0, 2.5])),
            "groups_per_step": draw(st.integers(1, 5)),
            "chunk_groups": draw(st.integers(1, 4)),
            "warmup_steps": draw(st.sampled_from([0, 0, 2])),
        },
        "weights": {
            "every": draw(st.sampled_from([1, max_lag + 1])),
            "update": "inflight" if deterministic else draw(st.sampled_from(["inflight", "drain"])),
        },
        "checkpoint": {"every": draw(st.sampled_from([1, 2, 4])), "turns": draw(st.booleans())},
        "supervise": {"restarts": RESTARTS},
        "faults": {
            "engine_mtbf_s": draw(mtbf),
            "worker_mtbf_s": draw(mtbf),
            "learner_mtbf_s": draw(st.sampled_from([None, 100.0])),
            "restart_s": draw(st.sampled_from([0.0, 3.0])),
            "slow_load_share": draw(st.sampled_from([0.0, 0.3])),
            "slow_load_factor": draw(st.sampled_from([5.0, 5.0, 1e9])),
            "leave_every_s": draw(st.sampled_from([None, 20.0])),
            "away_s": 5.0,
            "join_at_s": draw(st.sampled_from([[], [1.0, 10.0]])),
        },
        "run": {"seed": draw(seeds), "deterministic": deterministic, "steps": 8, "stall_s": 1e5},
    }
    for section, values in fixed.items():
        drawn[section] |= values
    faults = drawn["faults"]
    if faults["slow_load_share"] and faults["slow_load_factor"] == 1e9:
        faults["engine_mtbf_s"] = 60.0  # a load that lasts for ever ends with its engine,
        faults["learner_mtbf_s"] = None  # which the learner must live to see
    if drawn["run"]["deterministic"]:  # all engines must be up at once, so there are few, which live a while
        drawn["cluster"]["devices"] = drawn["cluster"]["training"] + 2
        faults |= {"engine_mtbf_s": faults["engine_mtbf_s"] and 100.0, "join_at_s": []}
        faults["leave_every_s"] = faults["leave_every_s"] and 200.0
    return SimulationSettings.model_validate(drawn)


def over_epochs(settings: SimulationSettings, epochs: int, tasks: int) -> SchedulerSettings:
    return replace(scheduler_settings(settings), steps=None, epochs=epochs, tasks=tasks)


def run_it(settings: SimulationSettings, core: SchedulerSettings) -> tuple[SimulatedRun, Books]:
    books = Books()
    run = SimulatedRun(settings, books.watch, core=core)
    run.run()
    return run, books


def check_visits(settings: SimulationSettings, tasks: int) -> None:
    run, books = run_it(settings, over_epochs(settings, 2, tasks))
    assert run.ended == "done"
    assert sorted(books.ends) == [(epoch, task) for epoch in range(2) for task in range(tasks)]
    assert books.worst_excess <= 0


@given(any_cluster(), st.integers(1, 15))
@examples(max_examples=300, deadline=None)
def test_every_visit_comes_to_one_end_within_the_lag_whatever_dies(settings: SimulationSettings, tasks: int) -> None:
    check_visits(settings, tasks)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@given(any_cluster(), st.integers(1, 40))
@examples(max_examples=5000, deadline=None)
def test_every_visit_comes_to_one_end_within_the_lag_whatever_dies_in_thousands_of_runs(
    settings: SimulationSettings, tasks: int
) -> None:
    check_visits(settings, tasks)


@given(any_cluster(workload={"filtered": 0.0, "failed": 0.0}), st.integers(2, 12))
@examples(max_examples=200, deadline=None)
def test_slow_tasks_are_trained_as_often_as_fast_ones_whatever_dies(settings: SimulationSettings, tasks: int) -> None:
    run, books = run_it(settings, over_epochs(settings, 2, tasks))
    assert run.ended == "done"
    assert books.trained(range(tasks)) == dict.fromkeys(range(tasks), 2)


@given(any_cluster(run={"deterministic": False}), st.sampled_from(["drop", "requeue", "train"]), st.integers(1, 12))
@examples(max_examples=200, deadline=None)
def test_whatever_becomes_of_stragglers_no_visit_is_lost_with_a_part(
    settings: SimulationSettings, on_stale: str, tasks: int
) -> None:
    settings = settings.changed("pacing", on_stale=on_stale)
    run, books = run_it(settings, over_epochs(settings, 2, tasks))
    assert run.ended == "done"
    assert sorted(books.ends) == [(epoch, task) for epoch in range(2) for task in range(tasks)]
    if on_stale != "train":
        assert books.worst_excess <= 0


@given(
    any_cluster(faults={"engine_mtbf_s": 10.0, "leave_every_s": None, "learner_mtbf_s": None, "worker_mtbf_s": None}),
    st.integers(0, 3),
)
@examples(max_examples=200, deadline=None)
def test_a_part_is_restarted_as_often_as_its_budget_says_and_the_run_ends_when_it_is_spent(
    settings: SimulationSettings, restarts: int
) -> None:
    settings = settings.changed("supervise", restarts=restarts, window_s=1e9)
    run, books = run_it(settings, replace(scheduler_settings(settings), steps=40))
    assert all(losses <= restarts for losses in books.losses.values())
    if run.ended != "done":
        engine = re.search(r"\be\d+\b", run.ended)
        assert engine is not None
        assert books.losses[engine[0]] == restarts, "it died once more than it was started again"


@given(any_cluster(run={"deterministic": True}, faults={"join_at_s": []}), st.integers(2, 12))
@examples(max_examples=200, deadline=None)
def test_in_lockstep_no_fault_changes_what_is_trained(settings: SimulationSettings, tasks: int) -> None:
    core = over_epochs(settings, 2, tasks)
    calm = settings.model_dump() | {"faults": {}}
    reference = Batches()
    SimulatedRun(SimulationSettings.model_validate(calm), lambda *_: [reference], core=core).run()
    faulty = Batches()
    run = SimulatedRun(settings, lambda *_: [faulty], core=core)
    run.run()
    assert run.ended == "done"
    assert faulty.trained == reference.trained


class Resettled(SimulatedRun):
    """Every start but the first has settings of its own."""

    def __init__(
        self, settings: SimulationSettings, books: Books, first: SchedulerSettings, later: list[SchedulerSettings]
    ) -> None:
        super().__init__(settings, books.watch, core=first)
        self._later = cycle(later)

    def _next_start(self) -> StartState:
        self._core_settings = next(self._later)
        return super()._next_start()


@given(
    any_cluster(
        run={"deterministic": False},
        workload={"turns": 3},
        weights={"every": 1},
        faults={"learner_mtbf_s": 20.0, "slow_load_share": 0.0, "engine_mtbf_s": None},
        checkpoint={"turns": True, "every": 1},
    ),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6), st.sampled_from([0.0, 1.0, 3.0])), min_size=1, max_size=3),
    st.integers(2, 30),
)
@examples(max_examples=300, deadline=None)
def test_a_run_resumed_with_another_lag_batch_or_depth_loses_no_visit_and_keeps_the_new_lag(
    settings: SimulationSettings, changes: list[tuple[int, int, float]], tasks: int
) -> None:
    first, books = over_epochs(settings, 2, tasks), Books()
    later = [replace(first, max_lag=lag, groups_per_step=size, depth=depth) for lag, size, depth in changes]
    run = Resettled(settings, books, first, later)
    run.run()
    assert run.ended == "done" or names(run.ended, "learner 20")
    if run.ended == "done":
        assert sorted(books.ends) == [(epoch, task) for epoch in range(2) for task in range(tasks)]
    assert books.worst_excess <= 0


class Batches(SimulationObserver):
    """Which visit was trained in which batch under which stamp, the last word of all starts of the run."""

    def __init__(self) -> None:
        self.trained: dict[int, list[Admit]] = {}
        self._admitted: dict[int, Admit] = {}

    def on_action(self, action: Action) -> None:
        match action:
            case Admit(group):
                self._admitted[group] = action
            case CloseBatch(version, groups):
                self.trained[version] = [self._admitted[group] for group in groups]
