"""MERGED"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

from outpace.engines.embedded.request import Done
from outpace.errors import OutpaceError, RequestFailed
from outpace.types import Generation


class Submissions:
    """Futures of the pending requests. Event loop only.

    The compute thread identifies a submission by its key, callers by a request id, which may be reused.
    """

    def __init__(self) -> None:
        self._serial = itertools.count()
        self._keys: dict[str, str] = {}  # request id -> key of its newest submission
        self._answers: dict[str, asyncio.Future[Generation]] = {}  # by key

    def __len__(self) -> int:
        return len(self._answers)

    def refuse_twice(self, request_id: str) -> None:
        if request_id in self._keys:
            raise RequestFailed(f"request {request_id} is already in flight")

    def new_key(self, request_id: str) -> str:
        return f"{request_id} #{next(self._serial)}"

    async def answer(self, request_id: str, key: str) -> Generation:
        """Wait for the result of the submission with this key."""
        self._keys[request_id] = key
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._answers[key] = future
        try:
            return await future
        finally:
            del self._keys[request_id], self._answers[key]

    def keys_of(self, request_ids: Iterable[str]) -> set[str]:
        """Return the keys of those requests that are still pending."""
        return {self._keys[request_id] for request_id in request_ids if request_id in self._keys}

    def settle(self, finished: Iterable[Done]) -> None:
        for done in finished:
            future = self._answers.get(done.id)
            if future is None or future.done():
                continue  # the caller is gone
            if isinstance(done.result, Generation):
                future.set_result(done.result)
            else:
                future.set_exception(done.result)

    def fail(self, error: OutpaceError) -> None:
        for future in self._answers.values():
            if not future.done():
                future.set_exception(error)
