"""The tools of an OpenEnv server, as typed methods of an environment class.

A server that offers MCP tools has one tool for each of them. Any other has the one tool `step`, with the fields of its
action as parameters. The model is shown the server's own JSON schemas.
"""

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
class Offered:
    """A tool of the server: what it says of it, and the action that calling it is."""

    name: str
    description: str
    schema: dict[str, Any]
    action: Callable[[dict[str, Any]], dict[str, Any]]


async def discovered(place: Place) -> list[Offered]:
    """Raises `BadInput` if there is no such server."""
    try:
        session = await place.connect()
        try:
            return await _offered(session)
        finally:
            await session.close()
    except BadInput:
        raise
    except Exception as error:  # the boundary to a server that may be absent, or something else altogether
        why = one_line(error) or type(error).__name__
        raise BadInput(f"{SETTING}: no OpenEnv server answers at {place.url}: {why}") from error


async def _offered(session: Session) -> list[Offered]:
    """The MCP tools of the server, or the one tool that its schema describes."""
    try:
        told = await session.ask("step", {"type": "list_tools"})
        return [_mcp_tool(tool) for tool in told["observation"]["tools"]]
    except (ServerRefused, KeyError, TypeError):  # its actions are others
        pass
    schema = await session.action_schema()
    fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
    said = schema.get("description") or "Take one step in the environment."
    return [Offered("step", said, {**schema, "properties": fields}, lambda arguments: arguments)]


def _mcp_tool(tool: dict[str, Any]) -> Offered:
    name = tool["name"]

    def action(arguments: dict[str, Any]) -> dict[str, Any]:
        return {"type": "call_tool", "tool_name": name, "arguments": arguments}

    return Offered(name, tool.get("description") or name, tool.get("input_schema") or {}, action)


def method_of(tool: Offered) -> Callable[..., Any]:
    """A method that takes what the schema says; the model is shown the schema as it is."""
    if tool.name in NOT_TOOLS or tool.name.startswith("_"):
        raise BadInput(f"{SETTING}: the server has a tool {tool.name}, which is no name for one here")

    async def method(self: Any, **arguments: Any) -> str:
        text: str = await self._step(tool.action(arguments))
        return text

    fields: dict[str, Any] = tool.schema.get("properties", {})
    hints = {name: _hint(field) for name, field in fields.items()}
    try:
        parameters = [_parameter(name, name in tool.schema.get("required", ())) for name in fields]
    except ValueError as error:  # not an identifier, or a word of Python
        raise BadInput(f"{SETTING}: the tool {tool.name} has a parameter that cannot be named: {error}") from None
    described = [
        f"    {name}: {one_line(field['description'])}" for name, field in fields.items() if field.get("description")
    ]
    method.__name__ = tool.name
    method.__doc__ = "\n".join([tool.description, *(["", "Args:", *described] if described else [])])
    method.__annotations__ = hints
    method.__signature__ = inspect.Signature([_parameter("self", True), *parameters])  # type: ignore[attr-defined]
    return method


def _parameter(name: str, required: bool) -> inspect.Parameter:
    """What is not required and not given is not sent."""
    default = inspect.Parameter.empty if required else None
    return inspect.Parameter(
        name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD if name == "self" else inspect.Parameter.KEYWORD_ONLY,
        default=default,
    )


def _hint(field: dict[str, Any]) -> Any:
    """The Python type to check, and the JSON schema to show; one that refers to others is left to the server."""
    shown = {key: value for key, value in field.items() if key not in ("description", "title")}
    if "$ref" in json.dumps(shown):
        return Any
    kind = shown.get("type")
    return Annotated[TYPES.get(kind, Any) if isinstance(kind, str) else Any, WithJsonSchema(shown)]
