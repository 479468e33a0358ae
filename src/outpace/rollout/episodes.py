"""Running one episode: the user's rollout under a time limit, turned into plain data whatever it returned.

A rollout that raises, times out or returns something odd is an episode with an error; only the failure of a part of
the system itself (`PartFailed`) goes up, because no sibling can do better.
"""

from __future__ import annotations

import asyncio
import logging

from outpace.errors import PartFailed
from outpace.protocols import Rollout
from outpace.rollout.client import PolicyClient
from outpace.types import Episode, Task, Trajectory

log = logging.getLogger(__name__)


async def run_episode(rollout: Rollout, task: Task, client: PolicyClient, timeout_s: float) -> Episode:
    try:
        async with asyncio.timeout(timeout_s):
            returned = await rollout(task, client)
    except PartFailed:
        raise
    except TimeoutError:
        await client.abandon()
        return failed(f"took longer than rollout.timeout_s = {timeout_s:g} s")
    except asyncio.CancelledError:
        await client.abandon()
        raise
    except Exception as error:  # a boundary: user code may raise anything, and that is data
        await client.abandon()
        log.warning("episode of %s failed", task.id, exc_info=True)
        return failed(f"{type(error).__name__}: {error}")
    return _as_episode(returned, client)


def failed(reason: str) -> Episode:
    return Episode(trajectories=[], error=reason, stop="error")


def _as_episode(returned: object, client: PolicyClient) -> Episode:
    if isinstance(returned, Episode):
        return returned
    if isinstance(returned, Trajectory):
        return _episode([returned], client)
    if returned is None or isinstance(returned, int | float):
        if not client.requests:
            return failed("the rollout asked the policy nothing")
        rewards = {} if returned is None else {"rollout": float(returned)}
        return _episode([client.trajectory()], client, rewards)
    return failed(f"the rollout returned {type(returned).__name__}; return an Episode, a Trajectory, a number or None")


def _episode(trajectories: list[Trajectory], client: PolicyClient, rewards: dict[str, float] | None = None) -> Episode:
    return Episode(
        trajectories=trajectories,
        completion=client.completions[-1] if client.completions else "",
        rewards=rewards or {},
        stop=client.stop,
        requests=list(client.requests),
    )
