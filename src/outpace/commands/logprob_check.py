"""`outpace check-logprobs`: compare sampler and learner logprobs on the same tokens, without training.

With a run, both sides load its newest complete checkpoint, through the same weight transport as in training. Without a
run, both use `model.path`; servers in `engine.urls` receive those weights and lose the ones they hold. Do not use it on
servers of an active run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from outpace.checkpoint.commit import CHECKPOINTS, newest_complete
from outpace.config.load import load_config, parse_arguments
from outpace.controller.logprob_check import HIGH_QUANTILE, LogprobComparison, compare_engines
from outpace.errors import BadInput
from outpace.run.plan import RunPlan, UserObjects, load_run_config, make_plan
from outpace.run.start import launch
from outpace.runtime.cleanup import temporary_directory


def check_logprobs(run: Path | None, settings: Sequence[str]) -> int:
    """Print one table row per engine. Returns exit code 0 if all engines match the learner."""
    found = measure(run, settings)
    print_table(found)
    return 0 if all(result.agrees for result in found.values()) else BadInput.exit_code


def measure(run: Path | None, settings: Sequence[str]) -> dict[str, LogprobComparison]:
    """Return the comparison of every engine, by name."""
    with temporary_directory("check-logprobs") as directory:
        overrides = [*settings, f"--run.dir={directory}", "--rollout.workers=1", "--run.runtime=local"]
        if run is None:
            config = load_config(None, [*_default_settings(settings), *overrides])
        else:
            config = load_run_config(run, overrides)
        checkpoint = None if run is None else _checkpoint(run)
        return asyncio.run(_measure(make_plan(config, UserObjects()), directory, checkpoint))


def _default_settings(settings: Sequence[str]) -> list[str]:
    """Default to vLLM if any `launch` setting is given, like `outpace serve`."""
    launches = any(key.startswith("launch.") for key in parse_arguments(settings))
    return ["--engine.kind=vllm"] if launches else []


def _checkpoint(run: Path) -> Path:
    checkpoint = newest_complete(run / CHECKPOINTS)
    if checkpoint is None:
        raise BadInput(f"{run} has no complete checkpoint; pass --model.path instead to check the original model")
    return checkpoint


async def _measure(plan: RunPlan, directory: Path, checkpoint: Path | None) -> dict[str, LogprobComparison]:
    async with launch(plan, directory) as launcher:
        components = await launcher.start()
        learner, (worker,) = components.learner, components.workers.values()
        version = 0 if checkpoint is None else await learner.load(str(checkpoint))
        return await compare_engines(components.engines, learner, worker, plan.config, version)


def print_table(found: Mapping[str, LogprobComparison], console: Console | None = None) -> None:
    """Print the table. Its numbers are absolute logprob differences."""
    console = console or Console()
    table = Table("engine", "verdict", "tokens", "mean", f"{HIGH_QUANTILE:.0%} within", "largest", box=None)
    for name, result in found.items():
        numbers = (f"{value:.2g}" for value in (result.mean, result.high, result.largest))
        table.add_row(name, result.verdict, str(result.tokens), *(numbers if result.tokens else ("", "", "")))
    console.print(table)
    for name, result in found.items():
        console.print(f"{name}: {result.line}", soft_wrap=True, highlight=False, markup=False)
