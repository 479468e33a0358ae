"""What a person types, read as an answer.

/call look_up volume=3 page=0        a call; values are JSON, or text where the tool wants text
/call look_up {"volume": 3}          the same with an object
The answer is 3                      anything else is said
//call me                            said, and begins with one slash
"""

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
    """The calls and the rest of the lines, each in its order. Raises `BadInput` for a call that cannot be read."""
    calls = tuple(read_call(line, tools) for line in lines if is_call(line))
    said = [line[1:] if line.startswith("//") else line for line in lines if not is_call(line)]
    return Typed("\n".join(said), calls)


def is_call(line: str) -> bool:
    return line.split(maxsplit=1)[:1] == [CALL]


def read_call(line: str, tools: Sequence[Schema]) -> tuple[str, dict[str, Any]]:
    _, name, rest = (*line.split(maxsplit=2), "", "")[:3]
    if not name:
        raise BadInput(f"{CALL}: which tool? write {CALL} name key=value, or {CALL} name {{JSON}}")
    rest = rest.strip()
    return name, _object(name, rest) if rest.startswith("{") else _pairs(name, rest, _texts(name, tools))


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        arguments: dict[str, Any] = json.loads(text)  # braces make it an object, or it is refused
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{CALL} {name}: this is not valid JSON: {one_line(error)}") from None
    return arguments


def _pairs(name: str, text: str, texts: set[str]) -> dict[str, Any]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInput(f"{CALL} {name}: {one_line(error)}; quote text as in key='two words'") from None
    for word in words:
        if not word.partition("=")[0].isidentifier() or "=" not in word:
            raise BadInput(f"{CALL} {name}: {one_line(word, 60)!r} is not key=value; quote text as in key='two words'")
    pairs = [word.partition("=") for word in words]
    return {key: value if key in texts else _value(value) for key, _, value in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _texts(name: str, tools: Sequence[Schema]) -> set[str]:
    """The parameters of a tool that are text, and so are never read as anything else."""
    described: Schema = next((tool["function"] for tool in tools if tool["function"].get("name") == name), {})
    properties = described.get("parameters", {}).get("properties", {})
    return {key for key, schema in properties.items() if schema.get("type") == "string"}


def signature(tool: Schema) -> str:
    """A tool in one line, as a person would write it down: `look_up(volume: integer, page: integer)  what it does`."""
    described = tool["function"]
    parameters = described.get("parameters", {})
    required = parameters.get("required", [])
    shown = [
        f"{key}{'' if key in required else '?'}: {schema.get('type', 'any')}"
        for key, schema in parameters.get("properties", {}).items()
    ]
    return f"{described['name']}({', '.join(shown)})  {one_line(described.get('description', ''))}".rstrip()
