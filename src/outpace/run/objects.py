"""User objects of a run: functions, classes, tasks and metrics that were passed or registered in Python.

A run started from Python saves them in its run directory, so that `outpace eval` can restore them (`SavedObjects`):

    objects.json    references (`module:name`, `/path/to/file.py:name`) of functions and classes; `missing`: the rest
    heldout.jsonl   the held-out tasks used in evaluations, if the tasks were passed as objects

Nothing is pickled. A lambda, a local function or a class from a notebook has no reference; the error names it.

Child processes get the components that a script registered by name and the metrics that it declared. `registered_for`
collects them in the caller; `Registered.install` registers them in the child.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from outpace.algorithms import ADVANTAGES, MASKS, NORMALIZERS, POLICY_LOSSES
from outpace.config import Config
from outpace.config.defaults import get_value
from outpace.errors import BadInput, one_line
from outpace.monitoring.line_file import read_lines, write_atomically
from outpace.monitoring.metric_table import DECLARED, Metric
from outpace.protocols import TaskSource
from outpace.runtime.references import FILE_MODULE, absolute_reference, is_reference, load_function
from outpace.runtime.registry import ENVIRONMENTS, REWARDS, TASKS, TRACKERS, TRANSPORTS, Registry
from outpace.types import Task

OBJECTS_FILE = "objects.json"
HELDOUT_FILE = "heldout.jsonl"


@dataclass(frozen=True)
class SavedObjects:
    """References by argument name (one reference, a list, or a dict by kind), and the objects without a reference."""

    references: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    heldout: list[Task] | None = None

    def write(self, run: Path) -> None:
        write_atomically(
            run / OBJECTS_FILE, json.dumps({"references": self.references, "missing": self.missing}, indent=2) + "\n"
        )
        if self.heldout is not None:
            write_atomically(run / HELDOUT_FILE, (_row_line(task) for task in self.heldout))


def collect_saved_objects(given: Mapping[str, Any], heldout: TaskSource | None, count: int) -> SavedObjects:
    """Collect the references of the objects in `given` (rewards, rollouts, environment, tools), and the first `count`
    held-out tasks if the caller passed them as objects."""
    references: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name, value in given.items():
        found = _references(value)
        without = [_name_of(item) for item, reference in found if reference is None]
        if without:
            missing[name] = ", ".join(without)
        elif isinstance(value, Mapping):
            references[name] = {kind: reference for kind, (_, reference) in zip(value, found, strict=True)}
        else:
            references[name] = [reference for _, reference in found] if isinstance(value, list | tuple) else found[0][1]
    tasks = None if heldout is None else [heldout[index] for index in range(min(count, len(heldout)))]
    if tasks is not None and not all(map(_survives_json, tasks)):
        tasks, missing["tasks"] = None, "columns that JSON cannot represent"
    return SavedObjects(references, missing, tasks)


def load_saved_objects(run: Path) -> dict[str, Any]:
    """Load the objects of a run, as arguments of `UserObjects`. Raises `BadInput` for objects without a reference."""
    try:
        content = msgspec.json.decode((run / OBJECTS_FILE).read_bytes(), type=dict[str, dict[str, Any]])
    except (OSError, ValueError):
        raise BadInput(
            f"{run}: the run uses Python objects, but {OBJECTS_FILE} is missing or unreadable; "
            "call trainer.evaluate() in the script that started it"
        ) from None
    for name, what in content.get("missing", {}).items():
        raise BadInput(
            f"{run}: {name} ({one_line(what, 100)}) cannot be imported outside the script that started the run; "
            "call trainer.evaluate() there, or define it at the top level of a file"
        )
    objects = {name: _loaded(name, found) for name, found in content.get("references", {}).items()}
    if (run / HELDOUT_FILE).is_file():
        objects["eval_tasks"] = list(read_lines(run / HELDOUT_FILE))
    return objects


# ------------------------------------------------------------------------------------------------------- references


def _references(value: Any) -> list[tuple[Any, str | None]]:
    if isinstance(value, Mapping):
        value = list(value.values())
    return [(item, reference_of(item)) for item in (value if isinstance(value, list | tuple) else [value])]


def reference_of(value: Any) -> str | None:
    """Return a reference by which another process can import this function or class, or None. A string is already
    one."""
    if isinstance(value, str):
        return absolute_reference(value)
    value = getattr(value, "original", value)  # a reward function that gets more arguments than it names
    name, place = getattr(value, "__qualname__", ""), getattr(value, "__module__", "")
    module = sys.modules.get(place or "")
    if not name or module is None or getattr(module, name, None) is not value:
        return None  # a local function, a lambda, an instance, or a name that was rebound
    file = getattr(module, "__file__", None) or ""
    if place == "__main__" or place.startswith(FILE_MODULE) or _is_beside_script(place, file):
        return f"{Path(file).resolve()}:{name}" if file.endswith(".py") and Path(file).is_file() else None
    return f"{place}:{name}"


def _is_beside_script(module: str, file: str) -> bool:
    """Return whether this is a top-level module that is not installed. `outpace eval` may run where it is not
    importable by name."""
    installed = {sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")}
    return "." not in module and file.endswith(".py") and not any(Path(file).is_relative_to(path) for path in installed)


def _loaded(name: str, found: Any) -> Any:
    if isinstance(found, dict):
        return {kind: _loaded(name, reference) for kind, reference in found.items()}
    if isinstance(found, list):
        return tuple(_loaded(name, reference) for reference in found)
    return load_function(found, name) if is_reference(found) else found  # a name


def _name_of(value: Any) -> str:
    return str(getattr(value, "__qualname__", None) or type(value).__name__)


# ------------------------------------------------------------------------------------------------------------- tasks


def _row(task: Task) -> dict[str, Any]:
    return {**task.columns, "id": task.id, "prompt": task.prompt}


def _row_line(task: Task) -> str:
    return json.dumps(_row(task), ensure_ascii=False) + "\n"


def _survives_json(task: Task) -> bool:
    try:
        return bool(json.loads(_row_line(task)) == _row(task))
    except (TypeError, ValueError):
        return False


# ------------------------------------------------------------------------------------------------- registered names

WORKER = (TASKS, REWARDS, ENVIRONMENTS, ADVANTAGES)
LEARNER = (POLICY_LOSSES, ADVANTAGES, NORMALIZERS, MASKS)
ENGINE = (TRANSPORTS,)
"""Registries in which each component looks up names of the config. The reporter gets references instead."""


@dataclass(frozen=True)
class Registered:
    """Components that a script registered by name, for a child process that looks them up. Contains only what the
    config names. Importable functions are sent by reference; those of `__main__` or a notebook by value."""

    components: dict[str, dict[str, Any]] = field(default_factory=dict)  # by setting, then by name
    metrics: dict[str, Metric] = field(default_factory=dict)

    def install(self) -> None:
        """Register the components in this process."""
        for registry in {*WORKER, *LEARNER, *ENGINE}:
            for name, component in self.components.get(registry.setting, {}).items():
                registry.add(name, component)
        DECLARED.update(self.metrics)


def registered_for(config: Config, registries: Sequence[Registry], metrics: bool = False) -> Registered | None:
    """Return what a component that uses these registries needs, or None if nothing is registered."""
    components = {registry.setting: _own_components(config, registry) for registry in registries}
    registered = Registered(
        {setting: own for setting, own in components.items() if own}, dict(DECLARED) if metrics else {}
    )
    return None if registered == Registered() else registered


def tracker_references(names: Sequence[str]) -> list[str]:
    """Return trackers as names or references that the reporter can load. A class that this program registered becomes a
    reference."""
    loadable = {name: reference_of(TRACKERS.find(name) if _is_own(TRACKERS, name) else name) for name in names}
    for name, reference in loadable.items():
        if reference is None:
            raise BadInput(f"{TRACKERS.setting}: {name} must be a class at the top level of a file")
    return [reference for reference in loadable.values() if reference is not None]


def _own_components(config: Config, registry: Registry) -> dict[str, Any]:
    """Return the components that the config names and that only this program knows."""
    named = {name for setting in registry.settings for name in _names(get_value(config, setting))}
    return {name: registry.find(name) for name in sorted(named) if _is_own(registry, name)}


def _is_own(registry: Registry, name: str) -> bool:
    return name in registry.registered and not registry.is_installed(name)


def _names(value: Any) -> Iterable[str]:
    if value is None or isinstance(value, str):
        return [value] if value else []
    return list(value.values()) if isinstance(value, Mapping) else list(value)
