"""MERGED"""

from __future__ import annotations

from collections import Counter

from outpace.engines.servers.spec import STALE
from outpace.errors import RequestFailed
from outpace.types import Version


class Shelf:
    """Which weight versions the server has, and how many requests use each. Pure bookkeeping."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self.pinned: Version | None = None
        self.newest = version  # ever sent to the server; no token can be newer
        self._served = version
        self._adapters: dict[Version, str] = {}
        self._users: Counter[Version] = Counter()
        self._lost: set[Version] = set()  # adapters dropped by a torn update, still to be removed from the server

    def admits(self, min_version: Version, pinned: Version | None) -> bool:
        """Whether a request can be served now. Raises `RequestFailed` if it never can."""
        if self.version == STALE:
            return False
        if pinned is None:
            return self.version >= min_version
        if pinned != self.pinned:
            current = "none" if self.pinned is None else f"version {self.pinned}"
            raise RequestFailed(f"version {pinned} is not pinned in this engine (pinned: {current})")
        return True

    def goes_back(self, version: Version) -> bool:
        return version < self._served

    def holds(self, version: Version) -> bool:
        """Whether the adapter of this version is registered."""
        return version in self._adapters

    def take(self, pinned: Version | None) -> Version:
        """Count one more user of the current (or pinned) version and return that version."""
        version = self.version if pinned is None else pinned
        self._users[version] += 1
        return version

    def give_back(self, version: Version) -> None:
        self._users[version] -= 1

    def adapter(self, version: Version) -> str | None:
        return self._adapters.get(version)

    def put(self, version: Version, adapter: str | None = None, *, pinned: bool = False) -> None:
        if adapter is not None:
            self._adapters[version] = adapter
        if pinned:
            self.pinned = version
        else:
            self.version = self._served = version
        self.newest = max(self.newest, version)

    def tear(self) -> None:
        """Record that the server's weights are unknown."""
        self.version = STALE
        self.pinned = None
        self._lost |= self._adapters.keys()
        self._adapters.clear()

    def take_unused(self) -> list[Version]:
        """Drop and return the versions whose adapters are no longer needed."""
        unused = [v for v in self._adapters if v not in (self.version, self.pinned) and not self._users[v]]
        for version in unused:
            del self._adapters[version], self._users[version]
        lost, self._lost = self._lost - self._adapters.keys(), set()
        return [*unused, *sorted(lost)]
