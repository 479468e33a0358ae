"""Reward functions of a run: lookup, and checks before the run starts.

A reward function is a Python callable, or its name or reference (`outpace.runtime.registry`):

    @outpace.register_reward("name")   def f(prompts, completions, **columns) -> list[float | None]   TRL's signature
    @outpace.evaluator                 def f(task, episode) -> float | None                           one episode
    def compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict             verl's signature

A function in TRL's signature gets the texts of a whole group, a function of verl a single text. An evaluator gets one
attempt: its trajectories, metrics and existing rewards. `check_rewards` finds every error that can be found before the
run starts.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, cast

from outpace.config import Config
from outpace.errors import BadInput, with_article
from outpace.protocols import Reward
from outpace.rewards.functions import LOGGING, is_async, is_evaluator
from outpace.rewards.verl import per_answer
from outpace.runtime.by_value import UserCodeSource, source_by_value
from outpace.runtime.references import (
    BY_KEYWORD,
    is_reference,
    named_parameters,
    parameters_of,
)
from outpace.runtime.registry import REWARDS

SETTING = "rewards.functions"
ALWAYS_PASSED = ("prompts", "completions")
ON_REQUEST = ("completion_ids", "environments", "trainer_state")
"""Arguments from TRL that are passed only to functions that name them. `environments` are the live instances, so a
function that names them runs in the rollout worker's process."""
BUILT_FROM_CONFIG = ("judge", "python")
"""Built-in rewards with their own settings: the registry has the factory that builds each one from the config."""
BUILT_IN = {name: place for name, place in REWARDS.built_in.items() if name not in BUILT_FROM_CONFIG}
RUN_IN_PROCESS = frozenset({BUILT_IN["reasoning_gym"], BUILT_IN["math"]})
"""Built-in functions that call third-party packages and therefore run in grader processes, like user functions."""
OPTIONAL_PACKAGES = {"math": ("math_verify", "math")}
"""Optional packages of built-in rewards: (module, outpace extra)."""
MAIN_THREAD = frozenset({BUILT_IN["math"]})
"""Built-in functions that use signals and therefore cannot run on a thread."""

NamedReward = tuple[str, Reward]


def resolve_rewards(names: Sequence[str | Reward], config: Config | None = None) -> list[NamedReward]:
    """Return (name, function) pairs. The name is the short one used in metrics, or the full reference if two collide.

    `config` holds the settings of rewards that are built from it; defaults are used when absent."""
    functions = [(given, per_answer(_load(given, config or Config()))) for given in names]
    short = [_short_name(given) for given, _ in functions]
    named = [
        (name if short.count(name) == 1 else str(given), function)
        for name, (given, function) in zip(short, functions, strict=True)
    ]
    for name, _ in named:
        if [other for other, _ in named].count(name) > 1:
            raise BadInput(f"{SETTING}: {name} is listed twice; give it a weight of 2 instead")
    return named


def check_rewards(
    names: Sequence[str | Reward],
    weights: Sequence[float] | None = None,
    columns: Collection[str] | None = None,
    config: Config | None = None,
) -> list[NamedReward]:
    """Resolve the functions and check their weights and, if `columns` is given, their required parameters."""
    found = resolve_rewards(names, config)
    if weights is not None and len(weights) != len(found):
        raise BadInput(f"rewards.weights: expected one weight per function ({len(found)}), got {len(weights)}")
    for name, function in found:
        if config is not None and config.rewards.isolation == "thread" and _built_in(function) in MAIN_THREAD:
            raise BadInput(f"rewards.isolation: {name} must run in a process that can be killed; remove this setting")
        if config is not None and named_parameters(function, ("environments",)):
            _check_environments_available(name, config)
        missing = set() if columns is None else _required(function) - {*columns, *ALWAYS_PASSED, *ON_REQUEST, *LOGGING}
        if missing:
            have = ", ".join(sorted(columns or ())) or "none"
            needs = ", ".join(sorted(missing))
            raise BadInput(f"{SETTING}: {name} requires {needs}; columns of the tasks: {have}")
    return found


def _check_environments_available(name: str, config: Config) -> None:
    """Raise if `environments` cannot be passed: instances in another process, or reset by the next episode."""
    if config.rewards.isolation == "process":
        raise BadInput(f"rewards.isolation: {name} takes environments, which stay in the worker; remove this setting")
    if config.environment.isolation == "process":
        raise BadInput(f'environment.isolation: {name} takes the environment instances; use "thread"')
    if config.environment.reuse:
        raise BadInput(f"environment.reuse: {name} takes environments after their episode; remove this setting")


def has_own_timeout(function: Reward) -> bool:
    """Return whether a built-in reward enforces its own timeout per request, excluding time spent queued."""
    return getattr(function, "own_timeout", False) is True and type(function).__module__.startswith("outpace.rewards.")


def isolated_sources(
    functions: Sequence[NamedReward],
    isolation: Literal["process", "thread"] | None = None,
    references: Sequence[str] | None = None,
) -> dict[str, UserCodeSource]:
    """Return the functions that run in grader processes, with the source each process loads them from.

    `isolation=None` isolates all but the built-in functions, which are trusted and take microseconds. Async functions
    always run on the event loop. Without `references`, functions that are not built in are sent by value."""
    found: dict[str, UserCodeSource] = {}
    for (name, function), reference in zip(functions, references or [""] * len(functions), strict=True):
        built_in = _built_in(function)
        in_worker = is_async(function) or bool(named_parameters(function, ("environments",)))
        if in_worker or isolation == "thread" or (isolation is None and built_in and built_in not in RUN_IN_PROCESS):
            continue
        reference = built_in or (reference if is_reference(reference) else "")
        found[name] = UserCodeSource(reference) if reference else source_by_value(function)
    return found


def _built_in(function: Reward) -> str:
    """Return the reference of a built-in function, however it was named; empty for others."""
    reference = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
    return reference if reference in BUILT_IN.values() else ""


def _required(function: Reward) -> set[str]:
    if is_evaluator(function):
        return set()
    return {
        parameter.name
        for parameter in parameters_of(function) or ()
        if parameter.kind in BY_KEYWORD and parameter.default is inspect.Parameter.empty
    }


def _load(given: str | Reward, config: Config) -> Callable[..., Any]:
    if not isinstance(given, str):
        if callable(given):
            return given
        raise BadInput(f"{SETTING}: {given!r} is {with_article(type(given).__name__)}, not a function or its name")
    package, extra = OPTIONAL_PACKAGES.get(given, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        raise BadInput(f'{SETTING}: {given} requires the package {package}: pip install "outpace[{extra}]"')
    found: Callable[..., Any] = REWARDS.find(given)
    return cast(Reward, found(config)) if given in BUILT_FROM_CONFIG else found


def _short_name(given: str | Reward) -> str:
    if isinstance(given, str):
        return given.rpartition(":")[2]
    return str(getattr(given, "__name__", type(given).__name__))
