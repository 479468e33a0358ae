"""`outpace agree`: whether those who sample and the learner say the same of the same tokens, with nothing trained.

With a run, both sides get the weights of its newest complete checkpoint, by the way that updates take in training.
Without one, servers that were running before get the model's, whatever they have held: not while somebody trains with
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from outpace.checkpoint.commit import newest_complete
from outpace.checkpoint.retention import CHECKPOINTS
from outpace.config.loading import load_config, parse_arguments
from outpace.errors import BadInput
from outpace.parts import PartSpecs, start_engines
from outpace.pipeline.agreement import agreements
from outpace.pipeline.verdicts import HIGH, Agreement
from outpace.planning import Objects, config_of_run, make_plan
from outpace.protocols import Learner, Worker
from outpace.runtime.local import LocalRuntime
from outpace.runtime.scratch import Scratch, temporary_directory
from outpace.runtime.together import together
from outpace.session import Plan


def agree(run: Path | None, settings: Sequence[str]) -> int:
    """Print a table, one line per engine. 0: all agree."""
    found = measure(run, settings)
    print_table(found)
    return 0 if all(result.agrees for result in found.values()) else BadInput.exit_code


def measure(run: Path | None, settings: Sequence[str]) -> dict[str, Agreement]:
    """What came of every engine, by name."""
    with temporary_directory("agree") as directory:
        words = [*settings, f"--run.dir={directory}", "--rollout.workers=1"]
        config = (
            load_config(None, [*_taken_for_granted(settings), *words]) if run is None else config_of_run(run, words)
        )
        checkpoint = None if run is None else _checkpoint(run)
        return asyncio.run(_measure(make_plan(config, Objects()), directory, checkpoint))


def _taken_for_granted(settings: Sequence[str]) -> list[str]:
    """As with `outpace serve`, a server that is to be started is vLLM unless something else is said."""
    launches = any(key.startswith("launch.") for key in parse_arguments(settings))
    return ["--engine.kind=vllm"] if launches else []


def _checkpoint(run: Path) -> Path:
    checkpoint = newest_complete(run / CHECKPOINTS)
    if checkpoint is None:
        raise BadInput(f"{run} has no complete checkpoint; without a run, its model is compared as it was")
    return checkpoint


async def _measure(plan: Plan, directory: Path, checkpoint: Path | None) -> dict[str, Agreement]:
    scratch = await asyncio.to_thread(Scratch)
    runtime = LocalRuntime(directory / "logs", guardian=scratch.guardian)
    specs = PartSpecs(plan.config, directory, scratch.path, plan.code, plan.learner_code)
    try:
        sampling = specs.engines()
        learner, started, worker = await together(
            runtime.start(Learner, *specs.learner()),
            start_engines(runtime, sampling),
            *(runtime.start(Worker, *spec) for spec in specs.workers()),
        )
        engines = {spec.name: engine for (spec, _), engine in zip(sampling, started, strict=True)}
        version = 0 if checkpoint is None else await learner.load(str(checkpoint))
        return await agreements(engines, learner, worker, plan.config, version)
    finally:
        await runtime.stop()
        await asyncio.to_thread(scratch.remove)


def print_table(found: Mapping[str, Agreement], console: Console | None = None) -> None:
    """Differences are absolute ones, of logprobs."""
    console = console or Console()
    table = Table("engine", "verdict", "tokens", "mean", f"{HIGH:.0%} within", "largest", box=None)
    for name, result in found.items():
        numbers = (f"{value:.2g}" for value in (result.mean, result.high, result.largest))
        table.add_row(name, result.verdict, str(result.tokens), *(numbers if result.tokens else ("", "", "")))
    console.print(table)
    for name, result in found.items():
        console.print(f"{name}: {result.line}", soft_wrap=True, highlight=False, markup=False)
