"""Environments behind an OpenEnv server, by URL.

    class creation: fetch the server's tools once ─▶ one typed method per tool
    episode:        reset ─▶ tool calls, each one step on the server ─▶ get_reward, which also ends the session

A server with MCP tools has one tool for each of them. Any other server has the single tool `step`, with the fields of
its action as parameters. The model sees the server's own JSON schemas.

Invariants
- Each episode has its own session on the server (JSON messages over `/ws`), which ends with the episode, even a
  cancelled one. A session is one environment and sends one message at a time.
- A session interrupted between message and reply is closed, so a late reply never answers another message.
- The reward is the sum of the server's step rewards.
- `metadata` of an observation is not shown to the policy.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import WithJsonSchema

from outpace.errors import BadInput, one_line
from outpace.rollouts.adapters.gymnasium import EPISODE_OVER
from outpace.rollouts.tools.functions import NOT_TOOLS

SETTING = "rollout.environment"
MAX_MESSAGE = 64 * 2**20


class OpenEnvError(Exception):
    """The server replied with an error; the message is shown to the policy, or logged if the episode fails."""


@dataclass(frozen=True)
class OpenEnvServer:
    """Address and connection options of an OpenEnv server."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 60.0

    async def connect(self) -> OpenEnvSession:
        import aiohttp  # slow to import and rarely needed

        http = aiohttp.ClientSession(headers=self.headers)
        try:
            async with asyncio.timeout(self.timeout_s):
                return OpenEnvSession(http, await http.ws_connect(f"{self.url}/ws", max_msg_size=MAX_MESSAGE), self)
        except BaseException:
            await http.close()
            raise


class OpenEnvSession:
    """One connection to the server, which is one environment there."""

    def __init__(self, http: Any, socket: Any, server: OpenEnvServer) -> None:
        self._http, self._socket, self._server = http, socket, server

    async def request(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message; return the data of the reply. Raises `OpenEnvError`; other exceptions end the session."""
        if self._http.closed:
            raise OpenEnvError("the session on the server has ended")
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
            raise OpenEnvError(one_line("; ".join(reasons) or content.get("message") or content))
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


TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list[Any],
    "object": dict[str, Any],
}


@dataclass(frozen=True)
class ServerTool:
    """A tool of the server. `action` converts the arguments of a call to the action that is sent."""

    name: str
    description: str
    schema: dict[str, Any]
    action: Callable[[dict[str, Any]], dict[str, Any]]


async def discover_tools(server: OpenEnvServer) -> list[ServerTool]:
    """Return the tools of the server; raises `BadInput` if it cannot be reached."""
    try:
        session = await server.connect()
        try:
            return await _list_tools(session)
        finally:
            await session.close()
    except BadInput:
        raise
    except Exception as error:  # boundary: there may be no server, or a different one
        why = one_line(error) or type(error).__name__
        raise BadInput(f"{SETTING}: no OpenEnv server answers at {server.url}: {why}") from error


async def _list_tools(session: OpenEnvSession) -> list[ServerTool]:
    """Return the MCP tools of the server, or the single tool that its action schema describes."""
    try:
        reply = await session.request("step", {"type": "list_tools"})
        return [_mcp_tool(tool) for tool in reply["observation"]["tools"]]
    except (OpenEnvError, KeyError, TypeError):  # not an MCP server
        pass
    schema = await session.action_schema()
    fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
    description = schema.get("description") or "Take one step in the environment."
    return [ServerTool("step", description, {**schema, "properties": fields}, lambda arguments: arguments)]


def _mcp_tool(tool: dict[str, Any]) -> ServerTool:
    name = tool["name"]

    def action(arguments: dict[str, Any]) -> dict[str, Any]:
        return {"type": "call_tool", "tool_name": name, "arguments": arguments}

    return ServerTool(name, tool.get("description") or name, tool.get("input_schema") or {}, action)


def tool_method(tool: ServerTool) -> Callable[..., Any]:
    """Build a method with the parameters of the schema; the model sees the schema unchanged."""
    if tool.name in NOT_TOOLS or tool.name.startswith("_"):
        raise BadInput(f"{SETTING}: the server has a tool named {tool.name}, which is reserved here")

    async def method(self: Any, **arguments: Any) -> str:
        text: str = await self._step(tool.action(arguments))
        return text

    fields: dict[str, Any] = tool.schema.get("properties", {})
    hints = {name: _hint(field) for name, field in fields.items()}
    try:
        parameters = [_parameter(name, name in tool.schema.get("required", ())) for name in fields]
    except ValueError as error:  # not an identifier, or a Python keyword
        raise BadInput(f"{SETTING}: the tool {tool.name} has a parameter with an invalid name: {error}") from None
    described = [
        f"    {name}: {one_line(field['description'])}" for name, field in fields.items() if field.get("description")
    ]
    method.__name__ = tool.name
    method.__doc__ = "\n".join([tool.description, *(["", "Args:", *described] if described else [])])
    method.__annotations__ = hints
    method.__signature__ = inspect.Signature([_parameter("self", True), *parameters])  # type: ignore[attr-defined]
    return method


def _parameter(name: str, required: bool) -> inspect.Parameter:
    """Build one parameter; optional parameters that are not given are not sent."""
    default = inspect.Parameter.empty if required else None
    return inspect.Parameter(
        name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD if name == "self" else inspect.Parameter.KEYWORD_ONLY,
        default=default,
    )


def _hint(field: dict[str, Any]) -> Any:
    """Return the Python type to validate with the JSON schema to show. Schemas with `$ref` are left to the server."""
    shown = {key: value for key, value in field.items() if key not in ("description", "title")}
    if "$ref" in json.dumps(shown):
        return Any
    kind = shown.get("type")
    return Annotated[TYPES.get(kind, Any) if isinstance(kind, str) else Any, WithJsonSchema(shown)]


HIDDEN = ("metadata", "tool_name", "error")


def openenv_environment(url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> type[Any]:
    """Return a class for `rollout.environment` with the tools of the server, which must already be running.

    `headers` are sent with every connection; `timeout_s` is the timeout of one reply."""
    server = OpenEnvServer(url.rstrip("/"), dict(headers or {}), timeout_s)
    with ThreadPoolExecutor(1) as executor:  # the caller may be running an event loop
        tools = executor.submit(asyncio.run, discover_tools(server)).result()
    methods = {tool.name: tool_method(tool) for tool in tools}
    return type("OpenEnv", (_OpenEnvEpisode,), {"_server": server, **methods})


class _OpenEnvEpisode:
    """One environment on the server; the subclass has a method for each tool."""

    _server: OpenEnvServer

    def __init__(self) -> None:
        self._session: OpenEnvSession | None = None
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
            return EPISODE_OVER
        reply = await self._session.request("step", action)
        self._reward += float(reply.get("reward") or 0.0)
        self._over = bool(reply.get("done"))
        text = observation_text(reply.get("observation"))
        return f"{text}\n{EPISODE_OVER}" if self._over else text

    async def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _close_abandoned(loop: asyncio.AbstractEventLoop, session: OpenEnvSession) -> None:
    """Close the session of an episode that ended before `get_reward`."""
    if not loop.is_closed():
        asyncio.run_coroutine_threadsafe(session.close(), loop)


def observation_text(observation: Any) -> str:
    """Return the observation as shown to the policy: a single field as is, several as JSON."""
    if not isinstance(observation, Mapping):
        return _text(observation)
    error = observation.get("error")
    if error:
        raise OpenEnvError(one_line(error.get("message", error) if isinstance(error, Mapping) else error))
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
        raise OpenEnvError(one_line(" ".join(texts)))
    return result["data"] if result.get("data") is not None else "\n".join(texts)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
