"""Text as a value of a type, as on the command line, and types as people say them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin


def parse_text(text: str, annotation: Any) -> Any:
    """`text` as a value of the type. Text that does not fit comes back as it is, for the validator to refuse."""
    options = get_args(annotation)
    if NoneType in options:
        option = next(option for option in options if option is not NoneType)
        if text.strip().lower() == "none" and not _has_word(annotation, "none"):
            return [] if _is_choice_of_several(option) else None
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
    """A JSON list, or items between commas."""
    if text.lstrip().startswith("["):
        return _json_or_text(text)
    return [parse_text(part.strip(), item) for part in text.split(",")] if text.strip() else []


def _parse_table(text: str) -> Any:
    """A JSON object, or `name=value` between commas, with values in JSON where they are; `none` is an empty one."""
    if text.strip().lower() == "none":
        return {}
    if text.lstrip().startswith("{"):
        return _json_or_text(text)
    try:
        return dict(_named_values(text.strip()))
    except ValueError:
        return text


def _named_values(text: str) -> Iterator[tuple[str, Any]]:
    while text:
        name, equals, rest = text.partition("=")
        if not equals or not name.strip() or "," in name:
            raise ValueError("every value has a name")
        value, text = _first_value(rest.lstrip())
        yield name.strip(), value


def _first_value(text: str) -> tuple[Any, str]:
    """The value with which the text begins, and what follows after the comma behind it: none of those inside it."""
    if text.startswith(('"', "[", "{")):
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            value, end = None, -1
        behind = text[end:].lstrip()
        if end > 0 and behind[:1] in ("", ","):
            return value, behind[1:]
    plain, _, rest = text.partition(",")
    return _json_or_text(plain.strip()), rest


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _has_word(annotation: Any, word: str) -> bool:
    """Whether `word` is one of the values that the type spells out, as `none` is for `correction.weight`."""
    return any(option == word or _has_word(option, word) for option in get_args(annotation))


def _is_choice_of_several(annotation: Any) -> bool:
    """A list of words from a fixed set, such as `correction.masks`: none of them can be chosen, too."""
    return get_origin(annotation) is list and get_origin(get_args(annotation)[0]) is Literal


def takes_text(annotation: Any) -> bool:
    return annotation is str or get_origin(annotation) is Literal or str in get_args(annotation)


def type_name(annotation: Any) -> str:
    """A type as people say it: `integer`, `wait|drop`, `list of text`. Where `none` is a word, it does not unset."""
    options = get_args(annotation)
    if NoneType in options and _has_word(annotation, "none"):
        return "text" if str in options else type_name(options[0])
    if get_origin(annotation) is Literal:
        return "|".join(map(str, options))
    if get_origin(annotation) is list:
        return f"list of {type_name(options[0])}"
    if get_origin(annotation) is dict:
        return "table"
    if NoneType in options:
        return " or ".join(dict.fromkeys(type_name(option) for option in options))
    return {bool: "true|false", int: "integer", float: "number", str: "text", NoneType: "none"}[annotation]
