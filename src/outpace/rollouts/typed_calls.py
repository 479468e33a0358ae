"""MERGED"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from outpace.errors import BadInput, one_line
from outpace.models.chat import Schema
from outpace.rollouts.human import Typed

CALL = "/call"


def read_answer(lines: Sequence[str], tools: Sequence[Schema]) -> Typed:
    """Parse typed lines into text and tool calls. Raises `BadInput` for a malformed call."""
    calls = tuple(read_call(line, tools) for line in lines if is_call(line))
    text_lines = [line[1:] if line.startswith("//") else line for line in lines if not is_call(line)]
    return Typed("\n".join(text_lines), calls)


def is_call(line: str) -> bool:
    return line.split(maxsplit=1)[:1] == [CALL]


def read_call(line: str, tools: Sequence[Schema]) -> tuple[str, dict[str, Any]]:
    _, name, rest = (*line.split(maxsplit=2), "", "")[:3]
    if not name:
        raise BadInput(f"{CALL}: name a tool, as in {CALL} name key=value or {CALL} name {{JSON}}")
    rest = rest.strip()
    if rest.startswith("{"):
        return name, _parse_object(name, rest)
    return name, _parse_pairs(name, rest, _string_parameters(name, tools))


def _parse_object(name: str, text: str) -> dict[str, Any]:
    try:
        arguments: dict[str, Any] = json.loads(text)  # text that starts with a brace is an object, or fails to parse
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{CALL} {name}: not valid JSON: {one_line(error)}") from None
    return arguments


def _parse_pairs(name: str, text: str, string_parameters: set[str]) -> dict[str, Any]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInput(f"{CALL} {name}: {one_line(error)}; quote text as in key='two words'") from None
    for word in words:
        if not word.partition("=")[0].isidentifier() or "=" not in word:
            raise BadInput(f"{CALL} {name}: {one_line(word, 60)!r} is not key=value; quote text as in key='two words'")
    pairs = [word.partition("=") for word in words]
    return {key: value if key in string_parameters else _parse_value(value) for key, _, value in pairs}


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _string_parameters(name: str, tools: Sequence[Schema]) -> set[str]:
    """Return the string parameters of a tool. Their values are never parsed as JSON."""
    described: Schema = next((tool["function"] for tool in tools if tool["function"].get("name") == name), {})
    properties = described.get("parameters", {}).get("properties", {})
    return {key for key, schema in properties.items() if schema.get("type") == "string"}


def signature(tool: Schema) -> str:
    """Describe a tool in one line: `look_up(volume: integer, page: integer)  description`."""
    described = tool["function"]
    parameters = described.get("parameters", {})
    required = parameters.get("required", [])
    shown = [
        f"{key}{'' if key in required else '?'}: {schema.get('type', 'any')}"
        for key, schema in parameters.get("properties", {}).items()
    ]
    return f"{described['name']}({', '.join(shown)})  {one_line(described.get('description', ''))}".rstrip()
