"""MERGED"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import WithJsonSchema

from outpace.errors import BadInput, one_line
from outpace.rollouts.adapters.openenv_session import SETTING, Place, ServerRefused, Session
from outpace.rollouts.tools.functions import NOT_TOOLS

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
    """A tool of the server: its description, and the action that a call is sent as."""

    name: str
    description: str
    schema: dict[str, Any]
    action: Callable[[dict[str, Any]], dict[str, Any]]


async def discovered(server: Place) -> list[ServerTool]:
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


async def _list_tools(session: Session) -> list[ServerTool]:
    """Return the MCP tools of the server, or the single tool that its action schema describes."""
    try:
        reply = await session.request("step", {"type": "list_tools"})
        return [_mcp_tool(tool) for tool in reply["observation"]["tools"]]
    except (ServerRefused, KeyError, TypeError):  # not an MCP server
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


def method_of(tool: ServerTool) -> Callable[..., Any]:
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
