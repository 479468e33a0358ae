"""The gate of a door: who is let in, in which order, and that no place is ever lost."""

from __future__ import annotations

import asyncio

import pytest

from outpace.engines.server.admission import AdmissionQueue, BusyClock
from outpace.errors import RequestFailed


def yes() -> bool:
    return True


def no() -> bool:
    return False


async def waiting_at(gate: AdmissionQueue, name: str, may_enter: object = yes) -> asyncio.Task[str]:
    task: asyncio.Task[str] = asyncio.create_task(gate.enter(name, may_enter))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    return task


async def test_those_who_may_enter_do_in_the_order_of_arrival() -> None:
    gate = AdmissionQueue(lambda: 1)
    first, barred, third = [await waiting_at(gate, name, may) for name, may in (("a", yes), ("b", no), ("c", yes))]
    assert await first == "admitted"
    assert (gate.running, gate.waiting) == (1, 2)
    gate.leave()
    assert await third == "admitted"
    assert not barred.done()
    gate.end("lost")
    assert await barred == "lost"
    assert (gate.running, gate.waiting) == (1, 0)


async def test_only_those_named_are_ended() -> None:
    gate = AdmissionQueue(lambda: 0)
    one, other = await waiting_at(gate, "a"), await waiting_at(gate, "b")
    gate.end("aborted", {"a"})
    assert await one == "aborted"
    assert not other.done()
    other.cancel()


async def test_a_request_that_can_never_be_served_hears_so() -> None:
    def never() -> bool:
        raise RequestFailed("not here")

    with pytest.raises(RequestFailed, match="not here"):
        await AdmissionQueue(lambda: 1).enter("a", never)


async def test_somebody_who_leaves_the_queue_takes_no_place() -> None:
    gate = AdmissionQueue(lambda: 1)
    await gate.enter("a", yes)
    waiting = await waiting_at(gate, "b")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (gate.running, gate.waiting) == (1, 0)


async def test_the_place_of_somebody_cancelled_in_the_moment_of_entering_is_free() -> None:
    gate = AdmissionQueue(lambda: 1)
    await gate.enter("a", yes)
    waiting = await waiting_at(gate, "b")
    gate.leave()  # lets b in, which has not run yet
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert gate.running == 0


async def test_somebody_cancelled_in_the_moment_of_being_refused_is_cancelled() -> None:
    refused = False

    def perhaps() -> bool:
        if refused:
            raise RequestFailed("not here")
        return False

    gate = AdmissionQueue(lambda: 1)
    waiting = await waiting_at(gate, "a", perhaps)
    refused = True
    gate.wake()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (gate.running, gate.waiting) == (0, 0)


async def test_a_raised_limit_is_felt_at_the_next_turn() -> None:
    limit = 1
    gate = AdmissionQueue(lambda: limit)
    await gate.enter("a", yes)
    second = await waiting_at(gate, "b")
    limit = 2
    gate.wake()
    assert await second == "admitted"


def test_time_counts_while_anybody_is_inside() -> None:
    now = 0.0
    clock = BusyClock(lambda: now)
    clock.enter()
    now = 2.0
    clock.enter()
    clock.leave()
    now = 3.0
    assert clock.seconds == 3.0
    clock.leave()
    now = 9.0
    assert clock.seconds == 3.0
