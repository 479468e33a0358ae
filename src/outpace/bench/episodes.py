"""`outpace bench episodes`: how many concurrent multi-turn episodes one rollout worker can run.

    scripted engine ◀── rollout worker: 2,000 concurrent episodes ──▶ tool that takes a second
    (no compute)            │ rendering, parsing, environment, rewards, group scoring
                            ▼
                         journal

Everything but the engine is real and built as in a run. The benchmark measures the worker itself: event-loop lag (a
probe sleeps 5 ms and checks the clock), CPU time per turn, and memory. The lower bound on wall time is what engine and
tool need for the slowest episode. The command exits with 1 if the 99th percentile of the lag is above 100 ms or an
episode fails.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from outpace.bench.archive import GROUP, Load, Script
from outpace.bench.modelled import ModelledEngine
from outpace.bench.options import take_options
from outpace.config import Config
from outpace.config.loading import load_config
from outpace.config.rules import resolve
from outpace.observe.metrics import percentile
from outpace.parts import PartSpecs, build_worker, engine_name
from outpace.placement import VARIABLE
from outpace.resources import child_environment, cores
from outpace.rollouts.worker import RolloutWorker
from outpace.runtime import garbage
from outpace.runtime.scratch import temporary_directory
from outpace.runtime.threads import steady_executor
from outpace.types import GroupOrder, GroupReport

PROBE_S = 0.005
USAGE_EVERY = 20  # probes
MAX_LAG_S = 0.1
MIB = 1 << 20

SETTINGS = {
    "model.path": "starter",
    "tasks.name": "outpace.bench.archive:questions",
    "rollout.environment": "outpace.bench.archive:Archive",
    "rewards.functions": '["number"]',
    "rollout.group_size": str(GROUP),
    "rollout.max_tokens": "512",
}


def main(words: Sequence[str]) -> int:
    options, settings = take_options(words, {"episodes": 2000, "turns": 4, "tokens": 64, "tool_ms": 1000})
    os.environ.update(child_environment(1) | {VARIABLE: ""})  # as in a worker, e.g. no tokenizer threads
    load = Load(options["episodes"], options["turns"], options["tokens"], options["tool_ms"])
    result = run(load, settings)
    print_table(result)
    print(json.dumps(result))
    missed = missed_bars(result)
    for message in missed:
        print(f"missed: {message}")
    return 1 if missed else 0


def run(load: Load, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Run the benchmark and return all results. `settings` are the worker's, as `--section.key value`."""
    logging.getLogger("outpace").setLevel(logging.ERROR)
    with temporary_directory("episodes") as folder:
        return asyncio.run(_measure(load, settings_of(load, settings), folder))


def settings_of(load: Load, settings: Sequence[str] = ()) -> Config:
    own = SETTINGS | {"tasks.options": json.dumps({"tool_ms": load.tool_ms}), "rollout.max_turns": str(load.turns)}
    return resolve(load_config(None, [*(f"--{key}={value}" for key, value in own.items()), *settings]))


# ---------------------------------------------------------------------------------------------------------- measurement


class ProcessUsage(NamedTuple):
    """Resident memory in bytes and number of threads of this process."""

    rss: int
    threads: int


def process_usage() -> ProcessUsage:
    process = psutil.Process()
    return ProcessUsage(process.memory_info().rss, process.num_threads())


@dataclass
class Probe:
    """Samples event-loop lag and peak process usage."""

    lateness: list[float] = field(default_factory=list)
    peak: ProcessUsage = field(default_factory=process_usage)

    async def watch(self) -> None:
        while True:
            due = time.perf_counter() + PROBE_S
            await asyncio.sleep(PROBE_S)
            self.lateness.append(max(0.0, time.perf_counter() - due))
            if len(self.lateness) % USAGE_EVERY == 0:
                self.sample_usage()

    def sample_usage(self) -> None:
        self.peak = ProcessUsage(*map(max, zip(self.peak, process_usage(), strict=True)))

    def lag(self, share: float) -> float:
        return percentile(Counter(self.lateness), share)

    def late_s(self) -> float:
        """Return the total lag beyond the limit. Weights long stalls, which only few probes hit."""
        return sum(max(0.0, late - MAX_LAG_S) for late in self.lateness)


async def _measure(
    load: Load, config: Config, folder: Path, before_work: Callable[[], None] = garbage.settle
) -> dict[str, Any]:
    asyncio.get_running_loop().set_default_executor(steady_executor())  # as in a worker process
    engine = ModelledEngine(Script(load, config.model.path), load.pace)
    worker = await make_worker(config, folder, engine)
    try:
        await play(worker, range(load.groups, load.groups + 2))  # warm-up: one-time allocations do not count
        bound = wall_time_bound(load, engine)
        before_work()
        before, turns_before, probe = process_usage(), engine.requests, Probe()
        watching = asyncio.create_task(probe.watch())
        cpu, started = time.process_time(), time.perf_counter()
        reports = await play(worker, range(load.groups))
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
        probe.sample_usage()
        watching.cancel()
    finally:
        await worker.close()
    gc.collect()
    measured = _timings(load, reports, probe, (wall, cpu, bound), engine.requests - turns_before)
    return measured | _memory(load, probe, before, process_usage())


async def make_worker(config: Config, folder: Path, engine: ModelledEngine) -> RolloutWorker:
    """Build a worker as in a run, but with this engine."""
    (spec, _), *_ = PartSpecs(config, folder, folder).workers()
    worker = await build_worker(spec, {engine_name(0): engine})
    assert isinstance(worker, RolloutWorker)
    return worker


async def play(worker: RolloutWorker, groups: Sequence[int]) -> list[GroupReport]:
    """Run all groups concurrently; group n uses task n."""
    orders = [GroupOrder(group, task=group, epoch=0, min_version=0, size=GROUP) for group in groups]
    return await asyncio.gather(*(worker.run(order) for order in orders))


def wall_time_bound(load: Load, engine: ModelledEngine) -> float:
    """Return the lower bound on wall time: engine and tool time of the slowest of the concurrent episodes."""
    episodes = [(group, episode) for group in range(load.groups) for episode in range(GROUP)]
    return max(engine.seconds(*each, load.turns) for each in episodes) + (load.turns - 1) * load.tool_ms / 1000


def _timings(
    load: Load, reports: list[GroupReport], probe: Probe, seconds: tuple[float, float, float], turns: int
) -> dict[str, Any]:
    wall, cpu, bound = seconds
    return {
        "episodes": load.groups * GROUP,
        "turns": turns,
        "groups": len(reports),
        "finished_groups": sum(report.outcome == "finished" for report in reports),
        "failed_episodes": sum(report.failed_episodes for report in reports),
        "reasons": sorted({report.reason for report in reports if report.reason}),
        "cores": cores(),
        "wall_s": wall,
        "bound_s": bound,
        "bound_of_wall": bound / wall,
        "turns_per_s": turns / wall,
        "cpu_us_per_turn": cpu / turns * 1e6,
        "cpu_of_wall": cpu / wall,
        "lag_ms": {name: 1000 * probe.lag(share) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))},
        "late_of_wall": probe.late_s() / wall,
        "probes": len(probe.lateness),
    }


def _memory(load: Load, probe: Probe, before: ProcessUsage, after: ProcessUsage) -> dict[str, Any]:
    kib_per_episode = 1 / 1024 / (load.groups * GROUP)
    return {
        "rss_mib_before": before.rss / MIB,
        "rss_kib_per_episode": (probe.peak.rss - before.rss) * kib_per_episode,
        "rss_kib_per_episode_after": (after.rss - before.rss) * kib_per_episode,
        "threads_before": before.threads,
        "threads": probe.peak.threads,
        "threads_after": after.threads,
    }


# --------------------------------------------------------------------------------------------------------------- report


def missed_bars(result: dict[str, Any]) -> list[str]:
    """Return a message per missed target."""
    missed = []
    late, failed = result["lag_ms"]["p99"], result["failed_episodes"]
    if not late <= MAX_LAG_S * 1000:
        missed.append(f"event-loop lag is {late:.0f} ms at the 99th percentile, more than {MAX_LAG_S * 1000:.0f}")
    if failed or result["finished_groups"] < result["groups"]:
        missed.append(f"{failed} episodes failed, {result['finished_groups']} of {result['groups']} groups finished")
    return missed


def print_table(result: dict[str, Any], console: Console | None = None) -> None:
    table = Table(title=f"{result['episodes']:,} concurrent episodes on one worker, {result['cores']} cores")
    table.add_column("quantity")
    table.add_column("measured", justify="right")
    for name, keys, form in ROWS:
        values = {**result, **result["lag_ms"]}
        table.add_row(name, form.format(*(values[key] for key in keys.split())))
    (console or Console()).print(table)


ROWS = (
    ("event-loop lag: p50, p99, max", "p50 p99 max", "{:.1f}, {:.1f}, {:.1f} ms"),
    ("lag beyond the limit, share of wall time", "late_of_wall", "{:.1%}"),
    ("CPU time per turn", "cpu_us_per_turn", "{:,.0f} µs"),
    ("CPU time, share of wall time", "cpu_of_wall", "{:.0%}"),
    ("turns, turns per second", "turns turns_per_s", "{:,}, {:,.0f}"),
    ("wall time, lower bound, ratio", "wall_s bound_s bound_of_wall", "{:.1f} s, {:.1f} s, {:.2f}"),
    ("memory per episode: peak, after", "rss_kib_per_episode rss_kib_per_episode_after", "{:.1f}, {:.1f} KiB"),
    ("threads: before, peak, after", "threads_before threads threads_after", "{}, {}, {}"),
)
"""Table rows: label, result keys, format."""
