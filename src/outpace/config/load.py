"""Load a `Config` from files, command lines and dicts, and dump it as TOML.

    defaults  <  TOML or YAML file  <  overrides (command line or dict)

Internally, settings are one flat mapping from dotted keys (`pacing.max_lag`) to values, so merging is dict merging.

Invariants
- An unknown key is an error with a suggestion, never ignored.
- A config records what the user set (`user_settings`). A run directory stores these settings beside the resolved
  values, and a resume applies its overrides to them. Settings of the file that an override leaves unread are dropped
  (`combine`).
- Every error is a one-line `BadInput` that starts with the dotted key, or with the file if no single key is at fault.
- Text given for a non-text setting is parsed as on the command line, wherever it comes from: YAML reads `1e-5` as text.
  No other conversion takes place.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pydantic
import tomli_w
from pydantic.fields import FieldInfo

from outpace.config import Config
from outpace.config.algorithm import ChoiceSection, function_parameters
from outpace.config.base import Section, first_error, json_or_text, parse_text, shown, takes_text, type_name
from outpace.config.defaults import by_section, fill_defaults, fill_unchecked, unread_keys, unused_keys
from outpace.config.engines import LaunchConfig
from outpace.config.other_libraries import equivalent_setting, names_with_equivalent, renamed_setting
from outpace.config.presets import PRESETS
from outpace.config.validation import check
from outpace.errors import BadInput, one_line, with_article
from outpace.runtime.references import closest_names, load_function


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
"""Settings of every run."""

PARAMETERS: dict[str, Mapping[str, FieldInfo]] = {
    f"{name}.{key}": by_function for name in SECTIONS for key, by_function in function_parameters(name).items()
}
"""Settings of the built-in functions that a section chooses from: by dotted key, then by function."""

KNOWN = (*FIELDS, *PARAMETERS)
"""All setting names, for suggestions."""


def load_config(file: Path | None = None, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """Return the checked config of a file and overrides: command-line arguments, or a nested or dotted dict."""
    from_file = file_settings(file) if file is not None else {}
    overriding = flatten(overrides) if isinstance(overrides, Mapping) else parse_arguments(overrides)
    return make_config(combine(from_file, overriding))


OTHER_FORMATS: Mapping[str, str] = {"rl": "outpace.compat.axolotl.config_file:settings_of"}
"""Config files of other libraries, by a key that only they have: functions of the content and the file that return
settings. They are loaded by name, because they are in a higher layer."""


def file_settings(file: Path) -> FlatSettings:
    """Return the settings of a config file of outpace or of another library."""
    content = read_config_file(file)
    for key in content.keys() & OTHER_FORMATS.keys():
        content = load_function(OTHER_FORMATS[key], str(file))(content, file)
    return flatten(content)


def make_config(values: Mapping[str, Any]) -> Config:
    """Return the checked config of a nested or dotted dict: `{"pacing": {"max_lag": 2}, "run.steps": 10}`."""
    config = _validated(flatten(values))
    check(config)
    return config


def _validated(flat: FlatSettings) -> Config:
    """Validate each key by itself; combinations are not checked."""
    try:
        return Config.model_validate(by_section(flat))
    except pydantic.ValidationError as error:
        raise BadInput(first_error(error)) from None


def combine(file: FlatSettings, overrides: FlatSettings) -> FlatSettings:
    """Return the settings of a file with overrides.

    Drops settings of the file that nothing reads anymore because an override turns a feature off or makes another
    choice, and names them in a line on standard error. Settings in the overrides are never dropped."""
    dropped = _replaced(file, overrides)
    dropped |= _closed({key: value for key, value in file.items() if key not in dropped}, overrides)
    if names := [key for key in file if key in dropped and key not in overrides]:
        print(f"outpace: dropped, because the overrides replace what reads them: {', '.join(names)}", file=sys.stderr)
    return {key: value for key, value in file.items() if key not in dropped} | overrides


def _replaced(file: FlatSettings, overrides: FlatSettings) -> set[str]:
    """Return the keys of the file that belong to a choice changed by the overrides.

    Another policy loss, estimator or engine kind may have keys of the same names, with another meaning. Running servers
    replace servers to launch, and vice versa."""
    merged = {**file, **overrides}
    replaced = {
        key
        for section in ("policy_loss", "advantage")
        for key in file
        if key.startswith(f"{section}.") and key not in FIELDS and _differs(f"{section}.name", file, merged)
    }
    if _differs("engine.kind", file, merged):
        replaced |= SERVER_KEYS
    elif overrides.get("engine.urls"):
        replaced |= {"engine.count", *LAUNCH_KEYS}
    elif any(overrides.get(key) is not None for key in LAUNCH_KEYS):
        replaced.add("engine.urls")
    return replaced


def _differs(key: str, file: FlatSettings, merged: FlatSettings) -> bool:
    return bool(_choice(key, file) != _choice(key, merged))


def _choice(key: str, settings: FlatSettings) -> Any:
    preset = PRESETS.get(str(settings.get("algorithm.preset")))
    return settings.get(key) or (preset and preset.values.get(key)) or FIELDS[key].default


def _closed(file: FlatSettings, overrides: FlatSettings) -> set[str]:
    """Return the keys that are read with the file alone but not with the overrides."""
    if not file or not overrides:
        return set()
    try:
        before, after = (fill_unchecked(_validated(settings)) for settings in (file, {**file, **overrides}))
    except BadInput:  # `make_config` reports it, unless an override corrects the file
        return set()
    return {key for key, _ in unread_keys(after)} - {key for key, _ in unread_keys(before)}


LAUNCH_KEYS = {f"launch.{key}" for key in LaunchConfig.model_fields}
"""Settings that apply only to servers that outpace starts."""

SERVER_KEYS = {
    "engine.urls", "engine.count", "engine.api_key_env", "engine.seeded", "weights.transport", *LAUNCH_KEYS
}  # fmt: skip
"""Settings that name or depend on certain servers, so those of another kind do not take them over."""


# ------------------------------------------------------------------------------------------------------- run directory

CONFIG_FILE = "config.toml"
"""What the user set, in a run directory. A resume applies overrides to it."""

RESOLVED_FILE = "resolved.toml"
"""Every setting of the run as it started last, and the format of the run directory."""

RUN_FORMAT = 2
EMPTY_RESOLVED = f"format = {RUN_FORMAT}\n\n"
OBJECTS_COMMENT = "# with objects of a Python program: "


def dump_toml(config: Config) -> str:
    """Return every setting that applies as TOML, which loads back to an equal config. None is omitted: it is the
    default where allowed."""
    unused = {key for key, _ in unused_keys(fill_defaults(config))}
    values = config.model_dump(exclude_none=True)
    return tomli_w.dumps(
        {
            section: {key: value for key, value in keys.items() if f"{section}.{key}" not in unused}
            for section, keys in values.items()
        }
    )


def dump_resolved(config: Config) -> str:
    """Return the content of `RESOLVED_FILE`."""
    return EMPTY_RESOLVED + dump_toml(config)


def dump_settings(config: Config, objects: Sequence[str] = ()) -> str:
    """Return what the user set as TOML: the content of `CONFIG_FILE`.

    `objects` names the Python objects that the caller passed in addition; `python_objects_of` reads the names back."""
    comment = f"{OBJECTS_COMMENT}{', '.join(objects)}\n" if objects else ""
    given = {
        name: {key: value for key, value in section.items() if value is not None}
        for name, section in user_settings(config).items()
    }
    return comment + tomli_w.dumps({name: section for name, section in given.items() if section})


def user_settings(config: Config) -> dict[str, dict[str, Any]]:
    """Return what the user set, by section."""
    return {
        name: {key: value for key, value in section.model_dump().items() if key in section.model_fields_set}
        for name, section in config
    }


def python_objects_of(file: Path) -> str:
    """Return the names of the Python objects that a dumped config needs in addition, or "" if it is complete."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        first = lines.readline().strip()
    return first.removeprefix(OBJECTS_COMMENT) if first.startswith(OBJECTS_COMMENT) else ""


def read_resolved(run: Path) -> dict[str, Any]:
    """Return the resolved settings of a run directory, by section. Raises `BadInput` if this version cannot read it."""
    if not (run / CONFIG_FILE).is_file():
        raise BadInput(f"{run}: not a run directory (no {CONFIG_FILE})")
    if not (run / RESOLVED_FILE).is_file():
        raise BadInput(f"{run}: has the format of an earlier version; convert it with `outpace migrate {run}`")
    resolved = dict(read_config_file(run / RESOLVED_FILE))
    if (found := resolved.pop("format", None)) != RUN_FORMAT:
        raise BadInput(f"{run}: has the run format {found}, and this version of outpace reads {RUN_FORMAT}; update it")
    return resolved


# ------------------------------------------------------------------------------------------------------------- keys


def flatten(values: Mapping[str, Any]) -> FlatSettings:
    """Return settings by dotted key, from nested or dotted ones. Rejects unknown keys; parses text by type."""
    return {key: _read_by_type(key, value) for key, value in _pairs(values)}


def _pairs(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if name in FIELDS or may_be_parameter(str(name)):
            yield name, value
        elif name not in SECTIONS:
            raise unknown_key_error(str(name), value)
        elif value is None:
            continue  # YAML reads an empty section as None
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            raise BadInput(f"{name}: is a section, not a single setting ({shown(value)}); set its keys instead")


def _read_by_type(dotted: str, value: Any) -> Any:
    if dotted not in FIELDS and not may_be_parameter(dotted):
        raise unknown_key_error(dotted, value)
    if not isinstance(value, str):
        return value
    if dotted not in FIELDS:
        return _parameter_value(value)
    annotation = FIELDS[dotted].annotation
    return value if takes_text(annotation) else parse_text(value, annotation)


def may_be_parameter(dotted: str) -> bool:
    """Return whether the key may be a setting of a function; which ones there are depends on the chosen function."""
    section, _, key = dotted.partition(".")
    return bool(key) and issubclass(SECTIONS.get(section, Section), ChoiceSection)


def _parameter_value(text: str) -> Any:
    """Return the value of a function's setting, whose type is known only when the function is."""
    return None if text.strip().lower() == "none" else json_or_text(text)


def unknown_key_error(dotted: str, value: Any = None) -> BadInput:
    """Return the error for an unknown key, with a suggestion: the equivalent of another library's name, also for names
    inside a table `value`; otherwise the nearest name."""
    if remedy := renamed_setting(dotted):
        return BadInput(f"{dotted}: {remedy}")
    for name in names_with_equivalent(dotted, value):
        return BadInput(f"{one_line(name)}: no such setting; {equivalent_setting(name)}")
    section, dot, last = dotted.rpartition(".")
    candidates = (
        [f"{section}.{key}" for key in closest_names(last, SECTIONS[section].model_fields)]
        if section in SECTIONS
        else [],
        _settings_called(last),
        closest_names(dotted, KNOWN if dot else SECTIONS) if section not in SECTIONS else [],
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
    return exact or [key for name in closest_names(word, map(_last, KNOWN)) for key in _settings_called(name)]


def _settings_called(last: str) -> list[str]:
    return [key for key in KNOWN if _last(key) == last]


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
        is_parameter = fields is FIELDS and dotted not in fields and may_be_parameter(dotted)
        if dotted not in fields and not is_parameter:
            raise unknown(dotted)
        annotation = Any if is_parameter else fields[dotted].annotation
        if not equals:
            text = _next_value(dotted, annotation, rest)
        flat[dotted] = _parameter_value(text) if is_parameter else parse_text(text, annotation)
    return flat


def _next_value(dotted: str, annotation: Any, rest: list[str]) -> str:
    if rest and not rest[0].startswith("--"):
        return rest.pop(0)
    if annotation is bool or bool in get_args(annotation):
        return "true"
    expected = f"; expected {type_name(annotation)}" if annotation is not Any else ""
    raise BadInput(f"{dotted}: missing value{expected}")


# -------------------------------------------------------------------------------------------------------------- help


def describe_settings(sections: Mapping[str, type[Section]] = SECTIONS) -> str:
    """Return the help text of all settings: type, default and description, by section."""
    return "\n\n".join(describe_section(name, section) for name, section in sections.items())


def describe_section(name: str, section: type[Section]) -> str:
    """Return the help text of one section."""
    lines = [f"[{name}]  {section_summary(section)}".rstrip()]
    for key, setting in settings_of(name, section).items():
        default = "not set" if setting.default is None else f"default {setting.default}"
        lines.append(f"  --{name}.{key}  {setting.type}  ({default})")
        lines.append(f"      {setting.description}")
    return "\n".join(lines)


def settings_of(name: str, section: type[Section]) -> dict[str, SettingHelp]:
    """Return the settings of a section by key, those of its functions last."""
    found = {key: setting_help(info) for key, info in section.model_fields.items()}
    if issubclass(section, ChoiceSection):
        found |= {key: _parameter_help(by_function) for key, by_function in function_parameters(name).items()}
    return found


def _parameter_help(by_function: Mapping[str, FieldInfo]) -> SettingHelp:
    helps = {function: setting_help(info) for function, info in by_function.items()}
    first = next(iter(helps.values()))
    defaults = ", ".join(f"{each.default} ({function})" for function, each in helps.items() if each.default is not None)
    return SettingHelp(first.type, defaults or None, f"{', '.join(helps)}: {first.description}")


class SettingHelp(NamedTuple):
    """A setting as help and documentation show it. `default` is in TOML notation, or None if the setting is not set."""

    type: str
    default: str | None
    description: str


def setting_help(info: FieldInfo) -> SettingHelp:
    default = None if info.default is None else json.dumps(info.default)
    return SettingHelp(type_name(info.annotation), default, " ".join((info.description or "").split()))


def list_sections(sections: Mapping[str, type[Section]] = SECTIONS) -> str:
    """Return one line per section: its name and summary."""
    return "\n".join(f"  {name:<13}{section_summary(section)}".rstrip() for name, section in sections.items())


def section_summary(section: type[Section]) -> str:
    """Return the first line of the section's docstring."""
    return (section.__doc__ or "").strip().partition("\n")[0]
