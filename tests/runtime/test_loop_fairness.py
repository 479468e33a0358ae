"""LoopFairness: the work of many tasks is spread over iterations of the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from outpace.runtime.async_tools import LoopFairness


class Turns:
    """Counts event loop iterations with a callback that reschedules itself."""

    def __init__(self) -> None:
        self.count, self.over = 0, False
        self._next()

    def _next(self) -> None:
        self.count += 1
        if not self.over:
            asyncio.get_running_loop().call_soon(self._next)


async def turns_of_tasks(tasks: int, per_turn: int) -> list[int]:
    """The loop iteration in which each task continued, in order of arrival."""
    fairness, turns, continued_in = LoopFairness(per_turn), Turns(), [0] * tasks

    async def go(number: int) -> None:
        await fairness.wait_turn()
        continued_in[number] = turns.count

    await asyncio.gather(*map(go, range(tasks)))
    turns.over = True
    return continued_in


@given(tasks=st.integers(1, 60), per_turn=st.integers(1, 8))
def test_at_most_per_turn_tasks_continue_in_one_loop_iteration_in_order_of_arrival(tasks: int, per_turn: int) -> None:
    continued_in = asyncio.run(turns_of_tasks(tasks, per_turn))
    assert max(Counter(continued_in).values()) <= per_turn
    assert continued_in == sorted(continued_in)


async def test_a_single_task_does_not_wait() -> None:
    turns = Turns()
    await LoopFairness(4).wait_turn()
    assert turns.count == 1
    turns.over = True


async def test_a_cancelled_task_does_not_use_up_a_turn() -> None:
    fairness = LoopFairness(1)
    await fairness.wait_turn()
    first, second = asyncio.create_task(fairness.wait_turn()), asyncio.create_task(fairness.wait_turn())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(second, 10)


async def test_idle_loop_fairness_leaves_nothing_scheduled_on_the_loop() -> None:
    fairness = LoopFairness(2)
    await fairness.wait_turn()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not fairness._ticking
