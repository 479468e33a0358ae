"""Agent programs: an external program runs one episode, using only the URL of its model.

    task as JSON ─▶ stdin ────────┐
    OPENAI_BASE_URL, _API_KEY, … ─┴▶ program ─▶ exit code 0: the reward functions grade the last answer
                                       │ any other exit: a failed episode, with the last line of stderr
                                       └▶ stdout and stderr ─▶ worker log

Invariants
- The program and all processes it started are gone when the episode ends, however it ends. A closing worker waits for
  this (`wait_until_ended`). If the worker is killed, its programs die with it (`outpace.runtime.die_with_parent`).
- A program that does not exist or is not executable ends the run. A lack of system resources fails the episode.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from urllib.parse import urlsplit

from outpace.errors import BadInput, one_line
from outpace.protocols import ModelClient, Rollout
from outpace.runtime.child_process import ProcessOutput, describe_exit, end_program, start_program, write_input
from outpace.runtime.process_table import MARK_VARIABLE, new_mark
from outpace.types import Endpoint, Episode, Task

_endings: set[asyncio.Task[None]] = set()  # keeps references: asyncio may garbage-collect an unreferenced task


def agent_rollout(command: Sequence[str]) -> Rollout:
    """Return a rollout that starts `command` once per episode and passes it every column of the task."""
    if not command:
        raise BadInput("rollout.agent: empty; set the program to start and its arguments")

    async def run_agent(task: Task, client: ModelClient) -> Episode | None:
        endpoint = await client.endpoint()
        agent = AgentProcess(command, _environment(endpoint, task))
        try:
            problem = await agent.run(_as_json(task))
        finally:
            await agent.end()
        return None if problem is None else Episode([], error=f"the agent {problem}", stop="error")

    return run_agent


async def wait_until_ended() -> None:
    """Wait until all programs of ended episodes on this event loop are gone, with their child processes."""
    loop = asyncio.get_running_loop()
    here = [ending for ending in _endings if ending.get_loop() is loop]
    await asyncio.gather(*here, return_exceptions=True)


class AgentProcess:
    """One run of a program."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._command = command
        self._mark = new_mark()
        self._environment = {**environment, MARK_VARIABLE: self._mark}
        self._process: asyncio.subprocess.Process | None = None
        self._outputs: list[ProcessOutput] = []
        # A separate task: cancelling the caller must not leave a half-started process.
        self._starting = asyncio.create_task(self._start())

    async def run(self, stdin_data: bytes) -> str | None:
        """Send the input and wait for the program to exit. Returns what went wrong, or None."""
        try:
            process = await asyncio.shield(self._starting)
        except OSError as error:
            return f"could not be started: {error.strerror or one_line(error)}"
        feeding = asyncio.create_task(write_input(process.stdin, stdin_data))
        try:
            status = await process.wait()
        finally:
            feeding.cancel()
        errors = self._outputs[-1]
        await errors.finish()
        return None if status == 0 else _exit_reason(status, errors.last_line)

    async def end(self) -> None:
        """Kill the program and everything it started. Completes even if the caller is cancelled."""
        ending = asyncio.create_task(self._end())
        _endings.add(ending)
        ending.add_done_callback(_endings.discard)
        await asyncio.shield(ending)

    async def _start(self) -> asyncio.subprocess.Process:
        with ExitStack() as child_ends:  # the program's ends of the pipes
            stdout, stderr = await self._open_log_pipe(child_ends), await self._open_log_pipe(child_ends)
            self._process = await start_program(
                self._command, self._environment, self._mark, "rollout.agent",
                stdin=asyncio.subprocess.PIPE, stdout=stdout, stderr=stderr,
            )  # fmt: skip
        return self._process

    async def _open_log_pipe(self, child_ends: ExitStack) -> int:
        """Open a pipe to the worker log and return the end that the program writes to."""
        reading, writing = os.pipe()
        child_ends.callback(os.close, writing)
        self._outputs.append(await ProcessOutput.of(reading, "an agent"))
        return writing

    async def _end(self) -> None:
        await asyncio.wait({self._starting})
        if not self._starting.cancelled():
            self._starting.exception()  # mark as retrieved: `run` has reported it
        if self._process is not None:
            await end_program(self._process, self._mark, "an agent")
            if self._process.stdin is not None:
                self._process.stdin.close()
        await asyncio.gather(*(output.finish() for output in self._outputs))


def _environment(endpoint: Endpoint, task: Task) -> dict[str, str]:
    """Return the worker's environment plus the endpoint. PYTHONPATH is dropped: the program may use another Python."""
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


def _exit_reason(status: int, last_line: str) -> str:
    how = describe_exit(status)
    return f"{how}: {one_line(last_line)}" if last_line else how
