"""Function tools: typed, documented Python functions and methods that the model can call.

    function ─▶ schema for the model
    JSON arguments ─▶ parsed, bounded, checked against the type hints ─▶ call ─▶ result as bounded text

The description of a tool is its docstring up to `Args:` or another section; the entries under `Args:` describe its
parameters.

Arguments and results are untrusted. Every failure of a call becomes a `ToolError`, which is returned to the model and
never fails the episode. A result may be any object, and converting it to text may run user code; the text is
always bounded, encodable and free of binary data.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from outpace.errors import BadInput, one_line
from outpace.models.chat import Schema
from outpace.runtime import async_tools
from outpace.runtime.async_tools import is_own_cancellation
from outpace.runtime.references import load_function


def result_text(value: Any) -> str:
    """Convert a tool result to text: strings verbatim, None as empty, binary data as a description, the rest as JSON.

    May run user code, but does not raise its exceptions."""
    if value is None:
        return ""
    if isinstance(value, str):
        return str.__str__(value)  # ignore the `__str__` of a subclass
    if isinstance(value, bytes | bytearray | memoryview):
        return _binary(value)
    try:
        return json.dumps(value, ensure_ascii=False, default=_non_json)
    except Exception:  # cycles, invalid keys, depth, or user code that raises
        return _safe_str(value)


def truncate_text(text: str, limit: int) -> str:
    """Cut the text to `limit` characters with a note on the rest, and replace characters that cannot be encoded."""
    left_out = len(text) - limit
    kept = text if left_out <= 0 else f"{text[:limit]}\n[{left_out} more characters omitted]"
    return kept.encode("utf-8", "replace").decode()  # a lone surrogate would make the tokenizer fail


def describe_binary(size: int, kind: str = "binary data") -> str:
    return f"[{size} byte{'s' * (size != 1)} of {kind}]"


def describe_error(error: BaseException) -> str:
    """Return an exception in one line: its type and message."""
    message = one_line(_safe_str(error))
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _non_json(value: Any) -> str:
    """Convert a value that JSON does not support."""
    return _binary(value) if isinstance(value, bytes | bytearray | memoryview) else _safe_str(value)


def _binary(value: bytes | bytearray | memoryview) -> str:
    return describe_binary(value.nbytes if isinstance(value, memoryview) else len(value))


def _safe_str(value: object) -> str:
    try:
        return str(value)
    except Exception:  # user-defined `__str__`
        return f"<{type(value).__name__}>"


NOT_TOOLS = ("reset", "get_reward")

_SECTION = re.compile(r"^(?:Args|Returns|Raises|Yields|Examples?):", re.MULTILINE)
_ARGUMENTS_SECTION = re.compile(r"^Args:[ \t]*\n(.*?)(?=^\S|\Z)", re.DOTALL | re.MULTILINE)
_ARGUMENT = re.compile(r"^(\w+)(?: *\([^)]*\))?: *(.*?)(?=^\w+(?: *\([^)]*\))?:|\Z)", re.DOTALL | re.MULTILINE)

log = logging.getLogger(__name__)


class ToolError(Exception):
    """An error of a tool call, returned to the model."""


_raised: set[str] = set()
"""Names of tools that have already raised in this process."""


@dataclass(frozen=True)
class Tool:
    """A function with its schema and parameter types. A method is not bound to an instance."""

    name: str
    schema: Schema
    function: Callable[..., Any]
    parameters: dict[str, TypeAdapter[Any]]
    required: frozenset[str]

    async def call(self, arguments: dict[str, Any]) -> Any:
        """Call the function and return the result. Non-async functions run on a thread.

        Raises `ToolError` for invalid arguments and for any exception of the function."""
        checked = self.checked(arguments)
        try:
            return await async_tools.call_user_function(self.function, **checked)
        # User code may raise anything; the error is returned to the model.
        except BaseException as error:
            if is_own_cancellation(error):
                raise
            # Warn once per tool: it may be a bug in the tool.
            level = logging.DEBUG if self.name in _raised else logging.WARNING
            log.log(level, "tool %s raised", self.name, exc_info=True)
            _raised.add(self.name)
            raise ToolError(f"{self.name} raised {describe_error(error)}") from error

    def checked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Convert the arguments to the declared types. Raises `ToolError`."""
        missing, unknown = self.required - arguments.keys(), arguments.keys() - self.parameters.keys()
        if missing:
            raise ToolError(f"{self.name} needs {', '.join(sorted(missing))}")
        if unknown:
            raise ToolError(f"{self.name} does not take {one_line(', '.join(sorted(unknown)), 100)}")
        return {name: self._checked_value(name, value) for name, value in arguments.items()}

    def _checked_value(self, name: str, value: Any) -> Any:
        try:
            return self.parameters[name].validate_python(value)
        except ValidationError as error:
            raise ToolError(f"{self.name}: {name}: {one_line(error.errors()[0]['msg'])}") from None
        except Exception as error:  # types may have custom validators, which may raise anything
            raise ToolError(f"{self.name}: {name}: {describe_error(error)}") from error


def tools_of(environment: type, setting: str = "rollout.environment") -> dict[str, Tool]:
    """Return the tools of an environment class by name. Raises `BadInput` for an unsuitable method."""
    methods = inspect.getmembers(environment, inspect.isroutine)
    return {
        name: _method_tool(method, name, f"{setting}: {environment.__name__}.{name}")
        for name, method in methods
        if not name.startswith("_") and name not in NOT_TOOLS
    }


def load_tools(given: Iterable[str | Callable[..., Any]], setting: str = "tools.functions") -> list[Tool]:
    """Load functions, or references to functions, as tools. Raises `BadInput` for an unsuitable function."""
    tools = [_function_tool(function, setting) for function in given]
    names = [tool.name for tool in tools]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise BadInput(f"{setting}: two functions are named {duplicates[0]}; rename one")
    return tools


def _function_tool(given: str | Callable[..., Any], setting: str) -> Tool:
    function = load_function(given, setting) if isinstance(given, str) else given
    name = getattr(function, "__name__", "")
    where = f"{setting}: {given if isinstance(given, str) else name or one_line(repr(given), 60)}"
    if not inspect.isroutine(function) or not name.isidentifier():
        raise BadInput(f"{where} must be a named function; its name becomes the tool name")
    if not inspect.getdoc(function):
        raise BadInput(f"{where} needs a docstring; it is the tool description for the model")
    return _tool(function, name, where)


def _method_tool(method: Callable[..., Any], name: str, where: str) -> Tool:
    if not inspect.getdoc(method):
        raise BadInput(f"{where} is public and therefore a tool, which needs a docstring; add one")
    return _tool(method, name, where)


# ----------------------------------------------------------------------------------------------------------- schemas


def _tool(function: Callable[..., Any], name: str, where: str) -> Tool:
    document = inspect.getdoc(function) or ""
    descriptions = _parameter_descriptions(document)
    parameters = _parameters(function, where)
    adapters = {parameter.name: _adapter(parameter, where) for parameter in parameters}
    properties = {
        key: {**adapter.json_schema(), **({"description": descriptions[key]} if key in descriptions else {})}
        for key, adapter in adapters.items()
    }
    required = [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]
    function_schema = {
        "name": name,
        "description": _SECTION.split(document)[0].strip(),
        "parameters": {
            "type": "object",
            "properties": properties,
            **({"required": required} if required else {}),
        },
    }
    return Tool(name, {"type": "function", "function": function_schema}, function, adapters, frozenset(required))


def _parameters(function: Callable[..., Any], where: str) -> list[inspect.Parameter]:
    """Return the parameters without `self`, with resolved type hints."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        signature = inspect.signature(function)
    except Exception as error:  # resolving a hint evaluates user code
        raise BadInput(f"{where}: cannot resolve a type hint: {describe_error(error)}") from None
    found = [
        parameter.replace(annotation=hints.get(parameter.name, inspect.Parameter.empty))
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    for parameter in found:
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise BadInput(f"{where}: {parameter} cannot be passed by name, and a model passes all arguments by name")
        if parameter.annotation is inspect.Parameter.empty:
            raise BadInput(f"{where}: {parameter.name} needs a type hint")
    return found


def _adapter(parameter: inspect.Parameter, where: str) -> TypeAdapter[Any]:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(parameter.annotation)
        adapter.json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError):
        raise BadInput(f"{where}: the type of {parameter.name} has no JSON schema") from None
    return adapter


def _parameter_descriptions(document: str) -> dict[str, str]:
    """Return the parameter descriptions under `Args:`."""
    section = _ARGUMENTS_SECTION.search(document)
    if section is None:
        return {}
    return {name: " ".join(text.split()) for name, text in _ARGUMENT.findall(inspect.cleandoc(section[1]))}


MAX_DEPTH = 100
"""Maximum nesting of objects and lists. JSON parsers fail at somewhat deeper nesting."""


def read_arguments(tool: str, text: str) -> dict[str, Any]:
    """Parse the JSON arguments of a call; empty text means no arguments. Raises `ToolError`.

    A tool may run in another process or behind a shared connection, so text that cannot be encoded and nesting that is
    too deep are rejected here."""
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments of {tool} are not valid JSON: {one_line(error)}") from None
    if not isinstance(arguments, dict):
        raise ToolError(f"the arguments of {tool} are not a JSON object")
    if _nests_deeper_than(MAX_DEPTH, arguments):
        raise ToolError(f"the arguments of {tool} are nested deeper than {MAX_DEPTH} levels")
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # lone surrogate: valid in JSON, but not in UTF-8
        raise ToolError(f"the arguments of {tool} contain a lone surrogate such as \\ud800") from None
    return arguments


def _nests_deeper_than(limit: int, value: Any) -> bool:
    layer = [value]
    for _ in range(limit):
        layer = [inner for outer in layer for inner in json_children(outer)]
        if not layer:
            return False
    return True


def json_children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
