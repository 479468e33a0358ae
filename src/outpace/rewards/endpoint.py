"""MERGED"""

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
"""Backoff before the first retry, before jitter; doubles with each retry."""
MAX_ANSWER = 1 << 22


class _Retry(Exception):
    """A failure worth retrying. `after_s` is the server's Retry-After."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


class Endpoint:
    """HTTP client with a concurrency limit, retries and bounded responses."""

    def __init__(self, concurrency: int) -> None:
        import aiohttp

        self.users = 0
        self._slots = asyncio.Semaphore(concurrency)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency))

    async def close(self) -> None:
        await self._session.close()

    async def post(
        self, address: str, body: dict[str, Any], headers: Mapping[str, str], timeout_s: float, retries: int
    ) -> bytes:
        """Return the body of a 200 response; raises `RequestFailed` that names the address otherwise."""
        async with self._slots:
            last = ""
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    for attempt in range(retries + 1):
                        try:
                            return await self._once(address, body, headers)
                        except _Retry as error:
                            last = str(error)
                            if attempt < retries:
                                await _back_off(attempt, error.after_s, limit)
            except TimeoutError:
                earlier = f"; earlier it {last}" if last else ""
                raise RequestFailed(f"{address} did not answer within {timeout_s:g} s{earlier}") from None
            raise RequestFailed(f"{address} {last}")

    async def _once(self, address: str, body: dict[str, Any], headers: Mapping[str, str]) -> bytes:
        import aiohttp

        try:
            async with self._session.post(address, json=body, headers=headers, allow_redirects=False) as response:
                content = await _read_bounded(response)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
            raise _Retry(f"cannot be reached: {one_line(error) or type(error).__name__}") from error
        except aiohttp.ClientError as error:
            raise RequestFailed(f"request to {address} failed: {type(error).__name__}: {one_line(error)}") from error
        if response.status == 200:
            return content
        why = f"answered {response.status}: {one_line(content.decode('utf-8', 'replace'))}"
        if response.status == 429 or response.status >= 500:
            raise _Retry(why, _retry_after_s(response.headers.get("Retry-After", "")))
        raise RequestFailed(f"{address} {why}")


_endpoints: PerLoop[dict[int, Endpoint]] = PerLoop()


@asynccontextmanager
async def shared_endpoint(concurrency: int) -> AsyncIterator[Endpoint]:
    """Yield the endpoint of the running event loop with that concurrency limit."""
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


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > MAX_ANSWER:
            raise RequestFailed(f"{response.url} sent more than {MAX_ANSWER} bytes")
    return bytes(content)


def pause_s(attempt: int, asked_s: float) -> float:
    """Return the wait before the next retry: exponential backoff with jitter, but at least the server's Retry-After."""
    return max(asked_s, FIRST_PAUSE_S * 2.0**attempt * random.uniform(0.5, 1.5))


async def _back_off(attempt: int, asked_s: float, limit: asyncio.Timeout) -> None:
    """Wait before the next attempt; raise `TimeoutError` at once if the wait would exceed the timeout."""
    pause = pause_s(attempt, asked_s)
    ends = asyncio.get_running_loop().time() + pause
    if ends >= (limit.when() or 0.0):
        raise TimeoutError
    await asyncio.sleep(pause)


def _retry_after_s(header: str) -> float:
    """Parse Retry-After in seconds. A date is ignored, because it would require synchronized clocks."""
    return float(header) if header.isdigit() else 0.0
