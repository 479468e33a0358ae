"""The health state machine of a server: when it gets requests, and when it is dead."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.engines.server.state import HealthMachine

Event = Callable[[HealthMachine], None]

EVENTS: dict[str, Event] = {
    "started": lambda machine: machine.started(),
    "loaded": lambda machine: machine.loaded(),
    "torn": lambda machine: machine.torn("a file was cut short"),
    "probe_passed": lambda machine: machine.probe_passed(),
    "probe_failed": lambda machine: machine.probe_failed("no answer"),
    "request_passed": lambda machine: machine.request_passed(),
    "request_failed": lambda machine: machine.request_failed("status 500"),
    "drain": lambda machine: machine.drain(),
    "ended": lambda machine: machine.ended("exit code 1"),
}
histories = st.lists(st.sampled_from(sorted(EVENTS)), max_size=40)
patiences = st.integers(1, 5)


def after(*events: str, patience: int = 3) -> HealthMachine:
    machine = HealthMachine(patience)
    for event in events:
        EVENTS[event](machine)
    return machine


def serving(*events: str, patience: int = 3) -> HealthMachine:
    return after("started", "loaded", *events, patience=patience)


def test_a_starting_server_gets_no_requests() -> None:
    assert (after().state, after().serves, after().finishes) == ("starting", False, False)


def test_a_server_is_stale_until_its_first_load() -> None:
    assert after("started").state == "stale"
    assert after("started", "loaded").state == "healthy"


def test_a_load_before_the_start_does_not_count() -> None:
    assert after("loaded", "started").state == "stale"


def test_a_restart_makes_the_server_stale_again() -> None:
    assert serving("started").state == "stale"


def test_after_a_torn_update_the_server_gets_no_requests_until_the_next_load() -> None:
    torn = serving("torn")
    assert (torn.state, torn.serves, torn.finishes, torn.why) == ("stale", False, False, "a file was cut short")
    assert serving("torn", "probe_passed").state == "stale", "a passed probe does not say which weights it samples from"
    assert serving("torn", "loaded").state == "healthy"


def test_one_failed_probe_makes_a_server_suspect_and_one_passed_probe_healthy() -> None:
    suspect = serving("probe_failed")
    assert (suspect.state, suspect.serves, suspect.finishes, suspect.why) == ("suspect", False, True, "no answer")
    assert serving("probe_failed", "probe_passed").serves


def test_a_load_does_not_clear_the_suspect_state() -> None:
    assert serving("probe_failed", "loaded").state == "suspect"


@pytest.mark.parametrize("patience", [1, 2, 3, 7])
def test_a_server_is_dead_after_patience_failed_probes_in_a_row(patience: int) -> None:
    assert serving(*["probe_failed"] * (patience - 1), patience=patience).state != "dead"
    dead = serving(*["probe_failed"] * patience, patience=patience)
    assert dead.state == "dead"
    assert re.search(rf"\b{patience}\b.*no answer", dead.why)


def test_a_passed_probe_resets_the_count_of_failed_probes() -> None:
    assert serving("probe_failed", "probe_failed", "probe_passed", "probe_failed", "probe_failed").state == "suspect"


def test_a_stale_server_also_dies_after_failed_probes() -> None:
    assert after("started", *["probe_failed"] * 3).state == "dead"


def test_failed_probes_during_a_slow_start_do_not_kill_the_server() -> None:
    assert after(*["probe_failed"] * 10).state == "starting"
    assert after(*["probe_failed"] * 10, "started", "loaded").state == "healthy"


def test_single_failed_requests_do_not_change_the_health() -> None:
    assert serving("request_failed", "request_failed").serves
    assert serving("request_failed", "request_failed", "request_passed", "request_failed").serves


def test_repeated_failed_requests_make_a_server_suspect_until_a_probe_or_request_passes() -> None:
    doubted = serving(*["request_failed"] * 3)
    assert (doubted.state, doubted.why) == ("suspect", "status 500")
    assert serving(*["request_failed"] * 3, "probe_passed").serves
    assert serving(*["request_failed"] * 3, "request_passed").serves


def test_failed_requests_alone_never_kill_a_server() -> None:
    assert serving(*["request_failed"] * 100).state == "suspect"


def test_a_passed_request_does_not_offset_a_failed_probe() -> None:
    assert serving("probe_failed", "request_passed").state == "suspect"


def test_a_draining_server_finishes_its_requests_and_gets_no_new_ones() -> None:
    draining = serving("drain")
    assert (draining.state, draining.serves, draining.finishes) == ("draining", False, True)
    assert not serving("drain", "torn").finishes


def test_a_draining_server_can_still_die() -> None:
    assert serving("drain", *["probe_failed"] * 3).state == "dead"


def test_the_first_cause_of_death_stays() -> None:
    machine = serving("ended")
    machine.ended("something later")
    assert machine.why == "exit code 1"


@given(histories, histories, patiences)
def test_no_event_revives_a_dead_server(before: list[str], later: list[str], patience: int) -> None:
    machine = after(*before, "ended", patience=patience)
    for event in later:
        EVENTS[event](machine)
        assert (machine.state, machine.serves, machine.finishes) == ("dead", False, False)


@given(histories, patiences)
def test_a_server_serves_only_when_healthy_and_finishes_requests_only_when_allowed(
    history: list[str], patience: int
) -> None:
    machine = after(*history, patience=patience)
    assert machine.serves == (machine.state == "healthy")
    assert not machine.serves or machine.finishes
    assert machine.state not in ("starting", "stale", "dead") or not machine.finishes
    assert (machine.why == "") == (machine.state == "healthy")


@given(histories, st.sampled_from(["started", "torn"]), histories, patiences)
def test_no_requests_between_a_start_or_torn_update_and_the_next_load(
    before: list[str], event: str, later: list[str], patience: int
) -> None:
    machine = after(*before, event, patience=patience)
    for other in later:
        if other == "loaded":
            break
        EVENTS[other](machine)
        assert not machine.serves
        assert not machine.finishes


@given(histories, patiences)
def test_draining_cannot_be_undone(history: list[str], patience: int) -> None:
    assert after(*history, "drain", *history, patience=patience).state in ("draining", "dead")
