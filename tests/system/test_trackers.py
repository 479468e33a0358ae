"""Runs that report to a tracker: it gets everything, and whatever happens to it, the run does not notice."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from outpace.checkpoint.commit import list_steps
from outpace.cli import main
from outpace.errors import BadInput, Interrupted
from outpace.run.reporting import check_trackers
from reporting.recording_tracker import calls, steps
from support import as_arguments, names, naming, read_lines, resolved, run_command, start_command

Settings = dict[str, Any]

TRACKER = f"{Path(__file__).parents[1] / 'reporting' / 'recording_tracker.py'}:RecordingTracker"
WITHIN_S = 240.0

pytestmark = pytest.mark.timeout(6 * WITHIN_S)


@pytest.fixture
def reporting(settings: Settings) -> Settings:
    return settings | {
        "run.steps": 6,
        "run.runtime": "inline",
        "run.report_to": [TRACKER],
        "report.tables_every": 2,
        "report.finish_s": 200.0,
        "checkpoint.every": 2,
        "eval.count": 2,
    }


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_and_resumed_run_is_one_run_in_its_tracker(reporting: Settings) -> None:
    run = Path(reporting["run.dir"])
    process = start_command("train", *as_arguments(reporting | {"run.steps": 1000}))
    wait_for(lambda: max(steps(run), default=0) >= 3, process)
    processes = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert psutil.wait_procs(processes, timeout=60)[1] == []

    last = max(list_steps(run / "checkpoints")) + 4
    assert main(["train", "--quiet", "--resume", str(run), f"--run.steps={last}"]) == 0
    lines = read_lines(run / "metrics.jsonl")
    found = calls(run)
    starts = [call for call in found if call["call"] == "start"]
    assert [start["run_id"] for start in starts] == [None, "first"]
    assert (starts[0]["name"], starts[0]["project"]) == ("run", "outpace")
    received = {
        call["step"]: call["values"] for call in found if call["call"] == "metrics" and len(call["values"]) > 20
    }
    assert received == {
        line["step"]: {name: value for name, value in line.items() if name != "step" and not name.startswith("eval/")}
        for line in lines
    }
    assert {0, last} <= set(steps(run))
    assert set(range(1, len(lines), 2)) <= set(steps(run, "table"))
    assert found[-1]["call"] == "finish"
    assert found[-1]["summary"]["steps"] == len(lines)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["block", "stop", "kill"])
def test_a_run_goes_on_without_its_tracker_and_sends_the_rest_later(reporting: Settings, fault: str) -> None:
    run = Path(reporting["run.dir"])
    quickly = {"run.steps": 1000, "report.finish_s": 0.5 if fault != "stop" else 0.0}
    process = start_command("train", *as_arguments(reporting | quickly))
    wait_for(lambda: any(call["call"] == "start" for call in calls(run)), process)
    if fault in ("stop", "kill"):
        (reporter,) = [
            child
            for child in psutil.Process(process.pid).children()
            if any("monitoring.reporter" in word for word in child.cmdline())
        ]
        reporter.send_signal(signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
    else:
        (run / "trackers" / "fault").write_text(fault)
    before = logged(run)
    wait_for(lambda: logged(run) >= before + 3, process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=WITHIN_S)
    assert process.returncode == Interrupted.exit_code, errors
    assert "outpace report" in " ".join(output.split())

    (run / "trackers" / "fault").unlink(missing_ok=True)
    done = run_command("report", str(run))
    assert done.returncode == 0, done.stderr
    last = logged(run)
    assert set(range(last + 1)) <= set(steps(run))
    assert set(range(1, last + 1, 2)) <= set(steps(run, "table"))
    assert calls(run)[-1]["summary"]["steps"] == last


@pytest.mark.slow
def test_a_signal_while_the_reporter_is_waited_for_ends_only_the_reporter(reporting: Settings) -> None:
    run = Path(reporting["run.dir"])
    process = start_command("train", *as_arguments(reporting | {"run.steps": 1000}))
    wait_for(lambda: any(call["call"] == "start" for call in calls(run)), process)
    (run / "trackers" / "fault").write_text("block")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    while "sending what they do not have" not in process.stdout.readline():
        assert process.poll() is None
    recorded = (run / "summary.json").read_bytes()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=WITHIN_S)
    assert process.returncode == Interrupted.exit_code, errors
    assert "trackers:" in output
    assert (run / "summary.json").read_bytes() == recorded


def test_a_signal_during_the_check_of_the_trackers_interrupts_the_start(reporting: Settings, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "slow.py").write_text(f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(600)\n")
    process = start_command("train", *as_arguments(reporting | {"run.report_to": [f"{tmp_path}/slow.py:Slow"]}))
    wait_for(begun.exists, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=WITHIN_S)
    assert process.returncode == Interrupted.exit_code, errors


def test_a_tracker_with_a_slow_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr("outpace.run.reporting.CHECK_S", 10.0)
    config = resolved({"run.report_to": [f"{tmp_path}/slow.py:Slow"]})
    with pytest.raises(BadInput, match=naming("run.report_to", "slow.py:Slow")):
        asyncio.run(check_trackers(config, tmp_path))


def logged(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.skipif(find_spec("mlflow") is not None, reason="mlflow is installed")
def test_a_tracker_that_is_not_installed_is_refused_at_the_start(
    reporting: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--quiet", *as_arguments(reporting | {"run.report_to": ["mlflow"]})]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert names(line, "run.report_to mlflow outpace[mlflow]")
    assert not Path(reporting["run.dir"]).exists()


def test_a_python_that_does_not_exist_is_refused_at_the_start(
    reporting: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--quiet", *as_arguments(reporting | {"report.python": "/no/such/python"})]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert names(line, "report.python /no/such/python")


def test_report_without_a_tracker_names_the_option(reporting: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    plain = {key: value for key, value in reporting.items() if "report" not in key} | {"run.steps": 1}
    assert main(["train", "--quiet", *as_arguments(plain)]) == 0
    capsys.readouterr()
    assert main(["report", plain["run.dir"]]) == 2
    assert names(capsys.readouterr().err, "--to run.report_to")
    assert main(["report", plain["run.dir"], "--to", TRACKER]) == 0
    assert set(steps(Path(plain["run.dir"]))) >= {1}
