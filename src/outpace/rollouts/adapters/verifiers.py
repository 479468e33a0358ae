"""Environments of the package verifiers (0.4), as task source and rollout.

    tasks:   its taskset ─▶ rows, some of them held out by their ids
    rollout: client.endpoint() ─▶ its agents run against that URL ─▶ mean reward of its trainable agents

The environment does everything: prompts, tools, simulated users, programs in their runtimes, rewards. It reaches the
policy only through the episode's URL, where every token is recorded as it was sampled.

Invariants
- verifiers gets the secret of an episode's URL through an environment variable that exists only during the episode.
- An episode that the environment reports as failed fails here too, with its error, and is not trained on.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from functools import cached_property
from typing import Any

from outpace.config import Config
from outpace.errors import BadInput, one_line
from outpace.protocols import ModelClient, TaskSource
from outpace.tasks.dataset import Dataset
from outpace.types import Endpoint, Task

TASK_INDEX = "verifiers_task"
"""Column with the index of the task in the taskset."""


class VerifiersEnvironment:
    """Use `tasks` for `tasks.name` and `rollout` for `rollout.function`.

    `environment` is the id of a taskset, the `[env]` section of a verifiers config as a mapping, or a function that
    returns an `Env`. `limit` takes only the first tasks; an unbounded taskset requires it."""

    def __init__(self, environment: str | Mapping[str, Any] | Callable[[], Any], *, limit: int | None = None) -> None:
        self._environment = environment
        self._limit = limit
        self._opening = asyncio.Lock()
        self._open: AsyncExitStack | None = None

    def tasks(self, config: Config) -> tuple[TaskSource, TaskSource | None]:
        """Return the training and held-out tasks; `eval.holdout` is the fraction held out."""
        name = self._env.config.env_id or type(self._env).__name__
        rows = [
            {
                "id": task.data.id or f"{name}/{number}",
                "prompt": task.data.prompt_text or task.data.name or name,
                TASK_INDEX: number,
            }
            for number, task in enumerate(self._tasks)
        ]
        whole = Dataset(rows, name, duplicate_ids=config.tasks.duplicate_ids, setting="tasks.name")
        return whole.split(config.eval.holdout, config.eval.seed)

    async def rollout(self, task: Task, client: ModelClient) -> float:
        """Run one episode; return the mean reward of its trainable agents."""
        await self._serve()
        with _context(await client.endpoint()) as context:
            episode = await self._env.run_episode(self._tasks[task.columns[TASK_INDEX]], context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(one_line(f"{errors[-1].type}: {errors[-1].message}" if errors else "no agent ran"))
        rewards = [trace.reward for trace in episode.traces if trace.agent is None or trace.agent.trainable]
        return sum(rewards) / len(rewards) if rewards else 0.0

    async def _serve(self) -> None:
        """Start the servers that episodes share, once, if there are any; they end with the process."""
        async with self._opening:
            if self._open is not None:
                return
            env, opened = self._env, AsyncExitStack()
            if env.taskset.toolsets(env.taskset.config) or type(env).start is not _package().Env.start:
                await opened.enter_async_context(env.serving())
                # With None, every agent starts its own interception server. A shared one would keep a client and
                # its connections for each episode's URL until the end of the run.
                env._interception = None
            self._open = opened  # only on success: the next episode retries a failed start

    @cached_property
    def _env(self) -> Any:
        verifiers = _package()
        given = self._environment
        if callable(given):
            return given()
        settings = {"taskset": {"id": given}} if isinstance(given, str) else dict(given)
        try:
            return verifiers.load_environment(verifiers.resolve_env_config(settings))
        # Boundary to the package and to everything the taskset imports.
        except Exception as error:
            raise BadInput(f"tasks.name: verifiers cannot load {settings}: {one_line(error)}") from error

    @cached_property
    def _tasks(self) -> list[Any]:
        taskset = self._env.taskset
        if self._limit is not None:
            taskset = taskset.take(self._limit)
        if not taskset.bounded:
            raise BadInput(f"tasks.name: {type(taskset).__name__} is unbounded; give VerifiersEnvironment a limit")
        return list(taskset)


@contextmanager
def _context(endpoint: Endpoint) -> Iterator[Any]:
    """Yield the endpoint as a verifiers model context. verifiers reads API keys only from environment variables."""
    verifiers = _package()
    variable = f"OUTPACE_EPISODE_{secrets.token_hex(8).upper()}"
    os.environ[variable] = endpoint.api_key
    try:
        client = verifiers.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
        yield verifiers.ModelContext(model=endpoint.model, client=client)
    finally:
        del os.environ[variable]


def _package() -> Any:
    try:
        import verifiers.v1
    except ImportError:
        raise BadInput("tasks.name: requires verifiers: pip install 'outpace[verifiers]'") from None
    return verifiers.v1
