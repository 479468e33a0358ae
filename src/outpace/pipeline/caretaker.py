"""Keeps the parts of a run alive, as far as the supervisor allows.

    runtime.deaths ─▶ supervisor ─┬▶ restart, EngineLost … EngineJoined     calls that were under way are made again
          ▲                       └▶ the run ends with the part's own account
          └── killed ◀── silent for too long ◀── a sign of life from everybody, every probe_s

An engine gives a sign of life when its event loop turns and, if it has requests running, its compute thread gets on.

Engines may come and go while the run lasts. One that cannot be kept alive ends the run only when it is the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from outpace.errors import OutpaceError, PartFailed, PartLost
from outpace.pipeline.events import EngineJoined, EngineLeft, EngineLost, Event
from outpace.pipeline.supervisor import GiveUp, Role, SuperviseSettings, Supervisor
from outpace.pipeline.watchdog import Awake
from outpace.protocols import Engine
from outpace.runtime.spec import Runtime

T = TypeVar("T")


class PartGone(PartFailed):
    """A part has left the run for good, and the run goes on without it."""


@dataclass(frozen=True)
class CareSettings:
    supervise: SuperviseSettings
    probe_s: float
    silent_s: float
    all_engines: bool = False  # the run cannot do without any of them


class Caretaker:
    def __init__(
        self,
        runtime: Runtime,
        roles: Mapping[str, Role],
        engines: Mapping[str, Engine],
        settings: CareSettings,
        tell: Callable[[Event | BaseException], None],
        notice: Callable[[str, str], None],
        back: Callable[[str], None] = lambda part: None,
    ) -> None:
        """`tell` is for the driver, `notice` (a part's role, and what became of it) for people; `back` hears of parts
        that were replaced."""
        self._runtime = runtime
        self._roles: dict[str, Role] = {}
        self._engines = engines
        self._settings = settings
        self._tell = tell
        self._notice = notice
        self._back = back
        self._supervisor = Supervisor(settings.supervise)
        self._up: dict[str, asyncio.Event] = {}
        self._lives: dict[str, int] = {}
        self._silent: dict[str, float] = {}
        self._turns: dict[str, int] = {}  # of engines, when they were last asked
        self._replaced: dict[str, asyncio.Event] = {}  # the next life begins
        self._gone: dict[str, PartGone] = {}  # engines that will not come back
        self._replacing: dict[str, asyncio.Task[None]] = {}
        for name, role in roles.items():
            self.enter(name, role)

    def enter(self, name: str, role: Role) -> None:
        """This part is up, and cared for from here on."""
        self._roles[name] = role
        self._lives[name] = 0
        self._silent[name] = 0.0
        self._up[name], self._replaced[name] = asyncio.Event(), asyncio.Event()
        self._up[name].set()

    def leave(self, name: str, why: str) -> None:
        """It is not cared for any more; whoever waits for it hears why."""
        del self._roles[name]
        self._gone[name] = PartGone(name, why)
        replacing = self._replacing.get(name)
        if replacing is not None and replacing is not asyncio.current_task():
            replacing.cancel()
        self._lives[name] += 1
        self._up[name].set()
        self._replaced[name].set()

    async def called_off(self, name: str) -> None:
        """Nobody is starting it again any more."""
        if (replacing := self._replacing.pop(name, None)) is not None:
            await asyncio.wait({replacing})

    def cares_for(self, part: str) -> bool:
        return part in self._roles

    def life(self, part: str) -> int:
        """How often this part was replaced."""
        return self._lives[part]

    def lives_on(self, part: str, life: int) -> bool:
        """Whether it is still the one that it was in that life, as far as is known."""
        return part not in self._gone and self._lives[part] == life and self._up[part].is_set()

    async def ask(self, part: str, call: Callable[[], Awaitable[T]]) -> T:
        """What a part answers. If it dies over the call, its successor is asked the same; `PartGone`: there is none."""
        while True:
            await self._up[part].wait()
            if part in self._gone:
                raise self._gone[part]
            life = self._lives[part]
            try:
                return await call()
            except PartFailed as error:
                if part in self._gone:
                    raise self._gone[part] from error
                if not isinstance(error, PartLost):
                    raise
                # If its process lives all the same, it will be found silent.
                while self._lives[part] == life and part not in self._gone:
                    await self._replaced[part].wait()

    # ----------------------------------------------------------------------------------------------------- deaths

    async def watch(self) -> None:
        """For as long as the run lasts: replace whoever dies."""
        async with asyncio.TaskGroup() as replacing:
            while True:
                lost = await self._runtime.deaths.get()
                self._replacing[lost.part] = replacing.create_task(self._replace(lost))

    async def _replace(self, lost: PartFailed) -> None:
        name = lost.part
        if name not in self._roles:
            return  # it was leaving anyway
        self._up[name].clear()
        is_engine = self._roles[name] == "engine"
        if is_engine:
            self._tell(EngineLost(name))
        if not await self._restarted(name, lost):
            return
        self._lives[name] += 1
        self._silent[name] = 0.0
        self._up[name].set()
        self._replaced[name].set()
        self._replaced[name] = asyncio.Event()
        self._back(name)
        if is_engine:
            self._tell(EngineJoined(name))

    async def _restarted(self, name: str, lost: PartFailed) -> bool:
        while True:
            decision = self._supervisor.died(name, self._roles[name], asyncio.get_running_loop().time())
            if isinstance(decision, GiveUp):
                self._give_up(name, PartFailed(name, f"{lost.message}; {decision.reason}", lost.remote_traceback))
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

    def _give_up(self, name: str, failure: PartFailed) -> None:
        others = [part for part, role in self._roles.items() if role == "engine" and part != name]
        if self._roles[name] != "engine" or self._settings.all_engines or not any(self._up[o].is_set() for o in others):
            self._tell(failure)
            return
        self._notice("engine", f"{failure}; the run goes on without it")
        self.leave(name, failure.message)
        self._tell(EngineLeft(name))

    # ----------------------------------------------------------------------------------------------- signs of life

    async def probe(self) -> None:
        """For as long as the run lasts: end whoever is silent for too long, for `watch` to replace."""
        awake = Awake(asyncio.get_running_loop().time, self._settings.probe_s)
        while True:
            await asyncio.sleep(self._settings.probe_s)
            names = list(self._roles)
            alive = await asyncio.gather(*(self._gives_sign(name) for name in names))
            seconds = awake.lap()
            for name, lives in zip(names, alive, strict=True):
                if name in self._roles:
                    await self._judge(name, lives, seconds)

    async def _judge(self, name: str, lives: bool, seconds: float) -> None:
        self._silent[name] = 0.0 if lives else self._silent[name] + seconds
        if self._silent[name] >= self._settings.silent_s:
            self._silent[name] = 0.0
            self._notice(self._roles[name], f"{name} gave no sign of life for {self._settings.silent_s:g} s")
            await self._runtime.kill(name)

    async def _gives_sign(self, name: str) -> bool:
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
