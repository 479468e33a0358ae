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

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.errors import BadInput, one_line
from outpace.wording import with_article


def read_file(file: Path) -> Mapping[str, Any]:
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
