"""Which weights a server holds, and who samples by them. Pure bookkeeping.

Whole models replace one another: there is one version, and what runs goes on under the next. Adapters stand beside one
another: a request keeps the one it began with, and one that nobody uses any more may go.
"""

from __future__ import annotations

from collections import Counter

from outpace.engines.servers.spec import STALE
from outpace.errors import RequestFailed
from outpace.types import Version


class Shelf:
    def __init__(self, version: Version) -> None:
        self.version = version
        self.pinned: Version | None = None
        self.newest = version  # that it was ever told to hold: tokens can be of no later one
        self._served = version
        self._adapters: dict[Version, str] = {}
        self._users: Counter[Version] = Counter()
        self._lost: set[Version] = set()  # torn off the shelf, and to be forgotten

    def admits(self, min_version: Version, pinned: Version | None) -> bool:
        """Whether such a request can be served now. Raises `RequestFailed` where it never will be."""
        if self.version == STALE:
            return False
        if pinned is None:
            return self.version >= min_version
        if pinned != self.pinned:
            resident = "none" if self.pinned is None else f"version {self.pinned}"
            raise RequestFailed(f"version {pinned} is not pinned in this engine ({resident} is)")
        return True

    def goes_back(self, version: Version) -> bool:
        return version < self._served

    def holds(self, version: Version) -> bool:
        """Whether its adapter is registered."""
        return version in self._adapters

    def take(self, pinned: Version | None) -> Version:
        """Somebody begins to sample; by which version."""
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
        """Nobody knows what it holds."""
        self.version = STALE
        self.pinned = None
        self._lost |= self._adapters.keys()
        self._adapters.clear()

    def take_unused(self) -> list[Version]:
        """Versions whose adapters nobody needs any more; they are off the shelf."""
        unused = [v for v in self._adapters if v not in (self.version, self.pinned) and not self._users[v]]
        for version in unused:
            del self._adapters[version], self._users[version]
        lost, self._lost = self._lost - self._adapters.keys(), set()
        return [*unused, *sorted(lost)]
