"""Load a `Config` from files, command lines and dicts, and dump it as TOML.

    defaults  <  TOML or YAML file  <  overrides (command line or dict)

Internally, settings are one flat mapping from dotted keys (`pacing.max_lag`) to values, so merging is dict merging.

Invariants
- An unknown key is an error with a suggestion, never ignored.
- An override brings its own defaults, even where the file spells out the defaults of another choice, as the saved
  config of a run does. File settings that only the overridden choice uses are dropped (`keys_replaced_by`).
- Every error is a one-line `BadInput` that starts with the dotted key, or with the file if no single key is at fault.
- Text given for a non-text setting is parsed as on the command line, wherever it comes from: YAML reads `1e-5` as text.
  No other conversion takes place.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pydantic
from pydantic.fields import FieldInfo

from outpace.config import Config
from outpace.config.base import Section, parse_text, takes_text, type_name
from outpace.config.defaults import keys_at_default
from outpace.config.engines import LaunchConfig
from outpace.config.other_libraries import RENAMED, equivalent_setting, names_with_equivalent
from outpace.config.validation import check, keys_from_task
from outpace.errors import BadInput, one_line, with_article
from outpace.runtime.references import closest_names


def read_config_file(file: Path) -> Mapping[str, Any]:
    """Return the raw content of a TOML or YAML file. Every error is a one-line `BadInput` that starts with the file."""
    readers = {".toml": _read_toml, ".yaml": _read_yaml, ".yml": _read_yaml}
    if file.suffix not in readers:
        raise BadInput(f"{file}: not a config file; use a file that ends in .toml, .yaml or .yml")
    try:
        content = readers[file.suffix](file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise BadInput(f"{file}: config file not found") from None
    except OSError as error:
        raise BadInput(f"{file}: cannot read config file: {one_line(error.strerror)}") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{file}: not valid utf-8 text ({error.reason} at byte {error.start})") from None
    except ValueError as error:
        raise BadInput(f"{file}: {one_line(error)}") from None
    if not isinstance(content, Mapping):
        raise BadInput(f"{file}: should contain sections with keys, not {with_article(type(content).__name__)}")
    return content


def _read_toml(text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at_end = f"at line {text.count(chr(10)) + 1}, the end of the file"
        raise ValueError(f"not valid TOML: {str(error).replace('at end of document', at_end)}") from None


def _read_yaml(text: str) -> Any:
    import yaml  # imported lazily: most configs are TOML

    try:
        _reject_duplicate_keys(yaml.compose(text, Loader=yaml.SafeLoader))
        return yaml.safe_load(text) or {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ValueError(f"not valid YAML: {error.problem}{where}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {error}") from None


def _reject_duplicate_keys(root: Any) -> None:
    """Raise `ValueError` for a key that is set twice. YAML would silently keep the last value."""
    pending = [root]
    while pending:
        node = pending.pop()
        if node is None or node.id != "mapping":
            continue
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                raise ValueError(f"{key.value} is set twice (again at line {key.start_mark.line + 1})")
            seen.add(key.value)
            pending.append(value)


Values = Mapping[str, Any]
"""Settings by dotted key."""

LAUNCH_KEYS = {f"launch.{key}" for key in LaunchConfig.model_fields}
"""Settings that apply only to servers that outpace starts."""

ENGINE_KIND_KEYS = {
    "engine.urls", "engine.count", "engine.path", "engine.api_key_env", "engine.seeded", "weights.transport",
    *LAUNCH_KEYS,
}  # fmt: skip
"""Settings that apply to, or name, engines of one kind."""


def keys_replaced_by(file: Values, overrides: Values) -> set[str]:
    """Return the file settings that the overrides replace.

    The saved config of a run spells out every setting, including those that only its engine kind reads. Resuming it
    with another engine kind, or with running servers instead of launched ones, drops the settings of the old choice
    instead of rejecting each of them. Settings given in the overrides are never dropped."""
    before = file.get("engine.kind", "embedded")
    if overrides.get("engine.kind", before) != before:
        uses_dir = overrides["engine.kind"] != "embedded" or {**file, **overrides}.get("weights.delta")
        return ENGINE_KIND_KEYS | (set() if uses_dir else {"weights.dir"})
    if overrides.get("engine.urls"):
        return {"engine.count", *LAUNCH_KEYS}
    if any(overrides.get(key) is not None for key in LAUNCH_KEYS):
        return {"engine.urls"}
    return set()


FlatSettings = dict[str, Any]
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
    """Return the checked config of a file and overrides: command-line arguments, or a nested or dotted dict."""
    from_file = flatten(read_config_file(file)) if file is not None else {}
    overriding = flatten(overrides) if isinstance(overrides, Mapping) else parse_arguments(overrides)
    another_task = overriding.get("tasks.name") is not None
    kept = _without_defaults(from_file, another_task) if overriding else from_file
    replaced = keys_replaced_by(from_file, overriding)
    return make_config({key: value for key, value in kept.items() if key not in replaced} | overriding)


def make_config(values: Mapping[str, Any]) -> Config:
    """Return the checked config of a nested or dotted dict: `{"pacing": {"max_lag": 2}, "run.steps": 10}`."""
    config = _validated(flatten(values))
    check(config)
    return config


def _validated(flat: FlatSettings) -> Config:
    """Validate each key by itself; combinations are not checked."""
    nested: dict[str, dict[str, Any]] = {}
    for dotted, value in flat.items():
        section, _, key = dotted.partition(".")
        nested.setdefault(section, {})[key] = value
    try:
        return Config.model_validate(nested)
    except pydantic.ValidationError as error:
        raise BadInput(_explain(error)) from None


def _without_defaults(flat: FlatSettings, another_task: bool) -> FlatSettings:
    """Drop keys that equal their default, or the default of the file's built-in task. `another_task` says whether the
    overrides name another task."""
    try:
        config = _validated(flat)
        droppable = keys_at_default(config) | keys_from_task(config, another_task)
    except BadInput:  # an override may fix it; otherwise the check of the merged config reports it
        return flat
    return {key: value for key, value in flat.items() if key not in droppable}


OBJECTS_COMMENT = "# with objects of a Python program: "


def dump_toml(config: Config, objects: Sequence[str] = ()) -> str:
    """Return the config as TOML that loads back to an equal config. None is omitted: it is the default where allowed.

    `objects` names the Python objects that the caller passed in addition; `python_objects_of` reads the names back."""
    lines = [f"{OBJECTS_COMMENT}{', '.join(objects)}"] if objects else []
    for section, values in config.model_dump(exclude_none=True).items():
        lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    return "\n".join(lines)


def python_objects_of(file: Path) -> str:
    """Return the names of the Python objects that a dumped config needs in addition, or "" if it is complete."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        first = lines.readline().strip()
    return first.removeprefix(OBJECTS_COMMENT) if first.startswith(OBJECTS_COMMENT) else ""


def _toml(value: Any) -> str:
    """Return the value in TOML. JSON notation works except for DEL (0x7f), tables, and non-finite numbers."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# ------------------------------------------------------------------------------------------------------------- keys


def flatten(values: Mapping[str, Any]) -> FlatSettings:
    """Return settings by dotted key, from nested or dotted ones. Rejects unknown keys; parses text by type."""
    return {key: _read_by_type(key, value) for key, value in _pairs(values)}


def _pairs(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if name in FIELDS:
            yield name, value
        elif name not in SECTIONS:
            raise unknown_key_error(str(name), value)
        elif value is None:
            continue  # YAML reads an empty section as None
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            raise BadInput(f"{name}: is a section, not a single setting ({_shown(value)}); set its keys instead")


def _read_by_type(dotted: str, value: Any) -> Any:
    if dotted not in FIELDS:
        raise unknown_key_error(dotted, value)
    annotation = FIELDS[dotted].annotation
    return parse_text(value, annotation) if isinstance(value, str) and not takes_text(annotation) else value


def unknown_key_error(dotted: str, value: Any = None) -> BadInput:
    """Return the error for an unknown key, with a suggestion: the equivalent of another library's name, also for names
    inside a table `value`; otherwise the nearest name."""
    if dotted in RENAMED:
        return BadInput(f"{dotted}: was renamed; use {RENAMED[dotted]}")
    for name in names_with_equivalent(dotted, value):
        return BadInput(f"{one_line(name)}: no such setting; {equivalent_setting(name)}")
    section, dot, last = dotted.rpartition(".")
    candidates = (
        [f"{section}.{key}" for key in closest_names(last, SECTIONS[section].model_fields)]
        if section in SECTIONS
        else [],
        _settings_called(last),
        closest_names(dotted, FIELDS if dot else SECTIONS) if section not in SECTIONS else [],
    )
    close = next(filter(None, candidates), [])
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    elif section in SECTIONS:
        hint = f"{section} has {', '.join(SECTIONS[section].model_fields)}"
    else:
        hint = f"the sections are {', '.join(SECTIONS)}"
    return BadInput(f"{one_line(dotted)}: no such {'setting' if dot else 'section'}; {hint}")


def similar_settings(word: str) -> list[str]:
    """Return the settings that a key without its section may refer to."""
    exact = _settings_called(word)
    return exact or [key for name in closest_names(word, map(_last, FIELDS)) for key in _settings_called(name)]


def _settings_called(last: str) -> list[str]:
    return [key for key in FIELDS if _last(key) == last]


def _last(dotted: str) -> str:
    return dotted.rpartition(".")[2]


# ----------------------------------------------------------------------------------------------------- command line


def parse_arguments(
    arguments: Sequence[str],
    fields: Mapping[str, FieldInfo] = FIELDS,
    unknown: Callable[[str], BadInput] = unknown_key_error,
) -> FlatSettings:
    """Parse command-line overrides: `--section.key value`, `--section.key=value`, or a bare `--section.flag`."""
    flat: FlatSettings = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise BadInput(f"{one_line(argument)}: unexpected argument; write settings as --section.key value")
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
    raise BadInput(f"{dotted}: missing value; expected {type_name(annotation)}")


# -------------------------------------------------------------------------------------------------------------- help


def describe_settings(sections: Mapping[str, type[Section]] = SECTIONS) -> str:
    """Return the help text of all settings: type, default and description, by section."""
    return "\n\n".join(describe_section(name, section) for name, section in sections.items())


def describe_section(name: str, section: type[Section]) -> str:
    """Return the help text of one section."""
    lines = [f"[{name}]  {section_summary(section)}".rstrip()]
    for key, info in section.model_fields.items():
        setting = setting_help(info)
        default = "not set" if setting.default is None else f"default {setting.default}"
        lines.append(f"  --{name}.{key}  {setting.type}  ({default})")
        lines.append(f"      {setting.description}")
    return "\n".join(lines)


class SettingHelp(NamedTuple):
    """A setting as help and documentation show it. `default` is in TOML notation, or None if the setting is not set."""

    type: str
    default: str | None
    description: str


def setting_help(info: FieldInfo) -> SettingHelp:
    default = None if info.default is None else _toml(info.default)
    return SettingHelp(type_name(info.annotation), default, " ".join((info.description or "").split()))


def list_sections(sections: Mapping[str, type[Section]] = SECTIONS) -> str:
    """Return one line per section: its name and summary."""
    return "\n".join(f"  {name:<13}{section_summary(section)}".rstrip() for name, section in sections.items())


def section_summary(section: type[Section]) -> str:
    """Return the first line of the section's docstring."""
    return (section.__doc__ or "").strip().partition("\n")[0]


def _explain(error: pydantic.ValidationError) -> str:
    """Return the first validation error as one line, with the number of further ones."""
    by_key: dict[str, list[Any]] = {}
    for each in error.errors(include_url=False):
        by_key.setdefault(".".join(str(part) for part in each["loc"][:2]), []).append(each)
    key, errors = next(iter(by_key.items()))
    # For a union of types, report the error of the text alternative.
    first = next((each for each in errors if each["type"] == "string_type"), errors[0])
    more = f" (and {len(by_key) - 1} more)" if len(by_key) > 1 else ""
    if callable(first["input"]) and key.startswith("algorithm."):
        return f"{key}: is a function object; pass its name instead, such as path/to/file.py:function{more}"
    item = "".join(f"item {part + 1} " for part in first["loc"][2:] if isinstance(part, int))
    problem = first["msg"].replace("Input should", "should", 1)
    if first["type"] in ("bool_type", "bool_parsing"):
        problem = "should be true or false"
    if first["type"] == "dict_type":
        problem = "should be a table: comma-separated name=value pairs, or a JSON object"
    return f"{key}: {item}{one_line(problem)}, not {_shown(first['input'])}{more}"


def _shown(value: Any) -> str:
    return one_line(repr(value), limit=60)
