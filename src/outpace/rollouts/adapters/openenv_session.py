"""One connection to an OpenEnv server: JSON messages over its `/ws` endpoint, one answer to each.

Invariants
- A session is one environment on the server, and sends one message at a time.
- What was interrupted between message and answer is not used again: a late answer is never taken for another one's.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from outpace.errors import one_line

SETTING = "rollout.environment"
MAX_MESSAGE = 64 * 2**20


class ServerRefused(Exception):
    """The server answered with an error; its text is for the policy, or for the log of a failed episode."""


@dataclass(frozen=True)
class Place:
    """Where the server is, and how it is spoken to."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 60.0

    async def connect(self) -> Session:
        import aiohttp  # here: it takes a while, and few runs need it

        http = aiohttp.ClientSession(headers=self.headers)
        try:
            async with asyncio.timeout(self.timeout_s):
                return Session(http, await http.ws_connect(f"{self.url}/ws", max_msg_size=MAX_MESSAGE), self)
        except BaseException:
            await http.close()
            raise


class Session:
    def __init__(self, http: Any, socket: Any, place: Place) -> None:
        self._http, self._socket, self._place = http, socket, place

    async def ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The data of the answer. Raises `ServerRefused`; after anything else that it raises, the session has ended."""
        if self._http.closed:
            raise ServerRefused("the session on the server has ended")
        try:
            async with asyncio.timeout(self._place.timeout_s):
                await self._socket.send_json({"type": kind, "data": data})
                answer = json.loads(await self._socket.receive_str())
        except BaseException:
            await self._http.close()  # at once, without the farewell that a busy server would be late for
            raise
        told: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") == "error":
            reasons = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in told.get("errors", ())]
            raise ServerRefused(one_line("; ".join(reasons) or told.get("message") or told))
        return told

    async def action_schema(self) -> dict[str, Any]:
        async with self._http.get(f"{self._place.url}/schema") as response:
            response.raise_for_status()
            schema: dict[str, Any] = (await response.json())["action"]
        return schema

    async def close(self) -> None:
        if not self._http.closed:
            await self._socket.close()
            await self._http.close()
