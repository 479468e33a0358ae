"""Work of many tasks, spread over the turns of the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from outpace.runtime.async_tools import LoopFairness


class Turns:
    """Counts the turns of the loop, by a callback that asks to be called again in the next one."""

    def __init__(self) -> None:
        self.count, self.over = 0, False
        self._next()

    def _next(self) -> None:
        self.count += 1
        if not self.over:
            asyncio.get_running_loop().call_soon(self._next)


async def who_passed_when(people: int, per_turn: int) -> list[int]:
    """For each, in the order in which they came, the turn in which they went on."""
    turnstile, turns, wait_turn = LoopFairness(per_turn), Turns(), [0] * people

    async def go(number: int) -> None:
        await turnstile.wait_turn()
        wait_turn[number] = turns.count

    await asyncio.gather(*map(go, range(people)))
    turns.over = True
    return wait_turn


@given(people=st.integers(1, 60), per_turn=st.integers(1, 8))
def test_no_more_than_so_many_go_through_in_one_turn_in_the_order_in_which_they_came(
    people: int, per_turn: int
) -> None:
    wait_turn = asyncio.run(who_passed_when(people, per_turn))
    assert max(Counter(wait_turn).values()) <= per_turn
    assert wait_turn == sorted(wait_turn)


async def test_one_who_comes_alone_does_not_wait() -> None:
    turns = Turns()
    await LoopFairness(4).wait_turn()
    assert turns.count == 1
    turns.over = True


async def test_one_who_leaves_takes_nobodys_place() -> None:
    turnstile = LoopFairness(1)
    await turnstile.wait_turn()
    first, second = asyncio.create_task(turnstile.wait_turn()), asyncio.create_task(turnstile.wait_turn())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(second, 10)


async def test_an_idle_turnstile_leaves_nothing_on_the_loop() -> None:
    turnstile = LoopFairness(2)
    await turnstile.wait_turn()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not turnstile._ticking
