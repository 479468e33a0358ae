"""Reward functions by name: built in, `package.module:function`, `path/to/file.py:function`, or a Python callable.

Everything that can be known before a run starts is checked here, so that a misspelt function or a column that no task
has ends in one line and not in a thousand failed groups.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, TypeVar, cast

from outpace.config import Config
from outpace.errors import BadInput
from outpace.protocols import Reward
from outpace.references import is_reference, load_function
from outpace.rewards.evaluator import is_evaluator
from outpace.runtime.code import Source, by_value
from outpace.runtime.signature import BY_KEYWORD, named, parameters_of
from outpace.wording import with_article

R = TypeVar("R", bound=Callable[..., Any])

SETTING = "rewards.functions"
ALWAYS_GIVEN = ("prompts", "completions")
NOT_GIVEN = frozenset({"trainer_state", "log_metric", "log_extra"})
ON_REQUEST = ("completion_ids", "environments")
"""What TRL passes too: given to a function that spells it out. Environments are the instances themselves, so whoever
asks for them is called in the worker's own process."""
BUILT_IN = {
    "countdown": "outpace.rewards.countdown:countdown",
    "number": "outpace.rewards.number:number",
    "math": "outpace.rewards.mathematics:math",
    "reasoning_gym": "outpace.rewards.reasoning_gym:reasoning_gym",
}
APART = frozenset({BUILT_IN["reasoning_gym"], BUILT_IN["math"]})
"""Built-in functions that call the code of another package, and so run in processes like anybody's own."""
MADE = {
    "judge": "outpace.rewards.judge:make_judge",
    "python": "outpace.rewards.programs:make_python",
}
"""Built-in rewards with settings of their own: what makes each from the config."""
PACKAGES = {"math": ("math_verify", "math")}
"""What some need that is not always installed, and the extra of outpace that has it."""
MAIN_THREAD = frozenset({BUILT_IN["math"]})
"""Built-in functions that use signals, and so cannot run on a thread at all."""

OWN: dict[str, Reward] = {}
"""What the user has registered."""

NamedReward = tuple[str, Reward]


def register(name: str) -> Callable[[R], R]:
    """Make a function available by `name` in `rewards.functions`."""

    def keep(function: R) -> R:
        if name in BUILT_IN or name in MADE:
            raise ValueError(f"a reward named {name!r} is built in")
        OWN[name] = function
        return function

    return keep


def resolve_rewards(names: Sequence[str | Reward], config: Config | None = None) -> list[NamedReward]:
    """Each function with the short name it has in metrics; the full reference where two short names are equal.

    `config` has the settings of those that are made from it; its defaults when absent."""
    functions = [(given, _load(given, config or Config())) for given in names]
    short = [_short_name(given) for given, _ in functions]
    named = [
        (name if short.count(name) == 1 else str(given), function)
        for name, (given, function) in zip(short, functions, strict=True)
    ]
    for name, _ in named:
        if [other for other, _ in named].count(name) > 1:
            raise BadInput(f"{SETTING}: {name} is there twice; give it a weight of 2 instead")
    return named


def check_rewards(
    names: Sequence[str | Reward],
    weights: Sequence[float] | None = None,
    columns: Collection[str] | None = None,
    config: Config | None = None,
) -> list[NamedReward]:
    """Resolve, and check weights and parameters against the columns of the tasks where these are known."""
    found = resolve_rewards(names, config)
    if weights is not None and len(weights) != len(found):
        raise BadInput(f"rewards.weights: needs one per function, {len(found)} in all, not {len(weights)}")
    for name, function in found:
        if config is not None and config.rewards.isolation == "thread" and _built_in(function) in MAIN_THREAD:
            raise BadInput(f"rewards.isolation: {name} needs a process that can be killed; leave this out")
        if config is not None and named(function, ("environments",)):
            _check_that_environments_are_here(name, config)
        missing = set() if columns is None else _required(function) - {*columns, *ALWAYS_GIVEN, *ON_REQUEST}
        if missing & NOT_GIVEN:
            raise BadInput(
                f"{SETTING}: {name} needs TRL's {', '.join(sorted(missing & NOT_GIVEN))}, which is not passed; "
                "let it take **kwargs instead"
            )
        if missing:
            have = ", ".join(sorted(columns or ())) or "none"
            raise BadInput(f"{SETTING}: {name} needs the columns {', '.join(sorted(missing))}; the tasks have {have}")
    return found


def _check_that_environments_are_here(name: str, config: Config) -> None:
    """An instance in another process cannot be handed over, nor one that the next episode resets meanwhile."""
    if config.rewards.isolation == "process":
        raise BadInput(f"rewards.isolation: {name} asks for environments, which stay in the worker; leave this out")
    if config.environment.isolation == "process":
        raise BadInput(f'environment.isolation: {name} asks for the environments themselves; use "thread"')
    if config.environment.reuse:
        raise BadInput(f"environment.reuse: {name} asks for environments after their episode; leave this out")


def is_async(function: Reward) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def keeps_own_time(function: Reward) -> bool:
    """Whether it is a built-in function whose single steps have limits of their own, however many wait in its queue."""
    return getattr(function, "own_time", False) is True and type(function).__module__.startswith("outpace.rewards.")


def isolated(
    functions: Sequence[NamedReward],
    isolation: Literal["process", "thread"] | None = None,
    references: Sequence[str] | None = None,
) -> dict[str, Source]:
    """Which functions run in processes of their own, and how those get them.

    None stands for "all but the built-in ones", which can be trusted and take microseconds. Asynchronous functions
    belong to the event loop whatever is said. Without `references` a function that is not built in goes by value."""
    found: dict[str, Source] = {}
    for (name, function), reference in zip(functions, references or [""] * len(functions), strict=True):
        built_in = _built_in(function)
        stays = is_async(function) or bool(named(function, ("environments",)))
        if stays or isolation == "thread" or (isolation is None and built_in and built_in not in APART):
            continue
        reference = built_in or (reference if is_reference(reference) else "")
        found[name] = Source(reference) if reference else by_value(function)
    return found


def _built_in(function: Reward) -> str:
    """The reference of a built-in function, whoever named it; empty for others."""
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
        raise BadInput(
            f"{SETTING}: {given!r} is {with_article(type(given).__name__)}, not a function or the name of one"
        )
    if is_reference(given):
        return load_function(given, SETTING)
    if given in OWN:
        return OWN[given]
    _check_built_in(given)
    if given in MADE:
        return cast(Reward, load_function(MADE[given], SETTING)(config))
    return load_function(BUILT_IN[given], SETTING)


def _check_built_in(name: str) -> None:
    known = [*BUILT_IN, *MADE, *OWN]
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"built in are {', '.join(known)}."
        raise BadInput(
            f"{SETTING}: there is no reward {name!r}; {hint} "
            "Your own are written package.module:function or file.py:function"
        )
    package, extra = PACKAGES.get(name, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        raise BadInput(f'{SETTING}: {name} needs the package {package}: pip install "outpace[{extra}]"')


def _short_name(given: str | Reward) -> str:
    if isinstance(given, str):
        return given.rpartition(":")[2]
    return str(getattr(given, "__name__", type(given).__name__))
