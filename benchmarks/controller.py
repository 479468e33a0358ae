"""`python benchmarks/controller.py`: CPU cost of the controller process per episode event.

Uses the real driver, scheduler, recorder and RPC over real sockets. The components run in a child process and answer
immediately, so the CPU time of this process from the first group to the last record is all controller:

    episode event = the start or end of an episode: two per episode, group_size episodes per group
    cost          = CPU seconds of this process (all threads, user and system) / episode events

Also measures the simulator: a simulated cluster of 10,000 devices with 100,000 concurrent rollouts, in simulated
seconds per CPU second.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from outpace.commands.bench_options import run_benchmark, take_options
from outpace.config import Config
from outpace.controller.driver import Driver
from outpace.controller.engine_registry import Components
from outpace.controller.evaluation import Evaluator
from outpace.controller.pacing import SchedulerSettings
from outpace.controller.recorder import Recorder
from outpace.controller.scheduler import Scheduler
from outpace.controller.training import ControllerState
from outpace.errors import BadInput, ComponentFailed
from outpace.hardware.cores import ComputeUnits
from outpace.monitoring.callbacks import CallbackRunner
from outpace.monitoring.console import ProgressConsole
from outpace.monitoring.run_directory import RunLog
from outpace.protocols import Engine, Learner, Worker
from outpace.runtime import diagnostics, wire
from outpace.runtime.cleanup import temporary_directory
from outpace.runtime.components import ComponentSpec
from outpace.runtime.rpc import DEFAULT_DEADLINE_S, Channel, RpcProxy, close_proxy
from outpace.simulator.metrics import SimulationResult
from outpace.simulator.run import SimulatedRun
from outpace.simulator.settings import SimulationSettings
from outpace.tasks.order import TaskOrder
from outpace.types import Version

TARGET_US = 50.0
"""Target: microseconds per episode event."""

TASKS = 100_000
IDLE_COMPONENTS = Path(__file__).with_name("idle_components.py")
WORKERS = 4

LARGE = SimulationSettings.model_validate(
    {
        "cluster": {"devices": 10_000, "training": 5_000, "per_engine": 4, "workers": 64},
        "engine": {"slots": 80},
        "workload": {"mean_tokens": 4000.0, "sigma": 0.5},
        "pacing": {"groups_per_step": 8192, "depth": 3.0, "max_lag": 4, "chunk_groups": 256, "max_running": 100_000},
        "run": {"steps": 6},
    }
)
"""1,250 engines with 80 slots each: 100,000 concurrent rollouts, fewer during the last steps."""


@dataclass(frozen=True)
class ControllerCost:
    groups: int
    episodes: int
    outstanding: int  # groups; as many as admission allows
    seconds: float
    cpu_s: float

    @property
    def events(self) -> int:
        return 2 * self.episodes

    @property
    def us_per_event(self) -> float:
        return self.cpu_s / self.events * 1e6


def main(words: Sequence[str]) -> int:
    """`python benchmarks/controller.py [--groups N] [--group-size N] [--groups-per-step N] [--large-steps N]`."""
    options, rest = take_options(words, {"groups": 20_000, "group_size": 8, "groups_per_step": 256, "large_steps": 6})
    if rest:
        raise BadInput(f"{rest[0]}: this benchmark takes --{', --'.join(name.replace('_', '-') for name in options)}")
    console = Console(width=100, highlight=False)
    with temporary_directory("bench") as directory:
        settings = scheduler_settings(options["groups"], options["group_size"], options["groups_per_step"])
        cost = asyncio.run(measure(directory / "run", settings))
    console.print(_controller_table(cost))
    figures = SimulatedRun(LARGE.changed("run", steps=max(2, options["large_steps"]))).run()
    assert figures is not None, "without faults the simulation completes its steps"
    console.print(_simulator_table(figures))
    missed = _missed(cost, figures)
    for message in missed:
        console.print(f"missed: {message}")
    return 1 if missed else 0


def scheduler_settings(groups: int, group_size: int, groups_per_step: int) -> SchedulerSettings:
    return SchedulerSettings(
        groups_per_step=groups_per_step,
        group_size=group_size,
        max_lag=3,
        depth=3.0,
        chunk_groups=max(1, groups_per_step // 4),
        max_running=1_000_000,
        on_stale="wait",
        warmup_steps=0,
        publish_every=1,
        update="inflight",
        deterministic=False,
        steps=max(1, groups // groups_per_step),
        epochs=None,
        tasks=TASKS,
        eval_every=0,
        eval_enabled=False,
        checkpoint_every=20,
    )


# ----------------------------------------------------------------------------------------------------------- controller


async def measure(directory: Path, settings: SchedulerSettings) -> ControllerCost:
    """Run the controller over idle components and return its cost."""
    log = RunLog.claim(directory)
    log.start("")
    recorder = Recorder(log, ProgressConsole(None, quiet=True), CallbackRunner([]), ComputeUnits(2), 0)
    scheduler = Scheduler(settings, TaskOrder(settings.tasks, 0, shuffle=True))
    config = Config.model_validate(
        {
            "run": {"stall_s": 60.0, "save_rollouts": 0},
            "rollout": {"group_size": settings.group_size},
            "supervise": {"restarts": 0, "window_s": 60.0},
        }
    )
    async with idle_components() as components:
        await recorder.training_begins(components.engines, components.learner)
        driver = Driver(scheduler, components, recorder, Evaluator({}, config.eval), _save_nothing, config)
        diagnostics.tune_gc()
        began, cpu_began = time.monotonic(), time.process_time()
        await driver.run(dict.fromkeys(components.engines, 0))
        seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu_began
    log.close()
    groups = scheduler.counts["trained"]
    most = int((1 + settings.depth) * settings.groups_per_step)
    return ControllerCost(groups, groups * settings.group_size, most, seconds, cpu_s)


async def _save_nothing(version: Version, state: Callable[[], Awaitable[ControllerState | None]]) -> bool:
    """Save no checkpoint, but build the controller's state for one, which is part of the cost."""
    return await state() is not None


class FixedRuntime:
    """Runtime of the idle components. Supports ping only; nothing is started or restarted."""

    def __init__(self, proxies: dict[str, RpcProxy]) -> None:
        self.deaths: asyncio.Queue[ComponentFailed] = asyncio.Queue()
        self._proxies = proxies

    def spec(self, name: str) -> ComponentSpec:
        return ComponentSpec(name, factory="", protocol="")

    async def ping(self, name: str, deadline_s: float) -> bool:
        return await self._proxies[name].ping(deadline_s)

    async def restart(self, name: str) -> None:
        raise NotImplementedError

    async def kill(self, name: str) -> None:
        raise NotImplementedError

    async def start(self, *_: object) -> None:
        raise NotImplementedError

    async def dump(self) -> str:
        return ""

    async def stop(self) -> None: ...


async def _open_channel(end: socket.socket) -> Channel:
    reader, writer = await asyncio.open_unix_connection(sock=end, limit=wire.MAX_FRAME)
    return Channel(reader, writer)


@contextlib.asynccontextmanager
async def idle_components() -> AsyncIterator[Components]:
    """Start the idle components in a child process, each behind its own socket."""
    names = ["learner", "engine-0", *(f"worker-{number}" for number in range(WORKERS))]
    pairs = {name: socket.socketpair() for name in names}
    theirs = {name: pair[1].fileno() for name, pair in pairs.items()}
    words = [f"{name}={number}" for name, number in theirs.items()]
    command = [sys.executable, str(IDLE_COMPONENTS), *words]
    child = await asyncio.create_subprocess_exec(*command, pass_fds=tuple(theirs.values()))
    proxies: dict[str, RpcProxy] = {}
    try:
        for name, (ours, their) in pairs.items():
            their.close()
            protocol: type = {"l": Learner, "e": Engine, "w": Worker}[name[0]]
            proxies[name] = RpcProxy(protocol, await _open_channel(ours), name, DEFAULT_DEADLINE_S)
        engines = {"engine-0": proxies["engine-0"]}
        workers = {name: proxies[name] for name in names if name.startswith("worker")}
        yield Components(proxies["learner"], engines, workers, FixedRuntime(proxies))  # type: ignore[arg-type]
    finally:
        for each in proxies.values():
            close_proxy(each)
        await child.wait()


# --------------------------------------------------------------------------------------------------------------- report


def _controller_table(cost: ControllerCost) -> Table:
    table = Table(title="controller, with components that answer immediately")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("groups", f"{cost.groups:,}")
    table.add_row("episode events (started or finished)", f"{cost.events:,}")
    table.add_row("running groups, at most", f"{cost.outstanding:,}")
    table.add_row("CPU µs per episode event", f"{cost.us_per_event:.1f}")
    table.add_row("CPU µs per group", f"{cost.cpu_s / cost.groups * 1e6:.0f}")
    table.add_row("episode events per second", f"{cost.events / cost.seconds:,.0f}")
    return table


def _simulator_table(figures: SimulationResult) -> Table:
    table = Table(title="simulator")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("devices", f"{figures.generating + figures.training:,}")
    table.add_row("engines", f"{figures.engines:,}")
    table.add_row("concurrent rollouts: max, mean", f"{figures.running_most:,}, {figures.running_mean:,.0f}")
    table.add_row("simulated seconds", f"{figures.simulated_s:,.0f}")
    table.add_row("CPU seconds", f"{figures.cpu_s:,.1f}")
    table.add_row("simulated seconds per CPU second", f"{figures.simulated_s / figures.cpu_s:,.1f}")
    return table


def _missed(cost: ControllerCost, figures: SimulationResult) -> list[str]:
    missed = []
    if cost.us_per_event > TARGET_US:
        missed.append(f"an episode event costs {cost.us_per_event:.1f} µs, target {TARGET_US:g}")
    if figures.simulated_s < figures.cpu_s:
        missed.append("the simulator is slower than real time")
    return missed


if __name__ == "__main__":
    run_benchmark(main)
