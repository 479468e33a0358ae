"""`python benchmarks/episodes.py`: how many concurrent multi-turn episodes one rollout worker can run.

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
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from outpace.commands.bench_options import run_benchmark, take_options
from outpace.config import Config
from outpace.config.load import load_config
from outpace.config.validation import resolve
from outpace.hardware.cores import available_cores
from outpace.hardware.placement import CUDA_VISIBLE_DEVICES
from outpace.models.loading import eos_ids, load_tokenizer
from outpace.monitoring.metrics import percentile
from outpace.rollouts.worker import RolloutWorker
from outpace.run.build import ComponentSpecs, build_worker, engine_name
from outpace.runtime import diagnostics
from outpace.runtime.async_tools import steady_executor
from outpace.runtime.cleanup import temporary_directory
from outpace.runtime.process_tree import child_environment
from outpace.tasks.registry import TaskSources
from outpace.types import (
    EngineStats,
    Generation,
    GroupOrder,
    GroupReport,
    Ints,
    LoadReport,
    Manifest,
    Sampling,
    Task,
    Version,
)


@dataclass(frozen=True)
class Pace:
    """Simulated engine speed. Request times vary by up to the fraction `jitter` in both directions."""

    first_token_s: float
    tokens_per_s: float
    jitter: float = 0.5

    def seconds(self, request_id: str, tokens: int) -> float:
        """Return the latency of a request. Deterministic per request id."""
        factor = 1 + self.jitter * random.Random(request_id).uniform(-1, 1)
        return factor * (self.first_token_s + tokens / self.tokens_per_s)


class ScriptedEngine:
    """Implements the methods of `outpace.protocols.Engine` that a rollout worker uses."""

    def __init__(self, script: Callable[[int, int, int], Sequence[int]], pace: Pace) -> None:
        """`script` returns the completion for a group, episode and turn."""
        self._script = script
        self._pace = pace
        self.requests = 0
        self.tokens = 0

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        group, episode, turn = map(int, request_id.split("."))
        answer = np.array(self._script(group, episode, turn), dtype=np.int32)
        await asyncio.sleep(self._pace.seconds(request_id, len(answer)))
        self.requests += 1
        self.tokens += len(answer)
        return Generation(
            tokens=answer,
            logprobs=np.full(len(answer), -0.5, dtype=np.float32),
            versions=np.full(len(answer), min_version, dtype=np.int32),
            stop="stop",
        )

    def seconds(self, group: int, episode: int, turns: int) -> float:
        """Return the total latency of an episode's requests."""
        return sum(
            self._pace.seconds(f"{group}.{episode}.{turn}", len(self._script(group, episode, turn)))
            for turn in range(turns)
        )

    async def abort(self, request_ids: list[str]) -> None:
        """Do nothing: there is no compute to stop."""

    async def stream_tokens(self, request_id: str, after: int) -> Ints:
        return np.zeros(0, dtype=np.int32)

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        raise NotImplementedError("a scripted engine has no weights")

    async def release_pinned(self) -> None:
        raise NotImplementedError("a scripted engine has no weights")

    async def stats(self) -> EngineStats:
        raise NotImplementedError("a scripted engine has no statistics")


GROUP = 8
"""Episodes per task."""

PACE = Pace(first_token_s=0.2, tokens_per_s=100)
"""Speed of one request on a busy engine with many slots."""


@dataclass(frozen=True)
class EpisodeLoad:
    """The worker's load: whole groups, all running concurrently."""

    episodes: int = 2000
    turns: int = 4
    tokens: int = 64
    tool_ms: int = 1000
    pace: Pace = PACE

    @property
    def groups(self) -> int:
        return -(-self.episodes // GROUP)


class Questions:
    """Task source with practically unlimited tasks, each solved with the archive tool."""

    def __init__(self, tool_ms: int) -> None:
        self._tool_ms = tool_ms

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Task:
        text = f"How many pages has volume {index}? Look into the archive, page by page, before you answer."
        return Task(f"archive/{index}", text, {"answer": index, "tool_ms": self._tool_ms})


def questions(config: Config) -> TaskSources:
    """Return the task sources, for `tasks.name`."""
    return Questions(config.tasks.options.get("tool_ms", 1000)), None


class Archive:
    """Environment for `rollout.environment`. Its tool sleeps, like a tool behind a network."""

    def __init__(self) -> None:
        self._tool_s = 0.0

    async def reset(self, tool_ms: int, **columns: Any) -> str:
        self._tool_s = tool_ms / 1000
        return " The archive is open."

    async def look_up(self, volume: int, page: int) -> str:
        """Look up a page of a volume.

        Args:
            volume: its number.
            page: which page, from 0 on.
        """
        await asyncio.sleep(self._tool_s)
        return f"page {page} of volume {volume} is there; whether it is the last one is not written on it"


class Script:
    """Scripted completions: a tool call in all turns but the last, then a number, right in every other episode."""

    def __init__(self, load: EpisodeLoad, model: str) -> None:
        self._encode = load_tokenizer(model).encode
        self._end = eos_ids(model)[0]
        self._load = load
        self._encoded: dict[str, list[int]] = {}  # encoded once, so that the engine uses no CPU time of the worker

    def __call__(self, group: int, episode: int, turn: int) -> list[int]:
        if turn < self._load.turns - 1:
            arguments = json.dumps({"volume": group, "page": turn})
            return self._answer(f'<tool_call>{{"name": "look_up", "arguments": {arguments}}}</tool_call>')
        return self._answer(f"It has {group + episode % 2}")

    def _answer(self, text: str) -> list[int]:
        if text not in self._encoded:
            tokens = self._encode(text, add_special_tokens=False)
            padding = self._encode("so ", add_special_tokens=False) * self._load.tokens
            self._encoded[text] = [*padding[: max(0, self._load.tokens - len(tokens) - 1)], *tokens, self._end]
        return self._encoded[text]


PROBE_S = 0.005
USAGE_EVERY = 20  # probes
MAX_LAG_S = 0.1
MIB = 1 << 20

SETTINGS = {
    "model.path": "starter",
    "tasks.name": f"{Path(__file__)}:questions",
    "rollout.environment": f"{Path(__file__)}:Archive",
    "rewards.functions": '["number"]',
    "rollout.group_size": str(GROUP),
    "rollout.max_tokens": "512",
}


def main(words: Sequence[str]) -> int:
    options, settings = take_options(words, {"episodes": 2000, "turns": 4, "tokens": 64, "tool_ms": 1000})
    os.environ.update(child_environment(1) | {CUDA_VISIBLE_DEVICES: ""})  # as in a worker, e.g. no tokenizer threads
    load = EpisodeLoad(options["episodes"], options["turns"], options["tokens"], options["tool_ms"])
    result = run(load, settings)
    print_table(result)
    print(json.dumps(result))
    missed = missed_targets(result)
    for message in missed:
        print(f"missed: {message}")
    return 1 if missed else 0


def run(load: EpisodeLoad, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Run the benchmark and return all results. `settings` are the worker's, as `--section.key value`."""
    logging.getLogger("outpace").setLevel(logging.ERROR)
    with temporary_directory("episodes") as folder:
        return asyncio.run(_measure(load, bench_config(load, settings), folder))


def bench_config(load: EpisodeLoad, settings: Sequence[str] = ()) -> Config:
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
    load: EpisodeLoad, config: Config, folder: Path, before_work: Callable[[], None] = diagnostics.tune_gc
) -> dict[str, Any]:
    asyncio.get_running_loop().set_default_executor(steady_executor())  # as in a worker process
    engine = ScriptedEngine(Script(load, config.model.path), load.pace)
    worker = await make_worker(config, folder, engine)
    try:
        await run_groups(worker, range(load.groups, load.groups + 2))  # warm-up: one-time allocations do not count
        bound = wall_time_bound(load, engine)
        before_work()
        before, turns_before, probe = process_usage(), engine.requests, Probe()
        watching = asyncio.create_task(probe.watch())
        cpu, started = time.process_time(), time.perf_counter()
        reports = await run_groups(worker, range(load.groups))
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
        probe.sample_usage()
        watching.cancel()
    finally:
        await worker.close()
    gc.collect()
    measured = _timings(load, reports, probe, (wall, cpu, bound), engine.requests - turns_before)
    return measured | _memory(load, probe, before, process_usage())


async def make_worker(config: Config, folder: Path, engine: ScriptedEngine) -> RolloutWorker:
    """Build a worker as in a run, but with this engine."""
    spec, *_ = ComponentSpecs(config, folder, folder).workers()
    worker = await build_worker(spec, {engine_name(0): engine})
    assert isinstance(worker, RolloutWorker)
    return worker


async def run_groups(worker: RolloutWorker, groups: Sequence[int]) -> list[GroupReport]:
    """Run all groups concurrently; group n uses task n."""
    orders = [GroupOrder(group, task=group, epoch=0, min_version=0, size=GROUP) for group in groups]
    return await asyncio.gather(*(worker.run(order) for order in orders))


def wall_time_bound(load: EpisodeLoad, engine: ScriptedEngine) -> float:
    """Return the lower bound on wall time: engine and tool time of the slowest of the concurrent episodes."""
    episodes = [(group, episode) for group in range(load.groups) for episode in range(GROUP)]
    return max(engine.seconds(*each, load.turns) for each in episodes) + (load.turns - 1) * load.tool_ms / 1000


def _timings(
    load: EpisodeLoad, reports: list[GroupReport], probe: Probe, seconds: tuple[float, float, float], turns: int
) -> dict[str, Any]:
    wall, cpu, bound = seconds
    return {
        "episodes": load.groups * GROUP,
        "turns": turns,
        "groups": len(reports),
        "finished_groups": sum(report.outcome == "finished" for report in reports),
        "failed_episodes": sum(report.failed_episodes for report in reports),
        "reasons": sorted({report.reason for report in reports if report.reason}),
        "cores": available_cores(),
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


def _memory(load: EpisodeLoad, probe: Probe, before: ProcessUsage, after: ProcessUsage) -> dict[str, Any]:
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


def missed_targets(result: dict[str, Any]) -> list[str]:
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


if __name__ == "__main__":
    run_benchmark(main)
