"""`outpace migrate RUN`: convert a run directory of outpace 0.1, in place.

    config.toml (every setting, old names) ─▶ resolved.toml (every setting, new names, the format of the directory)
                                           └▶ config.toml (what differs from the defaults)

In `metrics.jsonl`, metrics get their new names. Checkpoints, journal and the other logs keep their formats, so a resume
continues exactly as it would have before. A migration that is interrupted can be repeated: the old config is kept in
`config_0_1.toml`, every file is replaced atomically, and a directory without `resolved.toml` counts as one of 0.1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from outpace.config import Config
from outpace.config.base import OpenedBy
from outpace.config.defaults import by_section
from outpace.config.load import (
    CONFIG_FILE,
    EMPTY_RESOLVED,
    FIELDS,
    OBJECTS_COMMENT,
    RESOLVED_FILE,
    dump_resolved,
    make_config,
    may_be_parameter,
    python_objects_of,
    read_config_file,
    read_resolved,
)
from outpace.config.other_libraries import RENAMED, RENAMED_VALUES
from outpace.config.validation import resolve
from outpace.errors import BadInput, one_line
from outpace.monitoring.line_file import read_lines, write_atomically
from outpace.monitoring.metrics import RENAMED_METRICS
from outpace.monitoring.run_directory import LOCK_FILE, OLD_CONFIG_FILE, RunLock

PRESET = "algorithm.preset"


def migrate(run: Path) -> str:
    """Convert a run directory, and return a one-line report."""
    if not (run / CONFIG_FILE).is_file():
        raise BadInput(f"{run}: not a run directory (no {CONFIG_FILE})")
    if (run / RESOLVED_FILE).exists():
        read_resolved(run)  # raises if the format is that of a newer version
        return f"{run}: nothing to do, the directory has the current format"
    try:
        return _migrate_locked(run)
    except OSError as error:
        raise BadInput(f"{run}: cannot be converted: {error.strerror or error}") from None


def _migrate_locked(run: Path) -> str:
    lock = RunLock(run / LOCK_FILE)
    try:
        old = run / (OLD_CONFIG_FILE if (run / OLD_CONFIG_FILE).exists() else CONFIG_FILE)
        values = renamed_settings(read_config_file(old))
        _check_keys(run, values)
        objects = python_objects_of(old)
        if old.name == CONFIG_FILE:
            write_atomically(run / OLD_CONFIG_FILE, old.read_text())
        comment = f"{OBJECTS_COMMENT}{objects}\n" if objects else ""
        complete = _resolved(values, objects)
        chosen = without_defaults(values, objects) if complete else values
        resolved = dump_resolved(complete) if complete else EMPTY_RESOLVED + tomli_w.dumps(by_section(values))
        _rename_metrics(run / "metrics.jsonl")
        write_atomically(run / CONFIG_FILE, comment + tomli_w.dumps(by_section(chosen)))
        write_atomically(run / RESOLVED_FILE, resolved)
    finally:
        lock.release()
    return f"{run}: converted; the previous config is in {OLD_CONFIG_FILE}"


def _check_keys(run: Path, values: Mapping[str, Any]) -> None:
    """Reject a config of another program."""
    for key in values:
        if key not in FIELDS and not may_be_parameter(key):
            raise BadInput(f"{run}: not a run directory of outpace 0.1; {CONFIG_FILE} has the key {one_line(key, 60)}")


def _rename_metrics(file: Path) -> None:
    if file.exists():
        lines = ({RENAMED_METRICS.get(name, name): value for name, value in line.items()} for line in read_lines(file))
        write_atomically(file, "".join(json.dumps(line) + "\n" for line in lines))


def renamed_settings(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of outpace 0.1 by dotted key, with the names and values of this version.

    Drops defaults of settings that apply only if another setting is on, because 0.1 wrote them in either case."""
    old: dict[str, Any] = {}
    for section, keys in sections.items():
        old |= {f"{section}.{key}": value for key, value in keys.items()} if isinstance(keys, dict) else {section: keys}
    new = {RENAMED.get(key, key): value for key, value in old.items()}
    new |= {key: names[new[key]] for key, names in RENAMED_VALUES.items() if new.get(key) in names}
    return {key: value for key, value in new.items() if not _is_default_of_closed_key(key, new)}


def _is_default_of_closed_key(key: str, values: Mapping[str, Any]) -> bool:
    info = FIELDS.get(key)
    if info is None or info.default != values[key]:
        return False
    name = key.partition(".")[0]
    keys = {each.partition(".")[2]: value for each, value in values.items() if each.partition(".")[0] == name}
    section_type = Config.model_fields[name].annotation
    assert section_type is not None
    section = section_type.model_construct(**keys)
    of_servers = name == "launch" or key == "weights.transport"
    return of_servers or any(isinstance(mark, OpenedBy) and not mark.is_open(section) for mark in info.metadata)


def without_defaults(values: dict[str, Any], objects: str = "") -> dict[str, Any]:
    """Drop the settings that would have the same value if left out. `objects` names the run's Python objects."""
    complete, kept = _resolved(values, objects), dict(values)
    # Presets and function names give other keys their values, so they are tried last.
    for key in sorted(values, key=lambda key: (key == PRESET, key.endswith(".name"))):
        fewer = {each: value for each, value in kept.items() if each != key}
        if _resolved(fewer, objects) == complete:
            kept = fewer
    return kept


def _resolved(settings: dict[str, Any], objects: str) -> Config | None:
    """Return the resolved config, or None if it is not valid, for example because it names a function that only
    the program that started the run registers."""
    own = bool(objects)
    try:
        return resolve(make_config(settings), own_tasks="tasks" in objects, own_rewards=own, own_rollout=own)
    except BadInput:
        return None
