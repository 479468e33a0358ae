"""Running one episode: the user's rollout under a time limit, turned into plain data whatever it returned.

A rollout that raises, times out or returns something odd is an episode with an error. Two things go up, because no
sibling can do better: the failure of a part of the system (`PartFailed`) and input that cannot work (`BadInput`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from numbers import Real

import msgspec

from outpace.errors import BadInput, ContextFull, PartFailed, one_line
from outpace.protocols import Rollout
from outpace.rollouts.policy.client import PolicyClient
from outpace.rollouts.policy.trajectory import problem
from outpace.types import Episode, Message, Task, Trajectory

log = logging.getLogger(__name__)


async def run_episode(rollout: Rollout, task: Task, client: PolicyClient, timeout_s: float) -> Episode:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            returned = await rollout(task, client)
    except asyncio.CancelledError:
        await client.abandon()
        raise
    except ContextFull as error:
        if serious := await client.abandon():
            raise serious from None
        return failed(client, str(error), stop="context")
    except BaseException as error:  # a boundary: user code may raise anything, and that is data
        if isinstance(error, GeneratorExit):
            raise
        serious = _serious(error)
        if serious := await client.abandon() or serious:
            raise serious from None
        if isinstance(error, TimeoutError) and limit.expired():
            return failed(client, f"took longer than rollout.timeout_s = {timeout_s:g} s")
        log.warning("episode of %s failed", task.id, exc_info=True)
        text = "".join(traceback.format_exception(error))
        return failed(client, f"{type(error).__name__}: {one_line(error)}", text)
    if serious := await client.abandon():
        raise serious
    return _as_episode(returned, task, client)


def failed(client: PolicyClient, reason: str, trace: str = "", stop: str = "error") -> Episode:
    """An episode that trains nothing; what was sampled for it is kept for the accounts."""
    return Episode(client.trajectories(), error=reason, stop=stop, requests=list(client.requests), traceback=trace)


def whole_return(episode: Episode) -> float:
    """What an episode brought in all, for people: its reward, those of its turns, and the mean of those that its
    trajectories have of their own."""
    own = [trajectory.reward for trajectory in episode.trajectories if trajectory.reward is not None]
    turns = sum(float(trajectory.turn_rewards.sum()) for trajectory in episode.trajectories)
    return episode.reward + turns + (sum(own) / len(own) if own else 0.0)


def _serious(error: BaseException) -> PartFailed | BadInput | None:
    """What has to go up, also out of the groups that task groups raise."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for found in map(_serious, error.exceptions) if found), None)
    return error if isinstance(error, PartFailed | BadInput) else None


def _as_episode(returned: object, task: Task, client: PolicyClient) -> Episode:
    last = _last_answer(task, client)
    rewards: dict[str, float] = {}
    if isinstance(returned, Episode):
        returned = msgspec.structs.replace(
            returned,
            trajectories=_given(returned) or client.trajectories(),
            completion=returned.completion or last,
            error=returned.error and one_line(returned.error),
            requests=returned.requests or list(client.requests),
            metrics={**_measured(client), **returned.metrics},
        )
        return returned if returned.error else _checked(returned, client)
    if isinstance(returned, Trajectory):
        trajectories = [returned]
    elif returned is None or isinstance(returned, Real):
        if not client.requests:
            return failed(client, "the rollout asked the policy nothing")
        trajectories = client.trajectories()
        rewards = {} if returned is None else {"rollout": float(returned)}
    else:
        kind = type(returned).__name__
        return failed(client, f"the rollout returned {kind}; return an Episode, a Trajectory, a number or None")
    episode = Episode(
        trajectories, last, rewards, stop=_stop(client), metrics=_measured(client), requests=list(client.requests)
    )
    return _checked(episode, client)


def _given(episode: Episode) -> list[Trajectory]:
    """Its own trajectories. Those of a failed episode are for people to read: what cannot be read is left out."""
    given = episode.trajectories
    return [each for each in given if problem(each) is None] if episode.error else given


def _stop(client: PolicyClient) -> str:
    """Why the newest answer ended; one that says nothing at all has a reason of its own."""
    says_nothing = client.newest is not None and not client.newest.text.strip()
    return "empty" if says_nothing and client.stop == "stop" else client.stop


def _measured(client: PolicyClient) -> dict[str, float]:
    """What is worth knowing of an episode with several answers."""
    return {"breaks": float(client.breaks)} if client.answers > 1 else {}


def _last_answer(task: Task, client: PolicyClient) -> str | list[Message]:
    """What the reward functions judge, in the form of the prompt: a message after messages, text after text."""
    text = client.newest.text if client.newest else ""
    return text if isinstance(task.prompt, str) else [{"role": "assistant", "content": text}]


def _checked(episode: Episode, client: PolicyClient) -> Episode:
    """The episode, or a failed one when it would poison the mean of its group or the learner."""
    for name, reward in {**episode.rewards, "reward": episode.reward}.items():
        if not isinstance(reward, Real) or not math.isfinite(reward):
            return failed(client, f"the rollout's {name} is {one_line(repr(reward), 60)}, not a finite number")
    if silent := client.silent_roles:
        spoke = ", ".join(sorted({trajectory.role for trajectory in episode.trajectories}))
        return failed(client, f"a reward was given to the role {silent[0]!r}, which has not spoken; there are {spoke}")
    for trajectory in episode.trajectories:
        if fault := problem(trajectory, client.min_version):
            return failed(client, f"the rollout returned a trajectory that cannot be trained on: {fault}")
    return episode
