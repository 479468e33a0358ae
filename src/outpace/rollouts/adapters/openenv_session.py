"""MERGED"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from outpace.errors import one_line

SETTING = "rollout.environment"
MAX_MESSAGE = 64 * 2**20


class ServerRefused(Exception):
    """The server replied with an error; the message is shown to the policy, or logged if the episode fails."""


@dataclass(frozen=True)
class Place:
    """Address and connection options of an OpenEnv server."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 60.0

    async def connect(self) -> Session:
        import aiohttp  # slow to import and rarely needed

        http = aiohttp.ClientSession(headers=self.headers)
        try:
            async with asyncio.timeout(self.timeout_s):
                return Session(http, await http.ws_connect(f"{self.url}/ws", max_msg_size=MAX_MESSAGE), self)
        except BaseException:
            await http.close()
            raise


class Session:
    """One connection to the server, which is one environment there."""

    def __init__(self, http: Any, socket: Any, server: Place) -> None:
        self._http, self._socket, self._server = http, socket, server

    async def request(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message; return the data of the reply. Raises `OpenEnvError`; other exceptions end the session."""
        if self._http.closed:
            raise ServerRefused("the session on the server has ended")
        try:
            async with asyncio.timeout(self._server.timeout_s):
                await self._socket.send_json({"type": kind, "data": data})
                reply = json.loads(await self._socket.receive_str())
        except BaseException:
            await self._http.close()  # at once: the WebSocket closing handshake would wait for a busy server
            raise
        content: dict[str, Any] = reply.get("data") or {}
        if reply.get("type") == "error":
            reasons = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in content.get("errors", ())]
            raise ServerRefused(one_line("; ".join(reasons) or content.get("message") or content))
        return content

    async def action_schema(self) -> dict[str, Any]:
        async with self._http.get(f"{self._server.url}/schema") as response:
            response.raise_for_status()
            schema: dict[str, Any] = (await response.json())["action"]
        return schema

    async def close(self) -> None:
        if not self._http.closed:
            await self._socket.close()
            await self._http.close()
