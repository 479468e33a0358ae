"""Held-out reward of a model, or of what a run has trained, with engines and workers only: `outpace eval` and
`Trainer.evaluate`."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from outpace.checkpoint.export import export
from outpace.config import Config
from outpace.config.dependent import with_values
from outpace.config.loading import load_config
from outpace.errors import BadInput
from outpace.parts import PartSpecs, start_engines
from outpace.pipeline.evaluation import Evaluation, Evaluator
from outpace.planning import Objects, make_plan, run_with_objects
from outpace.protocols import Worker
from outpace.runtime.local import LocalRuntime
from outpace.runtime.scratch import Scratch, temporary_directory
from outpace.runtime.together import together
from outpace.session import Plan
from outpace.types import Member


def evaluate_model(run: Path | None, settings: Sequence[str]) -> dict[str, Any]:
    """Measure `model.path`, or the newest complete checkpoint of a run on the run's own held-out tasks."""
    if run is None:
        config, objects = load_config(None, settings), Objects()
    else:
        config, objects = run_with_objects(run, settings)
    evaluation = evaluate(config, objects, run)
    measured = {name: value for name, value in evaluation.metrics().items() if not name.startswith("eval/version")}
    return {"model": str(run or config.model.path), **measured}


def evaluate(config: Config, objects: Objects, run: Path | None = None) -> Evaluation:
    """Measure the model that the config names, or instead of it the newest complete checkpoint of `run`.

    Blocks, and starts an event loop of its own."""
    with temporary_directory("eval") as scratch:
        places = {"run.dir": str(scratch)}
        if run is not None:
            export(run, scratch / "model")
            places["model.path"] = str(scratch / "model")
        plan = make_plan(with_values(config, places), objects)
        return evaluate_plan(plan, scratch)


def evaluate_plan(plan: Plan, directory: Path) -> Evaluation:
    """Measure the model of a plan on its held-out tasks; `directory` takes the logs. On a thread with an event loop of
    its own, so the caller's may be running. Ctrl-C ends it."""
    if plan.config.engine.urls:
        raise BadInput(
            "engine.urls: which weights a running server holds is unknown, and an evaluation sends none; "
            "leave this empty, and a server is started"
        )
    if plan.eval_count == 0:
        raise BadInput("eval.count: there are no held-out tasks; give tasks.eval_path or a larger eval.holdout")
    if plan.eval_warning:
        print(f"outpace: {plan.eval_warning}", file=sys.stderr)
    loop = asyncio.new_event_loop()
    work = loop.create_task(_evaluate(plan, directory))
    outcome: Future[Evaluation] = Future()

    def run() -> None:
        try:
            outcome.set_result(loop.run_until_complete(work))
        except BaseException as error:  # the boundary between threads: raised again below
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


async def _evaluate(plan: Plan, directory: Path) -> Evaluation:
    scratch = Scratch()
    runtime = LocalRuntime(directory / "logs", guardian=scratch.guardian)
    specs = PartSpecs(plan.config, directory, scratch.path, plan.code)
    try:
        engines = specs.engines()
        _, *workers = await together(
            start_engines(runtime, engines),
            *(runtime.start(Worker, *worker) for worker in specs.workers()),
        )
        members = [Member(name, socket, serves=True) for name, socket in specs.sockets.items()]
        await together(*(worker.fleet(members) for worker in workers))
        evaluator = Evaluator(plan.eval_count, plan.config.eval.max_running)
        work = evaluator.run(0, lambda order: workers[order.group % len(workers)].run(order), pinned=False)
        return await _unless_somebody_dies(work, runtime)
    finally:
        await runtime.stop()
        await asyncio.to_thread(scratch.remove)


async def _unless_somebody_dies(work: Coroutine[Any, Any, Evaluation], runtime: LocalRuntime) -> Evaluation:
    """Nobody is replaced here: an evaluation is quickly made again."""
    evaluation, death = asyncio.create_task(work), asyncio.create_task(runtime.deaths.get())
    try:
        await asyncio.wait({evaluation, death}, return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            raise death.result()
        return evaluation.result()
    finally:
        evaluation.cancel()
        death.cancel()
