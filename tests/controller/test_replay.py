from __future__ import annotations

from outpace.config.algorithm import ReplayConfig
from outpace.controller.batcher import ReplayEntry, ReplayPool


def replay(
    fraction: float = 0.5, max_age: int = 2, times: int = 1, size: int = 4, pool: dict[int, ReplayEntry] | None = None
) -> ReplayPool:
    return ReplayPool(ReplayConfig(fraction=fraction, max_age=max_age, times=times), size, pool)


def test_the_highest_reward_std_is_replayed_first_and_ties_go_to_the_newest() -> None:
    pool = replay(fraction=0.75)
    pool.batch_trained(0, {0: 0.25, 1: 0.5, 2: 0.25, 3: 0.1}, ())
    assert pool.choose() == (1, 2, 0)


def test_the_first_batch_replays_nothing_and_a_small_pool_replays_what_it_has() -> None:
    pool = replay(fraction=0.9)
    assert pool.choose() == ()
    pool.batch_trained(0, {0: 0.5, 1: 0.0}, ())
    assert pool.choose() == (0,)


def test_a_group_with_zero_reward_std_leaves_the_pool_at_once() -> None:
    pool = replay()
    assert pool.batch_trained(0, {0: 0.5, 1: 0.0}, ()) == (1,)


def test_a_group_leaves_the_pool_after_its_maximum_number_of_replays() -> None:
    pool = replay(max_age=9, times=2)
    pool.batch_trained(0, {0: 0.5}, ())
    assert pool.batch_trained(1, {}, pool.choose()) == ()
    assert pool.batch_trained(2, {}, pool.choose()) == (0,)
    assert pool.choose() == ()


def test_a_group_that_exceeds_max_age_leaves_the_pool_unused() -> None:
    pool = replay(fraction=0.25, max_age=2)
    pool.batch_trained(0, {0: 0.1}, ())
    assert pool.batch_trained(1, {1: 0.5, 2: 0.5}, ()) == ()
    assert pool.choose() == (2,)
    assert sorted(pool.batch_trained(2, {}, (2,))) == [0, 2]
    assert pool.choose() == (1,)


def test_a_fraction_of_less_than_one_group_disables_the_pool() -> None:
    pool = replay(fraction=0.2, size=4)
    assert not pool.replay_enabled
    assert pool.batch_trained(0, {0: 0.5}, ()) == ()
    assert pool.choose() == ()
    assert not ReplayPool(None, 4).replay_enabled


def test_a_fraction_without_an_exact_float_loses_no_group() -> None:
    pool = replay(fraction=0.29, size=100)
    pool.batch_trained(0, dict.fromkeys(range(100), 0.5), ())
    assert len(pool.choose()) == 29


def test_a_pool_continues_from_its_saved_state() -> None:
    pool = replay()
    pool.batch_trained(0, {0: 0.5, 1: 0.25}, ())
    again = replay(pool=pool.state())
    assert again.choose() == pool.choose() != ()
    assert again.batch_trained(1, {}, again.choose()) == pool.batch_trained(1, {}, pool.choose())
    assert again.state() == pool.state()
