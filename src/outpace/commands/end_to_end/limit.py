"""The limit of a machine: how many samples per second no schedule can exceed.

Let w_g and w_t be the core-seconds that sampling and training cost per sample, each measured while nothing else runs.
N cores then finish at most N / (w_g + w_t) samples per second. On GPUs, w_g and w_t are device-seconds: the time
in which engine or learner is busy while it has the device to itself.

    engine alone    engines and workers of a run sample groups; no learner runs
    learner alone   the learner trains on these groups, from the journal; the engines are idle

Several threads finish sooner than one but cost more core-seconds, so both are measured with one thread and with all
cores, and the cheaper count of each is used. Only the engine and learner processes count: workers, rewards and the
controller are not in the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import msgspec

from outpace.commands.end_to_end.work import Work
from outpace.config.defaults import with_values
from outpace.errors import BadInput, ComponentFailed
from outpace.hardware.cores import available_cores, compute_units
from outpace.protocols import Engine, Learner, Worker
from outpace.run.plan import RunPlan, UserObjects, make_plan
from outpace.run.start import launch
from outpace.runtime.async_tools import gather_or_cancel
from outpace.types import FleetMember, GroupOrder, JournalLocation

MEASURED_STEPS = 3
"""Number of steps whose groups are measured, after one warm-up step."""
FILL_SLOTS = 2
"""Requests per slot in the smaller of two bursts."""

COMPONENTS = ("engine", "learner")


class Cost(msgspec.Struct, frozen=True):
    """Core-seconds or device-seconds per sample, with this many threads (0 on a GPU)."""

    seconds: float
    threads: int


class Limit(msgspec.Struct, frozen=True):
    engine: Cost
    learner: Cost
    units: int  # cores or devices

    @property
    def samples_per_s(self) -> float:
        return self.units / (self.engine.seconds + self.learner.seconds)


def measure_limit(work: Work, directory: Path, first_task: int, threads: Mapping[str, int] | None = None) -> Limit:
    """Measure in fresh processes, on the tasks from `first_task` on. `threads`: the cheapest counts of engine and
    learner, if known."""
    if work.on_gpu:
        choices: list[Mapping[str, int]] = [{}]
    elif threads is not None:
        choices = [threads]
    else:
        choices = [dict.fromkeys(COMPONENTS, count) for count in sorted({1, available_cores()})]
    found = [_measure(work, directory / f"run-{number}", first_task, each) for number, each in enumerate(choices)]
    return Limit(
        min((each.engine for each in found), key=lambda cost: cost.seconds),
        min((each.learner for each in found), key=lambda cost: cost.seconds),
        found[0].units,
    )


def _measure(work: Work, directory: Path, first_task: int, threads: Mapping[str, int]) -> Limit:
    directory.mkdir()
    fixed = {f"{name}.threads": count for name, count in threads.items()}
    config = with_values(work.config, {"run.dir": str(directory), "run.runtime": "local", **fixed})
    if (units := compute_units(config)) is None:
        raise BadInput("engine.urls: the GPUs of running servers are not known; leave this out")
    plan = make_plan(config, UserObjects(), quiet=True)
    engine_s, learner_s = asyncio.run(_seconds_alone(work, plan, directory, first_task))
    samples = MEASURED_STEPS * work.samples
    return Limit(
        Cost(engine_s * units.per_engine / samples, threads.get("engine", 0)),
        Cost(learner_s / samples, threads.get("learner", 0)),
        units.count,
    )


async def _seconds_alone(work: Work, plan: RunPlan, directory: Path, first_task: int) -> tuple[float, float]:
    """Return the seconds of engine and learner for `MEASURED_STEPS` steps."""
    async with launch(plan, directory) as launcher:
        engines, workers = await launcher.start_samplers()
        members = [FleetMember(name, socket, serves=True) for name, socket in launcher.specs.sockets.items()]
        await gather_or_cancel(*(worker.fleet(members) for worker in workers.values()))
        engine_s, places = await _Sampler(work, engines, workers, first_task).measure()
        learner = await launcher.start_learner()
        return engine_s, await _train(work, learner, places)


class _Sampler:
    """Samples groups of consecutive tasks with the engines and workers of a run."""

    def __init__(
        self, work: Work, engines: Mapping[str, Engine], workers: Mapping[str, Worker], first_task: int
    ) -> None:
        self._work = work
        self._first_task = first_task
        self._engines = engines
        self._workers = list(workers.values())
        self._tasks = work.task_count

    async def measure(self) -> tuple[float, list[JournalLocation]]:
        """Return the engines' seconds for `MEASURED_STEPS` steps, and the locations of the groups of one more step.

        Slots fall idle at the end of a burst of requests, which does not happen in a run. So two bursts of different
        sizes are sampled, and the difference of their seconds counts."""
        prompts, slots = self._work.prompts, self._work.config.engine.resolved_slots * len(self._engines)
        measured = prompts * MEASURED_STEPS
        smaller = max(prompts, FILL_SLOTS * -(-slots // self._work.attempts))
        await self._sample(range(prompts))
        started = await self._seconds()
        await self._sample(range(prompts, prompts + smaller))
        between = await self._seconds()
        places = await self._sample(range(prompts + smaller, prompts + 2 * smaller + measured))
        return (await self._seconds() - between) - (between - started), places[: prompts + measured]

    async def _sample(self, groups: range) -> list[JournalLocation]:
        workers, size = self._workers, self._work.attempts
        tasks = {group: (self._first_task + group) % self._tasks for group in groups}
        orders = [GroupOrder(group, task, 0, 0, size, position=group) for group, task in tasks.items()]
        reports = await gather_or_cancel(*(workers[each.group % len(workers)].run(each) for each in orders))
        for report in reports:
            if report.place is None:
                raise ComponentFailed("worker", f"group {report.group} failed: {report.reason}", report.traceback)
        return [report.place for report in reports if report.place is not None]

    async def _seconds(self) -> float:
        """Return the core-seconds of all engines so far, or the seconds in which they were busy on GPUs."""
        found = [await engine.stats() for engine in self._engines.values()]
        return sum(stats.busy_s if self._work.on_gpu else stats.core_s for stats in found)


async def _train(work: Work, learner: Learner, places: list[JournalLocation]) -> float:
    """Train on all groups, a step of `work.prompts` groups at a time. Returns the seconds without the first step."""
    chunk, before = work.config.pacing.chunk_groups, 0.0
    for version, start in enumerate(range(0, len(places), work.prompts)):
        batch = places[start : start + work.prompts]
        for first in range(0, len(batch), chunk):
            await learner.chunk(version, batch[first : first + chunk], False)
        await learner.step(version)
        if version == 0:
            before = await _learner_seconds(work, learner)
    return await _learner_seconds(work, learner) - before


async def _learner_seconds(work: Work, learner: Learner) -> float:
    stats = await learner.stats()
    return stats.busy_s if work.on_gpu else stats.core_s
