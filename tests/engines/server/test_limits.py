"""The concurrency limit: how many requests one server gets at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.engines.server.admission import MAX_LIMIT_PER_SLOT, ConcurrencyLimit
from outpace.engines.server.protocol import Pressure


def pressure(waiting: int = 0, cache: float = 0.3, preemptions: int = 0) -> Pressure:
    return Pressure(running=8, waiting=waiting, cache_used=cache, preemptions=preemptions)


def test_the_limit_starts_at_the_slots() -> None:
    assert ConcurrencyLimit(64).value == 64


def test_the_limit_grows_by_steps_while_no_request_queues_and_every_slot_is_used() -> None:
    limit = ConcurrencyLimit(64)
    assert [limit.observe(pressure(), limit.value) for _ in range(3)] == [68, 72, 76]


@pytest.mark.parametrize(
    ("seen", "sent"),
    [
        pytest.param(pressure(), 63, id="slots are free"),
        pytest.param(pressure(waiting=1), 64, id="requests queue in the server"),
        pytest.param(pressure(cache=0.9), 64, id="the KV cache is nearly full"),
    ],
)
def test_the_limit_stays_without_reason_to_change(seen: Pressure, sent: int) -> None:
    assert ConcurrencyLimit(64).observe(seen, sent) == 64


def test_the_limit_falls_by_a_quarter_after_a_preemption() -> None:
    limit = ConcurrencyLimit(64)
    limit.observe(pressure(waiting=1), 64)
    assert limit.observe(pressure(waiting=1, preemptions=1), 64) == 48


def test_the_limit_falls_by_a_quarter_when_the_kv_cache_is_full() -> None:
    assert ConcurrencyLimit(64).observe(pressure(cache=1.0), 64) == 48


def test_the_limit_does_not_fall_again_before_the_decrease_takes_effect() -> None:
    limit = ConcurrencyLimit(64)
    limit.observe(pressure(cache=1.0), 64)
    assert limit.observe(pressure(cache=1.0), 64) == 48
    assert limit.observe(pressure(cache=1.0), 48) == 36


def test_preemptions_before_the_first_observation_do_not_count() -> None:
    assert ConcurrencyLimit(64).observe(pressure(waiting=1, preemptions=900), 64) == 64


def test_each_preemption_counts_once() -> None:
    limit = ConcurrencyLimit(64)
    for total in (0, 5, 5, 5):
        limit.observe(pressure(waiting=1, preemptions=total), 10)
    assert limit.value == 48


def test_a_restarted_server_counts_preemptions_from_zero() -> None:
    limit = ConcurrencyLimit(64)
    limit.observe(pressure(waiting=1, preemptions=9), 10)
    assert limit.observe(pressure(waiting=1, preemptions=0), 10) == 64
    assert limit.observe(pressure(waiting=1, preemptions=1), 10) == 48


def test_queued_requests_bring_the_limit_down_to_the_slots_and_no_further() -> None:
    limit = ConcurrencyLimit(16)
    for _ in range(2):
        limit.observe(pressure(), limit.value)
    assert [limit.observe(pressure(waiting=3), limit.value) for _ in range(4)] == [17, 16, 16, 16]


def test_a_step_down_does_not_go_below_the_slots() -> None:
    limit = ConcurrencyLimit(64)
    for _ in range(6):
        limit.observe(pressure(), limit.value)
    assert limit.observe(pressure(cache=1.0), limit.value) == 66
    assert limit.observe(pressure(waiting=1), 66) == 64


def test_the_growth_of_the_limit_is_bounded() -> None:
    limit = ConcurrencyLimit(5)
    for _ in range(100):
        limit.observe(pressure(), limit.value)
    assert limit.value == MAX_LIMIT_PER_SLOT * 5


def test_the_limit_recovers_when_the_server_has_room() -> None:
    limit = ConcurrencyLimit(64)
    limit.observe(pressure(cache=1.0), 64)
    for _ in range(4):
        limit.observe(pressure(), limit.value)
    assert limit.value == 64


observations = st.lists(
    st.tuples(st.integers(0, 500), st.floats(0, 1), st.integers(0, 1000), st.integers(0, 5000)), max_size=60
)


@given(st.integers(1, 512), observations)
def test_the_limit_stays_within_its_bounds(slots: int, observations: list[tuple[int, float, int, int]]) -> None:
    limit = ConcurrencyLimit(slots)
    for waiting, cache, preemptions, sent in observations:
        before = limit.value
        value = limit.observe(pressure(waiting, cache, preemptions), sent)
        assert value == limit.value
        assert 1 <= value <= MAX_LIMIT_PER_SLOT * slots
        assert value >= before * 0.75 - 1, "one observation decreases the limit by at most a quarter"
