"""Engines that die, stay away or come back with their initial weights, from the view of the controller.

The scheduler is real; engines, learner and groups are simulated. Tested elsewhere: a partial snapshot and a flipped bit
are never served (tests/weights/test_store.py, tests/engines/embedded/test_engine.py); real processes that are killed
(tests/faults/test_processes.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.simulated import PLAIN, Pace, Simulation, Trace, erratic, make_scheduler, steady
from outpace.controller.events import Admit, EngineJoined, EngineLoaded, EngineLost, Event, LoadWeights
from outpace.types import Version
from support import examples

RUN = replace(PLAIN, steps=20, tasks=30, max_lag=2)
Outage = tuple[str, float, float | None]
"""Engine, time of its death, and duration; None: permanent."""


class FleetWithOutages(Simulation):
    """Two engines with outages; a load in progress is lost with its engine."""

    def __init__(self, pace: Pace, outages: list[Outage], seed: int = 0) -> None:
        self.scheduler = make_scheduler(RUN)
        super().__init__(self.scheduler, pace, engines=2, seed=seed)
        self.down: set[str] = set()
        self.weightless: set[str] = set()  # down, or back and not loaded yet
        self.loaded_while_down: list[tuple[str, Version]] = []
        self.started_with_no_weights: list[Admit] = []
        self._wrap_components()
        for engine, at, for_s in outages:
            self.clock.after(at, lambda engine=engine, for_s=for_s: self._die(engine, for_s))

    def _wrap_components(self) -> None:
        components = self.components
        start, load, send = components.start, components.load, components._send_event

        def checked_start(admit: Admit) -> None:
            if len(self.weightless) == len(components.served):
                self.started_with_no_weights.append(admit)
            start(admit)

        def checked_load(engine: str, version: Version) -> None:
            if engine in self.down:
                self.loaded_while_down.append((engine, version))
            load(engine, version)

        def checked_send(event: Event) -> None:
            if isinstance(event, EngineLoaded):
                self.weightless.discard(event.engine)
            send(event)

        components.start, components.load = checked_start, checked_load  # type: ignore[method-assign]
        components._send_event = checked_send

    def _die(self, engine: str, for_s: float | None) -> None:
        if engine in self.down:
            return
        self.down.add(engine)
        self.weightless.add(engine)
        self.components._lives[engine] += 1
        if for_s is not None:
            self.clock.after(for_s, lambda: self._come_back(engine))
        self.send_event(EngineLost(engine))

    def _come_back(self, engine: str) -> None:
        self.down.remove(engine)
        self.send_event(EngineJoined(engine))


def run_and_check(fleet: FleetWithOutages) -> Trace:
    trace = fleet.run()
    assert trace.finish == "done"
    assert fleet.loaded_while_down == []
    assert fleet.started_with_no_weights == []
    assert [batch.version for batch in trace.batches] == list(range(RUN.steps or 0))
    assert max(lag for _, lag in trace.lags) <= RUN.max_lag
    groups = [group for batch in trace.batches for group in batch.groups]
    assert len(groups) == len(set(groups)) == len(trace.admitted)
    return trace


def loads_of(trace: Trace, engine: str) -> list[Version]:
    return [load.version for load in trace.of(LoadWeights) if load.engine == engine]


def test_training_and_weight_sync_continue_with_the_remaining_engine() -> None:
    fleet = FleetWithOutages(steady(), [("e0", 10.0, None)])
    trace = run_and_check(fleet)
    assert loads_of(trace, "e1")[-1] == (RUN.steps or 0) - 1, "no engine loads the last version"
    assert len(loads_of(trace, "e0")) < len(loads_of(trace, "e1"))


def test_an_engine_that_comes_back_loads_the_newest_weights_before_it_serves() -> None:
    fleet = FleetWithOutages(steady(load=3.0), [("e0", 10.0, 5.0)])
    fleet.run(until=lambda _: fleet.clock.now > 10)
    before, newest = len(loads_of(fleet.trace, "e0")), fleet.scheduler.version
    trace = run_and_check(fleet)
    after = loads_of(trace, "e0")[before:]
    assert after[0] >= newest
    assert after == sorted(set(after)), "no older version is loaded"


def test_while_no_engine_serves_nothing_is_admitted_and_the_waiting_reason_names_engines() -> None:
    fleet = FleetWithOutages(steady(), [("e0", 10.0, 100.0), ("e1", 10.0, 100.0)])
    fleet.run(until=lambda _: fleet.clock.now > 50)
    assert fleet.scheduler.running == 0
    assert "engine" in fleet.scheduler.waiting_reason()
    run_and_check(fleet)


def test_an_engine_that_dies_during_a_load_loads_its_weights_again() -> None:
    fleet = FleetWithOutages(steady(load=4.0), [("e0", 9.0, 1.0), ("e1", 11.0, 1.0)])
    run_and_check(fleet)


@examples(200)
@given(
    seed=st.integers(0, 10**6),
    outages=st.lists(st.tuples(st.sampled_from(["e0", "e1"]), st.floats(0, 400), st.floats(0, 50)), max_size=12),
)
@pytest.mark.timeout(400)
def test_no_engine_outage_loses_a_group_or_exceeds_the_lag(seed: int, outages: list[Outage]) -> None:
    run_and_check(FleetWithOutages(erratic(seed), outages, seed))
