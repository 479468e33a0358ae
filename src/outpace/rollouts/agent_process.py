"""A program as the agent of one episode: it knows nothing of outpace, only where its model is.

    task, as JSON ─▶ standard input ┐
    OPENAI_BASE_URL, _API_KEY, …  ──┴▶ program ─▶ exit code 0: the reward functions judge the last answer
                                         │ otherwise: a failed episode, with the last line on standard error
                                         └▶ standard output and error ─▶ the worker's log

Invariants
- The program and all that it has started are gone when the episode ends, however it ends; a worker that closes waits
  for that (`all_ended`), and a worker that is killed takes the programs with it (`outpace.runtime.lifeline`).
- A program that cannot be there ends the run. A system that has nothing left to start it with fails the episode.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

from outpace.errors import BadInput, one_line
from outpace.protocols import ModelClient, Rollout
from outpace.rewards.streams import reader
from outpace.runtime.family import MARK, family_ended, how_it_ended
from outpace.runtime.lifeline import launched
from outpace.runtime.output import Output
from outpace.types import Endpoint, Episode, Task

log = logging.getLogger(__name__)

END_LIMIT_S = 2.0
"""How long a killed program may take to be gone."""
NO_PROGRAM = (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR)
"""What the system says of something that it cannot start now or later."""

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


async def all_ended() -> None:
    """Wait until nothing is left of the programs of this event loop whose episodes have ended."""
    loop = asyncio.get_running_loop()
    here = [ending for ending in _endings if ending.get_loop() is loop]
    await asyncio.gather(*here, return_exceptions=True)


class AgentProcess:
    """One run of a program."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._command = command
        self._mark = secrets.token_hex(16)
        self._environment = {**environment, MARK: self._mark}
        self._process: asyncio.subprocess.Process | None = None
        self._outputs: list[Output] = []
        # A task of its own, so that whoever is cancelled while he waits for it leaves no half-started process.
        self._starting = asyncio.create_task(self._start())

    async def run(self, given: bytes) -> str | None:
        """Hand it its input and wait for its end; says what went wrong, if anything did."""
        try:
            process = await asyncio.shield(self._starting)
        except OSError as error:
            return f"could not be started: {error.strerror or one_line(error)}"
        feeding = asyncio.create_task(_feed(process, given))
        try:
            status = await process.wait()
        finally:
            feeding.cancel()
        errors = self._outputs[-1]
        await errors.finish()
        return None if status == 0 else _how_it_ended(status, errors.last_line)

    async def end(self) -> None:
        """See to it that nothing of it is left, also for somebody who is cancelled meanwhile."""
        ending = asyncio.create_task(self._end())
        _endings.add(ending)
        ending.add_done_callback(_endings.discard)
        await asyncio.shield(ending)

    async def _start(self) -> asyncio.subprocess.Process:
        with ExitStack() as theirs:  # the ends of pipes that are the program's
            stdout, stderr = await self._hear(theirs), await self._hear(theirs)
            problem, telling = os.pipe()
            theirs.callback(os.close, telling)
            told, transport = await reader(problem)
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *launched(self._command, telling), pass_fds=[telling], env=self._environment,
                    start_new_session=True, stdin=asyncio.subprocess.PIPE, stdout=stdout, stderr=stderr,
                )  # fmt: skip
                theirs.close()
                number = await told.read()
            finally:
                transport.close()
        if number:
            raise _not_started(self._command[0], int(number))
        return self._process

    async def _hear(self, theirs: ExitStack) -> int:
        """Where the program is to write, for the worker's log."""
        reading, writing = os.pipe()
        theirs.callback(os.close, writing)
        self._outputs.append(await Output.of(reading, "an agent"))
        return writing

    async def _end(self) -> None:
        await asyncio.wait({self._starting})
        if not self._starting.cancelled():
            self._starting.exception()  # whoever runs it has heard of it
        if self._process is not None:
            await _gone(self._process, self._mark)
        await asyncio.gather(*(output.finish() for output in self._outputs))


async def _gone(process: asyncio.subprocess.Process, mark: str) -> None:
    gone = await family_ended(process.pid, mark)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), END_LIMIT_S)
    if process.stdin is not None:
        process.stdin.close()
    if not gone or process.returncode is None:
        log.warning("an agent left processes of group %d that cannot be ended", process.pid)


async def _feed(process: asyncio.subprocess.Process, given: bytes) -> None:
    stdin = process.stdin
    assert stdin is not None, "it was started with a pipe"
    with suppress(ConnectionError):  # a program need not read its input
        stdin.write(given)
        await stdin.drain()
    stdin.close()


def _not_started(program: str, number: int) -> BadInput | OSError:
    if number in NO_PROGRAM:
        return BadInput(f"rollout.agent: cannot start {program}: {os.strerror(number)}")
    return OSError(number, os.strerror(number))


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
