"""Ending a run early from Python: by a signal, by cancelling its task, by `stop()`, from a callback."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import outpace as api
from outpace.checkpoint import commit
from outpace.errors import ComponentFailed
from support import INLINE, read_lines

Settings = dict[str, Any]
ENDLESS = 100_000


class Recorder(api.Callback):
    """Records callback events and lets a test wait for a step."""

    def __init__(self, step: int = 2) -> None:
        self.step = step
        self.reached = threading.Event()
        self.lines: list[Mapping[str, float]] = []
        self.checkpoints: list[tuple[int, Path]] = []
        self.versions: list[int] = []

    def on_batch_end(self, metrics: Mapping[str, float]) -> None:
        self.lines.append(metrics)
        if metrics["step"] >= self.step:
            self.reached.set()

    def on_checkpoint(self, step: int, path: Path) -> None:
        assert path.is_dir()
        self.checkpoints.append((step, path))

    def on_policy_updated(self, version: int) -> None:
        self.versions.append(version)


@pytest.fixture
def endless(settings: Settings) -> Settings:
    return {**settings, "run.steps": ENDLESS, **INLINE}


def newest_checkpoint(settings: Settings) -> int:
    return max(commit.list_steps(Path(settings["run.dir"]) / "checkpoints"))


async def until(event: threading.Event) -> None:
    await asyncio.to_thread(event.wait)


SCRIPT = """
import asyncio
import outpace

trainer = outpace.Trainer(config={config!r}, quiet=True)

async def main():
    try:
        await trainer.train_async()
    except outpace.errors.Interrupted:
        print("interrupted after", trainer.summary.steps)
        raise

import outpace.errors
asyncio.run(main())
"""


@pytest.mark.slow
def test_sigint_in_a_script_that_awaits_train_async_ends_the_run_as_it_does_for_train(
    endless: Settings, tmp_path: Path
) -> None:
    run, script = Path(endless["run.dir"]), tmp_path / "script.py"
    script.write_text(SCRIPT.format(config=endless))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["exit"], summary["reason"]) == (3, "stopped")
    assert f"interrupted after {summary['steps']}" in out
    assert re.search(rf"outpace\.errors\.Interrupted: .*\b{summary['steps']}\b", err), err
    assert newest_checkpoint(endless) == summary["steps"]


async def test_a_cancelled_task_writes_a_checkpoint_before_the_cancellation_is_raised(endless: Settings) -> None:
    recorder = Recorder()
    trainer = api.Trainer(config=endless, callbacks=[recorder], quiet=True)
    training = asyncio.create_task(trainer.train_async())
    await until(recorder.reached)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert trainer.summary is not None
    assert (trainer.summary.exit, trainer.summary.reason) == (3, "stopped")
    assert newest_checkpoint(endless) == trainer.summary.steps >= 2
    resumed = await api.Trainer(config={**endless, "run.steps": trainer.summary.steps + 1}, quiet=True).train_async(
        resume=True
    )
    assert resumed.steps == trainer.summary.steps + 1


async def test_a_second_cancellation_ends_the_run_at_once(endless: Settings) -> None:
    recorder, blocked = Recorder(), threading.Event()

    class Blocks(api.Callback):
        def on_run_end(self, summary: Any) -> None:
            blocked.set()

    trainer = api.Trainer(config=endless, callbacks=[recorder, Blocks()], quiet=True)
    training = asyncio.create_task(trainer.train_async())
    await until(recorder.reached)
    training.cancel()
    await asyncio.sleep(0)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert trainer.summary is not None
    assert trainer.summary.exit == 130
    assert blocked.is_set()


async def test_a_task_cancelled_during_start_up_leaves_no_directory_behind(endless: Settings, tmp_path: Path) -> None:
    training = asyncio.create_task(api.Trainer(config=endless, quiet=True).train_async())
    await asyncio.sleep(0)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert "run" not in os.listdir(tmp_path)


async def test_a_timeout_around_train_async_raises_timeout_error(endless: Settings) -> None:
    recorder = Recorder()

    async def limited() -> None:
        async with asyncio.timeout(None) as limit:
            limiting = asyncio.create_task(until(recorder.reached))
            limiting.add_done_callback(lambda _: limit.reschedule(0))
            await api.Trainer(config=endless, callbacks=[recorder], quiet=True).train_async()

    with pytest.raises(TimeoutError):
        await limited()
    assert newest_checkpoint(endless) >= 2


async def test_stop_from_another_coroutine_returns_the_summary_and_resume_continues(endless: Settings) -> None:
    recorder = Recorder()
    trainer = api.Trainer(config=endless, callbacks=[recorder], quiet=True)
    training = asyncio.create_task(trainer.train_async())
    await until(recorder.reached)
    trainer.stop()
    summary = await training
    assert (summary.exit, summary.reason) == (0, "stopped")
    assert summary == trainer.summary
    assert newest_checkpoint(endless) == summary.steps < ENDLESS
    again = await api.Trainer(config={**endless, "run.steps": summary.steps + 1}, quiet=True).train_async(resume=True)
    assert (again.steps, again.reason) == (summary.steps + 1, "done")


def test_a_stopped_run_is_not_treated_as_completed(endless: Settings) -> None:
    """With the same `run.steps` as before there are still steps to train."""

    class Steps(Recorder):
        def on_batch_end(self, metrics: Mapping[str, float]) -> None:
            super().on_batch_end(metrics)
            if self.reached.is_set():
                self.stop()

    first = api.Trainer(config=endless, callbacks=[Steps(2)], quiet=True).train()
    second = api.Trainer(config=endless, callbacks=[Steps(first.steps + 1)], quiet=True).train(resume=True)
    assert first.steps < second.steps < ENDLESS


def test_what_a_blocking_callback_requests_happens_at_the_step_it_has_seen(endless: Settings) -> None:
    class Requests(Recorder):
        blocking = True
        evaluated: list[int] = []

        def on_batch_end(self, metrics: Mapping[str, float]) -> None:
            super().on_batch_end(metrics)
            request = {1: self.evaluate, 2: self.save, 3: self.stop}.get(int(metrics["step"]))
            time.sleep(0.05)  # long enough for the next batch to be trained
            if request is not None:
                request()

        def on_evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
            self.evaluated.append(version)

    requests = Requests()
    config = {
        **endless,
        "pacing.max_lag": 3,
        "checkpoint.every": 0,
        "eval.every": 0,
        "eval.holdout": 0.1,
        "eval.count": 2,
    }
    summary = api.Trainer(config=config, callbacks=[requests], quiet=True).train()
    assert summary.steps == 3
    assert requests.evaluated == [0, 1]
    assert [step for step, _ in requests.checkpoints] == [2, 3]


@pytest.mark.parametrize(
    "event",
    [
        "on_policy_updated",
        pytest.param("on_batch_end", marks=pytest.mark.slow),
        pytest.param("on_checkpoint", marks=pytest.mark.slow),
    ],
)
def test_a_blocking_callback_that_raises_ends_the_run_with_its_traceback(endless: Settings, event: str) -> None:
    def raises(*arguments: Any) -> None:
        raise ZeroDivisionError("a bug of the callback")

    callback = type("Raises", (api.Callback,), {"blocking": True, event: raises})()
    with pytest.raises(ComponentFailed, match="a bug of the callback") as caught:
        api.Trainer(config={**endless, "checkpoint.every": 2}, callbacks=[callback], quiet=True).train()
    assert "raise ZeroDivisionError" in caught.value.remote_traceback


def test_stop_during_start_up_returns_a_summary_of_no_steps(endless: Settings) -> None:
    trainer = api.Trainer(config=endless, quiet=True)

    def stop_soon() -> None:
        while not Path(endless["run.dir"]).exists():
            time.sleep(0.001)
        trainer.stop()

    stopping = threading.Thread(target=stop_soon)
    stopping.start()
    summary = trainer.train()
    stopping.join()
    assert (summary.exit, summary.reason) == (0, "stopped")


def test_stop_without_a_run_does_nothing(endless: Settings) -> None:
    trainer = api.Trainer(config=endless)
    trainer.stop()
    assert trainer.summary is None


def test_callbacks_get_the_metrics_lines_every_checkpoint_and_every_version_once(settings: Settings) -> None:
    recorder = Recorder()
    config = {**settings, "run.steps": 4, "checkpoint.every": 2, "engine.count": 2, **INLINE}
    api.Trainer(config=config, callbacks=[recorder], quiet=True).train()
    run = Path(settings["run.dir"])
    assert recorder.lines == read_lines(run / "metrics.jsonl")
    assert [step for step, _ in recorder.checkpoints] == [2, 4]
    assert recorder.checkpoints[-1][1] == commit.checkpoint_path(run / "checkpoints", 4)
    assert recorder.versions == sorted(set(recorder.versions)), "once each, in order"
    assert recorder.versions


def test_an_exception_in_a_callback_ends_the_run_with_a_checkpoint(endless: Settings) -> None:
    class Fails(api.Callback):
        def on_batch_end(self, metrics: Mapping[str, float]) -> None:
            if metrics["step"] == 2:
                raise ValueError("not today")

    trainer = api.Trainer(config=endless, callbacks=[Fails()], quiet=True)
    with pytest.raises(ComponentFailed, match="ValueError: not today") as caught:
        trainer.train()
    assert "in on_batch_end" in caught.value.remote_traceback
    assert trainer.summary is not None
    assert trainer.summary.exit == 4
    assert newest_checkpoint(endless) == trainer.summary.steps >= 2


def test_an_exception_at_the_end_of_a_run_is_in_its_summary(settings: Settings) -> None:
    class Fails(api.Callback):
        def on_run_end(self, summary: Any) -> None:
            raise ValueError("not today")

    trainer = api.Trainer(config={**settings, **INLINE}, callbacks=[Fails()], quiet=True)
    with pytest.raises(ComponentFailed, match="ValueError: not today"):
        trainer.train()
    assert trainer.summary is not None
    assert (trainer.summary.exit, trainer.summary.steps) == (4, 3)
    assert json.loads((Path(settings["run.dir"]) / "summary.json").read_text())["exit"] == 4


def test_an_exception_in_a_callback_is_only_reported_if_callback_errors_is_report(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(api.Callback):
        def on_batch_end(self, metrics: Mapping[str, float]) -> None:
            raise ValueError("not today")

    config = {**settings, **INLINE, "run.callback_errors": "report"}
    assert api.Trainer(config=config, callbacks=[Fails()], quiet=True).train().steps == 3
    assert "not today" in caplog.text
