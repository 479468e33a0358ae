"""The real trackio, tensorboard, mlflow and wandb (offline), with local stores, read back with their own interfaces.

The steps come from a scripted run, so that faults happen between exactly known steps; one test trains. Where a fault
is a full disk, the store is on a small file system in memory, which only root can mount."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import outpace
from outpace.monitoring.reporter import BOOTSTRAP, ReportOrder
from outpace.monitoring.run_directory import RunLog
from outpace.runtime import registry
from reporting.test_reporter import ATTEMPT
from support import as_arguments, kill_processes, names, read_lines, run_command, start_command
from system.conftest import rewards, settings, tasks, toy_model

__all__ = ["rewards", "settings", "tasks", "toy_model"]

TRACKERS = tuple(registry.TRACKERS.built_in)
PYTHON = os.environ.get("OUTPACE_TRACKERS_PYTHON", "")
WITHIN_S = 240.0
READER = Path(__file__).with_name("read_back.py")

pytestmark = [
    pytest.mark.trackers,
    pytest.mark.skipif(not PYTHON, reason="OUTPACE_TRACKERS_PYTHON is not set"),
    pytest.mark.timeout(6 * WITHIN_S),
]


class Stores:
    """Local stores of all trackers in one folder, and a scripted run next to them."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.run = folder / "run"
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "TRACKIO_DIR": str(data / "trackio"),
            "MLFLOW_TRACKING_URI": f"sqlite:///{data}/mlflow.db",
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(data),
            "TMPDIR": str(folder / "tmp"),  # a run gives its reporter a directory that is removed with it
        }
        (folder / "tmp").mkdir()
        self.order = ReportOrder(str(self.run), list(TRACKERS), "outpace", "run", tables_every=2, finish_s=200.0)
        self.log: RunLog | None = None
        self.started: list[subprocess.Popen[str]] = []

    def begin(self, resume_from: int | None = None) -> None:
        self.log = RunLog.claim(self.run, resume=resume_from is not None)
        self.log.start("", "format = 2\n[run]\nseed = 7\n")
        if resume_from is not None:
            self.log.roll_back(resume_from)

    def steps(self, first: int, last: int, scale: float = 1.0) -> None:
        assert self.log is not None
        for step in range(first, last + 1):
            self.log.step(step, {"reward/mean": step * scale, "time/total_s": step * 1.0})
            (self.run / "rollouts" / f"step-{step:06d}.jsonl").write_text(json.dumps(ATTEMPT | {"step": step}) + "\n")

    def evaluation(self, version: int) -> None:
        assert self.log is not None
        self.log.evaluation(version, {"eval/reward": version / 10})

    def end(self, steps: int | None = None) -> None:
        """End this start of the run; without `steps` as a kill does, without a summary."""
        assert self.log is not None
        if steps is not None:
            (self.run / "summary.json").write_text(json.dumps({"steps": steps, "exit": 0, "reason": "done"}))
        self.log.close()

    def reporter(self, *trackers: str) -> subprocess.Popen[str]:
        order = replace(self.order, trackers=list(trackers or TRACKERS))
        command = [PYTHON, "-P", "-c", BOOTSTRAP, str(Path(outpace.__file__).parent), "report", order.to_json()]
        with open(self.folder / "reporter.log", "ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=self.environment, text=True,
                cwd=self.folder,
            )  # fmt: skip
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            kill_processes(children(process))
            process.kill()
            process.communicate()

    def received(self, tracker: str) -> int:
        """The step up to which this tracker has confirmed everything."""
        file = self.run / "trackers" / f"{tracker}.json"
        return int(json.loads(file.read_text())["metrics"]) if file.exists() else 0

    def read(self, tracker: str) -> dict[str, Any]:
        command = [PYTHON, str(READER), tracker, str(self.run)]
        done = subprocess.run(
            command,
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=WITHIN_S,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def finish(process: subprocess.Popen[str]) -> str:
    """Close the reporter's input, as the end of a run does, and return what it said."""
    output, _ = process.communicate("", timeout=WITHIN_S)
    return output


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def last_values(logged: list[list[float]]) -> dict[int, float]:
    return {int(step): round(value, 5) for step, value in logged}


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    found = Stores(tmp_path, tmp_path)
    yield found
    found.close()


def test_every_tracker_gets_every_step_table_and_evaluation_and_the_part_that_is_resumed(stores: Stores) -> None:
    stores.begin()
    first = stores.reporter()
    stores.evaluation(0)
    stores.steps(1, 4)
    wait_for(lambda: all(stores.received(tracker) == 4 for tracker in TRACKERS))
    stores.end()
    first.kill()  # with the run, as a kill of all its processes
    stores.begin(resume_from=2)
    second = stores.reporter()
    stores.steps(3, 6, scale=0.1)
    stores.evaluation(6)
    stores.end(6)
    assert finish(second) == ""
    assert second.returncode == 0
    for tracker in TRACKERS:
        found = stores.read(tracker)
        assert last_values(found["evals"]) == {0: 0.0, 6: 0.6}, tracker
        assert sorted({step for step, _ in found["tables"]}) == [1, 3, 5], tracker
        assert {rows for _, rows in found["tables"]} == {1}, tracker
        assert (found["config"], found["summary"], len(found["runs"])) == (7, 6, 1), tracker
        values = {(int(step), round(value, 5)) for step, value in found["steps"]}
        repeated = {(1, 1.0), (2, 2.0), (3, 0.3), (4, 0.4), (5, 0.5), (6, 0.6)}
        assert repeated <= values, tracker
        assert tracker != "tensorboard" or values == repeated


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_reporter_that_is_stopped_or_killed_loses_nothing(stores: Stores, tracker: str) -> None:
    stores.begin()
    process = stores.reporter(tracker)
    stores.steps(1, 2)
    wait_for(lambda: stores.received(tracker) == 2)
    process.send_signal(signal.SIGSTOP)
    stores.steps(3, 4)
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: stores.received(tracker) == 4)
    process.send_signal(signal.SIGSTOP)
    kill_processes(children(process))  # wandb's own process
    process.kill()
    stores.steps(5, 6)
    stores.end(6)
    again = stores.reporter(tracker)
    finish(again)
    assert again.returncode == 0
    found = stores.read(tracker)
    assert last_values(found["steps"]) == {step: step * 1.0 for step in range(1, 7)}
    assert sorted({step for step, _ in found["tables"]}) == [1, 3, 5]
    assert len(found["runs"]) == 1


def test_a_tracker_whose_own_process_is_killed_gets_everything_in_the_end(stores: Stores) -> None:
    stores.begin()
    process = stores.reporter("wandb")
    stores.steps(1, 2)
    wait_for(lambda: stores.received("wandb") == 2)
    kill_processes(children(process))
    stores.steps(3, 6)
    stores.end(6)
    finish(process)
    if process.returncode:  # it may take longer than the time at the end of a run
        process = stores.reporter("wandb")
        finish(process)
    assert process.returncode == 0
    assert sorted(last_values(stores.read("wandb")["steps"])) == [1, 2, 3, 4, 5, 6]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "outpace-test", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_full_disk_under_a_tracker_is_reported_and_what_it_missed_arrives_later(
    small_disk: Path, tmp_path: Path, tracker: str
) -> None:
    stores = Stores(tmp_path, small_disk)
    try:
        stores.begin()
        if tracker == "tensorboard":  # its files are in the run directory
            (stores.run / "trackers").mkdir()
            (stores.run / "trackers" / "tensorboard").symlink_to(small_disk)
        process = stores.reporter(tracker)
        stores.steps(1, 2)
        wait_for(lambda: stores.received(tracker) == 2)
        fill(small_disk)
        stores.steps(3, 20)
        assert process.stdout is not None
        assert names(process.stdout.readline(), tracker)
        (small_disk / "filler").unlink()
        stores.steps(21, 40)
        stores.end(40)
        assert finish(process).strip() == f"{tracker}: receives metrics again"
        assert process.returncode == 0
        assert len(read_lines(stores.run / "metrics.jsonl")) == 40
        assert sorted(last_values(stores.read(tracker)["steps"])) == list(range(1, 41))
    finally:
        stores.close()


def fill(disk: Path) -> None:
    with open(disk / "filler", "wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"x" * 1024)
        except OSError:
            return


def test_a_training_run_reports_to_all_and_its_resume_continues_the_same_runs(
    stores: Stores, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With everything a user does: `outpace train`, a kill, `--resume`, and `outpace report` for a late tracker."""
    for name in ("TRACKIO_DIR", "MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.setenv(name, stores.environment[name])
    early = ["tensorboard", "mlflow", "wandb"]
    settings |= {
        "run.dir": str(stores.run), "run.steps": 8, "run.runtime": "inline", "run.seed": 7, "run.report_to": early,
        "report.python": PYTHON, "report.tables_every": 2, "report.finish_s": 200.0, "eval.count": 2,
        "checkpoint.every": 2,
    }  # fmt: skip
    process = start_command("train", *as_arguments(settings), cwd=stores.folder)
    metrics = stores.run / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 4)
    process.kill()
    process.communicate()
    done = run_command("train", "--resume", str(stores.run), cwd=stores.folder)
    assert done.returncode == 0, done.stderr
    late = run_command("report", str(stores.run), "--to", "trackio", cwd=stores.folder)
    assert late.returncode == 0, late.stderr
    wanted = {line["step"]: round(line["reward/mean"], 5) for line in read_lines(metrics)}
    for tracker in TRACKERS:
        found = stores.read(tracker)
        values = {(int(step), round(value, 5)) for step, value in found["steps"]}
        assert set(wanted.items()) <= values, tracker
        assert {0, 8} <= set(last_values(found["evals"])), tracker
        assert {step for step, _ in found["tables"]} == {1, 3, 5, 7}, tracker
        assert (found["config"], found["summary"], len(found["runs"])) == (7, 8, 1), tracker
