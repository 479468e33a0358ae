"""From files, command lines and dicts to a `Config`, and back.

Values come, later ones winning, from: the defaults of `outpace.config`, a TOML or YAML file, overrides. Inside,
settings are one flat mapping from dotted keys (`pacing.max_lag`) to values, so that merging is dict merging.

Invariants:
- An unknown key is an error with a suggestion, never ignored.
- Every error is a `BadInput` of exactly one line that starts with the dotted key, or the file if no key is to blame.
- Text given for a setting that is not text is read as on the command line, wherever it comes from: YAML takes
  `1e-5` for text. Nothing else is converted.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo

from outpace.config import Config
from outpace.config.rules import check
from outpace.config.section import Section
from outpace.errors import BadInput, one_line

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
    return make_config({**from_file, **on_top})


def make_config(values: Mapping[str, Any]) -> Config:
    """A checked config from a nested or dotted dict: `{"pacing": {"max_lag": 2}, "run.steps": 10}`."""
    nested: dict[str, dict[str, Any]] = {}
    for dotted, value in flatten(values).items():
        section, _, key = dotted.partition(".")
        nested.setdefault(section, {})[key] = value
    try:
        config = Config.model_validate(nested)
    except pydantic.ValidationError as error:
        raise BadInput(_explain(error)) from None
    check(config)
    return config


def dump_toml(config: Config) -> str:
    """The config as TOML that loads back to an equal one. None is left out: it is the default wherever it is legal."""
    lines: list[str] = []
    for section, values in config.model_dump(exclude_none=True).items():
        lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------ files


def read_file(file: Path) -> Mapping[str, Any]:
    """The raw content of a TOML or YAML file."""
    readers = {".toml": _read_toml, ".yaml": _read_yaml, ".yml": _read_yaml}
    if file.suffix not in readers:
        raise BadInput(f"{file}: a config file ends in .toml, .yaml or .yml")
    try:
        content = readers[file.suffix](file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise BadInput(f"{file}: there is no such config file") from None
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {one_line(error.strerror)}") from None
    except ValueError as error:
        raise BadInput(f"{file}: {one_line(error)}") from None
    if not isinstance(content, Mapping):
        raise BadInput(f"{file}: should hold sections with keys, not a {type(content).__name__}")
    return content


def _read_toml(text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at_end = f"at line {text.count(chr(10)) + 1}, the end of the file"
        raise ValueError(f"not valid TOML: {str(error).replace('at end of document', at_end)}") from None


def _read_yaml(text: str) -> Any:
    import yaml  # here, because most configs are TOML

    try:
        _refuse_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader))
        return yaml.safe_load(text) or {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ValueError(f"not valid YAML: {error.problem}{where}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {error}") from None


def _refuse_repeated_keys(root: Any) -> None:
    """YAML lets the last of two equal keys win, so that the first would be ignored in silence."""
    pending = [root]
    while pending:
        node = pending.pop()
        if node is None or node.id != "mapping":
            continue
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                raise ValueError(f"{key.value} is set twice (the second time at line {key.start_mark.line + 1})")
            seen.add(key.value)
            pending.append(value)


def _toml(value: Any) -> str:
    """JSON's notation of text, numbers, booleans and lists is TOML's, but for one control character."""
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
    section, dot, last = dotted.rpartition(".")
    candidates = (
        [f"{section}.{key}" for key in _nearest(last, SECTIONS[section].model_fields)] if section in SECTIONS else [],
        [key for key in FIELDS if key.rpartition(".")[2] == last],
        _nearest(dotted, FIELDS if dot else SECTIONS) if section not in SECTIONS else [],
    )
    close = next(filter(None, candidates), [])
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    elif section in SECTIONS:
        hint = f"{section} has {', '.join(SECTIONS[section].model_fields)}"
    else:
        hint = f"the sections are {', '.join(SECTIONS)}"
    return BadInput(f"{one_line(dotted)}: no such {'setting' if dot else 'section'}; {hint}")


def _nearest(word: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(word, known, n=1, cutoff=0.6)


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
    if annotation is bool:
        return "true"
    raise BadInput(f"{dotted}: needs a value after it, {type_name(annotation)}")


def parse_text(text: str, annotation: Any) -> Any:
    """`text` as a value of the type. Text that does not fit comes back as it is, for the validator to refuse."""
    options = get_args(annotation)
    if NoneType in options:
        if text.strip().lower() == "none" and not _has_word(annotation, "none"):
            return None
        return parse_text(text, next(option for option in options if option is not NoneType))
    if get_origin(annotation) is list:
        return _parse_list(text, options[0])
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
    if not text.lstrip().startswith("["):
        return [parse_text(part.strip(), item) for part in text.split(",")] if text.strip() else []
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _has_word(annotation: Any, word: str) -> bool:
    """Whether `word` is one of the values that the type spells out, as `none` is for `correction.weight`."""
    return any(option == word or _has_word(option, word) for option in get_args(annotation))


def _takes_text(annotation: Any) -> bool:
    return annotation is str or get_origin(annotation) is Literal or str in get_args(annotation)


# ---------------------------------------------------------------------------------------------------- for the reader


def describe() -> str:
    """Every setting with its type, default and meaning: the body of `--help`."""
    blocks = []
    for name, section in SECTIONS.items():
        lines = [name]
        for key, info in section.model_fields.items():
            default = "none" if info.default is None else _toml(info.default)
            lines.append(f"  --{name}.{key}  {type_name(info.annotation)}  (default {default})")
            lines.append(f"      {one_line(info.description)}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def type_name(annotation: Any) -> str:
    """A type as people say it: `integer`, `wait|drop`, `list of text`."""
    options = get_args(annotation)
    if get_origin(annotation) is Literal:
        return "|".join(map(str, options))
    if get_origin(annotation) is list:
        return f"list of {type_name(options[0])}"
    if NoneType in options:
        return " or ".join(dict.fromkeys(type_name(option) for option in options))
    return {bool: "true|false", int: "integer", float: "number", str: "text", NoneType: "none"}[annotation]


def _explain(error: pydantic.ValidationError) -> str:
    """The first complaint of the validator as one line, with the number of those left unsaid."""
    first, *others = error.errors(include_url=False)
    dotted = ".".join(str(part) for part in first["loc"][:2])
    item = "".join(f"item {part + 1} " for part in first["loc"][2:] if isinstance(part, int))
    complaint = first["msg"].replace("Input should", "should", 1)
    more = f" (and {len(others)} more)" if others else ""
    return f"{dotted}: {item}{one_line(complaint)}, not {_shown(first['input'])}{more}"


def _shown(value: Any) -> str:
    return one_line(repr(value), limit=60)
