"""MERGED"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Generic

from outpace.runtime.limits import T


class PerLoop(Generic[T]):
    """One object per event loop, created on first use and dropped with the loop."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, T] = weakref.WeakKeyDictionary()

    def get(self, make: Callable[[], T]) -> T:
        """Return the object of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._made:
            self._made[loop] = make()
        return self._made[loop]
