"""Engines that die, stay away or come back with the weights they were born with, as the controller lives through it.

The core is the real one; engines, learner and groups are modelled. Shown elsewhere: half a snapshot and a flipped bit
are never served (tests/weights/test_store.py, tests/engines/test_embedded.py); real processes that are killed
(tests/faults/test_processes.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.simulated import PLAIN, Pace, Simulation, Trace, core_of, erratic, steady
from outpace.controller.events import Admit, EngineJoined, EngineLoaded, EngineLost, Event, LoadWeights
from outpace.types import Version

RUN = replace(PLAIN, steps=20, tasks=30, max_lag=2)
Outage = tuple[str, float, float | None]
"""Which engine dies, when, and for how long; None: for good."""


class Fleet(Simulation):
    """Two engines, of which some die; what they were loading is never heard of again."""

    def __init__(self, pace: Pace, outages: list[Outage], seed: int = 0) -> None:
        self.core = core_of(RUN)
        super().__init__(self.core, pace, engines=2, seed=seed)
        self.down: set[str] = set()
        self.weightless: set[str] = set()  # down, or back and not loaded yet
        self.loaded_while_down: list[tuple[str, Version]] = []
        self.started_with_no_weights: list[Admit] = []
        self._watch()
        for engine, at, for_s in outages:
            self.clock.after(at, lambda engine=engine, for_s=for_s: self._die(engine, for_s))

    def _watch(self) -> None:
        start, load, send = self.parts.start, self.parts.load, self.parts._send_event

        def starting(admit: Admit) -> None:
            if len(self.weightless) == len(self.parts.served):
                self.started_with_no_weights.append(admit)
            start(admit)

        def loading(engine: str, version: Version) -> None:
            if engine in self.down:
                self.loaded_while_down.append((engine, version))
            load(engine, version)

        def sending(event: Event) -> None:
            if isinstance(event, EngineLoaded):
                self.weightless.discard(event.engine)
            send(event)

        self.parts.start, self.parts.load, self.parts._send_event = starting, loading, sending  # type: ignore[method-assign]

    def _die(self, engine: str, for_s: float | None) -> None:
        if engine in self.down:
            return
        self.down.add(engine)
        self.weightless.add(engine)
        self.parts._lives[engine] += 1
        if for_s is not None:
            self.clock.after(for_s, lambda: self._come_back(engine))
        self.send_event(EngineLost(engine))

    def _come_back(self, engine: str) -> None:
        self.down.remove(engine)
        self.send_event(EngineJoined(engine))


def went_well(fleet: Fleet) -> Trace:
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


def test_training_goes_on_with_the_engine_that_is_left_and_syncs_without_the_dead_one() -> None:
    fleet = Fleet(steady(), [("e0", 10.0, None)])
    trace = went_well(fleet)
    assert loads_of(trace, "e1")[-1] == (RUN.steps or 0) - 1, "the last version is nobody's to serve"
    assert len(loads_of(trace, "e0")) < len(loads_of(trace, "e1"))


def test_an_engine_that_comes_back_serves_nothing_before_it_has_loaded_the_newest_weights() -> None:
    fleet = Fleet(steady(load=3.0), [("e0", 10.0, 5.0)])
    fleet.run(until=lambda _: fleet.clock.now > 10)
    before, newest = len(loads_of(fleet.trace, "e0")), fleet.core.version
    trace = went_well(fleet)
    after = loads_of(trace, "e0")[before:]
    assert after[0] >= newest
    assert after == sorted(set(after)), "no version is taken back"


def test_while_no_engine_serves_nothing_is_admitted_and_the_reason_is_said() -> None:
    fleet = Fleet(steady(), [("e0", 10.0, 100.0), ("e1", 10.0, 100.0)])
    fleet.run(until=lambda _: fleet.clock.now > 50)
    assert fleet.core.running == 0
    assert "engine" in fleet.core.waiting_reason()
    went_well(fleet)


def test_an_engine_that_dies_while_it_loads_is_given_its_weights_again() -> None:
    fleet = Fleet(steady(load=4.0), [("e0", 9.0, 1.0), ("e1", 11.0, 1.0)])
    went_well(fleet)


@settings(max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    outages=st.lists(st.tuples(st.sampled_from(["e0", "e1"]), st.floats(0, 400), st.floats(0, 50)), max_size=12),
)
@pytest.mark.timeout(400)
def test_whatever_dies_and_comes_back_no_group_is_lost_and_no_lag_exceeded(seed: int, outages: list[Outage]) -> None:
    went_well(Fleet(erratic(seed), outages, seed))
