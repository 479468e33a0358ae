"""What a server holds: who is admitted, and what may be forgotten."""

from __future__ import annotations

import pytest

from outpace.engines.server.admission import LoadedVersions
from outpace.engines.server.protocol import STALE
from outpace.errors import RequestFailed
from support import naming


def test_a_request_is_admitted_when_its_version_is_there() -> None:
    shelf = LoadedVersions(3)
    assert shelf.admits(3, None)
    assert not shelf.admits(4, None)
    shelf.record_load(4)
    assert shelf.admits(4, None)


def test_a_stale_shelf_admits_nobody_and_refuses_nobody() -> None:
    shelf = LoadedVersions(STALE)
    assert not shelf.admits(0, None)
    assert not shelf.admits(0, 5)


def test_a_version_that_is_not_pinned_is_refused() -> None:
    shelf = LoadedVersions(3)
    with pytest.raises(RequestFailed, match="version 3"):
        shelf.admits(0, 3)
    shelf.record_load(2, "v2", pinned=True)
    assert shelf.admits(0, 2)
    with pytest.raises(RequestFailed, match=naming("version 3", "version 2")):
        shelf.admits(0, 3)


def test_versions_go_back_neither_after_a_load_nor_after_a_torn_one() -> None:
    shelf = LoadedVersions(0)
    shelf.record_load(5)
    assert shelf.is_downgrade(4)
    assert not shelf.is_downgrade(5)
    shelf.mark_unknown()
    assert shelf.is_downgrade(4)
    assert not shelf.is_downgrade(5)


def test_an_adapter_stays_while_anybody_needs_it() -> None:
    shelf = LoadedVersions(0)
    shelf.record_load(1, "v1")
    assert shelf.take(None) == 1
    shelf.record_load(2, "v2")
    shelf.record_load(2, "v2", pinned=True)
    assert (shelf.adapter(1), shelf.adapter(2), shelf.adapter(0)) == ("v1", "v2", None)
    assert shelf.remove_unused() == []
    shelf.give_back(1)
    assert shelf.remove_unused() == [1]
    shelf.record_load(3, "v3")
    assert shelf.remove_unused() == []  # 2 is pinned
    shelf.pinned = None
    assert shelf.remove_unused() == [2]
    assert shelf.remove_unused() == []


def test_a_torn_shelf_holds_nothing_whoever_still_samples_by_it() -> None:
    shelf = LoadedVersions(0)
    shelf.record_load(1, "v1")
    shelf.take(None)
    shelf.mark_unknown()
    assert not shelf.has_adapter(1)
    assert shelf.remove_unused() == [1]
    assert shelf.remove_unused() == []


def test_what_was_torn_off_and_is_back_is_not_forgotten() -> None:
    shelf = LoadedVersions(0)
    shelf.record_load(1, "v1")
    shelf.mark_unknown()
    shelf.record_load(1, "v1")
    assert shelf.remove_unused() == []
