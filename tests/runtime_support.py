"""A toy component for tests, in its own child process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import psutil

from outpace.errors import BadInput, ComponentFailed
from outpace.runtime.components import ComponentSpec, Runtime

ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parent)}


def is_gone(pid: int) -> bool:
    """Whether a process has ended. A zombie has ended and only waits to be reaped."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.002)


async def noted_pids(note: Path, count: int = 1) -> list[int]:
    """Wait until processes have written `count` lines to `note`, and return the numbers in them."""

    def written() -> list[str]:
        return note.read_text().splitlines() if note.exists() else []

    await asyncio.to_thread(until, lambda: len(written()) >= count)
    return [int(line) for line in written()]


class Toy(Protocol):
    async def pid(self) -> int: ...
    async def attempt(self) -> int: ...
    async def wait(self) -> None: ...
    async def die(self, code: int) -> None: ...
    async def block(self, seconds: float) -> None: ...
    async def stop_itself(self) -> None: ...
    async def start_program(self, seconds: int) -> int: ...
    async def call_peer(self) -> int: ...
    async def break_down(self) -> None: ...


class RealToy:
    def __init__(self, spec: ComponentSpec, peers: dict[str, Any]) -> None:
        self._spec = spec
        self._peers = peers
        self._breakdown = asyncio.Event()

    async def pid(self) -> int:
        return os.getpid()

    async def attempt(self) -> int:
        return self._spec.attempt

    async def wait(self) -> None:
        await self._wait_for_ever()

    async def _wait_for_ever(self) -> None:
        await asyncio.Event().wait()

    async def die(self, code: int) -> None:
        print("these are my last words", flush=True)
        os._exit(code)

    async def block(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - simulates a blocked event loop

    async def stop_itself(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    async def start_program(self, seconds: int) -> int:
        return subprocess.Popen(["sleep", str(seconds)], start_new_session=True).pid  # noqa: ASYNC220

    async def call_peer(self) -> int:
        (peer,) = self._peers.values()
        return await peer.pid()  # type: ignore[no-any-return]

    async def break_down(self) -> None:
        self._breakdown.set()
        raise ValueError("this answer is never to be seen")

    async def close(self) -> None:
        await asyncio.sleep(self._spec.settings.get("closes_for_s", 0))

    async def broken(self) -> ComponentFailed:
        await self._breakdown.wait()
        return ComponentFailed("toy", "cannot go on", "Traceback: deep inside")


async def build(spec: ComponentSpec, peers: dict[str, Any]) -> RealToy:
    if "builds" in spec.settings:
        os.mkdir(spec.settings["builds"])
    if spec.attempt in spec.settings.get("dies_at", ()):
        os._exit(7)
    if spec.settings.get("bad"):
        raise BadInput("that cannot work")
    await asyncio.sleep(spec.settings.get("builds_for_s", 0))
    return RealToy(spec, peers)


async def start_toy(runtime: Runtime, name: str = "toy", **fields: Any) -> Toy:
    here = __name__
    spec = ComponentSpec(name, f"{here}:build", f"{here}:Toy", peer_protocol=f"{here}:Toy", **fields)
    return await runtime.start(Toy, spec)
