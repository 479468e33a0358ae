"""What a run that was started from Python leaves behind so that `outpace eval` can find its objects again.

    objects.json    references (`module:name`, `/path/to/file.py:name`) of functions and classes; `missing` has the rest
    heldout.jsonl   the held-out tasks that its evaluations take, where the tasks were given as objects

Nothing is pickled: a lambda, a local function or a class of a notebook has no reference, and is named in the error.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from outpace.errors import BadInput, one_line
from outpace.observe.linefile import read_lines, write_atomically
from outpace.protocols import TaskSource
from outpace.references import FILE_MODULE, absolute, load_function
from outpace.types import Task

OBJECTS_FILE = "objects.json"
HELDOUT_FILE = "heldout.jsonl"


@dataclass(frozen=True)
class SavedObjects:
    """References by the name of the argument (a single one, a list, or by kind), and what has none."""

    references: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    heldout: list[Task] | None = None

    def write(self, run: Path) -> None:
        write_atomically(
            run / OBJECTS_FILE, json.dumps({"references": self.references, "missing": self.missing}, indent=2) + "\n"
        )
        if self.heldout is not None:
            write_atomically(run / HELDOUT_FILE, (_row_line(task) for task in self.heldout))


def saved(given: Mapping[str, Any], heldout: TaskSource | None, count: int) -> SavedObjects:
    """What can be kept of the objects in `given` (rewards, rollout, environment, tools), and the first `count` held-out
    tasks if these are a Python caller's own."""
    references: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name, value in given.items():
        found = _references(value)
        lost = [_name_of(item) for item, reference in found if reference is None]
        if lost:
            missing[name] = ", ".join(lost)
        elif isinstance(value, Mapping):
            references[name] = {kind: reference for kind, (_, reference) in zip(value, found, strict=True)}
        else:
            references[name] = [reference for _, reference in found] if isinstance(value, list | tuple) else found[0][1]
    tasks = None if heldout is None else [heldout[index] for index in range(min(count, len(heldout)))]
    if tasks is not None and not all(map(_survives_json, tasks)):
        tasks, missing["tasks"] = None, "columns that JSON cannot hold"
    return SavedObjects(references, missing, tasks)


def restored(run: Path) -> dict[str, Any]:
    """The objects of a run as arguments of `Objects`; raises `BadInput` for what can only be had in the script."""
    try:
        noted = msgspec.json.decode((run / OBJECTS_FILE).read_bytes(), type=dict[str, dict[str, Any]])
    except (OSError, ValueError):
        raise BadInput(f"{run}: has objects of a Python program and no {OBJECTS_FILE}; evaluate it there") from None
    for name, what in noted.get("missing", {}).items():
        raise BadInput(
            f"{run}: its {name} ({one_line(what, 100)}) cannot be found outside the program that started the run; "
            "call trainer.evaluate() there, or define it at the top level of a file"
        )
    objects = {name: _loaded(name, found) for name, found in noted.get("references", {}).items()}
    if (run / HELDOUT_FILE).is_file():
        objects["eval_tasks"] = list(read_lines(run / HELDOUT_FILE))
    return objects


# ------------------------------------------------------------------------------------------------------- references


def _references(value: Any) -> list[tuple[Any, str | None]]:
    if isinstance(value, Mapping):
        value = list(value.values())
    return [(item, reference_of(item)) for item in (value if isinstance(value, list | tuple) else [value])]


def reference_of(value: Any) -> str | None:
    """How another process can import this function or class; None if it cannot. Text is a reference already."""
    if isinstance(value, str):
        return absolute(value)
    name, place = getattr(value, "__qualname__", ""), getattr(value, "__module__", "")
    module = sys.modules.get(place or "")
    if not name or module is None or getattr(module, name, None) is not value:
        return None  # local, a lambda, an instance, or replaced since
    file = getattr(module, "__file__", None) or ""
    if place == "__main__" or place.startswith(FILE_MODULE) or _is_beside_script(place, file):
        return f"{Path(file).resolve()}:{name}" if file.endswith(".py") and Path(file).is_file() else None
    return f"{place}:{name}"


def _is_beside_script(module: str, file: str) -> bool:
    """A lone module that is not installed: `outpace eval` may be started where its name is not known."""
    installed = {sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")}
    return "." not in module and file.endswith(".py") and not any(Path(file).is_relative_to(path) for path in installed)


def _loaded(name: str, found: Any) -> Any:
    if isinstance(found, dict):
        return {kind: load_function(reference, name) for kind, reference in found.items()}
    if isinstance(found, list):
        return tuple(load_function(reference, name) if ":" in reference else reference for reference in found)
    return load_function(found, name)


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
