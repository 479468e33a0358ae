"""Registries: the components that a config chooses by name.

There is one `Registry` for each kind of component. A name is known if it is

- built in: the component, or its reference, which is imported on first use
- registered by the program that starts the run, with the decorator of the kind. `outpace.run.objects` sends what the
  config names to the child processes
- an entry point of an installed package, in the group of the kind, such as `outpace.rewards`; so it is known in every
  process

Where a name is allowed, so is a reference to any function or class: `package.module:name` or `path/to/file.py:name`.

Kinds whose functions have their own settings are in `outpace.algorithms.registry`. The process that runs trackers
imports this module, so it uses only the standard library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, overload

from outpace.errors import BadInput, one_line
from outpace.runtime.references import FILE_MODULE, closest_names, is_reference, load_function

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

C = TypeVar("C", bound=Callable[..., Any])

Origin = tuple[str, str]
"""Module and qualified name of a registered component."""


class Registry:
    """Components of one kind, by name.

    - `word`: the kind with its article, for messages
    - `settings`: config keys that hold such names; messages show the first
    - `decorator`: its name in `outpace`
    - `group`: group of entry points
    - `signature`: what a component looks like, for docs/extending.md
    """

    def __init__(
        self,
        word: str,
        settings: tuple[str, ...],
        decorator: str,
        group: str,
        signature: str,
        built_in: Mapping[str, Any] | None = None,
    ) -> None:
        self.word = word
        self.settings = settings
        self.decorator = decorator
        self.group = group
        self.signature = signature
        self.built_in: dict[str, Any] = dict(built_in or {})
        self.registered: dict[str, dict[Origin, Any]] = {}
        REGISTRIES.append(self)

    @property
    def setting(self) -> str:
        return self.settings[0]

    @overload
    def register(self, name: str) -> Callable[[C], C]: ...
    @overload
    def register(self, name: C) -> C: ...
    def register(self, name: Any) -> Any:
        """Register a component under `name`, or under its own name if used without parentheses."""
        if not isinstance(name, str):
            self.add(name.__name__, name)
            return name

        def decorate(component: C) -> C:
            self.add(name, component)
            return component

        return decorate

    def add(self, name: str, component: Any) -> None:
        """Register a component. Registering it again, as in a notebook or an imported script, replaces it."""
        self.registered.setdefault(name, {})[_origin(self.code_of(component))] = component

    def names(self) -> list[str]:
        return list(dict.fromkeys([*self.built_in, *self.registered, *(each.name for each in self._entry_points())]))

    def is_installed(self, name: str) -> bool:
        """Return whether a package has an entry point of this name, so that every process knows it."""
        return any(each.name == name for each in self._entry_points())

    def find(self, name: str, setting: str = "") -> Any:
        """Return the component of a name or reference. Raises `BadInput`, which starts with `setting`."""
        setting = setting or self.setting
        if is_reference(name):
            return self.accept(load_function(name, setting), f"{setting}: {name}")
        self.check_known(name, setting)
        found: dict[str, Any] = {"outpace": self.built_in[name]} if name in self.built_in else {}
        for entry in self._entry_points():
            if entry.name == name:
                context = f"{setting}: {name} of {entry.dist.name if entry.dist else 'an installed package'}"
                found[entry.value] = self.accept(load_function(entry.value, context), context)
        for (module, qualname), component in self.registered.get(name, {}).items():
            if component not in found.values():  # a decorated function of a package is also its entry point
                found[f"{module}:{qualname}" if module else f"{qualname} of your program"] = component
        if len(found) > 1:
            raise BadInput(f"{setting}: {name} is defined by {' and by '.join(found)}; rename one of them")
        component = next(iter(found.values()))
        return load_function(component, setting) if isinstance(component, str) else component

    def check_known(self, name: str, setting: str = "") -> None:
        """Raise `BadInput` if there is no component of this name. Imports nothing, so a reference is not checked."""
        if is_reference(name) or name in self.names():
            return
        _entry_points.cache_clear()  # a package may just have been installed, as in a notebook
        if name not in self.names():
            raise BadInput(f"{setting or self.setting}: {self._why_unknown(name)}")

    def accept(self, loaded: Any, context: str) -> Any:
        """Return the component for a loaded function or class. `context` begins the message of a `BadInput`."""
        return loaded

    def code_of(self, component: Any) -> Any:
        """Return the function or class of a component."""
        return component

    def _entry_points(self) -> list[EntryPoint]:
        return _entry_points(tuple(sys.path)).get(self.group, [])

    def _why_unknown(self, name: str) -> str:
        shown, noun = one_line(repr(name), 100), self.word.partition(" ")[2]
        if name.endswith(".py"):
            return f"{shown} is a file; name the {noun} in it, as {one_line(name)}:name"
        other = next((each for each in REGISTRIES if name in each.built_in), None)
        reason = f"{name} is {other.word}, not {self.word}" if other else f"unknown {noun} {shown}"
        close = "".join(f"did you mean {each}? " for each in closest_names(name, self.names()))
        known = ", ".join(self.names())
        return f"{reason}; {close}use one of {known}; or your own, as package.module:name or path/to/file.py:name"


def _origin(code: Any) -> Origin:
    """Return module and name. The module of a script is "", whether it is run or imported by reference."""
    module = getattr(code, "__module__", None) or ""
    own = module == "__main__" or module.startswith(FILE_MODULE)
    return "" if own else module, getattr(code, "__qualname__", None) or type(code).__name__


@cache
def _entry_points(path: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    """Return the entry points of all packages on `sys.path`, by group. Reading them takes some milliseconds."""
    from importlib.metadata import entry_points  # slow to import

    found = entry_points()
    return {group: list(found.select(group=group)) for group in found.groups if group.startswith("outpace.")}


REGISTRIES: list[Registry] = []
"""The registries of all modules imported so far."""

TASKS = Registry(
    "a task",
    ("tasks.name", "eval.sets"),
    "register_task",
    "outpace.tasks",
    "f(config) -> training tasks, held-out tasks or None",
    {
        "countdown": "outpace.tasks.countdown:Countdown",
        "arithmetic": "outpace.tasks.generated:arithmetic_tasks",
        "calculator": "outpace.tasks.generated:calculator_tasks",
        "guess": "outpace.tasks.generated:guess_tasks",
    },
)
REWARDS = Registry(
    "a reward function",
    ("rewards.functions",),
    "register_reward",
    "outpace.rewards",
    "f(prompts, completions, **columns) -> one number or None per completion",
    {
        "countdown": "outpace.rewards.builtin:countdown",
        "number": "outpace.rewards.builtin:number",
        "math": "outpace.rewards.builtin:math",
        "reasoning_gym": "outpace.rewards.reasoning_gym:reasoning_gym",
        "judge": "outpace.rewards.judge:make_judge",
        "python": "outpace.rewards.python_tests:make_python",
    },
)
ENVIRONMENTS = Registry(
    "an environment",
    ("rollout.environment", "environment.kinds"),
    "environment",
    "outpace.environments",
    "class with reset(**columns), typed methods as tools and optionally get_reward()",
    {"calculator": "outpace.tasks.generated:Calculator", "guess": "outpace.tasks.generated:Guess"},
)
TRANSPORTS = Registry(
    "a weight transport",
    ("weights.transport",),
    "transport",
    "outpace.transports",
    "f(target) -> object with needs_pause, prepare, swap, forget and close",
    {
        "files": "outpace.engines.server.transports:files_transport",
        "memory": "outpace.engines.server.transports:memory_transport",
        "ipc": "outpace.engines.server.transports:memory_transport",
        "collective": "outpace.engines.server.transports:collective_transport",
    },
)
TRACKERS = Registry(
    "a tracker",
    ("run.report_to",),
    "tracker",
    "outpace.trackers",
    "class with start, metrics, table, flush and finish",
    {
        "trackio": "outpace.monitoring.trackers:Trackio",
        "wandb": "outpace.monitoring.trackers:Wandb",
        "tensorboard": "outpace.monitoring.trackers:Tensorboard",
        "mlflow": "outpace.monitoring.trackers:Mlflow",
    },
)

register_task = TASKS.register
register_reward = REWARDS.register
environment = ENVIRONMENTS.register
transport = TRANSPORTS.register
tracker = TRACKERS.register
