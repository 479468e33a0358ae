"""MERGED"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class OneThread:
    """Runs the file operations of a transport in one thread, in the order of the calls.

    A thread cannot be cancelled: a `prepare` that timed out keeps running, and the next one would write to the same
    place. Here the next one waits for its turn, within its own deadline."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "transport")

    async def run(self, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Run `call` in the thread. A call whose caller was cancelled before its turn is skipped."""
        return await asyncio.wrap_future(self._executor.submit(call, *arguments, **options))

    def close(self) -> None:
        """Drop queued calls. A running call finishes in the background."""
        self._executor.shutdown(wait=False, cancel_futures=True)
