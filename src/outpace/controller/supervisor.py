"""Supervision: restart engines and workers that die or hang, within a restart budget, and detect stalls.

    runtime.deaths ─▶ RestartPolicy ─┬▶ restart, EngineLost … EngineJoined     calls in progress are made again
          ▲                          └▶ the run ends with the component's own error
          └── killed ◀── unresponsive for silent_s ◀── every component is probed every probe_s

    learner    its death ends the run, which can be resumed: only a checkpoint can replace the learner
    engine     restarted; serves nothing before its first load
    worker     restarted; its groups are rolled out again

A component that dies more than `restarts` times within `window_s` is given up. That ends the run, except for an engine
while another one is up. Engines may join and leave during the run.

A probe succeeds if the component's event loop replies and, for an engine with running requests, its compute thread has
made progress. Both the probe and the stall watchdog count only time in which this process was awake (`AwakeClock`): a
suspended machine or a stopped and continued process has not stalled, however far the clocks advanced.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from outpace.config.sections import SuperviseConfig
from outpace.controller.events import EngineJoined, EngineLeft, EngineLost, Event
from outpace.errors import ComponentFailed, ComponentLost, OutpaceError, plural
from outpace.protocols import Engine
from outpace.runtime.async_tools import backoff_s
from outpace.runtime.components import ComponentKind, RestartSettings, Runtime

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class Restart:
    """Restart the component after a pause, which doubles while it keeps dying."""

    pause_s: float


@dataclass(frozen=True)
class GiveUp:
    """End the run; `reason` is appended to the component's own error."""

    reason: str


Decision = Restart | GiveUp


class RestartPolicy:
    """Decides whether to restart a dead component: at most `restarts` times within `window_s`; never without settings.
    Pure: takes the time as an argument."""

    def __init__(self, settings: RestartSettings | None) -> None:
        self._settings = settings
        self._deaths: defaultdict[str, deque[float]] = defaultdict(deque)
        self.restarts = 0

    def died(self, component: str, now: float) -> Decision:
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
        return Restart(pause_s)


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


class ComponentSupervisor:
    """Watches all components, restarts dead ones and repeats the calls they lost."""

    def __init__(
        self,
        runtime: Runtime,
        names: Iterable[str],
        engines: Mapping[str, Engine],
        settings: SuperviseConfig,
        post: Callable[[Event | BaseException], None],
        notice: Callable[[str, str], None],
        on_restart: Callable[[str], None] = lambda component: None,
        all_engines: bool = False,
    ) -> None:
        """`post` puts an event or error into the driver's queue. `notice` reports a component's role and what
        happened to it. `on_restart` is called with the name of a restarted component. `all_engines`: the run cannot
        continue without every engine."""
        self._runtime = runtime
        self._roles: dict[str, ComponentKind] = {}
        self._engines = engines
        self._settings = settings
        self._post = post
        self._notice = notice
        self._on_restart = on_restart
        self._policies: dict[str, RestartPolicy] = {}
        self._all_engines = all_engines
        self._up: dict[str, asyncio.Event] = {}
        self._restart_counts: dict[str, int] = {}
        self._silent: dict[str, float] = {}
        self._turns: dict[str, int] = {}  # progress counter of each engine at its last probe
        self._replaced: dict[str, asyncio.Event] = {}  # set when the component is replaced
        self._gone: dict[str, ComponentRemoved] = {}  # components that will not come back
        self._replacing: dict[str, asyncio.Task[None]] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        """Supervise a component that is up, as its spec says."""
        spec = self._runtime.spec(name)
        self._roles[name] = spec.kind
        self._policies[name] = RestartPolicy(spec.restart)
        self._restart_counts[name] = 0
        self._silent[name] = 0.0
        self._up[name], self._replaced[name] = asyncio.Event(), asyncio.Event()
        self._up[name].set()

    def leave(self, name: str, why: str) -> None:
        """Stop supervising a component. Calls that wait for it fail with `why`."""
        del self._roles[name]
        self._gone[name] = ComponentRemoved(name, why)
        replacing = self._replacing.get(name)
        if replacing is not None and replacing is not asyncio.current_task():
            replacing.cancel()
        self._restart_counts[name] += 1
        self._up[name].set()
        self._replaced[name].set()

    async def wait_restart_cancelled(self, name: str) -> None:
        """Wait until a cancelled restart of this component has ended."""
        if (replacing := self._replacing.pop(name, None)) is not None:
            await asyncio.wait({replacing})

    def supervises(self, component: str) -> bool:
        return component in self._roles

    def restart_count(self, component: str) -> int:
        """Return how often this component was replaced."""
        return self._restart_counts[component]

    def is_current(self, component: str, restarts: int) -> bool:
        """Return whether the component is up and has not been replaced since `restarts`."""
        same = component not in self._gone and self._restart_counts[component] == restarts
        return same and self._up[component].is_set()

    async def call(self, component: str, call: Callable[[], Awaitable[T]]) -> T:
        """Call a component and return its reply. If it dies, repeat the call on its replacement; `ComponentRemoved`
        if there is none."""
        while True:
            await self._up[component].wait()
            if component in self._gone:
                raise self._gone[component]
            restarts = self._restart_counts[component]
            try:
                return await call()
            except ComponentFailed as error:
                if component in self._gone:
                    raise self._gone[component] from error
                if not isinstance(error, ComponentLost):
                    raise
                # If its process is still alive, the probe will find it unresponsive.
                while self._restart_counts[component] == restarts and component not in self._gone:
                    await self._replaced[component].wait()

    # ---------------------------------------------------------------------------------------------------- restarts

    async def watch(self) -> None:
        """Restart components that die, for as long as the run lasts."""
        async with asyncio.TaskGroup() as replacing:
            while True:
                lost = await self._runtime.deaths.get()
                self._replacing[lost.component] = replacing.create_task(self._replace(lost))

    async def _replace(self, lost: ComponentFailed) -> None:
        name = lost.component
        if name not in self._roles:
            return  # it was leaving
        self._up[name].clear()
        is_engine = self._roles[name] == "engine"
        if is_engine:
            self._post(EngineLost(name))
        if not await self._restart(name, lost):
            return
        self._restart_counts[name] += 1
        self._silent[name] = 0.0
        self._up[name].set()
        self._replaced[name].set()
        self._replaced[name] = asyncio.Event()
        self._on_restart(name)
        if is_engine:
            self._post(EngineJoined(name))

    async def _restart(self, name: str, lost: ComponentFailed) -> bool:
        while True:
            decision = self._policies[name].died(name, asyncio.get_running_loop().time())
            if isinstance(decision, GiveUp):
                self._give_up(name, ComponentFailed(name, f"{lost.message}; {decision.reason}", lost.remote_traceback))
                return False
            self._notice(self._roles[name], f"{name} {lost.message}; it is started again")
            await asyncio.sleep(decision.pause_s)
            try:
                await self._runtime.restart(name)
                return True
            except ComponentFailed as error:
                lost = error
            except (OSError, OutpaceError) as error:  # no process can be started now, or a resource it needs is gone
                lost = ComponentFailed(name, f"could not be started: {error}")

    def _give_up(self, name: str, failure: ComponentFailed) -> None:
        others = [component for component, role in self._roles.items() if role == "engine" and component != name]
        if self._roles[name] != "engine" or self._all_engines or not any(self._up[o].is_set() for o in others):
            self._post(failure)
            return
        self._notice("engine", f"{failure}; the run continues without it")
        self.leave(name, failure.message)
        self._post(EngineLeft(name))

    # ----------------------------------------------------------------------------------------------------- probes

    async def probe(self) -> None:
        """Kill components that do not respond, for as long as the run lasts; `watch` restarts them."""
        awake = AwakeClock(asyncio.get_running_loop().time, self._settings.probe_s)
        while True:
            await asyncio.sleep(self._settings.probe_s)
            names = list(self._roles)
            alive = await asyncio.gather(*(self._is_alive(name) for name in names))
            seconds = awake.lap()
            for name, is_alive in zip(names, alive, strict=True):
                if name in self._roles:
                    await self._kill_if_silent(name, is_alive, seconds)

    async def _kill_if_silent(self, name: str, is_alive: bool, seconds: float) -> None:
        self._silent[name] = 0.0 if is_alive else self._silent[name] + seconds
        if self._silent[name] >= self._settings.silent_s:
            self._silent[name] = 0.0
            self._notice(self._roles[name], f"{name} did not respond for {self._settings.silent_s:g} s and is killed")
            await self._runtime.kill(name)

    async def _is_alive(self, name: str) -> bool:
        if not self._up[name].is_set():
            return True  # known to be down and being restarted
        if not await self._runtime.ping(name, self._settings.probe_s):
            return False
        return name not in self._engines or await self._makes_progress(name)

    async def _makes_progress(self, name: str) -> bool:
        try:
            async with asyncio.timeout(self._settings.probe_s):
                stats = await self._engines[name].stats()
        except (TimeoutError, ComponentFailed):
            return False
        before, self._turns[name] = self._turns.get(name), stats.turns
        return not stats.running or stats.turns != before
