"""Tools: the public, typed methods of an environment, as a model is shown them and as it calls them.

A tool's description is its docstring up to `Args:` or another such section; what stands under `Args:` describes its
parameters. What a model asks for is data from outside: arguments are checked against the method's type hints, and
whatever goes wrong is an answer to the model, never an error of the episode.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from outpace.errors import BadInput, one_line
from outpace.models.chat import Schema
from outpace.runtime import threads

NOT_TOOLS = ("reset", "get_reward")

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_SECTION = re.compile(r"^(?:Args|Returns|Raises|Yields|Examples?):", re.MULTILINE)
_ARGUMENTS_SECTION = re.compile(r"^Args:[ \t]*\n(.*?)(?=^\S|\Z)", re.DOTALL | re.MULTILINE)
_ARGUMENT = re.compile(r"^(\w+)(?: *\([^)]*\))?: *(.*?)(?=^\w+(?: *\([^)]*\))?:|\Z)", re.DOTALL | re.MULTILINE)


class ToolError(Exception):
    """Something the model should hear about a call that it made."""


@dataclass(frozen=True)
class Tool:
    """One method: what the model is shown, and what it takes."""

    name: str
    schema: Schema
    parameters: dict[str, TypeAdapter[Any]]
    required: frozenset[str]

    async def run(self, environment: object, arguments: dict[str, Any]) -> str:
        """The result as text for the model; raises `ToolError` for whatever goes wrong."""
        checked = self._checked(arguments)
        try:
            return _as_text(await threads.call(getattr(environment, self.name), **checked))
        except (Exception, SystemExit) as error:  # the boundary to the user's code: the model may learn from it
            raise ToolError(f"{self.name} raised {type(error).__name__}: {one_line(error)}") from error

    def _checked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        missing, unknown = self.required - arguments.keys(), arguments.keys() - self.parameters.keys()
        if missing:
            raise ToolError(f"{self.name} needs {', '.join(sorted(missing))}")
        if unknown:
            raise ToolError(f"{self.name} does not take {', '.join(sorted(unknown))}")
        return {name: self._value(name, value) for name, value in arguments.items()}

    def _value(self, name: str, value: Any) -> Any:
        try:
            return self.parameters[name].validate_python(value)
        except ValidationError as error:
            raise ToolError(f"{self.name}: {name}: {error.errors()[0]['msg']}") from None


@dataclass(frozen=True)
class Call:
    """What a model asked for."""

    name: str
    arguments: dict[str, Any]


def tools_of(environment: type) -> dict[str, Tool]:
    """The tools of an environment class, by name. Raises `BadInput` for a method that cannot be one."""
    methods = inspect.getmembers(environment, inspect.isroutine)
    return {
        name: _tool(method, name, f"{environment.__name__}.{name}")
        for name, method in methods
        if not name.startswith("_") and name not in NOT_TOOLS
    }


def parse_calls(text: str) -> list[Call | ToolError]:
    """The calls that an answer makes, in order; one that cannot be read is a `ToolError` in its place."""
    return [_parse(body) for body in _CALL.findall(text)]


def _parse(body: str) -> Call | ToolError:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolError(f"this tool call is not valid JSON: {one_line(error)}")
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolError('a tool call is an object like {"name": "...", "arguments": {...}}')
    return Call(name, arguments)


def _as_text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


# ----------------------------------------------------------------------------------------------------------- schemas


def _tool(method: Callable[..., Any], name: str, where: str) -> Tool:
    document = inspect.getdoc(method)
    if not document:
        raise BadInput(f"rollout.environment: {where} is public, so it is a tool, and a tool needs a docstring")
    told = _parameters_told(document)
    parameters = _parameters(method, where)
    adapters = {parameter.name: _adapter(parameter, where) for parameter in parameters}
    properties = {
        key: {**adapter.json_schema(), **({"description": told[key]} if key in told else {})}
        for key, adapter in adapters.items()
    }
    required = [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]
    function = {
        "name": name,
        "description": _SECTION.split(document)[0].strip(),
        "parameters": {
            "type": "object",
            "properties": properties,
            **({"required": required} if required else {}),
        },
    }
    return Tool(name, {"type": "function", "function": function}, adapters, frozenset(required))


def _parameters(method: Callable[..., Any], where: str) -> list[inspect.Parameter]:
    """The parameters with their hints resolved, without `self`."""
    try:
        hints = typing.get_type_hints(method)
    except NameError as error:
        raise BadInput(f"rollout.environment: {where}: a type hint cannot be resolved: {error}") from None
    found = [
        parameter.replace(annotation=hints.get(parameter.name, inspect.Parameter.empty))
        for parameter in inspect.signature(method).parameters.values()
        if parameter.name != "self"
    ]
    for parameter in found:
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise BadInput(f"rollout.environment: {where}: a model names its arguments; {parameter} has no name for it")
        if parameter.annotation is inspect.Parameter.empty:
            raise BadInput(f"rollout.environment: {where}: {parameter.name} needs a type hint")
    return found


def _adapter(parameter: inspect.Parameter, where: str) -> TypeAdapter[Any]:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(parameter.annotation)
        adapter.json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError):
        raise BadInput(f"rollout.environment: {where}: {parameter.name} cannot be written as JSON") from None
    return adapter


def _parameters_told(document: str) -> dict[str, str]:
    """The descriptions under `Args:`, by parameter."""
    section = _ARGUMENTS_SECTION.search(document)
    if section is None:
        return {}
    return {name: " ".join(text.split()) for name, text in _ARGUMENT.findall(inspect.cleandoc(section[1]))}
