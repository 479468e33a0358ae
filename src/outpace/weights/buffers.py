"""Which buffer the next snapshot goes into: the one rule that keeps what somebody reads from being overwritten.

Invariants
- Neither the latest complete snapshot, nor one that is being sealed or `held`, nor a leased one is ever given out.
- Buffers are added only when all are in use, so their number is bounded by the leases; none is ever taken away.
- Making one may take many times as long as a copy: whoever has the time makes it ahead, beside those who take one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from outpace.types import Version
from outpace.weights.snapshot import VOID


@dataclass(kw_only=True)
class Buffer:
    content: Tensor  # all of it, as uint8
    views: list[Tensor]  # every tensor's place in it
    version: Version = VOID
    sealed: bool = True


B = TypeVar("B", bound=Buffer)


class Buffers(Generic[B]):
    """Safe to call from several threads at once."""

    def __init__(self, make: Callable[[int], B]) -> None:
        """`make` gives buffer number so-and-so."""
        self.latest: Version = VOID
        self.all: list[B] = []
        self._make = make
        self._held: list[Version] = []
        self._lock = threading.Lock()
        self._making = threading.Lock()  # held by whoever makes one

    def make_ready(self, leased: Collection[Version]) -> None:
        """See to it that the next `take` finds one, if those leased now are the ones leased then."""
        with self._making:
            if not self._has_free(leased):
                buffer = self._make(len(self.all))
                with self._lock:
                    self.all.append(buffer)

    def take(self, version: Version, leased: Collection[Version]) -> B:
        """One for `version`, which is being written from here on."""
        if not self._has_free(leased):
            self.make_ready(leased)
        with self._lock:
            buffer = min(self._free(leased), key=lambda each: each.version)
            buffer.version, buffer.sealed = version, False
        return buffer

    def seal(self, buffer: B) -> None:
        """It is complete."""
        with self._lock:
            buffer.sealed = True
            self.latest = max(self.latest, buffer.version)

    @contextmanager
    def held_latest(self) -> Iterator[B | None]:
        """The latest complete one, which stays as it is meanwhile."""
        with self._lock:
            buffer = next((each for each in self.all if each.sealed and each.version == self.latest != VOID), None)
            if buffer is not None:
                self._held.append(buffer.version)
        try:
            yield buffer
        finally:
            if buffer is not None:
                with self._lock:
                    self._held.remove(buffer.version)

    def _has_free(self, leased: Collection[Version]) -> bool:
        with self._lock:
            return bool(self._free(leased))

    def _free(self, leased: Collection[Version]) -> list[B]:
        used = {self.latest, *self._held, *leased} - {VOID}
        return [each for each in self.all if each.sealed and each.version not in used]
