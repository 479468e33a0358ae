"""Requests to somebody else's HTTP endpoint, which may be slow, overloaded or wrong.

Invariants
- One session per event loop while anybody uses it; the last one to leave closes it.
- At most so many requests are under way at once; the time of one counts from when it is sent, and includes its retries.
- Tried again, after a pause with jitter, is what failed on the way, 429 and 5xx. Any other refusal is final.
- What comes back is of bounded size.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from outpace.errors import RequestFailed, one_line
from outpace.runtime.per_loop import PerLoop

if TYPE_CHECKING:
    import aiohttp

FIRST_PAUSE_S = 0.5
"""Before the first retry, more or less; twice as long before each further one."""
MAX_ANSWER = 1 << 22


class _Retry(Exception):
    """It may work later. `after_s` is what the server asked for."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


class Endpoint:
    def __init__(self, concurrency: int) -> None:
        import aiohttp

        self.users = 0
        self._places = asyncio.Semaphore(concurrency)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency))

    async def close(self) -> None:
        await self._session.close()

    async def post(
        self, address: str, body: dict[str, Any], headers: Mapping[str, str], timeout_s: float, retries: int
    ) -> bytes:
        """The body of a good answer; `RequestFailed`, naming the address, otherwise."""
        async with self._places:
            last = ""
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    for attempt in range(retries + 1):
                        try:
                            return await self._once(address, body, headers)
                        except _Retry as error:
                            last = str(error)
                            if attempt < retries:
                                await _pause(attempt, error.after_s, limit)
            except TimeoutError:
                said = f"; before, it {last}" if last else ""
                raise RequestFailed(f"{address} gave no answer within {timeout_s:g} s{said}") from None
            raise RequestFailed(f"{address} {last}")

    async def _once(self, address: str, body: dict[str, Any], headers: Mapping[str, str]) -> bytes:
        import aiohttp

        try:
            async with self._session.post(address, json=body, headers=headers, allow_redirects=False) as response:
                answer = await _bounded(response)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
            raise _Retry(f"cannot be reached: {one_line(error) or type(error).__name__}") from error
        except aiohttp.ClientError as error:
            raise RequestFailed(f"{address} cannot be asked: {type(error).__name__}: {one_line(error)}") from error
        if response.status == 200:
            return answer
        why = f"answered {response.status}: {one_line(answer.decode('utf-8', 'replace'))}"
        if response.status == 429 or response.status >= 500:
            raise _Retry(why, _seconds(response.headers.get("Retry-After", "")))
        raise RequestFailed(f"{address} {why}")


_endpoints: PerLoop[dict[int, Endpoint]] = PerLoop()


@asynccontextmanager
async def shared_endpoint(concurrency: int) -> AsyncIterator[Endpoint]:
    """The one of the running loop with that limit."""
    endpoints = _endpoints.get(dict)
    if concurrency not in endpoints:
        endpoints[concurrency] = Endpoint(concurrency)
    endpoint = endpoints[concurrency]
    endpoint.users += 1
    try:
        yield endpoint
    finally:
        endpoint.users -= 1
        if not endpoint.users:
            del endpoints[concurrency]
            await endpoint.close()


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    answer = bytearray()
    async for chunk in response.content.iter_any():
        answer += chunk
        if len(answer) > MAX_ANSWER:
            raise RequestFailed(f"{response.url} sent more than {MAX_ANSWER} bytes")
    return bytes(answer)


def pause_s(attempt: int, asked_s: float) -> float:
    """What the server asked for, and no less than our own pause, which grows."""
    return max(asked_s, FIRST_PAUSE_S * 2.0**attempt * random.uniform(0.5, 1.5))


async def _pause(attempt: int, asked_s: float, limit: asyncio.Timeout) -> None:
    """Wait before the next attempt, unless that would be after the time limit."""
    pause = pause_s(attempt, asked_s)
    ends = asyncio.get_running_loop().time() + pause
    if ends >= (limit.when() or 0.0):
        raise TimeoutError
    await asyncio.sleep(pause)


def _seconds(header: str) -> float:
    """Of Retry-After. It may also be a date, which is not worth a clock that is right."""
    return float(header) if header.isdigit() else 0.0
