"""Base class of settings sections, parsing of command-line text by type, and readable type names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from outpace.errors import one_line


class Section(BaseModel):
    """A frozen, strict model: no unknown keys, no implicit type conversion, no NaN or infinity."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class OpenedBy:
    """Marks a field that is read only if one of the `switches`, fields of its section, is on: set, and not false or its
    default. With `values`, a switch is on if it has one of these values.

    A config that sets a field that nothing reads is rejected."""

    def __init__(self, *switches: str, values: tuple[str, ...] = ()) -> None:
        self.switches, self.values = switches, values

    def is_open(self, section: Section) -> bool:
        if self.values:
            return any(getattr(section, switch) in self.values for switch in self.switches)
        return any(_is_on(section, switch) for switch in self.switches)


def _is_on(section: Section, key: str) -> bool:
    value = getattr(section, key)
    return value is not None and value is not False and value != type(section).model_fields[key].default


def closed_keys(section: Section) -> dict[str, OpenedBy]:
    """Return the keys of a section that nothing reads because all their switches are off."""
    marks = ((key, mark) for key, info in type(section).model_fields.items() for mark in info.metadata)
    return {key: mark for key, mark in marks if isinstance(mark, OpenedBy) and not mark.is_open(section)}


def first_error(error: ValidationError, prefix: str = "") -> str:
    """Return the first validation error as one line that starts with its dotted key, and the number of further ones."""
    by_key: dict[str, list[Any]] = {}
    for each in error.errors(include_url=False):
        path = [prefix, *each["loc"]] if prefix else each["loc"]
        by_key.setdefault(".".join(str(part) for part in path[:2]), []).append(each)
    key, errors = next(iter(by_key.items()))
    # For a union of types, report the error of the text alternative.
    first = next((each for each in errors if each["type"] == "string_type"), errors[0])
    more = f" (and {len(by_key) - 1} more)" if len(by_key) > 1 else ""
    if callable(first["input"]):
        return f"{key}: is a function object; pass its name instead, such as path/to/file.py:function{more}"
    item = "".join(f"item {part + 1} " for part in first["loc"][1 if prefix else 2 :] if isinstance(part, int))
    problem = first["msg"].replace("Input should", "should", 1)
    if first["type"] in ("bool_type", "bool_parsing"):
        problem = "should be true or false"
    if first["type"] == "dict_type":
        problem = "should be a table: comma-separated name=value pairs, or a JSON object"
    return f"{key}: {item}{one_line(problem)}, not {shown(first['input'])}{more}"


def shown(value: Any) -> str:
    return one_line(repr(value), limit=60)


def parse_text(text: str, annotation: Any) -> Any:
    """Return `text` parsed as a value of the type. Text that does not parse is returned unchanged, for the validator to
    reject."""
    options = get_args(annotation)
    if NoneType in options:
        option = next(option for option in options if option is not NoneType)
        if text.strip().lower() == "none" and not _allows_literal(annotation, "none"):
            return None
        return parse_text(text, option)
    if get_origin(annotation) is list:
        return _parse_list(text, options[0])
    if get_origin(annotation) is dict:
        return _parse_table(text)
    if annotation is bool:
        return {"true": True, "false": False}.get(text.strip().lower(), text)
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError:
            return text
    return text


def _parse_list(text: str, item: Any) -> Any:
    """Parse a JSON list, or comma-separated items. If `none` is a valid item, as in `correction.masks`, the
    text `none` is the empty list."""
    if text.strip().lower() == "none" and _allows_literal(item, "none"):
        return []
    if text.lstrip().startswith("["):
        return json_or_text(text)
    return [parse_text(part.strip(), item) for part in text.split(",")] if text.strip() else []


def _parse_table(text: str) -> Any:
    """Parse a JSON object, or comma-separated `name=value` pairs whose values may be JSON; `none` is an empty table."""
    if text.strip().lower() == "none":
        return {}
    if text.lstrip().startswith("{"):
        return json_or_text(text)
    try:
        return dict(_named_values(text.strip()))
    except ValueError:
        return text


def _named_values(text: str) -> Iterator[tuple[str, Any]]:
    while text:
        name, equals, rest = text.partition("=")
        if not equals or not name.strip() or "," in name:
            raise ValueError("every value needs a name")
        value, text = _first_value(rest.lstrip())
        yield name.strip(), value


def _first_value(text: str) -> tuple[Any, str]:
    """Return the first value, and the text after the comma that follows it. Commas inside the value do not count."""
    if text.startswith(('"', "[", "{")):
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            value, end = None, -1
        remainder = text[end:].lstrip()
        if end > 0 and remainder[:1] in ("", ","):
            return value, remainder[1:]
    plain, _, rest = text.partition(",")
    return json_or_text(plain.strip()), rest


def json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _allows_literal(annotation: Any, word: str) -> bool:
    """Return whether `word` is one of the type's literals, as `none` is for `correction.weight`."""
    return any(option == word or _allows_literal(option, word) for option in get_args(annotation))


def takes_text(annotation: Any) -> bool:
    return annotation is str or get_origin(annotation) is Literal or str in get_args(annotation)


def type_name(annotation: Any) -> str:
    """Return a readable type name: `integer`, `wait|drop`, `list of text`. If `none` is a literal of the type, it does
    not mean "not set" and is not listed separately."""
    options = get_args(annotation)
    if NoneType in options and _allows_literal(annotation, "none"):
        return "text" if str in options else type_name(options[0])
    if get_origin(annotation) is Literal:
        return "|".join(map(str, options))
    if get_origin(annotation) is list:
        return f"list of {type_name(options[0])}"
    if get_origin(annotation) is dict:
        return "table"
    if NoneType in options:
        return " or ".join(dict.fromkeys(type_name(option) for option in options))
    if str in options:
        return "text"
    return {bool: "true|false", int: "integer", float: "number", str: "text", NoneType: "none"}[annotation]
