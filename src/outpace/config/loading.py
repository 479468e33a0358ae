"""From files, command lines and dicts to a `Config`, and back.

Values come, later ones winning, from: the defaults of `outpace.config`, a TOML or YAML file, overrides. Inside,
settings are one flat mapping from dotted keys (`pacing.max_lag`) to values, so that merging is dict merging.

Invariants:
- An unknown key is an error with a suggestion, never ignored.
- A choice on top of a file brings its own defaults, also where the file spells out those of another, as the config of
  a run does; settings that only the other choice takes give way to it.
- Every error is a `BadInput` of exactly one line that starts with the dotted key, or the file if no key is to blame.
- Text given for a setting that is not text is read as on the command line, wherever it comes from: YAML takes
  `1e-5` for text. Nothing else is converted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pydantic
from pydantic.fields import FieldInfo

from outpace.config import Config
from outpace.config.dependent import redundant
from outpace.config.equivalents import RENAMED, equivalent, foreign_names
from outpace.config.files import read_file
from outpace.config.giving_way import given_way
from outpace.config.rules import brought_by_task, check
from outpace.config.section import Section
from outpace.config.text_values import parse_text, takes_text, type_name
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
    another_task = on_top.get("tasks.name") is not None
    stays = _without_defaults(from_file, another_task) if on_top else from_file
    chosen_against = given_way(from_file, on_top)
    return make_config({key: value for key, value in stays.items() if key not in chosen_against} | on_top)


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


def _without_defaults(flat: Flat, another_task: bool) -> Flat:
    """The same without keys that say what would be filled in anyway, or what came with a task that is not the one."""
    try:
        config = _validated(flat)
        unneeded = redundant(config) | brought_by_task(config, another_task)
    except BadInput:  # what is wrong may be overridden; if not, it is told when the whole is checked
        return flat
    return {key: value for key, value in flat.items() if key not in unneeded}


OBJECTS = "# with objects of a Python program: "


def dump_toml(config: Config, objects: Sequence[str] = ()) -> str:
    """The config as TOML that loads back to an equal one. None is left out: it is the default wherever it is legal.

    `objects` names what a Python caller has brought beside it, for `objects_beside`."""
    lines = [f"{OBJECTS}{', '.join(objects)}"] if objects else []
    for section, values in config.model_dump(exclude_none=True).items():
        lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    return "\n".join(lines)


def objects_beside(file: Path) -> str:
    """What a config that was dumped is not complete without; nothing, if it is."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        first = lines.readline().strip()
    return first.removeprefix(OBJECTS) if first.startswith(OBJECTS) else ""


def _toml(value: Any) -> str:
    """JSON's notation of text, numbers, booleans and lists is TOML's, but for one control character and what is no
    finite number."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
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
            raise unknown_key(str(name), value)
        elif value is None:
            continue  # YAML's reading of a section with nothing in it
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            raise BadInput(f"{name}: is a section with keys of its own, not a single value ({_shown(value)})")


def _read_by_type(dotted: str, value: Any) -> Any:
    if dotted not in FIELDS:
        raise unknown_key(dotted, value)
    annotation = FIELDS[dotted].annotation
    return parse_text(value, annotation) if isinstance(value, str) and not takes_text(annotation) else value


def unknown_key(dotted: str, value: Any = None) -> BadInput:
    """The error for a key that does not exist, with the one to use instead: of another library's name the equivalent,
    also of one inside a table `value`, otherwise the nearest name."""
    if dotted in RENAMED:
        return BadInput(f"{dotted}: is now {RENAMED[dotted]}")
    for name in foreign_names(dotted, value):
        return BadInput(f"{one_line(name)}: no such setting; {equivalent(name)}")
    section, dot, last = dotted.rpartition(".")
    candidates = (
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
    exact = _settings_called(word)
    return exact or [key for name in nearest(word, map(_last, FIELDS)) for key in _settings_called(name)]


def _settings_called(last: str) -> list[str]:
    return [key for key in FIELDS if _last(key) == last]


def _last(dotted: str) -> str:
    return dotted.rpartition(".")[2]


# ----------------------------------------------------------------------------------------------------- command line


def parse_arguments(
    arguments: Sequence[str],
    fields: Mapping[str, FieldInfo] = FIELDS,
    unknown: Callable[[str], BadInput] = unknown_key,
) -> Flat:
    """Overrides as on the command line: `--section.key value`, `--section.key=value`, or a bare `--section.flag`."""
    flat: Flat = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise BadInput(f"{one_line(argument)}: unexpected argument; settings are written --section.key value")
        name, equals, text = argument[2:].partition("=")
        dotted = name.replace("-", "_")
        if dotted not in fields:
            raise unknown(dotted)
        annotation = fields[dotted].annotation
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


# ---------------------------------------------------------------------------------------------------- for the reader


def describe(sections: Mapping[str, type[Section]] = SECTIONS) -> str:
    """Every setting with its type, default and meaning, by section."""
    return "\n\n".join(describe_section(name, section) for name, section in sections.items())


def describe_section(name: str, section: type[Section]) -> str:
    """The settings of one section, under its name and summary."""
    lines = [f"[{name}]  {summary(section)}".rstrip()]
    for key, info in section.model_fields.items():
        default = "not set" if info.default is None else f"default {_toml(info.default)}"
        lines.append(f"  --{name}.{key}  {type_name(info.annotation)}  ({default})")
        lines.append(f"      {one_line(info.description)}")
    return "\n".join(lines)


def index(sections: Mapping[str, type[Section]] = SECTIONS) -> str:
    """One line for each section."""
    return "\n".join(f"  {name:<13}{summary(section)}".rstrip() for name, section in sections.items())


def summary(section: type[Section]) -> str:
    """What a section is about: the first line of its class's docstring."""
    return (section.__doc__ or "").strip().partition("\n")[0]


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
    if first["type"] in ("bool_type", "bool_parsing"):
        complaint = "should be true or false"
    if first["type"] == "dict_type":
        complaint = "should be a table: name=value between commas, or a JSON object"
    return f"{key}: {item}{one_line(complaint)}, not {_shown(first['input'])}{more}"


def _shown(value: Any) -> str:
    return one_line(repr(value), limit=60)
