"""Loaded versions of a server: which requests are admitted, and which adapters can be removed."""

from __future__ import annotations

import pytest

from outpace.engines.server.admission import LoadedVersions
from outpace.engines.server.protocol import STALE
from outpace.errors import RequestFailed
from support import naming


def test_a_request_is_admitted_when_its_version_is_loaded() -> None:
    loaded = LoadedVersions(3)
    assert loaded.admits(3, None)
    assert not loaded.admits(4, None)
    loaded.record_load(4)
    assert loaded.admits(4, None)


def test_a_stale_server_neither_admits_nor_refuses_requests() -> None:
    loaded = LoadedVersions(STALE)
    assert not loaded.admits(0, None)
    assert not loaded.admits(0, 5)


def test_a_request_for_a_version_that_is_not_pinned_is_refused() -> None:
    loaded = LoadedVersions(3)
    with pytest.raises(RequestFailed, match="version 3"):
        loaded.admits(0, 3)
    loaded.record_load(2, "v2", pinned=True)
    assert loaded.admits(0, 2)
    with pytest.raises(RequestFailed, match=naming("version 3", "version 2")):
        loaded.admits(0, 3)


def test_an_older_version_is_a_downgrade_after_a_load_and_after_a_torn_load() -> None:
    loaded = LoadedVersions(0)
    loaded.record_load(5)
    assert loaded.is_downgrade(4)
    assert not loaded.is_downgrade(5)
    loaded.mark_unknown()
    assert loaded.is_downgrade(4)
    assert not loaded.is_downgrade(5)


def test_an_adapter_stays_while_a_request_or_pin_uses_it() -> None:
    loaded = LoadedVersions(0)
    loaded.record_load(1, "v1")
    assert loaded.take(None) == 1
    loaded.record_load(2, "v2")
    loaded.record_load(2, "v2", pinned=True)
    assert (loaded.adapter(1), loaded.adapter(2), loaded.adapter(0)) == ("v1", "v2", None)
    assert loaded.remove_unused() == []
    loaded.give_back(1)
    assert loaded.remove_unused() == [1]
    loaded.record_load(3, "v3")
    assert loaded.remove_unused() == []  # 2 is pinned
    loaded.pinned = None
    assert loaded.remove_unused() == [2]
    assert loaded.remove_unused() == []


def test_after_a_torn_update_all_adapters_are_removed_even_if_requests_use_them() -> None:
    loaded = LoadedVersions(0)
    loaded.record_load(1, "v1")
    loaded.take(None)
    loaded.mark_unknown()
    assert not loaded.has_adapter(1)
    assert loaded.remove_unused() == [1]
    assert loaded.remove_unused() == []


def test_an_adapter_loaded_again_after_a_torn_update_is_not_removed() -> None:
    loaded = LoadedVersions(0)
    loaded.record_load(1, "v1")
    loaded.mark_unknown()
    loaded.record_load(1, "v1")
    assert loaded.remove_unused() == []
