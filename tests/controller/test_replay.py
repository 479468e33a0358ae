from __future__ import annotations

from typing import Literal

import pytest

from outpace.config.algorithm import ReplayConfig
from outpace.controller.batcher import ReplayEntry, ReplayPool


def replay(
    fraction: float = 0.5,
    max_age: int = 2,
    times: int = 1,
    size: int = 4,
    pool: dict[int, ReplayEntry] | None = None,
    mode: Literal["add", "fill"] = "add",
) -> ReplayPool:
    return ReplayPool(ReplayConfig(fraction=fraction, mode=mode, max_age=max_age, times=times), size, pool)


def trained(pool: ReplayPool, batch: int, spreads: dict[int, float]) -> tuple[int, ...]:
    """Train a batch of these groups, by reward_std, and the chosen ones; return the groups no longer needed."""
    for group, spread in spreads.items():
        pool.group_finished(group, spread)
    return pool.batch_trained(batch, spreads)


def test_the_highest_reward_std_is_replayed_first_and_ties_go_to_the_newest() -> None:
    pool = replay(fraction=0.75)
    trained(pool, 0, {0: 0.25, 1: 0.5, 2: 0.25, 3: 0.1})
    assert pool.choose() == (1, 2, 0)


def test_the_first_batch_replays_nothing_and_a_small_pool_replays_what_it_has() -> None:
    pool = replay(fraction=0.9)
    assert pool.choose() == ()
    trained(pool, 0, {0: 0.5, 1: 0.0})
    assert pool.choose() == (0,)


def test_a_group_with_zero_reward_std_leaves_the_pool_at_once() -> None:
    pool = replay()
    assert trained(pool, 0, {0: 0.5, 1: 0.0}) == (1,)


def test_a_group_leaves_the_pool_after_its_maximum_number_of_replays() -> None:
    pool = replay(max_age=9, times=2)
    trained(pool, 0, {0: 0.5})
    assert pool.choose() == (0,)
    assert trained(pool, 1, {}) == ()
    assert pool.choose() == (0,)
    assert trained(pool, 2, {}) == (0,)
    assert pool.choose() == ()


def test_a_group_that_exceeds_max_age_leaves_the_pool_unused() -> None:
    pool = replay(fraction=0.25, max_age=2)
    trained(pool, 0, {0: 0.1})
    assert trained(pool, 1, {1: 0.5, 2: 0.5}) == ()
    assert pool.choose() == (2,)
    assert sorted(trained(pool, 2, {})) == [0, 2]
    assert pool.choose() == (1,)


def test_a_fraction_of_less_than_one_group_disables_the_pool() -> None:
    pool = replay(fraction=0.2, size=4)
    assert not pool.replay_enabled
    assert trained(pool, 0, {0: 0.5}) == ()
    assert pool.choose() == ()
    assert not ReplayPool(None, 4).replay_enabled


def test_a_fraction_without_an_exact_float_loses_no_group() -> None:
    pool = replay(fraction=0.29, size=100)
    trained(pool, 0, dict.fromkeys(range(100), 0.5))
    assert len(pool.choose()) == 29


def test_a_pool_continues_from_its_saved_state() -> None:
    pool = replay()
    trained(pool, 0, {0: 0.5, 1: 0.25})
    again = replay(pool=pool.state())
    assert again.choose() == pool.choose() != ()
    assert trained(again, 1, {}) == trained(pool, 1, {}) != ()
    assert again.state() == pool.state()


# ----------------------------------------------------------------------------------------- in place of filtered groups


def test_in_fill_mode_a_batch_replays_as_many_groups_as_places_were_kept() -> None:
    pool = replay(fraction=0.75, mode="fill")
    assert pool.fillable == 0, "the pool is empty"
    trained(pool, 0, {0: 0.25, 1: 0.5})
    assert pool.fillable == 2, "no more than the pool holds"
    trained(pool, 1, {2: 0.1, 3: 0.1, 4: 0.1})
    assert pool.fillable == 3, "no more than the fraction"
    assert pool.choose(0) == ()
    assert pool.choose(2) == (1, 0)


@pytest.mark.parametrize(("fraction", "size", "most"), [(0.5, 4, 2), (0.999999999, 4, 3), (0.9, 1, 0)])
def test_in_fill_mode_a_batch_keeps_at_least_one_new_group(fraction: float, size: int, most: int) -> None:
    pool = replay(fraction=fraction, size=size, mode="fill")
    trained(pool, 0, dict.fromkeys(range(9), 0.5))
    assert pool.fillable == most


def test_in_add_mode_no_place_is_filled() -> None:
    pool = replay()
    trained(pool, 0, {0: 0.5})
    assert pool.fillable == 0
