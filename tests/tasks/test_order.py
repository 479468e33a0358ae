from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.tasks.order import REROLL, TaskOrder, first_visit, reroll_number


def epoch_of(order: TaskOrder, epoch: int) -> list[int]:
    start = epoch * order.count
    tasks = [order.task(position) for position in range(start, start + order.count)]
    assert {number for number, _ in tasks} == {epoch}
    return [index for _, index in tasks]


@given(st.integers(1, 300), st.integers(), st.integers(0, 1000))
def test_every_epoch_contains_every_task_exactly_once(count: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_of(TaskOrder(count, seed, shuffle=True), epoch)) == list(range(count))


def test_without_shuffling_tasks_keep_their_order() -> None:
    assert [TaskOrder(3, 7, shuffle=False).task(position) for position in range(5)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1)
    ]  # fmt: skip


@given(st.integers(1, 30), st.integers(0, 1000), st.integers(0, 9))
def test_a_reroll_has_the_epoch_and_task_of_the_visit_it_repeats(count: int, position: int, number: int) -> None:
    order, again = TaskOrder(count, 3, shuffle=True), REROLL * number + position
    assert order.task(again) == order.task(position)
    assert (reroll_number(again), first_visit(again)) == (number, position)


def test_the_order_depends_only_on_seed_and_epoch() -> None:
    order = TaskOrder(100, 1, shuffle=True)
    assert epoch_of(order, 0) == epoch_of(TaskOrder(100, 1, shuffle=True), 0)
    assert epoch_of(order, 0) != epoch_of(order, 1)
    assert epoch_of(order, 0) != epoch_of(TaskOrder(100, 2, shuffle=True), 0)


def test_a_very_large_source_needs_no_memory() -> None:
    order = TaskOrder(10**12, 0, shuffle=True)
    seen = {order.task(position)[1] for position in range(1000)}
    assert len(seen) == 1000
    assert max(seen) > 9 * 10**11


@pytest.mark.parametrize("count", [2, 3, 5, 17])
def test_over_many_epochs_each_task_comes_first_about_equally_often(count: int) -> None:
    order = TaskOrder(count, 0, shuffle=True)
    epochs = 400 * count
    firsts = Counter(order.task(epoch * count)[1] for epoch in range(epochs))
    # 400 expected each, standard deviation below 20: a deviation of six sigma is not chance.
    assert all(abs(firsts[index] - 400) < 120 for index in range(count))


def test_shuffling_separates_neighboring_tasks() -> None:
    indices = epoch_of(TaskOrder(1000, 0, shuffle=True), 0)
    consecutive = sum(after - before == 1 for before, after in pairwise(indices))
    assert consecutive < 10


def test_a_source_without_tasks_is_rejected() -> None:
    with pytest.raises(ValueError, match="tasks"):
        TaskOrder(0, 0, shuffle=True)
