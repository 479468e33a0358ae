"""A thread for what a transport does with files: one thing after another, in the order in which it was asked.

A thread cannot be cancelled. A preparation that was given up because it took too long goes on, and the next one would
write to the same place beside it: here it waits for its turn, within the same deadline as for all else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class OneThread:
    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "transport")

    async def run(self, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """What nobody waits for any more when its turn comes is not done."""
        return await asyncio.wrap_future(self._executor.submit(call, *arguments, **options))

    def close(self) -> None:
        """What runs comes to its end, without anybody who waits for it."""
        self._executor.shutdown(wait=False, cancel_futures=True)
