"""Tools: typed, documented Python functions and methods, as a model is shown them and as it calls them.

A tool's description is its docstring up to `Args:` or another such section; what stands under `Args:` describes its
parameters. What a model asks for is data from outside: arguments are checked against the type hints, and whatever goes
wrong with a call is a `ToolError`, an answer to the model, never an error of the episode.
"""

from __future__ import annotations

import inspect
import logging
import re
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from outpace.errors import BadInput, one_line
from outpace.models.chat import Schema
from outpace.references import load_function
from outpace.rollouts.tools.results import told
from outpace.runtime import threads
from outpace.runtime.limits import is_ours

NOT_TOOLS = ("reset", "get_reward")

_SECTION = re.compile(r"^(?:Args|Returns|Raises|Yields|Examples?):", re.MULTILINE)
_ARGUMENTS_SECTION = re.compile(r"^Args:[ \t]*\n(.*?)(?=^\S|\Z)", re.DOTALL | re.MULTILINE)
_ARGUMENT = re.compile(r"^(\w+)(?: *\([^)]*\))?: *(.*?)(?=^\w+(?: *\([^)]*\))?:|\Z)", re.DOTALL | re.MULTILINE)

log = logging.getLogger(__name__)


class ToolError(Exception):
    """Something the model should hear about a call that it made."""


_raised: set[str] = set()
"""Names of tools that have raised in this process."""


@dataclass(frozen=True)
class Tool:
    """One function: what the model is shown of it, and what it takes. That of a method is not bound to an instance."""

    name: str
    schema: Schema
    function: Callable[..., Any]
    parameters: dict[str, TypeAdapter[Any]]
    required: frozenset[str]

    async def call(self, arguments: dict[str, Any], bound: Callable[..., Any] | None = None) -> Any:
        """What the function returns, or `bound` where it is the method of an instance; plain ones run on a thread.

        Raises `ToolError` for arguments that do not fit and for whatever the function raises."""
        checked = self.checked(arguments)
        try:
            return await threads.call(bound or self.function, **checked)
        # The boundary to the user's code, which may raise anything at all: the model may learn from it.
        except BaseException as error:
            if is_ours(error):
                raise
            # Once for people, who may have a bug to mend; the rest is for the model.
            level = logging.DEBUG if self.name in _raised else logging.WARNING
            log.log(level, "the tool %s raised", self.name, exc_info=True)
            _raised.add(self.name)
            raise ToolError(f"{self.name} raised {told(error)}") from error

    def checked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments in the types that the function declares, or `ToolError`."""
        missing, unknown = self.required - arguments.keys(), arguments.keys() - self.parameters.keys()
        if missing:
            raise ToolError(f"{self.name} needs {', '.join(sorted(missing))}")
        if unknown:
            raise ToolError(f"{self.name} does not take {one_line(', '.join(sorted(unknown)), 100)}")
        return {name: self._value(name, value) for name, value in arguments.items()}

    def _value(self, name: str, value: Any) -> Any:
        try:
            return self.parameters[name].validate_python(value)
        except ValidationError as error:
            raise ToolError(f"{self.name}: {name}: {one_line(error.errors()[0]['msg'])}") from None
        except Exception as error:  # a boundary: types may bring validators of their own
            raise ToolError(f"{self.name}: {name}: {told(error)}") from error


def tools_of(environment: type, setting: str = "rollout.environment") -> dict[str, Tool]:
    """The tools of an environment class, which `setting` names, by name. Raises `BadInput` for a method that cannot be
    one."""
    methods = inspect.getmembers(environment, inspect.isroutine)
    return {
        name: _method_tool(method, name, f"{setting}: {environment.__name__}.{name}")
        for name, method in methods
        if not name.startswith("_") and name not in NOT_TOOLS
    }


def load_tools(given: Iterable[str | Callable[..., Any]], setting: str = "tools.functions") -> list[Tool]:
    """Functions, or references to such, as tools. Raises `BadInput` for one that cannot be a tool."""
    tools = [_function_tool(one, setting) for one in given]
    names = [tool.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadInput(f"{setting}: two functions are called {twice[0]}, and a model calls tools by name; rename one")
    return tools


def _function_tool(given: str | Callable[..., Any], setting: str) -> Tool:
    function = load_function(given, setting) if isinstance(given, str) else given
    name = getattr(function, "__name__", "")
    where = f"{setting}: {given if isinstance(given, str) else name or one_line(repr(given), 60)}"
    if not inspect.isroutine(function) or not name.isidentifier():
        raise BadInput(f"{where} should be a function with a name, which is that of the tool")
    if not inspect.getdoc(function):
        raise BadInput(f"{where} needs a docstring, which tells the model what it does")
    return _tool(function, name, where)


def _method_tool(method: Callable[..., Any], name: str, where: str) -> Tool:
    if not inspect.getdoc(method):
        raise BadInput(f"{where} is public, so it is a tool, and a tool needs a docstring")
    return _tool(method, name, where)


# ----------------------------------------------------------------------------------------------------------- schemas


def _tool(function: Callable[..., Any], name: str, where: str) -> Tool:
    document = inspect.getdoc(function) or ""
    described = _parameters_told(document)
    parameters = _parameters(function, where)
    adapters = {parameter.name: _adapter(parameter, where) for parameter in parameters}
    properties = {
        key: {**adapter.json_schema(), **({"description": described[key]} if key in described else {})}
        for key, adapter in adapters.items()
    }
    required = [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]
    shown = {
        "name": name,
        "description": _SECTION.split(document)[0].strip(),
        "parameters": {
            "type": "object",
            "properties": properties,
            **({"required": required} if required else {}),
        },
    }
    return Tool(name, {"type": "function", "function": shown}, function, adapters, frozenset(required))


def _parameters(function: Callable[..., Any], where: str) -> list[inspect.Parameter]:
    """The parameters with their hints resolved, without `self`."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        signature = inspect.signature(function)
    except Exception as error:  # a boundary: resolving a hint evaluates what the user wrote
        raise BadInput(f"{where}: a type hint cannot be resolved: {told(error)}") from None
    found = [
        parameter.replace(annotation=hints.get(parameter.name, inspect.Parameter.empty))
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    for parameter in found:
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise BadInput(f"{where}: a model names its arguments; {parameter} has no name for it")
        if parameter.annotation is inspect.Parameter.empty:
            raise BadInput(f"{where}: {parameter.name} needs a type hint")
    return found


def _adapter(parameter: inspect.Parameter, where: str) -> TypeAdapter[Any]:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(parameter.annotation)
        adapter.json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError):
        raise BadInput(f"{where}: {parameter.name} cannot be written as JSON") from None
    return adapter


def _parameters_told(document: str) -> dict[str, str]:
    """The descriptions under `Args:`, by parameter."""
    section = _ARGUMENTS_SECTION.search(document)
    if section is None:
        return {}
    return {name: " ".join(text.split()) for name, text in _ARGUMENT.findall(inspect.cleandoc(section[1]))}
