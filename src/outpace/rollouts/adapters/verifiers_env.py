"""An environment of the package verifiers (0.4), as tasks and a rollout.

    tasks:   its taskset ─▶ rows, some of them held out by their ids
    rollout: client.endpoint() ─▶ its agents play against that URL ─▶ its rewards, added up

The environment does everything: prompts, tools, users, programs in their runtimes, judgement. It meets the policy only
behind the URL of the episode, where every token is recorded as it was sampled.

Invariants
- The secret of an episode's URL is known to verifiers by the name of an environment variable, which ends with it.
- An episode that the environment calls failed is a failed episode here, with its error, and trains nothing.
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

NUMBER = "verifiers_task"
"""The column that says which task of the taskset it is."""


class VerifiersEnvironment:
    """`tasks` is for `tasks.name`, `rollout` for `rollout.function`.

    `described` is the id of a taskset, the `[env]` section of a verifiers config as a mapping, or a function that
    returns an `Env`. `limit` takes the first tasks only; a taskset without an end needs it."""

    def __init__(self, described: str | Mapping[str, Any] | Callable[[], Any], *, limit: int | None = None) -> None:
        self._described = described
        self._limit = limit
        self._opening = asyncio.Lock()
        self._open: AsyncExitStack | None = None

    def tasks(self, config: Config) -> tuple[TaskSource, TaskSource | None]:
        """The tasks of the taskset; an `eval.holdout` share of them is held out."""
        name = self._env.config.env_id or type(self._env).__name__
        rows = [
            {
                "id": task.data.id or f"{name}/{number}",
                "prompt": task.data.prompt_text or task.data.name or name,
                NUMBER: number,
            }
            for number, task in enumerate(self._tasks)
        ]
        whole = Dataset(rows, name, duplicate_ids=config.tasks.duplicate_ids, setting="tasks.name")
        return whole.split(config.eval.holdout, config.eval.seed)

    async def rollout(self, task: Task, client: ModelClient) -> float:
        """One episode of the environment; its reward is the mean of those of its trainable agents."""
        await self._serve()
        with _context(await client.endpoint()) as context:
            episode = await self._env.run_episode(self._tasks[task.columns[NUMBER]], context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(one_line(f"{errors[-1].type}: {errors[-1].message}" if errors else "no agent has run"))
        rewards = [trace.reward for trace in episode.traces if trace.agent is None or trace.agent.trainable]
        return sum(rewards) / len(rewards) if rewards else 0.0

    async def _serve(self) -> None:
        """Start what episodes share, once, if there is any; it ends with the process."""
        async with self._opening:
            if self._open is not None:
                return
            env, opened = self._env, AsyncExitStack()
            if env.taskset.toolsets(env.taskset.config) or type(env).start is not _package().Env.start:
                await opened.enter_async_context(env.serving())
                # Without it every agent brings a server of its own. The shared one would keep a client, with its
                # connections, for each episode's URL until the end of the run.
                env._interception = None
            self._open = opened  # only now: what could not be started is tried again by the next episode

    @cached_property
    def _env(self) -> Any:
        verifiers = _package()
        if callable(self._described):
            return self._described()
        wanted = {"taskset": {"id": self._described}} if isinstance(self._described, str) else dict(self._described)
        try:
            return verifiers.load_environment(verifiers.resolve_env_config(wanted))
        # The boundary to the package and to whatever the taskset imports.
        except Exception as error:
            raise BadInput(f"tasks.name: verifiers cannot load {wanted}: {one_line(error)}") from error

    @cached_property
    def _tasks(self) -> list[Any]:
        taskset = self._env.taskset
        if self._limit is not None:
            taskset = taskset.take(self._limit)
        if not taskset.bounded:
            raise BadInput(f"tasks.name: {type(taskset).__name__} has no end; give VerifiersEnvironment a limit")
        return list(taskset)


@contextmanager
def _context(endpoint: Endpoint) -> Iterator[Any]:
    """The model as verifiers knows one. It reads keys from environment variables only."""
    verifiers = _package()
    variable = f"OUTPACE_EPISODE_{secrets.token_hex(8).upper()}"
    os.environ[variable] = endpoint.api_key
    try:
        where = verifiers.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
        yield verifiers.ModelContext(model=endpoint.model, client=where)
    finally:
        del os.environ[variable]


def _package() -> Any:
    try:
        import verifiers.v1
    except ImportError:
        raise BadInput("tasks.name: this one needs verifiers: pip install 'outpace[verifiers]'") from None
    return verifiers.v1
