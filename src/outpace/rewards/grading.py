"""Judging the completions of one group by several reward functions.

A function is called once for the whole group, in TRL's signature. What it returns is data from outside: one finite
number or None per completion, anything else is a `RewardFailed` that names the function and the sample.

Invariants:
- The event loop never runs a synchronous reward function; async ones run on it.
- A call takes at most `timeout_s`. A grader process that hangs is killed. A thread cannot be, so it is abandoned: it
  holds neither a place among the running calls nor the end of the process.
- None means "does not apply" and is left out of the sum. A completion to which nothing applies has no total.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from outpace.errors import BadInput, RewardFailed, one_line
from outpace.protocols import Reward
from outpace.rewards.outcomes import CallRaised, GraderDied, Scores, TimeLimitError, checked
from outpace.rewards.pool import GraderPool
from outpace.rewards.registry import accepted, is_async
from outpace.runtime.threads import in_thread

MAX_THREADS = 8
"""Synchronous calls that run at once, per event loop; further ones wait, and their time does not count yet."""


@dataclass(frozen=True)
class Graded:
    """The judgement of one completion. `parts` has the functions that applied, unweighted."""

    total: float | None
    parts: dict[str, float]


async def grade(
    functions: Sequence[tuple[str, Reward]],
    weights: Sequence[float] | None,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    timeout_s: float,
    pool: GraderPool | None = None,
) -> list[Graded]:
    """Judge `completions`. Prompts and every column have one value per completion; weights are 1 when absent.

    The functions that `pool` knows run in its processes."""
    count = len(completions)
    arguments = {**columns, "prompts": prompts, "completions": completions}
    assert all(len(values) == count for values in arguments.values())
    # Every function is heard before the first failure is raised, so that no call is left running unwatched.
    scores = await asyncio.gather(
        *(_score(name, function, arguments, count, timeout_s, pool) for name, function in functions),
        return_exceptions=True,
    )
    by_name: dict[str, Scores] = {}
    for (name, _), answer in zip(functions, scores, strict=True):
        if isinstance(answer, BaseException):
            raise answer
        by_name[name] = answer
    weighted = dict(zip(by_name, weights or [1.0] * len(by_name), strict=True))
    return [_combine(by_name, weighted, sample) for sample in range(count)]


def _combine(by_name: dict[str, Scores], weights: dict[str, float], sample: int) -> Graded:
    given = {name: scores[sample] for name, scores in by_name.items()}
    parts = {name: score for name, score in given.items() if score is not None}
    if not parts:
        return Graded(None, {})
    total = sum(weights[name] * score for name, score in parts.items())
    if not math.isfinite(total):
        raise RewardFailed(f"the weighted sum of {', '.join(parts)} for sample {sample} is {total}")
    return Graded(total, parts)


async def _score(
    name: str,
    function: Reward,
    arguments: dict[str, Sequence[Any]],
    count: int,
    timeout_s: float,
    pool: GraderPool | None,
) -> Scores:
    taken = accepted(function, arguments)
    given = {key: list(arguments[key]) for key in taken}  # lists of its own, to do with as it likes
    try:
        if pool is not None and name in pool:
            return await _in_process(pool, name, given, count, timeout_s)
        returned = await _in_worker(name, function, given, count, timeout_s)
    except TimeLimitError:
        raise RewardFailed(f"reward {name} took longer than {timeout_s:g} s on {_samples(count)}") from None
    return checked(name, returned, count)


# ----------------------------------------------------------------------------------------------------------- calling


async def _in_process(pool: GraderPool, name: str, given: dict[str, list[Any]], count: int, timeout_s: float) -> Scores:
    try:
        return await pool.call(name, given, count, timeout_s)
    except CallRaised as error:
        raise RewardFailed(f"reward {name} raised {error.kind} on {_samples(count)}: {error.message}") from error
    except GraderDied as error:
        raise RewardFailed(f"the process of reward {name} {error} on {_samples(count)}") from None
    except BadInput as error:  # a column that cannot be copied into another process
        raise RewardFailed(f"reward {name} needs rewards.isolation = thread: {error}") from error


async def _in_worker(name: str, function: Reward, given: dict[str, list[Any]], count: int, timeout_s: float) -> Any:
    call = partial(function, **given)
    try:
        return await (_on_loop(call, timeout_s) if is_async(function) else _off_loop(call, timeout_s))
    except TimeLimitError:
        raise
    # The boundary to the user's code, which may raise anything and may even try to exit.
    except (Exception, SystemExit) as error:
        raise RewardFailed(
            f"reward {name} raised {type(error).__name__} on {_samples(count)}: {one_line(error)}"
        ) from error


def _samples(count: int) -> str:
    return f"samples 0 to {count - 1}" if count > 1 else "sample 0"


async def _on_loop(call: Callable[[], Any], timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await call()
    except TimeoutError:
        if limit.expired():
            raise TimeLimitError from None
        raise


async def _off_loop(call: Callable[[], Any], timeout_s: float) -> Any:
    async with _places():
        returned, error = await _on_loop(partial(in_thread, call), timeout_s)
    if error is not None:
        raise error
    if inspect.isawaitable(returned):  # a plain function that hands out a coroutine
        return await _on_loop(lambda: returned, timeout_s)
    return returned


_places_of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


def _places() -> asyncio.Semaphore:
    loop = asyncio.get_running_loop()
    if loop not in _places_of_loop:
        _places_of_loop[loop] = asyncio.Semaphore(MAX_THREADS)
    return _places_of_loop[loop]
