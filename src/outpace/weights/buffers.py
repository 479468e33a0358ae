"""MERGED"""

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
    """Memory for one snapshot."""

    content: Tensor  # the whole buffer as uint8
    views: list[Tensor]  # one view per tensor
    version: Version = VOID
    sealed: bool = True


B = TypeVar("B", bound=Buffer)


class Buffers(Generic[B]):
    """Snapshot buffers, reused. Thread-safe."""

    def __init__(self, make: Callable[[int], B]) -> None:
        """`make(n)` allocates buffer number n."""
        self.latest: Version = VOID
        self.all: list[B] = []
        self._make = make
        self._held: list[Version] = []
        self._lock = threading.Lock()
        self._allocating = threading.Lock()  # held while allocating

    def make_ready(self, leased: Collection[Version]) -> None:
        """Allocate a buffer if none is free. The next `take` then does not allocate, given the same leases."""
        with self._allocating:
            if not self._any_free(leased):
                buffer = self._make(len(self.all))
                with self._lock:
                    self.all.append(buffer)

    def take(self, version: Version, leased: Collection[Version]) -> B:
        """Return a free buffer for `version`, marked as being written."""
        if not self._any_free(leased):
            self.make_ready(leased)
        with self._lock:
            buffer = min(self._free(leased), key=lambda each: each.version)
            buffer.version, buffer.sealed = version, False
        return buffer

    def seal(self, buffer: B) -> None:
        """Mark the buffer as complete."""
        with self._lock:
            buffer.sealed = True
            self.latest = max(self.latest, buffer.version)

    @contextmanager
    def held_latest(self) -> Iterator[B | None]:
        """Yield the latest complete buffer, or None. It is not reused inside the context."""
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

    def _any_free(self, leased: Collection[Version]) -> bool:
        with self._lock:
            return bool(self._free(leased))

    def _free(self, leased: Collection[Version]) -> list[B]:
        used = {self.latest, *self._held, *leased} - {VOID}
        return [each for each in self.all if each.sealed and each.version not in used]
