"""Environments behind an OpenEnv server, by URL.

    class creation: fetch the server's tools once ─▶ one typed method per tool
    episode:        reset ─▶ tool calls, each one step on the server ─▶ get_reward, which also ends the session

A server with MCP tools has one tool for each of them. Any other server has the single tool `step`, with the fields of
its action as parameters. The model sees the server's own JSON schemas.

Invariants
- Each episode has its own session on the server (JSON messages over `/ws`), which ends with the episode, even if that
  is cancelled. A session is one environment and sends one message at a time.
- A session interrupted between message and reply is not used again, so a late reply is never taken for another's.
- The reward is the sum of the server's step rewards.
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
    """Return a class for `rollout.environment` with the tools of the server, which must already be running.

    `headers` are sent with every connection; `timeout_s` is the timeout of one reply."""
    server = Place(url.rstrip("/"), dict(headers or {}), timeout_s)
    with ThreadPoolExecutor(1) as executor:  # the caller may be running an event loop
        tools = executor.submit(asyncio.run, discovered(server)).result()
    methods = {tool.name: method_of(tool) for tool in tools}
    return type("OpenEnv", (_OpenEnvEpisode,), {"_server": server, **methods})


class _OpenEnvEpisode:
    """One environment on the server; the subclass has a method for each tool."""

    _server: Place

    def __init__(self) -> None:
        self._session: Session | None = None
        self._reward = 0.0
        self._over = True

    async def reset(self, **columns: Any) -> str:
        """Reset on the server. All task columns are sent; the server uses those that its `reset` accepts."""
        self._reward, self._over = 0.0, False
        if self._session is None:
            self._session = await self._server.connect()
            weakref.finalize(self, _close_abandoned, asyncio.get_running_loop(), self._session).atexit = False
        try:
            reply = await self._session.request("reset", columns)
        except BaseException:
            await self._close_session()
            raise
        return observation_text(reply.get("observation"))

    async def get_reward(self) -> float:
        await self._close_session()
        return self._reward

    async def _step(self, action: dict[str, Any]) -> str:
        if self._over or self._session is None:
            return OVER
        reply = await self._session.request("step", action)
        self._reward += float(reply.get("reward") or 0.0)
        self._over = bool(reply.get("done"))
        text = observation_text(reply.get("observation"))
        return f"{text}\n{OVER}" if self._over else text

    async def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _close_abandoned(loop: asyncio.AbstractEventLoop, session: Session) -> None:
    """Close the session of an episode that ended before `get_reward`."""
    if not loop.is_closed():
        asyncio.run_coroutine_threadsafe(session.close(), loop)


def observation_text(observation: Any) -> str:
    """Return the observation as shown to the policy: a single field as is, several as JSON."""
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
    """Unwrap the result of an MCP tool."""
    if not isinstance(result, Mapping) or "content" not in result:
        return result
    texts = [part["text"] for part in result["content"] or () if isinstance(part, Mapping) and part.get("text")]
    if result.get("is_error"):
        raise ServerRefused(one_line(" ".join(texts)))
    return result["data"] if result.get("data") is not None else "\n".join(texts)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
