"""`outpace eval` and `Trainer.evaluate`: held-out reward of a model or run. Starts engines and workers, no learner."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from outpace.checkpoint.export import export
from outpace.config.defaults import with_values
from outpace.config.load import load_config
from outpace.controller.evaluation import Evaluation, Evaluator
from outpace.errors import BadInput
from outpace.monitoring.line_file import write_atomically
from outpace.monitoring.rollout_files import json_lines
from outpace.run.plan import RunPlan, UserObjects, load_run_with_objects, make_plan
from outpace.run.start import launch
from outpace.runtime.async_tools import gather_or_cancel
from outpace.runtime.cleanup import temporary_directory
from outpace.runtime.components import Runtime
from outpace.types import FleetMember

VERSIONS = ("eval/version", "eval/version_newest")
"""Metrics that mean nothing without training."""


def evaluate_model(run: Path | None, settings: Sequence[str], completions: Path | None = None) -> dict[str, Any]:
    """Evaluate `model.path`, or a run's newest complete checkpoint on that run's held-out tasks. Writes the attempts to
    the file `completions` as JSON lines, up to `eval.save_completions`."""
    if completions is not None:
        _check_writable(completions.absolute())
    if run is None:
        config, objects = load_config(None, settings), UserObjects()
    else:
        config, objects = load_run_with_objects(run, settings)
    with temporary_directory("eval") as directory:
        overrides = {"run.dir": str(directory), "run.runtime": "local"}
        if run is not None:
            overrides["model.path"] = str(export(run, directory / "model"))
        evaluation = evaluate_plan(make_plan(with_values(config, overrides), objects), directory)
    if completions is not None:
        write_atomically(completions, json_lines(evaluation.views))
    measured = {name: value for name, value in evaluation.metrics().items() if name not in VERSIONS}
    return {"model": str(run or config.model.path), **measured}


def _check_writable(file: Path) -> None:
    if not file.parent.is_dir():
        raise BadInput(f"--completions: there is no directory {file.parent}")
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise BadInput(f"--completions: cannot write {file}; name a file in a directory that you may write to")


def evaluate_plan(plan: RunPlan, directory: Path) -> Evaluation:
    """Evaluate a plan's model on its held-out tasks, with logs in `directory`. Blocks; Ctrl-C cancels it.

    Runs in a thread with its own event loop, so it works inside a running loop."""
    if plan.config.engine.urls:
        raise BadInput(
            "engine.urls: evaluation sends no weights, so a running server may hold the wrong ones; "
            "leave this empty to launch a server"
        )
    if not plan.eval_counts:
        raise BadInput("eval.count: no task is evaluated; set it, tasks.eval_path, eval.sets or a larger eval.holdout")
    if plan.eval_warning:
        print(f"outpace: {plan.eval_warning}", file=sys.stderr)
    loop = asyncio.new_event_loop()
    work = loop.create_task(_evaluate(plan, directory))
    outcome: Future[Evaluation] = Future()

    def run() -> None:
        try:
            outcome.set_result(loop.run_until_complete(work))
        except BaseException as error:  # thread boundary: raised again below
            outcome.set_exception(error)
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    thread = threading.Thread(target=run, name="outpace-evaluation", daemon=True)
    thread.start()
    try:
        return outcome.result()
    except KeyboardInterrupt:
        loop.call_soon_threadsafe(work.cancel)
        raise
    finally:
        thread.join()


async def _evaluate(plan: RunPlan, directory: Path) -> Evaluation:
    async with launch(plan, directory) as launcher:
        _, started = await launcher.start_samplers()
        workers = [*started.values()]
        members = [FleetMember(name, socket, serves=True) for name, socket in launcher.specs.sockets.items()]
        await gather_or_cancel(*(worker.fleet(members) for worker in workers))
        evaluator = Evaluator(plan.eval_counts, plan.config.eval)
        work = evaluator.run(0, lambda order: workers[order.group % len(workers)].run(order), pinned=False)
        return await _or_component_failure(work, launcher.runtime)


async def _or_component_failure(work: Coroutine[Any, Any, Evaluation], runtime: Runtime) -> Evaluation:
    """Return the evaluation, or raise if a component dies. There are no restarts: an evaluation is cheap to rerun."""
    evaluation, death = asyncio.create_task(work), asyncio.create_task(runtime.deaths.get())
    try:
        await asyncio.wait({evaluation, death}, return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            raise death.result()
        return evaluation.result()
    finally:
        evaluation.cancel()
        death.cancel()
