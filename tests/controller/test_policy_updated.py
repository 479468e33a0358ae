"""When a new policy is announced: once per version, when every serving engine has it."""

from __future__ import annotations

from dataclasses import replace

from controller.scripted import SMALL, Script, started
from controller.simulated import resume
from outpace.controller.events import (
    Checkpoint,
    EngineJoined,
    EngineLoaded,
    EngineLost,
    LoadFailed,
    LoadLate,
    LoadWeights,
    PolicyUpdated,
    Published,
    RunStarted,
    StopRequested,
)


def two_engines() -> Script:
    """Two engines that serve version 0, with versions 1 to 3 to come, one batch of two groups each."""
    script = Script(replace(SMALL, max_lag=3, depth=5.0, max_running=8))
    script.tell(RunStarted({"e0": 0, "e1": 0}), Published(0))
    return script


def trained(script: Script, version: int) -> None:
    """Train and publish a version."""
    first = 2 * (version - 1)
    script.train(first, first + 1)
    script.tell(Published(version))


def test_a_version_is_announced_once_when_the_last_engine_has_it() -> None:
    script = two_engines()
    trained(script, 1)
    script.tell(EngineLoaded("e0", 1))
    assert script.of(PolicyUpdated) == []
    script.tell(EngineLoaded("e1", 1))
    assert script.of(PolicyUpdated) == [PolicyUpdated(1)]


def test_the_version_that_a_run_starts_with_is_not_an_update() -> None:
    script = Script(SMALL)
    script.tell(RunStarted({"e0": 0, "e1": 0}), Published(0))
    assert script.of(PolicyUpdated) == []


def test_a_resumed_run_announces_only_what_is_newer_than_its_checkpoint() -> None:
    settings = replace(SMALL, max_lag=3, depth=5.0, max_running=8)
    script = started(settings)
    script.train(0, 1)
    script.tell(StopRequested(), Published(1))
    (checkpoint,) = script.of(Checkpoint)
    resumed = Script(settings, resume(settings, checkpoint))
    resumed.tell(RunStarted({"e0": 0, "e1": 0}), Published(1))
    assert len(resumed.of(LoadWeights)) == 2
    resumed.tell(EngineLoaded("e0", 1), EngineLoaded("e1", 1))
    assert resumed.of(PolicyUpdated) == []


def test_an_engine_that_skips_a_version_does_not_hold_up_the_next_one() -> None:
    script = two_engines()
    trained(script, 1)
    script.tell(EngineLoaded("e0", 1))
    trained(script, 2)  # e1 is still loading version 1
    script.tell(EngineLoaded("e1", 1))
    assert script.of(PolicyUpdated) == [PolicyUpdated(1)]
    trained(script, 3)
    script.tell(EngineLoaded("e0", 2), EngineLoaded("e0", 3))
    assert script.of(PolicyUpdated) == []
    script.tell(EngineLoaded("e1", 2), EngineLoaded("e1", 3))
    assert script.of(PolicyUpdated) == [PolicyUpdated(2), PolicyUpdated(3)]


def test_an_engine_that_died_is_not_waited_for_and_announces_nothing_again_when_it_is_back() -> None:
    script = two_engines()
    trained(script, 1)
    script.tell(EngineLoaded("e0", 1), EngineLost("e1"))
    assert script.of(PolicyUpdated) == [PolicyUpdated(1)]
    script.tell(EngineJoined("e1"))
    assert script.of(LoadWeights) == [LoadWeights("e1", 1)]
    script.tell(EngineLoaded("e1", 1))
    assert script.of(PolicyUpdated) == []


def test_an_engine_that_is_behind_still_serves_the_old_version_and_so_is_waited_for() -> None:
    script = two_engines()
    trained(script, 1)
    script.tell(EngineLoaded("e0", 1), LoadLate("e1", 1), LoadFailed("e1", 1, torn=False))
    assert script.of(PolicyUpdated) == []
    script.tell(EngineLoaded("e1", 1))
    assert script.of(PolicyUpdated) == [PolicyUpdated(1)]


def test_when_no_engine_serves_nothing_is_announced() -> None:
    script = two_engines()
    trained(script, 1)
    script.tell(EngineLost("e0"), EngineLost("e1"))
    assert script.of(PolicyUpdated) == []
