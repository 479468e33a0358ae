"""What a server holds: who is admitted, and what may be forgotten."""

from __future__ import annotations

import pytest

from outpace.engines.servers.door.shelf import Shelf
from outpace.engines.servers.spec import STALE
from outpace.errors import RequestFailed
from support import naming


def test_a_request_is_admitted_when_its_version_is_there() -> None:
    shelf = Shelf(3)
    assert shelf.admits(3, None)
    assert not shelf.admits(4, None)
    shelf.put(4)
    assert shelf.admits(4, None)


def test_a_stale_shelf_admits_nobody_and_refuses_nobody() -> None:
    shelf = Shelf(STALE)
    assert not shelf.admits(0, None)
    assert not shelf.admits(0, 5)


def test_a_version_that_is_not_pinned_is_refused() -> None:
    shelf = Shelf(3)
    with pytest.raises(RequestFailed, match="version 3"):
        shelf.admits(0, 3)
    shelf.put(2, "v2", pinned=True)
    assert shelf.admits(0, 2)
    with pytest.raises(RequestFailed, match=naming("version 3", "version 2")):
        shelf.admits(0, 3)


def test_versions_go_back_neither_after_a_load_nor_after_a_torn_one() -> None:
    shelf = Shelf(0)
    shelf.put(5)
    assert shelf.goes_back(4)
    assert not shelf.goes_back(5)
    shelf.tear()
    assert shelf.goes_back(4)
    assert not shelf.goes_back(5)


def test_an_adapter_stays_while_anybody_needs_it() -> None:
    shelf = Shelf(0)
    shelf.put(1, "v1")
    assert shelf.take(None) == 1
    shelf.put(2, "v2")
    shelf.put(2, "v2", pinned=True)
    assert (shelf.adapter(1), shelf.adapter(2), shelf.adapter(0)) == ("v1", "v2", None)
    assert shelf.take_unused() == []
    shelf.give_back(1)
    assert shelf.take_unused() == [1]
    shelf.put(3, "v3")
    assert shelf.take_unused() == []  # 2 is pinned
    shelf.pinned = None
    assert shelf.take_unused() == [2]
    assert shelf.take_unused() == []


def test_a_torn_shelf_holds_nothing_whoever_still_samples_by_it() -> None:
    shelf = Shelf(0)
    shelf.put(1, "v1")
    shelf.take(None)
    shelf.tear()
    assert not shelf.holds(1)
    assert shelf.take_unused() == [1]
    assert shelf.take_unused() == []


def test_what_was_torn_off_and_is_back_is_not_forgotten() -> None:
    shelf = Shelf(0)
    shelf.put(1, "v1")
    shelf.tear()
    shelf.put(1, "v1")
    assert shelf.take_unused() == []
