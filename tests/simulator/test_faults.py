"""Components die, hang, leave and join: no visit is lost, none happens twice and no run waits forever."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from outpace.controller.events import Action, Admit, CloseBatch
from outpace.controller.pacing import SchedulerSettings
from outpace.simulator.driver import SimulationObserver
from outpace.simulator.run import SimulatedRun, StartState, scheduler_settings
from outpace.simulator.settings import SimulationSettings
from simulator.books import VisitLedger
from support import examples, names

seeds = st.integers(0, 2**31)
RESTARTS = 10**6
"""More than any of these runs needs."""


@st.composite
def any_cluster(draw: st.DrawFn, **fixed: Any) -> SimulationSettings:
    """Draw a cluster with episodes of about a second and components that die now and then."""
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
        faults["engine_mtbf_s"] = 60.0  # an endless load ends when its engine dies,
        faults["learner_mtbf_s"] = None  # so the learner must live that long
    if drawn["run"]["deterministic"]:  # all engines must be up at once, so there are few and they live longer
        drawn["cluster"]["devices"] = drawn["cluster"]["training"] + 2
        faults |= {"engine_mtbf_s": faults["engine_mtbf_s"] and 100.0, "join_at_s": []}
        faults["leave_every_s"] = faults["leave_every_s"] and 200.0
    return SimulationSettings.model_validate(drawn)


def over_epochs(settings: SimulationSettings, epochs: int, tasks: int) -> SchedulerSettings:
    return replace(scheduler_settings(settings), steps=None, epochs=epochs, tasks=tasks)


def simulate(settings: SimulationSettings, scheduler_config: SchedulerSettings) -> tuple[SimulatedRun, VisitLedger]:
    ledger = VisitLedger()
    run = SimulatedRun(settings, ledger.start_observers, core=scheduler_config)
    run.run()
    return run, ledger


def check_visits(settings: SimulationSettings, tasks: int) -> None:
    run, ledger = simulate(settings, over_epochs(settings, 2, tasks))
    assert run.ended == "done"
    assert sorted(ledger.ends) == [(epoch, task) for epoch in range(2) for task in range(tasks)]
    assert ledger.worst_excess <= 0


@given(any_cluster(), st.integers(1, 15))
@examples(300)
def test_under_any_faults_every_visit_is_finalized_once_within_the_lag(
    settings: SimulationSettings, tasks: int
) -> None:
    check_visits(settings, tasks)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@given(any_cluster(), st.integers(1, 40))
@hypothesis_settings(max_examples=5000, deadline=None)
def test_under_any_faults_every_visit_is_finalized_once_within_the_lag_in_thousands_of_runs(
    settings: SimulationSettings, tasks: int
) -> None:
    check_visits(settings, tasks)


@given(any_cluster(workload={"filtered": 0.0, "failed": 0.0}), st.integers(2, 12))
@examples(200)
def test_under_any_faults_slow_tasks_are_trained_as_often_as_fast_ones(
    settings: SimulationSettings, tasks: int
) -> None:
    run, ledger = simulate(settings, over_epochs(settings, 2, tasks))
    assert run.ended == "done"
    assert ledger.trained(range(tasks)) == dict.fromkeys(range(tasks), 2)


@given(any_cluster(run={"deterministic": False}), st.sampled_from(["drop", "requeue", "train"]), st.integers(1, 12))
@examples(200)
def test_under_every_straggler_policy_no_visit_is_lost_when_components_die(
    settings: SimulationSettings, on_stale: str, tasks: int
) -> None:
    settings = settings.changed("pacing", on_stale=on_stale)
    run, ledger = simulate(settings, over_epochs(settings, 2, tasks))
    assert run.ended == "done"
    assert sorted(ledger.ends) == [(epoch, task) for epoch in range(2) for task in range(tasks)]
    if on_stale != "train":
        assert ledger.worst_excess <= 0


@given(
    any_cluster(faults={"engine_mtbf_s": 10.0, "leave_every_s": None, "learner_mtbf_s": None, "worker_mtbf_s": None}),
    st.integers(0, 3),
)
@examples(200)
def test_a_component_is_restarted_within_its_budget_and_the_run_ends_when_the_budget_is_spent(
    settings: SimulationSettings, restarts: int
) -> None:
    settings = settings.changed("supervise", restarts=restarts, window_s=1e9)
    run, ledger = simulate(settings, replace(scheduler_settings(settings), steps=40))
    assert all(losses <= restarts for losses in ledger.losses.values())
    if run.ended != "done":
        engine = re.search(r"\be\d+\b", run.ended)
        assert engine is not None
        assert ledger.losses[engine[0]] == restarts, "the last death used up the budget"


@given(any_cluster(run={"deterministic": True}, faults={"join_at_s": []}), st.integers(2, 12))
@examples(200)
def test_in_deterministic_mode_faults_do_not_change_what_is_trained(settings: SimulationSettings, tasks: int) -> None:
    scheduler_config = over_epochs(settings, 2, tasks)
    fault_free = settings.model_dump() | {"faults": {}}
    reference = Batches()
    SimulatedRun(SimulationSettings.model_validate(fault_free), lambda *_: [reference], core=scheduler_config).run()
    faulty = Batches()
    run = SimulatedRun(settings, lambda *_: [faulty], core=scheduler_config)
    run.run()
    assert run.ended == "done"
    assert faulty.trained == reference.trained


class RunWithChangedSettings(SimulatedRun):
    """A run whose later starts have other scheduler settings."""

    def __init__(
        self,
        settings: SimulationSettings,
        ledger: VisitLedger,
        first: SchedulerSettings,
        later: list[SchedulerSettings],
    ) -> None:
        super().__init__(settings, ledger.start_observers, core=first)
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
@examples(300)
def test_a_run_resumed_with_another_lag_batch_size_or_depth_loses_no_visit_and_respects_the_new_lag(
    settings: SimulationSettings, changes: list[tuple[int, int, float]], tasks: int
) -> None:
    first, ledger = over_epochs(settings, 2, tasks), VisitLedger()
    later = [replace(first, max_lag=lag, groups_per_step=size, depth=depth) for lag, size, depth in changes]
    run = RunWithChangedSettings(settings, ledger, first, later)
    run.run()
    assert run.ended == "done" or names(run.ended, "learner 20")
    if run.ended == "done":
        assert sorted(ledger.ends) == [(epoch, task) for epoch in range(2) for task in range(tasks)]
    assert ledger.worst_excess <= 0


class Batches(SimulationObserver):
    """Which visit was trained in which batch with which min_version; the latest start of the run counts."""

    def __init__(self) -> None:
        self.trained: dict[int, list[Admit]] = {}
        self._admitted: dict[int, Admit] = {}

    def on_action(self, action: Action) -> None:
        match action:
            case Admit(group):
                self._admitted[group] = action
            case CloseBatch(version, groups):
                self.trained[version] = [self._admitted[group] for group in groups]
