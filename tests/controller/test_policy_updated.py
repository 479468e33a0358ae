"""A new policy version is announced once, when every serving engine has loaded it."""

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
    """Two engines that serve version 0. Each of the next versions takes one batch of two groups."""
    script = Script(replace(SMALL, max_lag=3, depth=5.0, max_running=8))
    script.send(RunStarted({"e0": 0, "e1": 0}), Published(0))
    return script


def trained(script: Script, version: int) -> None:
    """Train and publish a version."""
    first = 2 * (version - 1)
    script.train(first, first + 1)
    script.send(Published(version))


def test_a_version_is_announced_once_when_the_last_engine_has_loaded_it() -> None:
    script = two_engines()
    trained(script, 1)
    script.send(EngineLoaded("e0", 1))
    assert script.of(PolicyUpdated) == []
    script.send(EngineLoaded("e1", 1))
    assert script.of(PolicyUpdated) == [PolicyUpdated(1)]


def test_the_version_that_a_run_starts_with_is_not_announced() -> None:
    script = Script(SMALL)
    script.send(RunStarted({"e0": 0, "e1": 0}), Published(0))
    assert script.of(PolicyUpdated) == []


def test_a_resumed_run_announces_only_versions_newer_than_its_checkpoint() -> None:
    settings = replace(SMALL, max_lag=3, depth=5.0, max_running=8)
    script = started(settings)
    script.train(0, 1)
    script.send(StopRequested(), Published(1))
    (checkpoint,) = script.of(Checkpoint)
    resumed = Script(settings, resume(settings, checkpoint))
    resumed.send(RunStarted({"e0": 0, "e1": 0}), Published(1))
    assert len(resumed.of(LoadWeights)) == 2
    resumed.send(EngineLoaded("e0", 1), EngineLoaded("e1", 1))
    assert resumed.of(PolicyUpdated) == []


def test_each_version_is_announced_when_the_slowest_engine_reaches_it() -> None:
    script = two_engines()
    trained(script, 1)
    script.send(EngineLoaded("e0", 1))
    trained(script, 2)  # e1 is still loading version 1
    script.send(EngineLoaded("e1", 1))
    assert script.of(PolicyUpdated) == [PolicyUpdated(1)]
    trained(script, 3)
    script.send(EngineLoaded("e0", 2), EngineLoaded("e0", 3))
    assert script.of(PolicyUpdated) == []
    script.send(EngineLoaded("e1", 2), EngineLoaded("e1", 3))
    assert script.of(PolicyUpdated) == [PolicyUpdated(2), PolicyUpdated(3)]


def test_a_dead_engine_does_not_delay_an_announcement_and_its_return_announces_nothing_again() -> None:
    script = two_engines()
    trained(script, 1)
    script.send(EngineLoaded("e0", 1), EngineLost("e1"))
    assert script.of(PolicyUpdated) == [PolicyUpdated(1)]
    script.send(EngineJoined("e1"))
    assert script.of(LoadWeights) == [LoadWeights("e1", 1)]
    script.send(EngineLoaded("e1", 1))
    assert script.of(PolicyUpdated) == []


def test_an_engine_whose_load_is_late_or_failed_still_serves_the_old_version_and_delays_the_announcement() -> None:
    script = two_engines()
    trained(script, 1)
    script.send(EngineLoaded("e0", 1), LoadLate("e1", 1), LoadFailed("e1", 1, torn=False))
    assert script.of(PolicyUpdated) == []
    script.send(EngineLoaded("e1", 1))
    assert script.of(PolicyUpdated) == [PolicyUpdated(1)]


def test_no_version_is_announced_while_no_engine_serves() -> None:
    script = two_engines()
    trained(script, 1)
    script.send(EngineLost("e0"), EngineLost("e1"))
    assert script.of(PolicyUpdated) == []
