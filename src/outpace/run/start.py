"""Start-up of the components, for every command that needs them: train, evaluate, check-logprobs.

    plan ─▶ runtime directory ─▶ runtime ─▶ engines, workers, the learner and the producer, in parallel
                                            (for evaluation, only engines and workers)

However the command ends, `launch` stops the components and removes the runtime directory.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from outpace.config import Config
from outpace.controller.engine_registry import Components, StartEngine
from outpace.errors import BadInput
from outpace.protocols import Engine, Learner, Producer, Worker
from outpace.run.build import ComponentSpecs
from outpace.run.learner_group import LearnerGroup
from outpace.run.plan import RunPlan
from outpace.runtime.async_tools import gather_or_cancel
from outpace.runtime.by_value import unpickle_objects
from outpace.runtime.cleanup import RuntimeDirectory
from outpace.runtime.components import ComponentSpec, InlineRuntime, Runtime
from outpace.runtime.local import LocalRuntime
from outpace.runtime.remote import RemoteProcesses
from outpace.runtime.torchrun import TorchrunProcess, torchrun_process

P = TypeVar("P")
Span = Callable[[str, str], AbstractContextManager[None]]


def _no_span(component: str, name: str) -> AbstractContextManager[None]:
    return nullcontext()


@asynccontextmanager
async def launch(plan: RunPlan, directory: Path, span: Span = _no_span) -> AsyncIterator[Launcher]:
    """Open the runtime that `run.runtime` names, with logs in `directory`. `span` records how long each component
    takes to start."""
    config = plan.config
    torchrun = torchrun_process()
    remote = None if torchrun is None else _remote_ranks(plan, directory, torchrun)
    runtime_dir = await asyncio.to_thread(RuntimeDirectory)
    runtime: Runtime = (
        InlineRuntime()
        if config.run.runtime == "inline"
        else LocalRuntime(directory / "logs", append=plan.resumes, cleanup=runtime_dir.cleanup, remote=remote)
    )
    specs: ComponentSpecs | None = None
    finished = False
    try:
        specs = ComponentSpecs(
            config, directory, runtime_dir.path, plan.code, plan.learner_code, plan.engine_code, plan.producer_code
        )
        if remote is not None:
            await asyncio.to_thread(_remove, specs.weight_folders)  # of a run that was killed
            await remote.open()
        yield Launcher(config, runtime, specs, specs.engines(), span)
        finished = True
    finally:
        await runtime.stop(finished)
        if remote is not None:
            await remote.close()
        if specs is not None:
            await asyncio.to_thread(_remove, specs.weight_folders)
        await asyncio.to_thread(runtime_dir.remove)


def _remote_ranks(plan: RunPlan, directory: Path, torchrun: TorchrunProcess) -> RemoteProcesses:
    """Return the other processes of torchrun, which become ranks of the learner."""
    if plan.learner_code:
        setting = next(iter(unpickle_objects(plan.learner_code)["registered"].components))
        raise BadInput(f"{setting}: names a function that only this process knows; use path/to/file.py:function")
    within_s = plan.config.learner.collective_timeout_s
    return RemoteProcesses(directory, range(1, torchrun.size), not torchrun.several_machines, within_s)


def _remove(directories: Iterable[Path]) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True)
class Launcher:
    """Starts the components of one plan."""

    config: Config
    runtime: Runtime
    specs: ComponentSpecs
    engine_specs: list[ComponentSpec]
    span: Span

    async def start(self) -> Components:
        """Start everything that training needs."""
        learner, (engines, workers), producer = await gather_or_cancel(
            self.start_learner(), self.start_samplers(), self._start_producer()
        )
        return Components(
            learner=learner,
            learner_names=[spec.name for spec in self.specs.learners()],
            engines=engines,
            workers=workers,
            runtime=self.runtime,
            sockets=dict(self.specs.sockets),
            urls=dict(zip(engines, self.config.engine.urls, strict=False)),
            producer=producer,
        )

    async def start_learner(self) -> Learner:
        """Start the learner, with all its ranks."""
        specs = self.specs.learners()
        ranks: list[Learner] = await gather_or_cancel(*(self._start(Learner, spec) for spec in specs))
        if len(ranks) == 1:
            return ranks[0]
        return LearnerGroup({spec.name: rank for spec, rank in zip(specs, ranks, strict=True)})

    async def _start(self, protocol: type[P], spec: ComponentSpec) -> P:
        with self.span(spec.name, "start"):
            return await self.runtime.start(protocol, spec)

    async def _start_producer(self) -> Producer | None:
        spec = self.specs.producer()
        return None if spec is None else await self._start(Producer, spec)

    async def start_samplers(self) -> tuple[dict[str, Engine], dict[str, Worker]]:
        """Start engines and workers."""
        worker_specs = self.specs.workers()
        engines, workers = await gather_or_cancel(
            self._start_engines(),
            gather_or_cancel(*(self._start(Worker, spec) for spec in worker_specs)),
        )
        return (
            {spec.name: engine for spec, engine in zip(self.engine_specs, engines, strict=True)},
            {spec.name: worker for spec, worker in zip(worker_specs, workers, strict=True)},
        )

    async def _start_engines(self) -> list[Engine]:
        """Start engines in parallel, but servers that share a GPU in sequence: each measures free memory as it
        starts."""
        gpu_locks: defaultdict[tuple[str, ...], asyncio.Lock] = defaultdict(asyncio.Lock)

        async def start(spec: ComponentSpec) -> Engine:
            gpus = tuple(spec.resources.gpus or ())
            async with gpu_locks[gpus] if spec.resources.gpu_memory < 1 else nullcontext():
                return await self._start(Engine, spec)

        return await gather_or_cancel(*map(start, self.engine_specs))

    def engine_starter(self, components: Components) -> StartEngine | None:
        """Return the function that starts a joining engine.

        None if no engine can join: the run is deterministic or has no child processes."""
        if self.config.run.deterministic or self.config.run.runtime == "inline":
            return None
        starting = set[str]()

        async def start_joining(url: str) -> tuple[str, str, Engine]:
            if url and self.config.engine.kind == "embedded":
                raise BadInput("engine.kind is embedded in this run, so no server can join; vllm and sglang allow it")
            spec = self.specs.joining_engine(url, starting | components.engines.keys())
            starting.add(spec.name)
            try:
                return spec.name, self.specs.sockets[spec.name], await self.runtime.start(Engine, spec)
            finally:
                starting.discard(spec.name)

        return start_joining
