"""Weight loads of engines that join, leave, fail and rejoin."""

from __future__ import annotations

import pytest

from outpace.controller.weight_publisher import UpdateMode, WeightPublisher


def make_publisher(update: UpdateMode = "inflight", *names: str, version: int = 0) -> WeightPublisher:
    publisher = WeightPublisher(update)
    publisher.start(dict.fromkeys(names or ("e0",), 0), version)
    publisher.published(version)
    return publisher


def test_a_lost_engine_blocks_admission_only_if_it_was_the_last_serving_one() -> None:
    publisher = make_publisher("inflight", "e0", "e1")
    publisher.lost("e0")
    assert not publisher.blocks_admission
    publisher.lost("e1")
    assert publisher.blocks_admission
    assert publisher.next_loads(busy=False) == [], "no engine is left to load anything"


def test_an_engine_that_rejoins_is_stale_until_its_first_load() -> None:
    publisher = make_publisher()
    publisher.lost("e0")
    publisher.joined("e0")
    assert publisher.blocks_admission
    assert publisher.next_loads(busy=True) == [("e0", 0)], "even while groups run: they wait for it"
    publisher.loaded("e0", 0)
    assert not publisher.blocks_admission


def test_a_load_in_progress_is_forgotten_when_its_engine_is_lost() -> None:
    publisher = make_publisher()
    publisher.published(1)
    assert publisher.next_loads(busy=False) == [("e0", 1)]
    publisher.lost("e0")
    assert publisher.loading == {}
    publisher.joined("e0")
    publisher.published(2)
    assert publisher.next_loads(busy=False) == [("e0", 2)]


def test_the_oldest_version_is_taken_over_serving_engines_only() -> None:
    publisher = make_publisher("inflight", "e0", "e1")
    publisher.published(1)
    publisher.next_loads(busy=False)
    publisher.loaded("e1", 1)
    assert publisher.oldest == 0
    publisher.lost("e0")
    assert publisher.oldest == 1


def test_a_new_engine_can_join() -> None:
    publisher = make_publisher()
    publisher.joined("e9")
    assert not publisher.blocks_admission
    assert publisher.next_loads(busy=False) == [("e9", 0)]


def test_an_engine_cannot_join_twice() -> None:
    with pytest.raises(AssertionError, match=r"\be0\b"):
        make_publisher().joined("e0")


def test_in_lockstep_mode_a_rejoining_engine_loads_the_version_it_had() -> None:
    publisher = make_publisher("lockstep")
    publisher.published(1)
    assert publisher.leases() == {0, 1}, "the loaded version stays leased in case the engine dies"
    publisher.lost("e0")
    publisher.joined("e0")
    assert publisher.blocks_admission
    assert publisher.next_loads(busy=True) == [("e0", 0)]
    publisher.loaded("e0", 0)
    assert publisher.next_loads(busy=True) == [], "its groups are still running"
    assert publisher.next_loads(busy=False) == [("e0", 1)]


def test_in_lockstep_mode_no_engine_advances_while_another_is_missing() -> None:
    publisher = make_publisher("lockstep", "e0", "e1")
    publisher.lost("e1")
    publisher.published(1)
    assert publisher.blocks_admission
    assert publisher.next_loads(busy=False) == []
    publisher.joined("e1")
    assert publisher.next_loads(busy=False) == [("e1", 0)]


def test_in_lockstep_mode_an_engine_that_never_had_weights_loads_the_newest() -> None:
    publisher = make_publisher("lockstep", version=4)
    assert publisher.blocks_admission
    assert publisher.next_loads(busy=False) == [("e0", 4)]
    publisher.lost("e0")
    publisher.joined("e0")
    assert publisher.next_loads(busy=False) == [("e0", 4)]


def test_a_failed_load_is_retried_with_the_newest_version_and_the_engine_keeps_serving_the_old_one() -> None:
    publisher = make_publisher()
    publisher.published(1)
    assert publisher.next_loads(busy=False) == [("e0", 1)]
    publisher.failed("e0", torn=False)
    assert not publisher.blocks_admission
    assert publisher.oldest == 0
    publisher.published(2)
    assert publisher.next_loads(busy=False) == [("e0", 2)], "the newest version, not the failed one"


def test_an_engine_with_a_torn_load_serves_nothing_until_the_next_load() -> None:
    publisher = make_publisher("inflight", "e0", "e1")
    publisher.published(1)
    publisher.next_loads(busy=False)
    publisher.loaded("e1", 1)
    publisher.failed("e0", torn=True)
    assert publisher.oldest == 1, "its previous version does not count"
    assert publisher.next_loads(busy=True) == [("e0", 1)]
    publisher.loaded("e0", 1)
    assert not publisher.stale


def test_a_load_failure_reported_after_the_engine_was_lost_changes_nothing() -> None:
    publisher = make_publisher()
    publisher.published(1)
    publisher.next_loads(busy=False)
    publisher.lost("e0")
    publisher.failed("e0", torn=False)
    assert publisher.blocks_admission
    publisher.joined("e0")
    assert publisher.next_loads(busy=False) == [("e0", 1)]


def test_in_lockstep_mode_a_torn_load_is_followed_by_a_load_of_the_previous_version() -> None:
    publisher = make_publisher("lockstep")
    publisher.published(1)
    assert publisher.next_loads(busy=False) == [("e0", 1)]
    publisher.failed("e0", torn=True)
    assert publisher.blocks_admission
    assert publisher.next_loads(busy=False) == [("e0", 0)]


def test_a_late_engine_with_too_old_weights_is_ignored_while_another_engine_serves() -> None:
    publisher = make_publisher("inflight", "e0", "e1")
    for version in (1, 2):
        publisher.published(version)
        for engine, loaded in publisher.next_loads(busy=False):
            if engine == "e1":
                publisher.loaded(engine, loaded)
    assert publisher.oldest_from(1) == 0, "its load is in progress, so it still counts"
    publisher.late("e0", 1)
    assert publisher.oldest_from(0) == 0
    assert publisher.oldest_from(1) == 2
    assert publisher.oldest_from(9) == 2, "if all are too old, the engine that is not late counts"
    publisher.loaded("e0", 1)
    assert publisher.oldest_from(1) == 1


def test_a_load_reported_late_after_it_ended_changes_nothing() -> None:
    publisher = make_publisher("inflight", "e0", "e1")
    publisher.published(1)
    publisher.next_loads(busy=False)
    publisher.loaded("e0", 1)
    publisher.late("e0", 1)
    publisher.late("e1", 0)
    assert publisher.oldest_from(1) == 0


def test_an_engine_that_has_left_is_ignored() -> None:
    publisher = make_publisher("inflight", "e0", "e1")
    publisher.left("e1")
    assert not publisher.stale
    publisher.published(1)
    assert publisher.next_loads(busy=False) == [("e0", 1)]
