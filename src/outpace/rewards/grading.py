"""Judging the completions of one group by several reward functions.

A function is called once for the whole group, in TRL's signature; an evaluator (`outpace.rewards.evaluator`) once for
each episode, all at once. What it returns is data from outside: one finite number or None per completion, anything else
is a `RewardFailed` that names the function and the sample.

Invariants:
- The event loop never runs a synchronous reward function; async ones run on it.
- A call takes at most `timeout_s`; only built-in functions that wait in queues of their own count their time
  themselves. A grader process that hangs is killed. A thread cannot be, so it is abandoned: it holds neither a place
  among the running calls nor the end of the process.
- None means "does not apply" and is left out of the sum. A completion to which nothing applies has no total.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import msgspec

from outpace.errors import BadInput, RewardFailed, one_line
from outpace.protocols import Reward
from outpace.rewards.evaluator import is_evaluator, wired
from outpace.rewards.outcomes import Scores, checked
from outpace.rewards.pool import GraderPool
from outpace.rewards.registry import is_async, keeps_own_time
from outpace.runtime.limits import TimeLimitError, is_ours, within
from outpace.runtime.per_loop import PerLoop
from outpace.runtime.servant import CallRaised, ServantDied
from outpace.runtime.signature import accepted, named
from outpace.runtime.threads import in_thread
from outpace.types import Episode, Task

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
    attempts: tuple[Task, Sequence[Episode]] | None = None,
    on_request: Mapping[str, Sequence[Any]] | None = None,
) -> list[Graded]:
    """Judge `completions`. Prompts and every column have one value per completion; weights are 1 when absent.

    The functions that `pool` knows run in its processes. `attempts` are the same completions as episodes, and their
    task, for evaluators; `on_request` is for functions that spell it out."""
    count = len(completions)
    arguments = {**columns, "prompts": prompts, "completions": completions}
    assert all(len(values) == count for values in arguments.values())
    # Every function is heard before the first failure is raised, so that no call is left running unwatched.
    scores = await _all_heard(
        _score_each(_Call(name, function, timeout_s, pool), attempts)
        if is_evaluator(function)
        else _score(_Call(name, function, timeout_s, pool, count), arguments, on_request or {})
        for name, function in functions
    )
    by_name = dict(zip((name for name, _ in functions), scores, strict=True))
    weighted = dict(zip(by_name, weights or [1.0] * len(by_name), strict=True))
    return [_combine(by_name, weighted, sample) for sample in range(count)]


async def _all_heard(calls: Iterable[Coroutine[Any, Any, Scores]]) -> list[Scores]:
    """What all of them gave, or the first failure once none of them runs any more."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return cast(list[Scores], answers)


def _combine(by_name: dict[str, Scores], weights: dict[str, float], sample: int) -> Graded:
    given = {name: scores[sample] for name, scores in by_name.items()}
    parts = {name: score for name, score in given.items() if score is not None}
    if not parts:
        return Graded(None, {})
    total = sum(weights[name] * score for name, score in parts.items())
    if not math.isfinite(total):
        raise RewardFailed(f"the weighted sum of {', '.join(parts)} for sample {sample} is {total}")
    return Graded(total, parts)


@dataclass(frozen=True)
class _Call:
    """One function and the samples that it is to judge: `count` of them from `first` on."""

    name: str
    function: Reward
    timeout_s: float
    pool: GraderPool | None
    count: int = 1
    first: int = 0

    @property
    def samples(self) -> str:
        last = self.first + self.count - 1
        return f"samples {self.first} to {last}" if self.count > 1 else f"sample {last}"

    @property
    def process(self) -> GraderPool | None:
        return self.pool if self.pool is not None and self.name in self.pool else None


SAMPLES = re.compile(r" (?:on|for) samples? \d+(?: to \d+)?")


def _attributed(call: _Call, error: RewardFailed) -> RewardFailed:
    """The failure with the name of its function, and with a reason that does not depend on the sample."""
    message = str(error)
    if call.name not in message:
        message = f"reward {call.name}: {message}"
    reason = SAMPLES.sub("", message).removeprefix(f"reward {call.name}").removeprefix(":").strip()
    return RewardFailed(message, call.name, reason)


async def _score(
    call: _Call, arguments: Mapping[str, Sequence[Any]], on_request: Mapping[str, Sequence[Any]]
) -> Scores:
    taken = {key: arguments[key] for key in accepted(call.function, arguments)}
    taken |= {key: on_request[key] for key in named(call.function, on_request)}
    given = {key: list(values) for key, values in taken.items()}
    if call.process is not None:
        return await _in_process(call, call.process, lambda: given)
    return _checked(call, await _in_worker(call, partial(_with_own, call.function, given)))


def _with_own(function: Reward, given: dict[str, list[Any]]) -> Any:
    """Copied where the function runs, which for a plain one is a thread."""
    return function(**{key: list(map(_own, values)) for key, values in given.items()})


def _own(value: Any) -> Any:
    """Messages and other plain containers are copied: what one function does to them, no other sees, nor a rollout that
    people read. Everything else, an environment for instance, is the thing itself."""
    return deepcopy(value) if type(value) in (list, dict) else value


async def _score_each(call: _Call, attempts: tuple[Task, Sequence[Episode]] | None) -> Scores:
    assert attempts is not None, "an evaluator needs the episodes"
    task, episodes = attempts
    scores = await _all_heard(
        _score_one(replace(call, first=sample), task, episode) for sample, episode in enumerate(episodes)
    )
    return [score for (score,) in scores]


async def _score_one(call: _Call, task: Task, episode: Episode) -> Scores:
    if call.process is not None:
        return await _in_process(call, call.process, lambda: wired(task, episode))
    seen = msgspec.structs.replace(episode, completion=_own(episode.completion))
    return _checked(call, [await _in_worker(call, partial(call.function, task, seen))])


# ----------------------------------------------------------------------------------------------------------- calling


async def _in_process(call: _Call, pool: GraderPool, given: Callable[[], dict[str, list[Any]]]) -> Scores:
    try:
        return await pool.call(call.name, given(), call.count, call.timeout_s, call.first)
    except TimeLimitError:
        raise _too_long(call) from None
    except CallRaised as error:
        raise _failed(call, f"raised {error.kind} on {call.samples}: {error.message}") from error
    except ServantDied as error:
        raise _attributed(call, RewardFailed(f"the process of reward {call.name} {error} on {call.samples}")) from None
    except BadInput as error:  # a column that cannot be copied into another process
        raise _failed(call, f"needs rewards.isolation = thread: {error}") from error
    except RewardFailed as error:
        raise _attributed(call, error) from error.__cause__


async def _in_worker(call: _Call, work: Callable[[], Any]) -> Any:
    limit = math.inf if keeps_own_time(call.function) else call.timeout_s
    try:
        return await (within(limit, work()) if is_async(call.function) else _off_loop(work, limit))
    except TimeLimitError:
        raise _too_long(call) from None
    except RewardFailed as error:  # of a built-in function
        raise _attributed(call, error) from error.__cause__
    # The boundary to the user's code, which may raise anything and may even try to exit.
    except BaseException as error:
        if is_ours(error):
            raise
        raise _failed(call, f"raised {type(error).__name__} on {call.samples}: {one_line(error)}") from error


def _too_long(call: _Call) -> RewardFailed:
    return _failed(call, f"took longer than {call.timeout_s:g} s on {call.samples}")


def _failed(call: _Call, what: str) -> RewardFailed:
    return _attributed(call, RewardFailed(f"reward {call.name} {what}"))


def _checked(call: _Call, returned: Any) -> Scores:
    try:
        return checked(call.name, returned, call.count, call.first)
    except RewardFailed as error:
        raise _attributed(call, error) from error.__cause__


async def _off_loop(call: Callable[[], Any], timeout_s: float) -> Any:
    async with _places():
        returned, error = await within(timeout_s, in_thread(call))
    if error is not None:
        raise error
    if inspect.isawaitable(returned):  # a plain function that hands out a coroutine
        return await within(timeout_s, returned)
    return returned


_places_of_loop: PerLoop[asyncio.Semaphore] = PerLoop()


def _places() -> asyncio.Semaphore:
    return _places_of_loop.get(lambda: asyncio.Semaphore(MAX_THREADS))
