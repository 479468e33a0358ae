"""Keeps the parts of a run alive, as far as the supervisor allows.

    runtime.deaths ─▶ supervisor ─┬▶ restart, EngineLost … EngineJoined     calls that were under way are made again
          ▲                       └▶ the run ends with the part's own account
          └── killed ◀── silent for too long ◀── a sign of life from everybody, every probe_s

An engine gives a sign of life when its event loop turns and, if it has requests running, its compute thread gets on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from outpace.errors import OutpaceError, PartFailed, PartLost
from outpace.pipeline.events import EngineJoined, EngineLost, Event
from outpace.pipeline.supervisor import GiveUp, Role, SuperviseSettings, Supervisor
from outpace.pipeline.watchdog import Awake
from outpace.protocols import Engine
from outpace.runtime.spec import Runtime

T = TypeVar("T")


@dataclass(frozen=True)
class CareSettings:
    supervise: SuperviseSettings
    probe_s: float
    silent_s: float


class Caretaker:
    def __init__(
        self,
        runtime: Runtime,
        roles: Mapping[str, Role],
        engines: Mapping[str, Engine],
        settings: CareSettings,
        tell: Callable[[Event | BaseException], None],
        notice: Callable[[str, str], None],
    ) -> None:
        """`tell` is for the driver, `notice` (a part's role, and what became of it) for people."""
        self._runtime = runtime
        self._roles = roles
        self._engines = engines
        self._settings = settings
        self._tell = tell
        self._notice = notice
        self._supervisor = Supervisor(settings.supervise)
        self._up = {name: asyncio.Event() for name in roles}
        self._lives = dict.fromkeys(roles, 0)
        self._silent = dict.fromkeys(roles, 0.0)
        self._turns: dict[str, int] = {}  # of engines, when they were last asked
        self._replaced = {name: asyncio.Event() for name in roles}  # the next life begins
        for up in self._up.values():
            up.set()

    def life(self, part: str) -> int:
        """How often this part was replaced."""
        return self._lives[part]

    async def ask(self, part: str, call: Callable[[], Awaitable[T]]) -> T:
        """What a part answers. If it dies over the call, its successor is asked the same."""
        while True:
            await self._up[part].wait()
            life = self._lives[part]
            try:
                return await call()
            except PartLost:  # and if its process lives all the same, it will be found silent
                while self._lives[part] == life:
                    await self._replaced[part].wait()

    # ----------------------------------------------------------------------------------------------------- deaths

    async def watch(self) -> None:
        """For as long as the run lasts: replace whoever dies."""
        async with asyncio.TaskGroup() as replacing:
            while True:
                replacing.create_task(self._replace(await self._runtime.deaths.get()))

    async def _replace(self, lost: PartFailed) -> None:
        name = lost.part
        self._up[name].clear()
        if self._roles[name] == "engine":
            self._tell(EngineLost(name))
        if not await self._restarted(name, lost):
            return
        self._lives[name] += 1
        self._silent[name] = 0.0
        self._up[name].set()
        self._replaced[name].set()
        self._replaced[name] = asyncio.Event()
        if self._roles[name] == "engine":
            self._tell(EngineJoined(name))

    async def _restarted(self, name: str, lost: PartFailed) -> bool:
        while True:
            decision = self._supervisor.died(name, self._roles[name], asyncio.get_running_loop().time())
            if isinstance(decision, GiveUp):
                self._tell(PartFailed(name, f"{lost.message}; {decision.reason}", lost.remote_traceback))
                return False
            self._notice(self._roles[name], f"{name} {lost.message}; it is started again")
            await asyncio.sleep(decision.pause_s)
            try:
                await self._runtime.restart(name)
                return True
            except PartFailed as error:
                lost = error
            except (OSError, OutpaceError) as error:  # no process can be had just now, or what it needs is gone
                lost = PartFailed(name, f"could not be started: {error}")

    # ----------------------------------------------------------------------------------------------- signs of life

    async def probe(self) -> None:
        """For as long as the run lasts: end whoever is silent for too long, for `watch` to replace."""
        awake = Awake(asyncio.get_running_loop().time, self._settings.probe_s)
        while True:
            await asyncio.sleep(self._settings.probe_s)
            alive = await asyncio.gather(*(self._lives_on(name) for name in self._roles))
            seconds = awake.lap()
            for name, lives in zip(self._roles, alive, strict=True):
                await self._judge(name, lives, seconds)

    async def _judge(self, name: str, lives: bool, seconds: float) -> None:
        self._silent[name] = 0.0 if lives else self._silent[name] + seconds
        if self._silent[name] >= self._settings.silent_s:
            self._silent[name] = 0.0
            self._notice(self._roles[name], f"{name} gave no sign of life for {self._settings.silent_s:g} s")
            await self._runtime.kill(name)

    async def _lives_on(self, name: str) -> bool:
        if not self._up[name].is_set():
            return True  # it is known to be down, and taken care of
        if not await self._runtime.ping(name, self._settings.probe_s):
            return False
        return name not in self._engines or await self._gets_on(name)

    async def _gets_on(self, name: str) -> bool:
        try:
            async with asyncio.timeout(self._settings.probe_s):
                stats = await self._engines[name].stats()
        except (TimeoutError, PartFailed):
            return False
        before, self._turns[name] = self._turns.get(name), stats.turns
        return not stats.running or stats.turns != before
