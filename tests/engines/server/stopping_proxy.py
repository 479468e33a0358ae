"""A proxy in front of a server that can stop the server at the start of an update."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
from aiohttp import web

UPDATE = "/collective_rpc"


class StoppingProxy:
    """Forward all requests, including streams. Call `before_update` with the update's number before each update."""

    def __init__(self, target: str, before_update: Callable[[int], None]) -> None:
        self._target = target
        self._before_update = before_update
        self.updates = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == UPDATE:
            self.updates += 1
            self._before_update(self.updates)
        url = f"{self._target}{request.path_qs}"
        async with self._client.request(
            request.method, url, data=body, headers={"Content-Type": "application/json"}
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            return response

    @asynccontextmanager
    async def serving(self, port: int) -> Any:
        patient = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=patient, connector=connector) as self._client:
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route("*", "/{path:.*}", self.handle)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            try:
                yield f"http://127.0.0.1:{port}"
            finally:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(runner.cleanup(), 5)
