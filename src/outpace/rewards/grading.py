"""Grading: score the completions of one group with all reward functions, then apply the overlong penalty.

    completions ─▶ each reward function ─▶ check_scores ─▶ weighted sum ─▶ GradedCompletion
    episode     ─▶ apply_overlong_penalty ─▶ episode with a lower reward (training only)

A function in TRL's signature is called once per group; an evaluator or a function of verl once per episode, all
concurrently. Return values are untrusted: one finite number or None per completion, anything else raises a
`RewardFailed` that names the function and the sample.

Invariants:
- The event loop never runs a synchronous reward function; async ones run on it.
- A call takes at most `timeout_s`, except built-in functions that enforce their own timeout per request. A grader
  process that hangs is killed. A hanging thread cannot be killed, so it is abandoned: it does not occupy one of the
  `MAX_THREADS` slots and does not delay process exit.
- None means "does not apply" and is left out of the sum. A completion with only Nones has no total.

Overlong shaping: with truncation alone, one token decides between the full reward and none, and the policy gets no
signal before the limit. The penalty grows linearly up to the limit instead. Evaluation reports unshaped rewards.
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
from types import NoneType
from typing import Any, cast

import msgspec

from outpace.config.sections import RewardsConfig
from outpace.errors import BadInput, RewardFailed, one_line
from outpace.monitoring.metric_table import forward_log
from outpace.protocols import Reward
from outpace.rewards.functions import (
    LOGGING,
    Scores,
    check_scores,
    encode_evaluator_arguments,
    is_async,
    is_evaluator,
    logging_arguments,
    pack_arguments,
    with_progress,
)
from outpace.rewards.grader_process import Grader, ScoresRejected
from outpace.rewards.registry import has_own_timeout
from outpace.rewards.verl import ComputeScore
from outpace.runtime.async_tools import PerLoop, TimeLimitError, is_own_cancellation, run_in_thread, with_time_limit
from outpace.runtime.by_value import UserCodeSource
from outpace.runtime.references import accepted_parameters, named_parameters
from outpace.runtime.user_code import (
    LOAD_LIMIT_S,
    ProcessPool,
    UserCodeDied,
    UserCodeError,
    UserCodeKilled,
    UserCodeProcess,
)
from outpace.types import Episode, Task, Trajectory

MAX_ANSWER = 1 << 26
"""Maximum size in bytes of a grader's reply: scores, and the columns of `log_extra` with their texts."""


class GraderProcess:
    """Handle of one grader process."""

    def __init__(self, memory_mb: int | None = None) -> None:
        self._process = UserCodeProcess(
            "outpace.rewards.grader_process", Grader, "a reward function", memory_mb, max_answer=MAX_ANSWER
        )
        self._loaded: set[str] = set()

    @property
    def usable(self) -> bool:
        return self._process.usable

    async def load(self, name: str, source: UserCodeSource) -> None:
        """Load the function in the process unless it is loaded. Raises `UserCodeError` or `UserCodeDied`."""
        if name in self._loaded:
            return
        try:
            await self._process.call(lambda grader: grader.load(name, source.reference, source.code), LOAD_LIMIT_S)
        except TimeLimitError:
            raise UserCodeDied("did not start and import the function in time") from None
        self._loaded.add(name)

    async def call(
        self, name: str, arguments: dict[str, list[Any]], count: int, timeout_s: float, first: int = 0
    ) -> Scores:
        """Call the function. Raises `RewardFailed`, `UserCodeError`, `UserCodeDied` or `TimeLimitError`."""
        body, by_value = pack_arguments(arguments)
        reply = await self._process.call(lambda grader: grader.score(name, count, body, by_value, first), timeout_s)
        if isinstance(reply, ScoresRejected):
            raise RewardFailed(reply.message)
        if not _are_scores(reply.scores, count) or not forward_log(reply.logged, reply.extra, reply.dropped):
            raise self._process.broken()
        return reply.scores

    async def end(self, patience_s: float = 0.0) -> None:
        await self._process.end(patience_s)


def _are_scores(values: list[float | None], count: int) -> bool:
    return len(values) == count and all(value is None or math.isfinite(value) for value in values)


class GraderPool:
    """Grader processes of one rollout worker: user reward functions run in processes that can be killed.

        call ─▶ idle or new GraderProcess ─▶ load, once per function ─▶ call ─▶ scores

    - At most `workers` calls run at once; further calls wait in FIFO order. A call's timeout excludes this wait and the
      time in which a process starts and imports the function.
    - A call that hangs, crashes or is cancelled ends only its own process. If a process is killed from outside (the OOM
      killer, for example), the call is retried once in another process.
    - Replies of a grader process are validated again on this side.
    - After `close` no process, task or file descriptor is left.
    """

    def __init__(self, functions: Mapping[str, UserCodeSource], workers: int = 2, memory_mb: int | None = None) -> None:
        """`memory_mb` limits the address space of each process."""
        self._functions = dict(functions)
        self._slots = asyncio.Semaphore(workers)
        self._graders = ProcessPool(partial(GraderProcess, memory_mb))

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    async def call(
        self, name: str, arguments: dict[str, list[Any]], count: int, timeout_s: float, first: int = 0
    ) -> Scores:
        """Score `count` completions; `first` is the index of the first one, for messages.

        Raises `RewardFailed` for invalid scores, `UserCodeError` for exceptions of the function, `TimeLimitError`, and
        `UserCodeDied` when the process ended."""
        async with self._slots:
            try:
                return await self._call_once(name, arguments, count, timeout_s, first)
            except UserCodeKilled:  # killed from outside: retry once
                if self._graders.closed:
                    raise
                return await self._call_once(name, arguments, count, timeout_s, first)

    async def _call_once(
        self, name: str, arguments: dict[str, list[Any]], count: int, timeout_s: float, first: int
    ) -> Scores:
        grader = self._graders.take()
        try:
            await grader.load(name, self._functions[name])
            return await grader.call(name, arguments, count, timeout_s, first)
        finally:
            self._graders.put_back(grader)

    async def close(self) -> None:
        await self._graders.close()


MAX_THREADS = 8
"""Concurrent synchronous calls per event loop. Further calls wait; their timeout starts when they run."""


class GradedCompletion(msgspec.Struct, frozen=True):
    """Scores of one completion. `parts` holds the unweighted scores of the functions that applied."""

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
) -> list[GradedCompletion]:
    """Grade `completions`. Prompts and every column have one value per completion; weights default to 1.

    Functions contained in `pool` run in its processes. `attempts` holds the task and the same completions as episodes,
    for evaluators. `on_request` holds arguments passed only to functions that name them."""
    count = len(completions)
    arguments = {**columns, "prompts": prompts, "completions": completions}
    assert all(len(values) == count for values in arguments.values())

    def score(call: _Call) -> Coroutine[Any, Any, Scores]:
        if is_evaluator(call.function):
            return _score_each(call, partial(_score_episode, attempts))
        if isinstance(call.function, ComputeScore):
            return _score_each(call, partial(_score_answer, arguments))
        return _score(call, arguments, on_request or {})

    # Wait for all functions before raising the first failure, so that no call keeps running unobserved.
    scores = await _gather_all(score(_Call(name, function, timeout_s, pool, count)) for name, function in functions)
    by_name = dict(zip((name for name, _ in functions), scores, strict=True))
    weighted = dict(zip(by_name, weights or [1.0] * len(by_name), strict=True))
    return [_weighted_total(by_name, weighted, sample) for sample in range(count)]


async def _gather_all(calls: Iterable[Coroutine[Any, Any, Scores]]) -> list[Scores]:
    """Wait for all calls, then return their results or raise the first failure."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast(list[Scores], results)


def _weighted_total(by_name: dict[str, Scores], weights: dict[str, float], sample: int) -> GradedCompletion:
    given = {name: scores[sample] for name, scores in by_name.items()}
    parts = {name: score for name, score in given.items() if score is not None}
    if not parts:
        return GradedCompletion(None, {})
    total = sum(weights[name] * score for name, score in parts.items())
    if not math.isfinite(total):
        raise RewardFailed(f"the weighted sum of {', '.join(parts)} for sample {sample} is {total}")
    return GradedCompletion(total, parts)


@dataclass(frozen=True)
class _Call:
    """One call of a function on `count` samples, starting at sample `first`."""

    name: str
    function: Reward
    timeout_s: float
    pool: GraderPool | None
    count: int
    first: int = 0

    @property
    def samples(self) -> str:
        last = self.first + self.count - 1
        return f"samples {self.first} to {last}" if self.count > 1 else f"sample {last}"

    @property
    def process(self) -> GraderPool | None:
        return self.pool if self.pool is not None and self.name in self.pool else None


SAMPLE_RANGE = re.compile(r" (?:on|for) samples? \d+(?: to \d+)?")


def _with_function_name(call: _Call, error: RewardFailed) -> RewardFailed:
    """Return the failure with its function's name and a reason that does not depend on the sample."""
    message = str(error)
    if call.name not in message:
        message = f"reward {call.name}: {message}"
    reason = SAMPLE_RANGE.sub("", message).removeprefix(f"reward {call.name}").removeprefix(":").strip()
    return RewardFailed(message, call.name, reason)


async def _score(
    call: _Call, arguments: Mapping[str, Sequence[Any]], on_request: Mapping[str, Sequence[Any]]
) -> Scores:
    chosen = {key: arguments[key] for key in accepted_parameters(call.function, arguments)}
    chosen |= {key: on_request[key] for key in named_parameters(call.function, on_request)}
    given = {key: list(values) for key, values in chosen.items() if key not in LOGGING}
    if call.process is not None:
        return await _in_process(call, call.process, lambda: given)
    return _checked(call, await _in_worker(call, partial(_call_with_copies, call.function, given)))


def _call_with_copies(function: Reward, given: dict[str, list[Any]]) -> Any:
    """Call with copied arguments. The copying runs where the function runs: on a thread if it is synchronous."""
    copied = {key: list(map(_copy_containers, values)) for key, values in given.items()}
    return function(**with_progress(copied), **logging_arguments(function))


def _copy_containers(value: Any) -> Any:
    """Deep-copy lists and dicts, so that a function cannot change what other functions or the saved rollouts see.
    Other objects, such as environments, are passed as they are."""
    return _copy(value) if type(value) in (list, dict) else value


def _copy(value: Any) -> Any:
    """Deep-copy JSON values, several times faster than `deepcopy`, which copies all other values."""
    kind = type(value)
    if kind is dict:
        return {key: _copy(each) for key, each in value.items()}
    if kind is list:
        return [_copy(each) for each in value]
    return value if kind in (str, int, float, bool, NoneType) else deepcopy(value)


async def _score_each(call: _Call, score: Callable[[_Call], Coroutine[Any, Any, Scores]]) -> Scores:
    """Score every sample in a separate call, all concurrently."""
    scores = await _gather_all(score(replace(call, first=sample, count=1)) for sample in range(call.count))
    return [score for (score,) in scores]


async def _score_answer(arguments: Mapping[str, Sequence[Any]], call: _Call) -> Scores:
    return await _score(call, {key: values[call.first : call.first + 1] for key, values in arguments.items()}, {})


async def _score_episode(attempts: tuple[Task, Sequence[Episode]] | None, call: _Call) -> Scores:
    assert attempts is not None, "an evaluator needs the episodes"
    task, episode = attempts[0], attempts[1][call.first]
    if call.process is not None:
        return await _in_process(call, call.process, lambda: encode_evaluator_arguments(task, episode))
    copied = msgspec.structs.replace(episode, completion=_copy_containers(episode.completion))
    return _checked(call, [await _in_worker(call, partial(call.function, task, copied))])


# ----------------------------------------------------------------------------------------------------------- calling


async def _in_process(call: _Call, pool: GraderPool, given: Callable[[], dict[str, list[Any]]]) -> Scores:
    try:
        return await pool.call(call.name, given(), call.count, call.timeout_s, call.first)
    except TimeLimitError:
        raise _timed_out(call) from None
    except UserCodeError as error:
        raise _failed(call, f"raised {error.name} on {call.samples}: {error.message}") from error
    except UserCodeDied as error:
        failure = RewardFailed(f"the grader process of reward {call.name} {error} on {call.samples}")
        raise _with_function_name(call, failure) from None
    except BadInput as error:  # a column that cannot be sent to another process
        raise _failed(call, f"requires rewards.isolation = thread: {error}") from error
    except RewardFailed as error:
        raise _with_function_name(call, error) from error.__cause__


async def _in_worker(call: _Call, work: Callable[[], Any]) -> Any:
    limit = math.inf if has_own_timeout(call.function) else call.timeout_s
    try:
        return await (with_time_limit(limit, work()) if is_async(call.function) else _run_in_thread(work, limit))
    except TimeLimitError:
        raise _timed_out(call) from None
    except RewardFailed as error:  # raised by a built-in function
        raise _with_function_name(call, error) from error.__cause__
    # Boundary to user code, which may raise anything, including SystemExit.
    except BaseException as error:
        if is_own_cancellation(error):
            raise
        raise _failed(call, f"raised {type(error).__name__} on {call.samples}: {one_line(error)}") from error


def _timed_out(call: _Call) -> RewardFailed:
    return _failed(call, f"took longer than {call.timeout_s:g} s on {call.samples}")


def _failed(call: _Call, what: str) -> RewardFailed:
    return _with_function_name(call, RewardFailed(f"reward {call.name} {what}"))


def _checked(call: _Call, returned: Any) -> Scores:
    try:
        return check_scores(call.name, returned, call.count, call.first)
    except RewardFailed as error:
        raise _with_function_name(call, error) from error.__cause__


async def _run_in_thread(call: Callable[[], Any], timeout_s: float) -> Any:
    async with _thread_slots():
        returned, error = await with_time_limit(timeout_s, run_in_thread(call))
    if error is not None:
        raise error
    if inspect.isawaitable(returned):  # a plain function that returns a coroutine
        return await with_time_limit(timeout_s, returned)
    return returned


_slots_by_loop: PerLoop[asyncio.Semaphore] = PerLoop()


def _thread_slots() -> asyncio.Semaphore:
    return _slots_by_loop.get(lambda: asyncio.Semaphore(MAX_THREADS))


OVERLONG_REWARD = "overlong"
"""Key of the penalty in `Episode.rewards`."""


def overlong_penalty(tokens: int, limit: int, rewards: RewardsConfig) -> float:
    """Return the penalty for `tokens` sampled tokens: it rises linearly over the last `rewards.overlong_buffer` tokens
    before `limit`, and stays at `rewards.overlong_penalty` for multi-turn episodes that exceed `limit`."""
    used = (tokens - (limit - rewards.overlong_buffer)) / rewards.overlong_buffer
    return -min(used, 1.0) * rewards.overlong_penalty if used > 0 else 0.0


def apply_overlong_penalty(episode: Episode, limit: int, rewards: RewardsConfig) -> Episode:
    """Return the episode with the penalty for its sampled tokens added to its reward, and to trajectory rewards if set.

    Failed episodes are returned unchanged."""
    if not rewards.overlong_buffer or episode.error is not None:
        return episode
    loss = overlong_penalty(sum(int(trajectory.mask.sum()) for trajectory in episode.trajectories), limit, rewards)
    return msgspec.structs.replace(
        episode,
        trajectories=[_penalized(trajectory, loss) for trajectory in episode.trajectories],
        reward=episode.reward + loss,
        rewards={**episode.rewards, OVERLONG_REWARD: loss},
    )


def _penalized(trajectory: Trajectory, loss: float) -> Trajectory:
    if trajectory.reward is None:
        return trajectory
    return msgspec.structs.replace(trajectory, reward=trajectory.reward + loss)
