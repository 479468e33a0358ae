"""Calls of reward functions: evaluators, checks of returned scores, and arguments sent to a grader process."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import msgspec

from outpace.errors import BadInput, RewardFailed, one_line, plural, with_article
from outpace.monitoring.metric_table import current_log, log_extra, log_metric
from outpace.runtime import wire
from outpace.runtime.by_value import decode_values, encode_values, pickle_objects
from outpace.runtime.references import named_parameters
from outpace.types import Episode, Task

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__outpace_evaluator__"


def evaluator(function: F) -> F:
    """Mark a function `f(task, episode) -> float | None` as a reward function; it stays callable as before."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        name = getattr(function, "__name__", repr(function))
        raise BadInput(f"@outpace.evaluator: {name} must take two arguments, a task and an episode") from None
    setattr(function, _MARK, True)
    return function


def is_evaluator(function: Any) -> bool:
    return getattr(function, _MARK, False) is True


def is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def encode_evaluator_arguments(task: Task, episode: Episode) -> dict[str, list[Any]]:
    """Encode the arguments of one evaluator call in the shape of a reward function's arguments."""
    try:
        return {"task": [wire.encode(task)], "episode": [wire.encode(episode)]}
    except (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError) as error:
        raise BadInput(f"task {task.id} or its episode cannot be sent to a grader process: {error}") from None


def call_evaluator(function: Callable[..., Any], arguments: dict[str, list[Any]]) -> Any:
    """Call an evaluator with arguments from `encode_evaluator_arguments`."""
    (task,), (episode,) = arguments["task"], arguments["episode"]
    return function(wire.decode(task, Task), wire.decode(episode, Episode))


LOGGING: dict[str, Callable[..., None]] = {"log_metric": log_metric, "log_extra": log_extra}
"""Logging functions that are passed, as in TRL, to reward functions that name them."""


def logging_arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the logging functions that `function` names. They may be called on any thread."""
    log = current_log()
    return {name: LOGGING[name] if log is None else getattr(log, name) for name in named_parameters(function, LOGGING)}


class TrainerProgress(msgspec.Struct, frozen=True):
    """Progress of the run when a completion was sampled: the argument `trainer_state`, with TRL's field names.

    A step is one update of the optimizer. `max_steps` and `num_train_epochs` are 0 if the run has no such limit."""

    global_step: int
    max_steps: int
    epoch: float
    num_train_epochs: int


def with_progress(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with `trainer_state` as one object instead of a list of dicts."""
    given = dict(arguments)
    if "trainer_state" in given:
        given["trainer_state"] = TrainerProgress(**given["trainer_state"][0])
    return given


def with_all_arguments(function: F) -> F:
    """Wrap a reward function so that its `**kwargs` also get, as in TRL, the arguments that are otherwise passed only
    to functions that name them. Functions without `**kwargs` and outpace's own are returned unchanged."""
    kinds = {each.kind for each in inspect.signature(function).parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds or str(function.__module__).startswith("outpace.rewards."):
        return function

    def call(completion_ids: Any, trainer_state: Any, log_metric: Any, log_extra: Any, **columns: Any) -> Any:
        own = {"completion_ids": completion_ids, "trainer_state": trainer_state}
        return function(**own, log_metric=log_metric, log_extra=log_extra, **columns)

    async def call_async(**arguments: Any) -> Any:
        return await call(**arguments)

    wrapper: Any = call_async if is_async(function) else call
    wrapper.original = function  # `outpace eval` imports it
    wrapper.__name__ = getattr(function, "__name__", type(function).__name__)
    wrapper.__signature__ = inspect.signature(call)
    if "environments" in inspect.signature(function).parameters:
        own = [inspect.Parameter("environments", inspect.Parameter.KEYWORD_ONLY)]
        *before, columns = wrapper.__signature__.parameters.values()
        wrapper.__signature__ = wrapper.__signature__.replace(parameters=[*before, *own, columns])
    return cast(F, wrapper)


Scores = list[float | None]


def check_scores(name: str, returned: Any, count: int, first: int = 0) -> Scores:
    """Convert a reward function's return value to one finite float or None per completion, or raise `RewardFailed`.

    Runs user code: iteration and conversion to float. `first` is the index of the first sample, for messages."""
    if isinstance(returned, str | bytes | Mapping):
        raise RewardFailed(
            f"reward {name} returned {with_article(type(returned).__name__)}, not a list of {plural(count, 'number')}"
        )
    try:
        values = list(returned)
    except TypeError:
        raise RewardFailed(
            f"reward {name} returned {one_line(repr(returned), 60)}, not a list of {plural(count, 'number')}"
        ) from None
    if len(values) != count:
        raise RewardFailed(f"reward {name} returned {plural(len(values), 'value')} for {plural(count, 'sample')}")
    return [_number(name, value, sample) for sample, value in enumerate(values, first)]


def _number(name: str, value: Any, sample: int) -> float | None:
    if value is None:
        return None
    try:
        score = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
        score = math.nan
    if not math.isfinite(score):
        shown = one_line(repr(value), 60)
        raise RewardFailed(f"reward {name} returned {shown} for sample {sample}, not a finite number or None")
    return score


Arguments = dict[str, list[Any]]


def pack_arguments(arguments: Arguments) -> tuple[bytes, bool]:
    """Encode the arguments of a call. Returns the bytes and whether they are by value (`outpace.runtime.by_value`).

    An argument that repeats one object, such as the prompt of a group, is sent once."""
    same = {name: each[0] for name, each in arguments.items() if _is_repeated(each)}
    parts = {"same": same, "each": {name: each for name, each in arguments.items() if name not in same}}
    try:
        return encode_values(parts)
    except BadInput:
        pickle_objects(arguments)  # raises an error that names the column
        raise


def unpack_arguments(body: bytes, by_value: bool, count: int) -> Arguments:
    """Decode arguments; each becomes a list of `count` values."""
    parts = decode_values(body, by_value)
    return {**{name: [value] * count for name, value in parts["same"].items()}, **parts["each"]}


def _is_repeated(each: list[Any]) -> bool:
    return bool(each) and all(value is each[0] for value in each)
