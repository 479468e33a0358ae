"""Environments behind an OpenEnv server, by URL.

    class made: the server is asked once for its tools ─▶ one typed method per tool
    episode:    reset ─▶ tool calls, each one step of the server ─▶ get_reward, which also ends the session

Invariants
- An episode is a session of its own on the server, which ends with it, also when it was given up.
- The reward is the sum of what the server says after each step, and nothing else.
- `metadata` of an observation is not shown to the policy.
"""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from outpace.errors import one_line
from outpace.rollouts.adapters.gymnasium_text import OVER
from outpace.rollouts.adapters.openenv_session import Place, ServerRefused, Session
from outpace.rollouts.adapters.openenv_tools import discovered, method_of

HIDDEN = ("metadata", "tool_name", "error")


def openenv_environment(url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> type[Any]:
    """A class for `rollout.environment`, whose tools are those of the server, which must be running already.

    `headers` go with every connection; `timeout_s` is how long one answer may take."""
    place = Place(url.rstrip("/"), dict(headers or {}), timeout_s)
    with ThreadPoolExecutor(1) as elsewhere:  # a caller may have an event loop of its own
        tools = elsewhere.submit(asyncio.run, discovered(place)).result()
    methods = {tool.name: method_of(tool) for tool in tools}
    return type("OpenEnv", (_Episode,), {"_place": place, **methods})


class _Episode:
    """One environment of the server; the subclass has a method for each tool."""

    _place: Place

    def __init__(self) -> None:
        self._session: Session | None = None
        self._reward = 0.0
        self._over = True

    async def reset(self, **columns: Any) -> str:
        """The columns of the task go to the server, which takes those that its own `reset` knows."""
        self._reward, self._over = 0.0, False
        if self._session is None:
            self._session = await self._place.connect()
            weakref.finalize(self, _leave, asyncio.get_running_loop(), self._session).atexit = False
        try:
            told = await self._session.ask("reset", columns)
        except BaseException:
            await self._left()
            raise
        return observation_text(told.get("observation"))

    async def get_reward(self) -> float:
        await self._left()
        return self._reward

    async def _step(self, action: dict[str, Any]) -> str:
        if self._over or self._session is None:
            return OVER
        told = await self._session.ask("step", action)
        self._reward += float(told.get("reward") or 0.0)
        self._over = bool(told.get("done"))
        text = observation_text(told.get("observation"))
        return f"{text}\n{OVER}" if self._over else text

    async def _left(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _leave(loop: asyncio.AbstractEventLoop, session: Session) -> None:
    """For an episode that was given up before its reward was asked for."""
    if not loop.is_closed():
        asyncio.run_coroutine_threadsafe(session.close(), loop)


def observation_text(observation: Any) -> str:
    """What the policy is shown: the only field as it is, or all of them as JSON."""
    if not isinstance(observation, Mapping):
        return _text(observation)
    error = observation.get("error")
    if error:
        raise ServerRefused(one_line(error.get("message", error) if isinstance(error, Mapping) else error))
    shown = {key: value for key, value in observation.items() if key not in HIDDEN and value not in (None, "", [], {})}
    if list(shown) == ["result"]:
        return _text(_tool_result(shown["result"]))
    return _text(next(iter(shown.values())) if len(shown) == 1 else shown or None)


def _tool_result(result: Any) -> Any:
    """What an MCP tool returned, out of its envelope."""
    if not isinstance(result, Mapping) or "content" not in result:
        return result
    texts = [part["text"] for part in result["content"] or () if isinstance(part, Mapping) and part.get("text")]
    if result.get("is_error"):
        raise ServerRefused(one_line(" ".join(texts)))
    return result["data"] if result.get("data") is not None else "\n".join(texts)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
