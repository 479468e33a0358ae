"""Supervision: restart engines and workers that die or hang, within a restart budget, and detect stalls.

    runtime.deaths ─▶ RestartPolicy ─┬▶ restart, EngineLost … EngineJoined     calls in progress are made again
          ▲                          └▶ the run ends with the component's own error
          └── killed ◀── unresponsive for silent_s ◀── every component is probed every probe_s

    learner    its death ends the run, which can be resumed: only a checkpoint can replace the learner
    engine     restarted; serves nothing before its first load
    worker     restarted; its groups are rolled out again

A component that dies more than `restarts` times within `window_s` is not restarted again. That ends the run, unless it
is an engine and another one is up. Engines may join and leave during the run.

A probe succeeds if the component's event loop replies and, for an engine with running requests, its compute thread has
made progress. The probe and the stall watchdog count only time in which this process was awake (`AwakeClock`): a
suspended machine or a stopped and continued process has not stalled, however far the clocks advanced.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from outpace.config.sections import SuperviseConfig
from outpace.controller import events as ev
from outpace.errors import ComponentFailed, ComponentLost, OutpaceError, plural
from outpace.protocols import Engine
from outpace.runtime.async_tools import backoff_s
from outpace.runtime.components import ComponentKind, RestartSettings, Runtime

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class GiveUp:
    """End the run; `reason` is appended to the component's own error."""

    reason: str


class RestartPolicy:
    """Decides whether to restart a dead component: at most `restarts` times within `window_s`; never without settings.
    Pure: takes the time as an argument."""

    def __init__(self, settings: RestartSettings | None) -> None:
        self._settings = settings
        self._deaths: defaultdict[str, deque[float]] = defaultdict(deque)
        self.restarts = 0

    def died(self, component: str, now: float) -> float | GiveUp:
        """Return the seconds to wait before the restart; the wait doubles while the component keeps dying."""
        settings = self._settings
        if settings is None:
            return GiveUp("the run can be resumed from its newest checkpoint")
        recent = self._deaths[component]
        while recent and recent[0] <= now - settings.window_s:
            recent.popleft()
        if len(recent) >= settings.restarts:
            return GiveUp(_budget_spent(settings))
        pause_s = 0.0 if not recent else backoff_s(len(recent), FIRST_PAUSE_S, LONGEST_PAUSE_S)
        recent.append(now)
        self.restarts += 1
        return pause_s


def _budget_spent(settings: RestartSettings) -> str:
    if settings.restarts == 0:
        return "supervise.restarts = 0"
    times = plural(settings.restarts, "time")
    return f"it was already restarted {times} within {settings.window_s:g} s (supervise.restarts)"


WatchdogState = Literal["fine", "warn", "end"]

WARN_AT = 0.5
"""Fraction of its patience after which the watchdog warns."""


class Watchdog:
    """Detects when the run makes no progress. Pure: takes elapsed time as an argument."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.stalled_s = 0.0  # time without progress
        self._warned = False

    def record_progress(self) -> None:
        """Record progress."""
        self.stalled_s = 0.0
        self._warned = False

    def tick(self, seconds: float) -> WatchdogState:
        """Add elapsed time and return whether to warn (once per stall) or to end the run."""
        self.stalled_s += seconds
        if self.stalled_s >= self.patience_s:
            return "end"
        if self.stalled_s >= WARN_AT * self.patience_s and not self._warned:
            self._warned = True
            return "warn"
        return "fine"


class AwakeClock:
    """Measures the time since the last call, capped so that time in which this process was suspended does not count."""

    def __init__(self, clock: Callable[[], float], interval_s: float) -> None:
        self._clock = clock
        self._max_s = 2 * interval_s  # a busy event loop is late, but not by much
        self._last = clock()

    def lap(self) -> float:
        before, self._last = self._last, self._clock()
        return min(self._last - before, self._max_s)


T = TypeVar("T")


class ComponentRemoved(ComponentFailed):
    """A component left the run for good, and the run continues without it."""


@dataclass
class _Supervised:
    """What the supervisor knows about one component."""

    kind: ComponentKind
    policy: RestartPolicy
    restarts: int = 0  # how often it was replaced
    up: asyncio.Event = field(default_factory=asyncio.Event)
    replaced: asyncio.Event = field(default_factory=asyncio.Event)  # set when it is replaced
    replacing: asyncio.Task[None] | None = None
    gone: ComponentRemoved | None = None  # it will not come back
    silent_s: float = 0.0
    turns: int | None = None  # progress counter of an engine at its last probe


class ComponentSupervisor:
    """Watches all components, restarts dead ones and repeats the calls they lost."""

    def __init__(
        self,
        runtime: Runtime,
        names: Iterable[str],
        engines: Mapping[str, Engine],
        settings: SuperviseConfig,
        post: Callable[[ev.Event | BaseException], None],
        notice: Callable[[str, str], None],
        on_restart: Callable[[], None] = lambda: None,
        all_engines: bool = False,
    ) -> None:
        """`post` puts an event or error into the driver's queue. `notice` reports a component's role and what
        happened to it. `on_restart` is called after a restart. `all_engines`: the run cannot continue without every
        engine."""
        self._runtime = runtime
        self._engines = engines
        self._settings = settings
        self._post = post
        self._notice = notice
        self._on_restart = on_restart
        self._all_engines = all_engines
        self._components: dict[str, _Supervised] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        """Supervise a component that is up, with the restart settings of its spec."""
        spec = self._runtime.spec(name)
        self._components[name] = _Supervised(spec.kind, RestartPolicy(spec.restart))
        self._components[name].up.set()

    def leave(self, name: str, why: str) -> None:
        """Stop supervising a component. Calls that wait for it fail with `why`."""
        known = self._components[name]
        known.gone = ComponentRemoved(name, why)
        if known.replacing is not None and known.replacing is not asyncio.current_task():
            known.replacing.cancel()
        known.restarts += 1
        known.up.set()
        known.replaced.set()

    async def wait_restart_cancelled(self, name: str) -> None:
        """Wait until a cancelled restart of this component has ended."""
        if (replacing := self._components[name].replacing) is not None:
            await asyncio.wait({replacing})

    def supervises(self, component: str) -> bool:
        return component in self._components and self._components[component].gone is None

    def restart_count(self, component: str) -> int:
        """Return how often this component was replaced."""
        return self._components[component].restarts

    def is_current(self, component: str, restarts: int) -> bool:
        """Return whether the component is up and has not been replaced since `restarts`."""
        known = self._components[component]
        return known.gone is None and known.restarts == restarts and known.up.is_set()

    async def call(self, component: str, call: Callable[[], Awaitable[T]]) -> T:
        """Call a component and return its reply. If it dies, repeat the call on its replacement; `ComponentRemoved`
        if there is none."""
        known = self._components[component]
        while True:
            await known.up.wait()
            if known.gone is not None:
                raise known.gone
            restarts = known.restarts
            try:
                return await call()
            except ComponentFailed as error:
                if known.gone is not None:
                    raise known.gone from error
                if not isinstance(error, ComponentLost):
                    raise
                # If its process is still alive, the probe will find it unresponsive.
                while known.restarts == restarts:
                    await known.replaced.wait()

    # ---------------------------------------------------------------------------------------------------- restarts

    async def watch(self) -> None:
        """Restart components that die, until the run ends."""
        async with asyncio.TaskGroup() as replacing:
            while True:
                lost = await self._runtime.deaths.get()
                if self.supervises(lost.component):  # otherwise it was leaving
                    known = self._components[lost.component]
                    known.replacing = replacing.create_task(self._replace(lost.component, known, lost))

    async def _replace(self, name: str, known: _Supervised, lost: ComponentFailed) -> None:
        known.up.clear()
        if known.kind == "engine":
            self._post(ev.EngineLost(name))
        if not await self._restart(name, known, lost):
            return
        known.restarts += 1
        known.silent_s = 0.0
        known.up.set()
        known.replaced.set()
        known.replaced = asyncio.Event()
        self._on_restart()
        if known.kind == "engine":
            self._post(ev.EngineJoined(name))

    async def _restart(self, name: str, known: _Supervised, lost: ComponentFailed) -> bool:
        while True:
            pause_s = known.policy.died(name, asyncio.get_running_loop().time())
            if isinstance(pause_s, GiveUp):
                self._give_up(name, ComponentFailed(name, f"{lost.message}; {pause_s.reason}", lost.remote_traceback))
                return False
            self._notice(known.kind, f"{name} {lost.message}; it is started again")
            await asyncio.sleep(pause_s)
            try:
                await self._runtime.restart(name)
                return True
            except ComponentFailed as error:
                lost = error
            except (OSError, OutpaceError) as error:  # no process can be started now, or a resource it needs is gone
                lost = ComponentFailed(name, f"could not be started: {error}")

    def _give_up(self, name: str, failure: ComponentFailed) -> None:
        others = [known for other, known in self._components.items() if known.kind == "engine" and other != name]
        another_is_up = any(known.gone is None and known.up.is_set() for known in others)
        if self._components[name].kind != "engine" or self._all_engines or not another_is_up:
            self._post(failure)
            return
        self._notice("engine", f"{failure}; the run continues without it")
        self.leave(name, failure.message)
        self._post(ev.EngineLeft(name))

    # ----------------------------------------------------------------------------------------------------- probes

    async def probe(self) -> None:
        """Kill components that do not respond, until the run ends; `watch` restarts them."""
        awake = AwakeClock(asyncio.get_running_loop().time, self._settings.probe_s)
        while True:
            await asyncio.sleep(self._settings.probe_s)
            probed = {name: known for name, known in self._components.items() if known.gone is None}
            alive = await asyncio.gather(*(self._is_alive(name, known) for name, known in probed.items()))
            seconds = awake.lap()
            for (name, known), is_alive in zip(probed.items(), alive, strict=True):
                if known.gone is None:
                    await self._kill_if_silent(name, known, 0.0 if is_alive else known.silent_s + seconds)

    async def _kill_if_silent(self, name: str, known: _Supervised, silent_s: float) -> None:
        known.silent_s = silent_s
        if silent_s >= self._settings.silent_s:
            known.silent_s = 0.0
            self._notice(known.kind, f"{name} did not respond for {self._settings.silent_s:g} s and is killed")
            await self._runtime.kill(name)

    async def _is_alive(self, name: str, known: _Supervised) -> bool:
        if not known.up.is_set():
            return True  # known to be down and being restarted
        if not await self._runtime.ping(name, self._settings.probe_s):
            return False
        return name not in self._engines or await self._makes_progress(name, known)

    async def _makes_progress(self, name: str, known: _Supervised) -> bool:
        try:
            async with asyncio.timeout(self._settings.probe_s):
                stats = await self._engines[name].stats()
        except (TimeoutError, ComponentFailed):
            return False
        before, known.turns = known.turns, stats.turns
        return not stats.running or stats.turns != before
