"""Engines that come, go and come back."""

from __future__ import annotations

import pytest

from outpace.controller.weight_publisher import UpdateMode, WeightPublisher


def courier(update: UpdateMode = "inflight", *names: str, version: int = 0) -> WeightPublisher:
    subject = WeightPublisher(update)
    subject.start(dict.fromkeys(names or ("e0",), 0), version)
    subject.published(version)
    return subject


def test_an_engine_that_is_lost_holds_admission_only_if_it_was_the_last_that_served() -> None:
    subject = courier("inflight", "e0", "e1")
    subject.lost("e0")
    assert not subject.blocks_admission
    subject.lost("e1")
    assert subject.blocks_admission
    assert subject.next_loads(busy=False) == [], "nobody is there to load anything"


def test_an_engine_that_comes_back_is_stale_until_its_first_load() -> None:
    subject = courier()
    subject.lost("e0")
    subject.joined("e0")
    assert subject.blocks_admission
    assert subject.next_loads(busy=True) == [("e0", 0)], "though groups run: they wait for it"
    subject.loaded("e0", 0)
    assert not subject.blocks_admission


def test_a_load_under_way_is_forgotten_with_its_engine() -> None:
    subject = courier()
    subject.published(1)
    assert subject.next_loads(busy=False) == [("e0", 1)]
    subject.lost("e0")
    assert subject.loading == {}
    subject.joined("e0")
    subject.published(2)
    assert subject.next_loads(busy=False) == [("e0", 2)]


def test_the_oldest_version_is_that_of_those_who_serve() -> None:
    subject = courier("inflight", "e0", "e1")
    subject.published(1)
    subject.next_loads(busy=False)
    subject.loaded("e1", 1)
    assert subject.oldest == 0
    subject.lost("e0")
    assert subject.oldest == 1


def test_an_engine_may_join_that_was_never_there() -> None:
    subject = courier()
    subject.joined("e9")
    assert not subject.blocks_admission
    assert subject.next_loads(busy=False) == [("e9", 0)]


def test_nobody_joins_twice() -> None:
    with pytest.raises(AssertionError, match=r"\be0\b"):
        courier().joined("e0")


def test_in_lockstep_an_engine_gets_the_very_version_back_that_it_had() -> None:
    subject = courier("lockstep")
    subject.published(1)
    assert subject.leases() == {0, 1}, "the one in force stays, in case the engine dies"
    subject.lost("e0")
    subject.joined("e0")
    assert subject.blocks_admission
    assert subject.next_loads(busy=True) == [("e0", 0)]
    subject.loaded("e0", 0)
    assert subject.next_loads(busy=True) == [], "its groups run"
    assert subject.next_loads(busy=False) == [("e0", 1)]


def test_in_lockstep_nobody_goes_on_while_somebody_is_missing() -> None:
    subject = courier("lockstep", "e0", "e1")
    subject.lost("e1")
    subject.published(1)
    assert subject.blocks_admission
    assert subject.next_loads(busy=False) == []
    subject.joined("e1")
    assert subject.next_loads(busy=False) == [("e1", 0)]


def test_in_lockstep_one_that_never_had_any_weights_gets_the_newest() -> None:
    subject = courier("lockstep", version=4)
    assert subject.blocks_admission
    assert subject.next_loads(busy=False) == [("e0", 4)]
    subject.lost("e0")
    subject.joined("e0")
    assert subject.next_loads(busy=False) == [("e0", 4)]


def test_a_load_that_fails_is_ordered_again_and_the_engine_serves_what_it_had() -> None:
    subject = courier()
    subject.published(1)
    assert subject.next_loads(busy=False) == [("e0", 1)]
    subject.failed("e0", torn=False)
    assert not subject.blocks_admission
    assert subject.oldest == 0
    subject.published(2)
    assert subject.next_loads(busy=False) == [("e0", 2)], "the newest, not the one that failed"


def test_an_engine_whose_load_was_torn_serves_nothing_until_the_next_one() -> None:
    subject = courier("inflight", "e0", "e1")
    subject.published(1)
    subject.next_loads(busy=False)
    subject.loaded("e1", 1)
    subject.failed("e0", torn=True)
    assert subject.oldest == 1, "what it had is not counted on"
    assert subject.next_loads(busy=True) == [("e0", 1)]
    subject.loaded("e0", 1)
    assert not subject.stale


def test_a_failure_that_is_told_after_the_engine_was_lost_changes_nothing() -> None:
    subject = courier()
    subject.published(1)
    subject.next_loads(busy=False)
    subject.lost("e0")
    subject.failed("e0", torn=False)
    assert subject.blocks_admission
    subject.joined("e0")
    assert subject.next_loads(busy=False) == [("e0", 1)]


def test_in_lockstep_a_torn_load_is_made_again_with_the_very_version_that_was_in_force() -> None:
    subject = courier("lockstep")
    subject.published(1)
    assert subject.next_loads(busy=False) == [("e0", 1)]
    subject.failed("e0", torn=True)
    assert subject.blocks_admission
    assert subject.next_loads(busy=False) == [("e0", 0)]


def test_an_engine_that_is_behind_and_too_old_is_left_aside_while_another_serves() -> None:
    subject = courier("inflight", "e0", "e1")
    for version in (1, 2):
        subject.published(version)
        for engine, loaded in subject.next_loads(busy=False):
            if engine == "e1":
                subject.loaded(engine, loaded)
    assert subject.oldest_from(1) == 0, "its load is under way: it is waited for"
    subject.late("e0", 1)
    assert subject.oldest_from(0) == 0
    assert subject.oldest_from(1) == 2
    assert subject.oldest_from(9) == 2, "all are too old: then the one is waited for that is not behind"
    subject.loaded("e0", 1)
    assert subject.oldest_from(1) == 1


def test_a_load_that_was_called_late_after_its_end_changes_nothing() -> None:
    subject = courier("inflight", "e0", "e1")
    subject.published(1)
    subject.next_loads(busy=False)
    subject.loaded("e0", 1)
    subject.late("e0", 1)
    subject.late("e1", 0)
    assert subject.oldest_from(1) == 0


def test_an_engine_that_has_left_is_not_waited_for() -> None:
    subject = courier("inflight", "e0", "e1")
    subject.left("e1")
    assert not subject.stale
    subject.published(1)
    assert subject.next_loads(busy=False) == [("e0", 1)]
