"""ProcessPool: reuse, replacement and closing."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.runtime.user_code import ProcessPool, UserCodeDied


class FakeProcess:
    def __init__(self) -> None:
        self.usable = True
        self.ended: list[float] = []

    async def end(self, patience_s: float = 0.0) -> None:
        self.usable = False
        await asyncio.sleep(0)
        self.ended.append(patience_s)


class Harness:
    """A pool and every process it ever started."""

    def __init__(self) -> None:
        self.all: list[FakeProcess] = []
        self.pool: ProcessPool[FakeProcess] = ProcessPool(self._make)

    def _make(self) -> FakeProcess:
        self.all.append(FakeProcess())
        return self.all[-1]


async def test_a_usable_process_that_was_put_back_is_reused() -> None:
    harness = Harness()
    first = harness.pool.take()
    second = harness.pool.take()
    assert first is not second
    harness.pool.put_back(first)
    assert harness.pool.take() is first
    await harness.pool.close()


async def test_an_unusable_process_that_was_put_back_is_ended_and_replaced() -> None:
    harness = Harness()
    process = harness.pool.take()
    process.usable = False
    harness.pool.put_back(process)
    assert harness.pool.take() is not process
    await harness.pool.close()
    assert process.ended == [0.0]


async def test_a_process_that_ended_while_idle_is_not_handed_out() -> None:
    harness = Harness()
    process = harness.pool.take()
    harness.pool.put_back(process)
    process.usable = False
    assert harness.pool.take() is not process
    await harness.pool.close()
    assert len(process.ended) == 1


async def test_start_spares_starts_only_missing_spares_and_they_are_used_last() -> None:
    harness = Harness()
    process = harness.pool.take()
    harness.pool.start_spares(2)
    harness.pool.start_spares(2)
    assert len(harness.all) == 3
    harness.pool.put_back(process)
    assert harness.pool.take() is process
    assert harness.pool.take() in harness.all[1:]
    await harness.pool.close()
    harness.pool.start_spares(2)
    assert len(harness.all) == 3


async def test_closing_waits_for_idle_processes_only_and_is_final() -> None:
    harness = Harness()
    busy, idle = harness.pool.take(), harness.pool.take()
    harness.pool.put_back(idle)
    await harness.pool.close()
    assert busy.ended == [0.0]
    assert idle.ended[0] > 0
    harness.pool.put_back(busy)
    with pytest.raises(UserCodeDied):
        harness.pool.take()


@given(st.lists(st.tuples(st.sampled_from(["take", "back", "spoil", "stock"]), st.integers(0, 5)), max_size=30))
def test_no_process_is_handed_out_twice_and_every_process_is_ended_once(steps: list[tuple[str, int]]) -> None:
    async def live() -> None:
        harness, taken = Harness(), list[FakeProcess]()
        for step, number in steps:
            if step == "take":
                process = harness.pool.take()
                assert process.usable
                assert process not in taken
                taken.append(process)
            elif step == "back" and taken:
                harness.pool.put_back(taken.pop(number % len(taken)))
            elif step == "spoil" and harness.all:
                harness.all[number % len(harness.all)].usable = False
            elif step == "stock":
                harness.pool.start_spares(number)
        await harness.pool.close()
        assert [len(process.ended) for process in harness.all] == [1] * len(harness.all)

    asyncio.run(live())
