"""From files, command lines and dicts to a `Config`, and back.

Values come, later ones winning, from: the defaults of `outpace.config`, a TOML or YAML file, overrides. Inside,
settings are one flat mapping from dotted keys (`pacing.max_lag`) to values, so that merging is dict merging.

Invariants:
- An unknown key is an error with a suggestion, never ignored.
- A choice on top of a file brings its own defaults, also where the file spells out those of another, as the config of
  a run does.
- Every error is a `BadInput` of exactly one line that starts with the dotted key, or the file if no key is to blame.
- Text given for a setting that is not text is read as on the command line, wherever it comes from: YAML takes
  `1e-5` for text. Nothing else is converted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo

from outpace.config import Config
from outpace.config.aliases import ALIASES, RENAMED
from outpace.config.dependent import redundant
from outpace.config.files import read_file
from outpace.config.rules import check
from outpace.config.section import Section
from outpace.errors import BadInput, one_line
from outpace.references import nearest

Flat = dict[str, Any]
"""Settings by dotted key."""


def _section_of(info: FieldInfo) -> type[Section]:
    assert isinstance(info.annotation, type)
    assert issubclass(info.annotation, Section)
    return info.annotation


SECTIONS: dict[str, type[Section]] = {name: _section_of(info) for name, info in Config.model_fields.items()}
FIELDS: dict[str, FieldInfo] = {
    f"{name}.{key}": info for name, section in SECTIONS.items() for key, info in section.model_fields.items()
}


def load_config(file: Path | None = None, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """The config of a file (optional) and overrides: command-line arguments, or a nested or dotted dict."""
    from_file = flatten(read_file(file)) if file is not None else {}
    on_top = flatten(overrides) if isinstance(overrides, Mapping) else parse_arguments(overrides)
    return make_config({**(_without_defaults(from_file) if on_top else from_file), **on_top})


def make_config(values: Mapping[str, Any]) -> Config:
    """A checked config from a nested or dotted dict: `{"pacing": {"max_lag": 2}, "run.steps": 10}`."""
    config = _validated(flatten(values))
    check(config)
    return config


def _validated(flat: Flat) -> Config:
    """Key by key; no combination is looked at."""
    nested: dict[str, dict[str, Any]] = {}
    for dotted, value in flat.items():
        section, _, key = dotted.partition(".")
        nested.setdefault(section, {})[key] = value
    try:
        return Config.model_validate(nested)
    except pydantic.ValidationError as error:
        raise BadInput(_explain(error)) from None


def _without_defaults(flat: Flat) -> Flat:
    """The same without keys that say what would be filled in anyway."""
    try:
        unneeded = redundant(_validated(flat))
    except BadInput:  # what is wrong may be overridden; if not, it is told when the whole is checked
        return flat
    return {key: value for key, value in flat.items() if key not in unneeded}


def dump_toml(config: Config) -> str:
    """The config as TOML that loads back to an equal one. None is left out: it is the default wherever it is legal."""
    lines: list[str] = []
    for section, values in config.model_dump(exclude_none=True).items():
        lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    """JSON's notation of text, numbers, booleans and lists is TOML's, but for one control character."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# ------------------------------------------------------------------------------------------------------------- keys


def flatten(values: Mapping[str, Any]) -> Flat:
    """Settings by dotted key, from nested or dotted ones; unknown keys are refused, text is read by type."""
    return {key: _read_by_type(key, value) for key, value in _pairs(values)}


def _pairs(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if name in FIELDS:
            yield name, value
        elif name not in SECTIONS:
            raise unknown_key(str(name))
        elif value is None:
            continue  # YAML's reading of a section with nothing in it
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            raise BadInput(f"{name}: is a section with keys of its own, not a single value ({_shown(value)})")


def _read_by_type(dotted: str, value: Any) -> Any:
    if dotted not in FIELDS:
        raise unknown_key(dotted)
    annotation = FIELDS[dotted].annotation
    return parse_text(value, annotation) if isinstance(value, str) and not _takes_text(annotation) else value


def unknown_key(dotted: str) -> BadInput:
    """The error for a key that does not exist, with the nearest one that does."""
    if dotted in RENAMED:
        return BadInput(f"{dotted}: is now {RENAMED[dotted]}")
    section, dot, last = dotted.rpartition(".")
    candidates = (
        [ALIASES[dotted]] if dotted in ALIASES else [],
        [f"{section}.{key}" for key in nearest(last, SECTIONS[section].model_fields)] if section in SECTIONS else [],
        _settings_called(last),
        nearest(dotted, FIELDS if dot else SECTIONS) if section not in SECTIONS else [],
    )
    close = next(filter(None, candidates), [])
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    elif section in SECTIONS:
        hint = f"{section} has {', '.join(SECTIONS[section].model_fields)}"
    else:
        hint = f"the sections are {', '.join(SECTIONS)}"
    return BadInput(f"{one_line(dotted)}: no such {'setting' if dot else 'section'}; {hint}")


def settings_like(word: str) -> list[str]:
    """What a key without its section may mean."""
    aliased = [key for alias, key in ALIASES.items() if _last(alias) == word]
    exact = _settings_called(word) or list(dict.fromkeys(aliased))
    return exact or [key for name in nearest(word, map(_last, FIELDS)) for key in _settings_called(name)]


def _settings_called(last: str) -> list[str]:
    return [key for key in FIELDS if _last(key) == last]


def _last(dotted: str) -> str:
    return dotted.rpartition(".")[2]


# ----------------------------------------------------------------------------------------------------- command line


def parse_arguments(arguments: Sequence[str]) -> Flat:
    """Overrides as on the command line: `--section.key value`, `--section.key=value`, or a bare `--section.flag`."""
    flat: Flat = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise BadInput(f"{one_line(argument)}: unexpected argument; settings are written --section.key value")
        name, equals, text = argument[2:].partition("=")
        dotted = name.replace("-", "_")
        if dotted not in FIELDS:
            raise unknown_key(dotted)
        annotation = FIELDS[dotted].annotation
        if not equals:
            text = _next_value(dotted, annotation, rest)
        flat[dotted] = parse_text(text, annotation)
    return flat


def _next_value(dotted: str, annotation: Any, rest: list[str]) -> str:
    if rest and not rest[0].startswith("--"):
        return rest.pop(0)
    if annotation is bool or bool in get_args(annotation):
        return "true"
    raise BadInput(f"{dotted}: needs a value after it, {type_name(annotation)}")


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
    """A JSON object, or `name=value` between commas, with values in JSON where they are not plain text."""
    if not text.lstrip().startswith("{"):
        pairs = [part.partition("=") for part in text.split(",") if part.strip()]
        return {name.strip(): _json_or_text(value.strip()) for name, _, value in pairs}
    return _json_or_text(text)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _has_word(annotation: Any, word: str) -> bool:
    """Whether `word` is one of the values that the type spells out, as `none` is for `correction.weight`."""
    return any(option == word or _has_word(option, word) for option in get_args(annotation))


def _is_choice_of_several(annotation: Any) -> bool:
    """A list of words from a fixed set, such as `correction.masks`: none of them can be chosen, too."""
    return get_origin(annotation) is list and get_origin(get_args(annotation)[0]) is Literal


def _takes_text(annotation: Any) -> bool:
    return annotation is str or get_origin(annotation) is Literal or str in get_args(annotation)


# ---------------------------------------------------------------------------------------------------- for the reader


def describe() -> str:
    """Every setting with its type, default and meaning: the body of `--help`."""
    blocks = []
    for name, section in SECTIONS.items():
        lines = [name]
        for key, info in section.model_fields.items():
            default = "not set" if info.default is None else f"default {_toml(info.default)}"
            lines.append(f"  --{name}.{key}  {type_name(info.annotation)}  ({default})")
            lines.append(f"      {one_line(info.description)}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


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


def _explain(error: pydantic.ValidationError) -> str:
    """The first complaint of the validator as one line, with the number of those left unsaid."""
    by_key: dict[str, list[Any]] = {}
    for each in error.errors(include_url=False):
        by_key.setdefault(".".join(str(part) for part in each["loc"][:2]), []).append(each)
    key, about = next(iter(by_key.items()))
    # Of the alternatives of a name, text is the one that was meant.
    first = next((each for each in about if each["type"] == "string_type"), about[0])
    more = f" (and {len(by_key) - 1} more)" if len(by_key) > 1 else ""
    if callable(first["input"]) and key.startswith("algorithm."):
        return f"{key}: name it as path/to/file.py:function; functions of algorithm are not sent by value{more}"
    item = "".join(f"item {part + 1} " for part in first["loc"][2:] if isinstance(part, int))
    complaint = first["msg"].replace("Input should", "should", 1)
    return f"{key}: {item}{one_line(complaint)}, not {_shown(first['input'])}{more}"


def _shown(value: Any) -> str:
    return one_line(repr(value), limit=60)
