"""Keeping servants: who is handed out, who is ended, and what is left after closing."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.runtime.user_code import ProcessPool, UserCodeDied


class Member:
    def __init__(self) -> None:
        self.usable = True
        self.ended: list[float] = []

    async def end(self, patience_s: float = 0.0) -> None:
        self.usable = False
        await asyncio.sleep(0)
        self.ended.append(patience_s)


class House:
    """A household, and everyone who has ever lived in it."""

    def __init__(self) -> None:
        self.all: list[Member] = []
        self.household: ProcessPool[Member] = ProcessPool(self._make)

    def _make(self) -> Member:
        self.all.append(Member())
        return self.all[-1]


async def test_a_member_that_came_back_well_is_used_again() -> None:
    house = House()
    first = house.household.take()
    second = house.household.take()
    assert first is not second
    house.household.put_back(first)
    assert house.household.take() is first
    await house.household.close()


async def test_one_that_came_back_unfit_is_ended_and_replaced() -> None:
    house = House()
    member = house.household.take()
    member.usable = False
    house.household.put_back(member)
    assert house.household.take() is not member
    await house.household.close()
    assert member.ended == [0.0]


async def test_one_that_ended_while_it_was_idle_is_not_handed_out() -> None:
    house = House()
    member = house.household.take()
    house.household.put_back(member)
    member.usable = False
    assert house.household.take() is not member
    await house.household.close()
    assert len(member.ended) == 1


async def test_stock_starts_what_is_missing_and_it_is_used_last() -> None:
    house = House()
    member = house.household.take()
    house.household.start_spares(2)
    house.household.start_spares(2)
    assert len(house.all) == 3
    house.household.put_back(member)
    assert house.household.take() is member
    assert house.household.take() in house.all[1:]
    await house.household.close()
    house.household.start_spares(2)
    assert len(house.all) == 3


async def test_closing_is_patient_with_the_idle_only_and_final() -> None:
    house = House()
    busy, idle = house.household.take(), house.household.take()
    house.household.put_back(idle)
    await house.household.close()
    assert busy.ended == [0.0]
    assert idle.ended[0] > 0
    house.household.put_back(busy)
    with pytest.raises(UserCodeDied):
        house.household.take()


@given(st.lists(st.tuples(st.sampled_from(["take", "back", "spoil", "stock"]), st.integers(0, 5)), max_size=30))
def test_whatever_happens_nobody_serves_two_and_everybody_ends(steps: list[tuple[str, int]]) -> None:
    async def live() -> None:
        house, taken = House(), list[Member]()
        for step, number in steps:
            if step == "take":
                member = house.household.take()
                assert member.usable
                assert member not in taken
                taken.append(member)
            elif step == "back" and taken:
                house.household.put_back(taken.pop(number % len(taken)))
            elif step == "spoil" and house.all:
                house.all[number % len(house.all)].usable = False
            elif step == "stock":
                house.household.start_spares(number)
        await house.household.close()
        assert [len(member.ended) for member in house.all] == [1] * len(house.all)

    asyncio.run(live())
