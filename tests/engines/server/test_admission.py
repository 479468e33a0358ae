"""The admission queue: order of admission, aborts, and no leaked slots."""

from __future__ import annotations

import asyncio

import pytest

from outpace.engines.server.admission import AdmissionQueue, BusyClock
from outpace.errors import RequestFailed


def yes() -> bool:
    return True


def no() -> bool:
    return False


async def enqueue(queue: AdmissionQueue, name: str, may_enter: object = yes) -> asyncio.Task[str]:
    task: asyncio.Task[str] = asyncio.create_task(queue.enter(name, may_enter))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    return task


async def test_eligible_requests_are_admitted_in_order_of_arrival() -> None:
    queue = AdmissionQueue(lambda: 1)
    first, barred, third = [await enqueue(queue, name, may) for name, may in (("a", yes), ("b", no), ("c", yes))]
    assert await first == "admitted"
    assert (queue.running, queue.waiting) == (1, 2)
    queue.leave()
    assert await third == "admitted"
    assert not barred.done()
    queue.end("lost")
    assert await barred == "lost"
    assert (queue.running, queue.waiting) == (1, 0)


async def test_an_interrupted_request_finds_its_slot_kept_although_others_wait() -> None:
    queue = AdmissionQueue(lambda: 1)
    await queue.enter("a", yes)
    other = await enqueue(queue, "b")
    queue.leave_interrupted("a")
    queue.wake()
    again = await enqueue(queue, "a")
    assert await again == "admitted"
    assert not other.done()
    queue.leave()
    assert await other == "admitted"
    assert (queue.running, queue.waiting) == (1, 0)


@pytest.mark.parametrize("ending", ["cancelled", "ended", "refused"])
async def test_a_kept_slot_is_free_when_its_request_is_not_admitted_after_all(ending: str) -> None:
    refused = False

    def perhaps() -> bool:
        if refused:
            raise RequestFailed("not here")
        return False

    queue = AdmissionQueue(lambda: 1)
    await queue.enter("a", yes)
    queue.leave_interrupted("a")
    again, other = await enqueue(queue, "a", perhaps), await enqueue(queue, "b")
    if ending == "cancelled":
        again.cancel()
    elif ending == "ended":
        queue.end("lost", {"a"})
    else:
        refused = True
        queue.wake()
    await asyncio.gather(again, return_exceptions=True)
    assert await other == "admitted"
    assert (queue.running, queue.waiting) == (1, 0)


async def test_the_slot_of_an_interrupted_request_that_does_not_return_becomes_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outpace.engines.server.admission.KEEP_SLOT_S", 0.0)
    queue = AdmissionQueue(lambda: 1)
    await queue.enter("a", yes)
    queue.leave_interrupted("a")
    async with asyncio.timeout(60):
        assert await queue.enter("b", yes) == "admitted"


async def test_only_the_named_requests_are_ended() -> None:
    queue = AdmissionQueue(lambda: 0)
    one, other = await enqueue(queue, "a"), await enqueue(queue, "b")
    queue.end("aborted", {"a"})
    assert await one == "aborted"
    assert not other.done()
    other.cancel()


async def test_a_request_that_can_never_be_served_fails() -> None:
    def never() -> bool:
        raise RequestFailed("not here")

    with pytest.raises(RequestFailed, match="not here"):
        await AdmissionQueue(lambda: 1).enter("a", never)


async def test_a_request_cancelled_in_the_queue_takes_no_slot() -> None:
    queue = AdmissionQueue(lambda: 1)
    await queue.enter("a", yes)
    waiting = await enqueue(queue, "b")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (queue.running, queue.waiting) == (1, 0)


async def test_a_request_cancelled_during_admission_frees_its_slot() -> None:
    queue = AdmissionQueue(lambda: 1)
    await queue.enter("a", yes)
    waiting = await enqueue(queue, "b")
    queue.leave()  # admits b, whose task has not run yet
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert queue.running == 0


async def test_a_request_cancelled_while_being_refused_is_cancelled() -> None:
    refused = False

    def perhaps() -> bool:
        if refused:
            raise RequestFailed("not here")
        return False

    queue = AdmissionQueue(lambda: 1)
    waiting = await enqueue(queue, "a", perhaps)
    refused = True
    queue.wake()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (queue.running, queue.waiting) == (0, 0)


async def test_a_raised_limit_applies_at_the_next_wake() -> None:
    limit = 1
    queue = AdmissionQueue(lambda: limit)
    await queue.enter("a", yes)
    second = await enqueue(queue, "b")
    limit = 2
    queue.wake()
    assert await second == "admitted"


def test_the_busy_clock_runs_while_any_request_is_running() -> None:
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
