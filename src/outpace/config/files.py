"""What is written in a config file, as it is: TOML or YAML. Every error is one line that starts with the file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.errors import BadInput, one_line
from outpace.wording import with_article


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
    except UnicodeDecodeError as error:
        raise BadInput(f"{file}: not a text file in utf-8 ({error.reason} at byte {error.start})") from None
    except ValueError as error:
        raise BadInput(f"{file}: {one_line(error)}") from None
    if not isinstance(content, Mapping):
        raise BadInput(f"{file}: should hold sections with keys, not {with_article(type(content).__name__)}")
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
