"""MERGED"""

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
"""An environment class, or a function that returns an instance."""
Given = Factory | Mapping[str, Factory | str]
"""The `environment` argument of `Trainer`: a factory, or factories or references by kind."""

VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)

ONLY = ""
"""Name of the kind in a run with one environment for all tasks."""


class NoSuchKind(OutpaceError):
    """A task names an environment kind that the run does not have."""


@dataclass(frozen=True)
class Origin:
    """Factory of one kind: `reference`, or `factory` if that is empty. `setting` is the setting that named it."""

    setting: str
    reference: str = ""
    factory: Factory | None = None

    def load(self) -> Factory:
        """Return the factory for use in this process."""
        return self.factory if self.factory is not None else load_function(self.reference, self.setting)

    def source(self) -> Source:
        """Return the source from which another process loads the factory."""
        return Source(absolute(self.reference)) if self.factory is None else by_value(self.factory)


def kinds_of(config: Config, given: Given | None = None) -> dict[str, Origin]:
    """Return the environments of a run by kind; empty if none is configured."""
    named, kinds = config.rollout.environment_class, config.environment.kinds
    ways = {"rollout.environment": named, "environment.kinds": kinds, "environment": given}
    used = [way for way, value in ways.items() if value]
    if len(used) > 1:
        raise BadInput(f"{used[0]}: {used[1]} also names environments; keep only one of the two")
    if named is not None:
        return {ONLY: Origin("rollout.environment", named)}
    if given is not None and not isinstance(given, Mapping):
        return {ONLY: _origin("environment", given)}
    prefix = "environment.kinds." if kinds else "environment: "
    return {name: _origin(f"{prefix}{name}", one) for name, one in (kinds or given or {}).items()}


def check_kinds(origins: Mapping[str, Origin], column: str, first: Task | None = None) -> None:
    """Raise `BadInput` for errors that can be found before the run starts; `first` is the first task."""
    for name, origin in origins.items():
        if not isinstance(name, str) or (not name and len(origins) > 1):
            raise BadInput(f"environment.kinds: {name!r} is not a valid name; use non-empty text")
        _check(origin)
    if origins and first is not None:
        try:
            kind = kind_of(first, origins, column)
        except NoSuchKind as error:
            raise BadInput(f"environment.column: {error}") from None
        _check_columns(origins[kind], first)


def give_rewards(origins: Mapping[str, Origin]) -> bool:
    """Return whether every kind has `get_reward`. Factories that are functions are assumed to."""
    factories = [origin.load() for origin in origins.values()]
    return all(not isinstance(factory, type) or hasattr(factory, "get_reward") for factory in factories)


def kind_of(task: Task, origins: Mapping[str, Origin], column: str) -> str:
    """Return the kind that the task names; raises `UnknownEnvironmentKind` if the run does not have it."""
    if set(origins) == {ONLY}:
        return ONLY
    if column not in task.columns:
        raise NoSuchKind(f"task {task.id} has no column {column} to name its environment")
    kind: Any = task.columns[column]
    if isinstance(kind, str) and kind in origins:
        return kind
    close = nearest(kind, origins) if isinstance(kind, str) else []
    hint = f"did you mean {close[0]}?" if close else f"available: {', '.join(origins)}"
    shown = one_line(repr(kind), 60)
    raise NoSuchKind(f"task {task.id}: {column} is {shown}, which is not an environment of this run; {hint}")


def _origin(setting: str, given: Factory | str) -> Origin:
    if isinstance(given, str):
        return Origin(setting, given)
    if not callable(given):
        shown = one_line(repr(given), 60)
        raise BadInput(f"{setting}: {shown} is neither a class nor a function that returns an environment")
    return Origin(setting, factory=given)


def _check_columns(origin: Origin, task: Task) -> None:
    """Raise `BadInput` if `reset` requires columns that the tasks do not have."""
    reset = getattr(origin.load(), "reset", None)
    if not isinstance(origin.load(), type) or reset is None:
        return
    parameters = (parameters_of(reset) or [])[1:]  # without self
    required = {each.name for each in parameters if each.kind in BY_KEYWORD and each.default is each.empty}
    if missing := required - {*task.columns, "prompt"}:
        have = ", ".join(sorted(task.columns)) or "none"
        needs = ", ".join(sorted(missing))
        raise BadInput(f"{origin.setting}: reset requires the columns {needs}; the tasks have {have}")


def _check(origin: Origin) -> None:
    factory = origin.load()
    if not isinstance(factory, type):  # a function's result is checked once it is called, without arguments
        if required := [
            p.name for p in parameters_of(factory) or [] if p.default is p.empty and p.kind not in VARIADIC
        ]:
            raise BadInput(
                f"{origin.setting}: {getattr(factory, '__name__', 'the function')} requires {', '.join(required)}; "
                "name a class with reset, or a function without arguments that returns an environment"
            )
        return
    if not callable(getattr(factory, "reset", None)):
        raise BadInput(f"{origin.setting}: {factory.__name__} has no method reset(**columns)")
    tools_of(factory, origin.setting)
