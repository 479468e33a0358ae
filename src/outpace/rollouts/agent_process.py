"""A program as the agent of one episode: it knows nothing of outpace, only where its model is.

    task, as JSON ─▶ standard input ┐
    OPENAI_BASE_URL, _API_KEY, …  ──┴▶ program ─▶ exit code 0: the reward functions judge the last answer
                                         │ otherwise: a failed episode, with the last line on standard error
                                         └▶ standard output and error ─▶ the worker's log

Invariant: the program and all that it has started are gone when the episode ends, however it ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from outpace.errors import BadInput, one_line
from outpace.protocols import ModelClient, Rollout
from outpace.runtime.family import MARK, end_family, how_it_ended
from outpace.runtime.output import Output
from outpace.types import Endpoint, Episode, Task

log = logging.getLogger(__name__)

END_LIMIT_S = 2.0
"""How long a killed program may take to be gone."""

_endings: set[asyncio.Task[None]] = set()  # a task that nobody refers to may be collected before it is done


def as_rollout(command: Sequence[str]) -> Rollout:
    """A rollout that starts `command` once per episode. The program gets every column of its task."""
    if not command:
        raise BadInput("rollout.agent: name the program to start, and its arguments")

    async def run_agent(task: Task, client: ModelClient) -> Episode | None:
        endpoint = await client.endpoint()
        agent = AgentProcess(command, _environment(endpoint, task))
        try:
            problem = await agent.run(_as_json(task))
        finally:
            await agent.end()
        return None if problem is None else Episode([], error=f"the agent {problem}", stop="error")

    return run_agent


class AgentProcess:
    """One run of a program."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._command = command
        self._mark = secrets.token_hex(16)
        self._environment = {**environment, MARK: self._mark}
        # A task of its own, so that whoever is cancelled while he waits for it leaves no half-started process.
        self._starting = asyncio.create_task(self._start())

    async def run(self, given: bytes) -> str | None:
        """Hand it its input and wait for its end; says what went wrong, if anything did."""
        try:
            await asyncio.shield(self._starting)
        except OSError as error:
            raise BadInput(f"rollout.agent: cannot start {self._command[0]}: {error.strerror}") from error
        feeding = asyncio.create_task(self._feed(given))
        try:
            status = await self._process.wait()
        finally:
            feeding.cancel()
        await self._errors.finish()
        return None if status == 0 else _how_it_ended(status, self._errors.last_line)

    async def end(self) -> None:
        """See to it that nothing of it is left, also for somebody who is cancelled meanwhile."""
        ending = asyncio.create_task(self._end())
        _endings.add(ending)
        ending.add_done_callback(_endings.discard)
        await asyncio.shield(ending)

    async def _start(self) -> None:
        pipes = [os.pipe(), os.pipe()]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment,
                start_new_session=True,
                stdin=asyncio.subprocess.PIPE,
                stdout=pipes[0][1],
                stderr=pipes[1][1],
            )
        except BaseException:
            for reading, _ in pipes:
                os.close(reading)
            raise
        finally:
            for _, writing in pipes:
                os.close(writing)
        self._output = await Output.of(pipes[0][0], "an agent")
        self._errors = await Output.of(pipes[1][0], "an agent")

    async def _feed(self, given: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None, "it was started with a pipe"
        with suppress(ConnectionError):  # a program need not read its input
            stdin.write(given)
            await stdin.drain()
        stdin.close()

    async def _end(self) -> None:
        await asyncio.wait({self._starting})
        if self._starting.exception() is not None:
            return
        gone = await asyncio.to_thread(end_family, self._process.pid, self._mark)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), END_LIMIT_S)
        await asyncio.gather(self._output.finish(), self._errors.finish())
        if self._process.stdin is not None:
            self._process.stdin.close()
        if not gone or self._process.returncode is None:
            log.warning("an agent left processes of group %d that cannot be ended", self._process.pid)


def _environment(endpoint: Endpoint, task: Task) -> dict[str, str]:
    """The worker's own, without its Python path, which is for a Python that may be another; and the endpoint."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    host = urlsplit(endpoint.base_url).hostname or ""
    direct = ",".join(filter(None, (inherited.get("NO_PROXY", inherited.get("no_proxy", "")), host)))
    return {
        **inherited,
        "NO_PROXY": direct,
        "no_proxy": direct,
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
        "ANTHROPIC_BASE_URL": endpoint.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "OUTPACE_TASK_ID": task.id.replace("\0", ""),
    }


def _as_json(task: Task) -> bytes:
    fields = {**task.columns, "id": task.id, "prompt": task.prompt}
    return json.dumps(fields, ensure_ascii=False, default=str).encode(errors="replace") + b"\n"


def _how_it_ended(status: int, last_line: str) -> str:
    how = how_it_ended(status)
    return f"{how}: {one_line(last_line)}" if last_line else how
