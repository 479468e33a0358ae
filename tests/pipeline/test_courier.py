"""Engines that come, go and come back."""

from __future__ import annotations

import pytest

from outpace.pipeline.courier import Courier, Update


def courier(update: Update = "inflight", *names: str, version: int = 0) -> Courier:
    subject = Courier(update)
    subject.start(dict.fromkeys(names or ("e0",), 0), version)
    subject.published(version)
    return subject


def test_an_engine_that_is_lost_holds_admission_only_if_it_was_the_last_that_served() -> None:
    subject = courier("inflight", "e0", "e1")
    subject.lost("e0")
    assert not subject.holds_admission
    subject.lost("e1")
    assert subject.holds_admission
    assert subject.deliver(busy=False) == [], "nobody is there to load anything"


def test_an_engine_that_comes_back_is_stale_until_its_first_load() -> None:
    subject = courier()
    subject.lost("e0")
    subject.joined("e0")
    assert subject.holds_admission
    assert subject.deliver(busy=True) == [("e0", 0)], "though groups run: they wait for it"
    subject.loaded("e0", 0)
    assert not subject.holds_admission


def test_a_load_under_way_is_forgotten_with_its_engine() -> None:
    subject = courier()
    subject.published(1)
    assert subject.deliver(busy=False) == [("e0", 1)]
    subject.lost("e0")
    assert subject.loading == {}
    subject.joined("e0")
    subject.published(2)
    assert subject.deliver(busy=False) == [("e0", 2)]


def test_the_oldest_version_is_that_of_those_who_serve() -> None:
    subject = courier("inflight", "e0", "e1")
    subject.published(1)
    subject.deliver(busy=False)
    subject.loaded("e1", 1)
    assert subject.oldest == 0
    subject.lost("e0")
    assert subject.oldest == 1


def test_an_engine_may_join_that_was_never_there() -> None:
    subject = courier()
    subject.joined("e9")
    assert not subject.holds_admission
    assert subject.deliver(busy=False) == [("e9", 0)]


def test_nobody_joins_twice() -> None:
    with pytest.raises(AssertionError, match="joined twice"):
        courier().joined("e0")


def test_in_lockstep_an_engine_gets_the_very_version_back_that_it_had() -> None:
    subject = courier("lockstep")
    subject.published(1)
    assert subject.leases() == {0, 1}, "the one in force stays, in case the engine dies"
    subject.lost("e0")
    subject.joined("e0")
    assert subject.holds_admission
    assert subject.deliver(busy=True) == [("e0", 0)]
    subject.loaded("e0", 0)
    assert subject.deliver(busy=True) == [], "its groups run"
    assert subject.deliver(busy=False) == [("e0", 1)]


def test_in_lockstep_nobody_goes_on_while_somebody_is_missing() -> None:
    subject = courier("lockstep", "e0", "e1")
    subject.lost("e1")
    subject.published(1)
    assert subject.holds_admission
    assert subject.deliver(busy=False) == []
    subject.joined("e1")
    assert subject.deliver(busy=False) == [("e1", 0)]


def test_in_lockstep_one_that_never_had_any_weights_gets_the_newest() -> None:
    subject = courier("lockstep", version=4)
    assert subject.holds_admission
    assert subject.deliver(busy=False) == [("e0", 4)]
    subject.lost("e0")
    subject.joined("e0")
    assert subject.deliver(busy=False) == [("e0", 4)]
