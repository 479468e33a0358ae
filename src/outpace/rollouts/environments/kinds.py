"""Which environments a run has, and which of them a task wants.

    one, named nowhere   rollout.environment, or Trainer(environment=Class)                every task has it
    several, by name     environment.kinds, or Trainer(environment={"maze": Maze, …})      a column of the task chooses

Whatever can be known before a run starts ends in one line. A task that names no kind is found when its turn comes: its
episodes fail, and say which task it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from outpace.config import Config
from outpace.errors import BadInput, OutpaceError, one_line
from outpace.references import absolute, load_function, nearest
from outpace.rollouts.tools.functions import tools_of
from outpace.runtime.code import Source, by_value
from outpace.runtime.signature import BY_KEYWORD, parameters_of
from outpace.types import Task

Factory = Callable[[], object]
"""An environment class, or a function that makes an instance."""
Given = Factory | Mapping[str, Factory | str]
"""What a Python caller may give."""

VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)

ONLY = ""
"""The name of the kind of a run that has one for all tasks."""


class NoSuchKind(OutpaceError):
    """A task names an environment that the run does not have."""


@dataclass(frozen=True)
class Origin:
    """Where the instances of a kind come from: `reference`, or `factory` where that is empty; `setting` named it."""

    setting: str
    reference: str = ""
    factory: Factory | None = None

    def load(self) -> Factory:
        """For this process."""
        return self.factory if self.factory is not None else load_function(self.reference, self.setting)

    def source(self) -> Source:
        """For another process."""
        return Source(absolute(self.reference)) if self.factory is None else by_value(self.factory)


def kinds_of(config: Config, given: Given | None = None) -> dict[str, Origin]:
    """The environments of a run by kind; none at all if nobody named one."""
    named, kinds = config.rollout.environment_class, config.environment.kinds
    ways = {"rollout.environment": named, "environment.kinds": kinds, "environment": given}
    used = [way for way, value in ways.items() if value]
    if len(used) > 1:
        raise BadInput(f"{used[0]}: {used[1]} names environments too; keep one of the two")
    if named is not None:
        return {ONLY: Origin("rollout.environment", named)}
    if given is not None and not isinstance(given, Mapping):
        return {ONLY: _origin("environment", given)}
    prefix = "environment.kinds." if kinds else "environment: "
    return {name: _origin(f"{prefix}{name}", one) for name, one in (kinds or given or {}).items()}


def check_kinds(origins: Mapping[str, Origin], column: str, first: Task | None = None) -> None:
    """Raise `BadInput` for what can be known to be wrong before anything starts; `first` is the first task."""
    for name, origin in origins.items():
        if not isinstance(name, str) or (not name and len(origins) > 1):
            raise BadInput(f"environment.kinds: {name!r} is no name that a column could hold")
        _check(origin)
    if origins and first is not None:
        try:
            kind = kind_of(first, origins, column)
        except NoSuchKind as error:
            raise BadInput(f"environment.column: {error}") from None
        _check_columns(origins[kind], first)


def give_rewards(origins: Mapping[str, Origin]) -> bool:
    """Whether every kind judges its episodes itself; of what a function makes, that is believed."""
    factories = [origin.load() for origin in origins.values()]
    return all(not isinstance(factory, type) or hasattr(factory, "get_reward") for factory in factories)


def kind_of(task: Task, origins: Mapping[str, Origin], column: str) -> str:
    """The kind that the task wants; `NoSuchKind` if the run does not have it."""
    if set(origins) == {ONLY}:
        return ONLY
    if column not in task.columns:
        raise NoSuchKind(f"task {task.id} has no column {column}, which names its environment")
    wanted: Any = task.columns[column]
    if isinstance(wanted, str) and wanted in origins:
        return wanted
    close = nearest(wanted, origins) if isinstance(wanted, str) else []
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(origins)}"
    raise NoSuchKind(f"task {task.id}: {column} is {one_line(repr(wanted), 60)}, no environment of this run; {hint}")


def _origin(setting: str, given: Factory | str) -> Origin:
    if isinstance(given, str):
        return Origin(setting, given)
    if not callable(given):
        raise BadInput(f"{setting}: {one_line(repr(given), 60)} is no class, and no function that makes an environment")
    return Origin(setting, factory=given)


def _check_columns(origin: Origin, task: Task) -> None:
    """What `reset` must have, the tasks must have."""
    reset = getattr(origin.load(), "reset", None)
    if not isinstance(origin.load(), type) or reset is None:
        return
    parameters = (parameters_of(reset) or [])[1:]  # without self
    required = {each.name for each in parameters if each.kind in BY_KEYWORD and each.default is each.empty}
    if missing := required - {*task.columns, "prompt"}:
        have = ", ".join(sorted(task.columns)) or "none"
        needs = ", ".join(sorted(missing))
        raise BadInput(f"{origin.setting}: reset needs the columns {needs}; the tasks have {have}")


def _check(origin: Origin) -> None:
    factory = origin.load()
    if not isinstance(factory, type):  # what a function makes is seen when it is called, without arguments
        if required := [
            p.name for p in parameters_of(factory) or [] if p.default is p.empty and p.kind not in VARIADIC
        ]:
            raise BadInput(
                f"{origin.setting}: {getattr(factory, '__name__', 'the function')} needs {', '.join(required)}; "
                "name a class with reset, or a function that makes an environment without arguments"
            )
        return
    if not callable(getattr(factory, "reset", None)):
        raise BadInput(f"{origin.setting}: {factory.__name__} has no method reset(**columns)")
    tools_of(factory, origin.setting)
