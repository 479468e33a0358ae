"""Parts as child processes of this machine.

Invariants
- A child that exits, for whatever reason, while it should be running becomes a `PartFailed` with the end of its own
  log, within moments: `failure` resolves and every pending call to it raises.
- `stop` leaves no child behind: a closed socket first, then SIGKILL, each with a bound.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

from outpace import errors
from outpace.runtime.child import Broken, Hello
from outpace.runtime.family import how_it_ended
from outpace.runtime.rpc import Channel, close_proxy, proxy
from outpace.runtime.spec import START_DEADLINE_S, PartSpec

P = TypeVar("P")

STOP_DEADLINE_S = 5.0
LOG_TAIL_LINES = 30


@dataclass
class Child:
    name: str
    process: asyncio.subprocess.Process
    channel: Channel
    remote: object
    log: Path
    watcher: asyncio.Task[None] | None = None


class LocalRuntime:
    """Starts parts as `python -m outpace.runtime.child`, watches them, stops them."""

    def __init__(self, logs: Path, append: bool = False) -> None:
        """`append` keeps what an earlier start of the same run has logged."""
        self._logs = logs
        self._mode: Literal["ab", "wb"] = "ab" if append else "wb"
        self._children: list[Child] = []
        self._stopping = False
        self.failure: asyncio.Future[errors.PartFailed] = asyncio.get_running_loop().create_future()

    async def start(self, protocol: type[P], spec: PartSpec, environment: dict[str, str]) -> P:
        """Start one part and wait until it is ready to be called."""
        log = self._logs / f"{spec.name}.log"
        ours, theirs = socket.socketpair()
        with theirs, _open_log(log, self._mode) as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "outpace.runtime.child", str(theirs.fileno()),
                pass_fds=[theirs.fileno()], env={**os.environ, **environment},
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        channel = Channel(*await asyncio.open_connection(sock=ours))
        child = Child(spec.name, process, channel, None, log)
        self._children.append(child)
        await self._introduce(child, spec)
        remote = proxy(protocol, channel, spec.name)
        child.remote = remote
        child.watcher = asyncio.create_task(self._watch(child), name=f"watch {spec.name}")
        return remote

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*(self._stop(child) for child in self._children))
        self._children.clear()

    async def _introduce(self, child: Child, spec: PartSpec) -> None:
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                await child.channel.send(spec)
                hello = await child.channel.receive(Hello)
        except (TimeoutError, ConnectionError):
            hello = None
        if hello is None:
            raise errors.PartFailed(spec.name, "did not start", _tail(child.log))
        if isinstance(hello, Broken):
            if hello.kind == errors.BadInput.__name__:
                raise errors.BadInput(hello.message)
            raise errors.PartFailed(spec.name, f"{hello.kind}: {hello.message}", hello.traceback)

    async def _watch(self, child: Child) -> None:
        code = await child.process.wait()
        if self._stopping:
            return
        how = how_it_ended(code)
        if not self.failure.done():
            self.failure.set_result(errors.PartFailed(child.name, how, _tail(child.log)))

    async def _stop(self, child: Child) -> None:
        if child.watcher is not None:
            child.watcher.cancel()
        close_proxy(child.remote)
        child.channel.close()
        for insist in (False, True):
            if insist and child.process.returncode is None:
                child.process.kill()
            try:
                async with asyncio.timeout(STOP_DEADLINE_S):
                    await child.process.wait()
                return
            except TimeoutError:
                continue


def _open_log(path: Path, mode: Literal["ab", "wb"]) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, mode)


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-LOG_TAIL_LINES:])
