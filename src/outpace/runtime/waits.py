"""MERGED"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

_waits: dict[int, tuple[str, float]] = {}
_ids = itertools.count()


@contextmanager
def waiting(reason: str) -> Iterator[None]:
    """Register a wait until the block ends. Thread-safe."""
    number = next(_ids)
    _waits[number] = (reason, time.monotonic())
    try:
        yield
    finally:
        del _waits[number]


def longest(most: int = 20) -> list[str]:
    """Return the oldest waits of this process, one line each."""
    now = time.monotonic()
    oldest = sorted(_waits.values(), key=lambda wait: wait[1])
    lines = [f"{reason}, for {now - since:.1f} s" for reason, since in oldest[:most]]
    return lines + ([f"and {len(oldest) - most} more"] if len(oldest) > most else [])
