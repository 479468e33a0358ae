"""Running one episode: calls the rollout under a time limit and converts its result to an `Episode`.

    rollout(task, client) ─▶ Episode, Trajectory, number or None ─▶ validated Episode

A rollout that raises, times out or returns an invalid result produces a failed episode. Only `ComponentFailed` and
`BadInput` propagate, because every other episode would fail the same way.

Custom rollouts (`@outpace.rollout`): an async function takes the task and the client of its episode. A plain function
takes the task and an OpenAI-compatible endpoint for its episode, and runs on a thread, where it may block.
`single_turn` is the default: one prompt, one answer.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from outpace.algorithms.token_advantages import trajectory_problem, turn_numbers
from outpace.errors import BadInput, ComponentFailed, ContextFull, one_line
from outpace.monitoring.metric_table import check_name, current_log, full_name, plain_value
from outpace.protocols import ModelClient, Rollout
from outpace.runtime import async_tools
from outpace.runtime.wire import encodable_text
from outpace.types import Episode, Message, Task, Trajectory, Version

if TYPE_CHECKING:
    from outpace.rollouts.client import PolicyClient
    from outpace.rollouts.transcript import EpisodePart


log = logging.getLogger(__name__)

RETRIES = "episode/retries"
"""Metric: number of further attempts after a rollout raised."""
EMPTY = "episode/empty"
"""Metric: number of attempts without an answer to train on."""


async def run_episode(
    rollout: Rollout, task: Task, client: PolicyClient, timeout_s: float, retries: int = 0
) -> Episode:
    """Run the rollout, and retry it up to `retries` times if it raises.

    Raises only `ComponentFailed`, `BadInput` and cancellation."""
    fatal: ComponentFailed | BadInput | None
    try:
        async with asyncio.timeout(timeout_s) as limit:
            returned = await _attempt(rollout, task, client, retries)
    except asyncio.CancelledError:
        await client.abandon()
        raise
    except ContextFull as error:
        if fatal := await client.abandon():
            raise fatal from None
        return failed_episode(client, str(error), stop="context")
    except BaseException as error:  # user code may raise anything; report it as a failed episode
        if isinstance(error, GeneratorExit):
            raise
        if fatal := await client.abandon() or _fatal_error(error):
            raise fatal from None
        if isinstance(error, TimeoutError) and limit.expired():
            return failed_episode(client, f"the episode took longer than rollout.timeout_s = {timeout_s:g} s")
        log.warning("episode of task %s failed", task.id, exc_info=True)
        text = "".join(traceback.format_exception(error))
        return failed_episode(client, f"{type(error).__name__}: {one_line(error)}", text)
    if fatal := await client.abandon():
        raise fatal
    return _as_episode(returned, task, client)


async def _attempt(rollout: Rollout, task: Task, client: PolicyClient, retries: int) -> object:
    for _ in range(retries):
        try:
            return await rollout(task, client)
        except ContextFull:
            raise
        except Exception as error:  # user code may raise anything
            if _fatal_error(error):
                raise
            log.warning("rollout of task %s failed, trying again", task.id, exc_info=True)
        if fatal := await client.restart():
            raise fatal
        if (reported := current_log()) is not None:
            reported.add(RETRIES, 1.0)
    return await rollout(task, client)


def failed_episode(client: PolicyClient, reason: str, trace: str = "", stop: str = "error") -> Episode:
    """Return a failed episode. It is not trained on; its sampled trajectories are kept for recording."""
    return Episode(client.trajectories(), error=reason, stop=stop, requests=list(client.requests), traceback=trace)


def episode_of_parts(
    client: PolicyClient, parts: Sequence[EpisodePart], stop: str, metrics: Mapping[str, float]
) -> Episode:
    """Build an episode from parts of what the client sampled, each with its own role and reward. The episode fails if
    the parts name no request, or a request without an answer."""
    requests = [request for part in parts for request in part.requests]
    if not requests:
        if (reported := current_log()) is not None:
            reported.add(EMPTY, 1.0)
        return failed_episode(client, "the rollout returned no answer to train on", stop="empty")
    try:
        return Episode(client.trajectories(parts), stop=stop, metrics=dict(metrics), requests=requests)
    except ValueError as error:
        return failed_episode(client, str(error))


def total_return(episode: Episode) -> float:
    """Return the total reward of an episode for display: its own reward, the turn rewards, and the mean of the
    trajectory rewards."""
    own = [reward for _, reward in own_rewards(episode)]
    turns = sum(float(kept.turn_rewards.sum()) for kept in episode.trajectories if len(kept.turn_rewards))
    return episode.reward + turns + (sum(own) / len(own) if own else 0.0)


def own_rewards(episode: Episode) -> list[tuple[str, float]]:
    """Return role and reward of every attempt within the episode that has its own reward."""
    attempts: dict[tuple[str, int], float] = {}
    for index, kept in enumerate(episode.trajectories):
        if kept.reward is not None:
            attempts[kept.role, index if kept.attempt is None else -1 - kept.attempt] = kept.reward
    return [(role, reward) for (role, _), reward in attempts.items()]


def has_reward(episode: Episode) -> bool:
    """Return whether the rollout or the task source already set a reward."""
    own = (kept.reward is not None or len(kept.turn_rewards) for kept in episode.trajectories)
    return bool(episode.rewards) or episode.reward != 0 or any(own)


def take_episodes(
    task: Task, newest: Version | None, decode: Callable[[Sequence[int]], str]
) -> tuple[Task, list[Episode]]:
    """Separate a task from its supplied episodes, and return these as a rollout would return them.

    Missing text is decoded, and rewards without a total are summed. Versions are capped at `newest`: a run that resumes
    from an older checkpoint has lost the weights that sampled newer tokens."""
    if not task.prompt:
        task = msgspec.structs.replace(task, prompt=decode(_first_prompt(task.episodes)))
    totals = any(episode.reward for episode in task.episodes)
    episodes = [
        msgspec.structs.replace(
            episode,
            trajectories=[_not_newer(kept, newest) for kept in episode.trajectories],
            completion=episode.completion or _in_form_of(task.prompt, decode(_last_turn(episode))),
            rewards=episode.rewards or ({"rollout": episode.reward} if totals else {}),
            reward=episode.reward if totals else sum(episode.rewards.values()),
            error=episode.error or _given_problem(episode),
        )
        for episode in task.episodes
    ]
    return msgspec.structs.replace(task, episodes=[]), episodes


def _given_problem(episode: Episode) -> str | None:
    problems = filter(None, map(trajectory_problem, episode.trajectories))
    return next((f"the task came with a trajectory that cannot be trained on: {problem}" for problem in problems), None)


def _not_newer(trajectory: Trajectory, newest: Version | None) -> Trajectory:
    if newest is None or not (trajectory.versions > newest).any():
        return trajectory
    return msgspec.structs.replace(trajectory, versions=np.minimum(trajectory.versions, np.int32(newest)))


def _first_prompt(episodes: Sequence[Episode]) -> list[int]:
    kept = next((kept for episode in episodes for kept in episode.trajectories if kept.mask.any()), None)
    return [] if kept is None else kept.tokens[: int(kept.mask.argmax())].tolist()


def _last_turn(episode: Episode) -> list[int]:
    """Return the token ids of the last answer."""
    kept = next((kept for kept in reversed(episode.trajectories) if kept.mask.any()), None)
    if kept is None:
        return []
    turn_T = turn_numbers(kept.mask)
    ids: list[int] = kept.tokens[kept.mask][turn_T == turn_T[-1]].tolist()
    return ids


def _in_form_of(prompt: str | list[Message], text: str) -> str | list[Message]:
    """Return an answer in the form of the prompt: messages for a message prompt, text for a text prompt."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _fatal_error(error: BaseException) -> ComponentFailed | BadInput | None:
    """Return the error that must end the run, if there is one. Looks inside exception groups."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for found in map(_fatal_error, error.exceptions) if found), None)
    return error if isinstance(error, ComponentFailed | BadInput) else None


def _as_episode(returned: object, task: Task, client: PolicyClient) -> Episode:
    last = _in_form_of(task.prompt, client.newest.text if client.newest else "")
    rewards: dict[str, float] = {}
    if isinstance(returned, Episode):
        returned = msgspec.structs.replace(
            returned,
            trajectories=_returned_trajectories(returned) or client.trajectories(),
            completion=returned.completion or last,
            error=returned.error and one_line(returned.error),
            requests=returned.requests or list(client.requests),
            metrics={**_client_metrics(client), **returned.metrics},
        )
        return returned if returned.error else _checked(returned, client)
    if isinstance(returned, Trajectory):
        trajectories = [returned]
    elif returned is None or isinstance(returned, Real):
        if not client.requests:
            return failed_episode(client, "the rollout sent no request to the policy")
        trajectories = client.trajectories()
        rewards = {} if returned is None else {"rollout": float(returned)}
    else:
        kind = type(returned).__name__
        return failed_episode(
            client, f"the rollout returned {kind}; it must return an Episode, a Trajectory, a number or None"
        )
    episode = Episode(
        trajectories, last, rewards, stop=_stop(client), metrics=_client_metrics(client), requests=list(client.requests)
    )
    return _checked(episode, client)


def _returned_trajectories(episode: Episode) -> list[Trajectory]:
    """Return the trajectories of the returned episode, without the invalid ones if it failed."""
    given = episode.trajectories
    return [each for each in given if trajectory_problem(each) is None] if episode.error else given


def _stop(client: PolicyClient) -> str:
    """Return the stop reason of the newest answer, or "empty" if it ended normally without text."""
    is_empty = client.newest is not None and not client.newest.text.strip()
    return "empty" if is_empty and client.stop == "stop" else client.stop


def _client_metrics(client: PolicyClient) -> dict[str, float]:
    """Return the metrics of an episode with several answers."""
    return {"breaks": float(client.breaks)} if client.answers > 1 else {}


def is_float(value: Any) -> bool:
    """Whether the value is a number that fits in a float, finite or not."""
    if type(value) is float:
        return True
    try:
        return isinstance(value, Real) and isinstance(float(value), float)
    except OverflowError:
        return False


def _checked(episode: Episode, client: PolicyClient) -> Episode:
    """Return the episode, or a failed one if its rewards, metrics or trajectories are not valid."""
    for name, reward in (*episode.rewards.items(), ("reward", episode.reward)):
        if not is_float(reward) or not math.isfinite(reward):
            return failed_episode(client, f"the rollout's {name} is {one_line(repr(reward), 60)}, not a finite number")
    for name, value in episode.metrics.items():
        try:
            check_name(full_name(name))
        except BadInput as error:
            return failed_episode(client, str(error))
        if not is_float(value):
            return failed_episode(client, f"the rollout's metric {name} is {one_line(repr(value), 60)}, not a number")
    try:
        extra = {encodable_text(str(column)): plain_value(value) for column, value in episode.extra.items()}
    except Exception as error:  # user code: `str` of a value may raise anything
        return failed_episode(client, f"the rollout's extra columns cannot be recorded: {one_line(error)}")
    if unused := client.silent_roles:
        active = ", ".join(sorted({trajectory.role for trajectory in episode.trajectories}))
        reason = f"a reward was set for the role {unused[0]!r}, which has no answers; roles with answers: {active}"
        return failed_episode(client, reason)
    for trajectory in episode.trajectories:
        if fault := trajectory_problem(trajectory, client.min_version):
            return failed_episode(client, f"the rollout returned a trajectory that cannot be trained on: {fault}")
    return msgspec.structs.replace(episode, extra=extra) if extra else episode


def rollout(function: Callable[..., Any], setting: str = "rollout.function") -> Rollout:
    """Turn a function into a rollout: `async def agent(task, client)` or `def agent(task, endpoint)`. Errors start with
    the `setting` that names it."""
    name = getattr(function, "__name__", repr(function))
    try:
        inspect.signature(function).bind("task", "client")
    except TypeError:
        message = f"{setting}: {name} must take two arguments: task and client (endpoint if not async)"
        raise BadInput(message) from None
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return function

    @functools.wraps(function)
    async def on_a_thread(task: Task, client: ModelClient) -> Any:
        return await async_tools.call_user_function(function, task, await client.endpoint())

    return on_a_thread


async def single_turn(task: Task, client: ModelClient) -> None:
    """Sample one answer to the prompt of the task. The reward functions grade it."""
    await client.sample(task.prompt)
