"""Work of many tasks, spread over the turns of the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from outpace.runtime.turnstile import Turnstile


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
    turnstile, turns, passed = Turnstile(per_turn), Turns(), [0] * people

    async def go(number: int) -> None:
        await turnstile.passed()
        passed[number] = turns.count

    await asyncio.gather(*map(go, range(people)))
    turns.over = True
    return passed


@given(people=st.integers(1, 60), per_turn=st.integers(1, 8))
def test_no_more_than_so_many_go_through_in_one_turn_in_the_order_in_which_they_came(
    people: int, per_turn: int
) -> None:
    passed = asyncio.run(who_passed_when(people, per_turn))
    assert max(Counter(passed).values()) <= per_turn
    assert passed == sorted(passed)


async def test_one_who_comes_alone_does_not_wait() -> None:
    turns = Turns()
    await Turnstile(4).passed()
    assert turns.count == 1
    turns.over = True


async def test_one_who_leaves_takes_nobodys_place() -> None:
    turnstile = Turnstile(1)
    await turnstile.passed()
    first, second = asyncio.create_task(turnstile.passed()), asyncio.create_task(turnstile.passed())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(second, 10)


async def test_an_idle_turnstile_leaves_nothing_on_the_loop() -> None:
    turnstile = Turnstile(2)
    await turnstile.passed()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not turnstile._ticking
