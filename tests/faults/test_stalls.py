"""Stalled runs: a warning at half time, an end within the limit, and a dump of what every process was doing.

Tested elsewhere: when the watchdog warns, ends the run and resets (tests/controller/test_watchdog.py).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import outpace as api
from faults.watching import Settings, StartRun, arguments, summary_of
from outpace.errors import Stalled

pytestmark = pytest.mark.timeout(400)

HANGING = """
import time

def hanging(prompts, completions, **columns):
    time.sleep(600)
"""


@pytest.fixture
def hanging(settings: Settings, tmp_path: Path) -> Settings:
    """Every worker hangs in its rewards, whose timeout is long."""
    (tmp_path / "hang.py").write_text(HANGING)
    functions = [f"{tmp_path}/hang.py:hanging"]
    return settings | {"rewards.functions": functions, "rewards.timeout_s": 500.0, "run.stall_s": 4.0}


def test_a_stall_gives_a_warning_at_half_time_and_then_ends_the_run_naming_the_waiting_component(
    hanging: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Stalled, match=r"\b\d\.\d s\b.*\blearner\b.*stall\.txt") as caught:
        api.Trainer(config=hanging | {"run.runtime": "inline"}).train()
    assert caught.value.exit_code == 5
    messages = re.findall(r"\b\d\.\d s\b.*\blearner\b", capsys.readouterr().out)
    assert len(messages) == 2, "once as a warning, once at the end"
    assert summary_of(tmp_path / "run")["exit"] == 5
    dump = (tmp_path / "run" / "logs" / "stall.txt").read_text()
    assert "learner" in dump.splitlines()[0]
    assert "group 0" in dump


@pytest.mark.slow
def test_a_stalled_run_dumps_the_stacks_of_all_its_processes_and_leaves_none_running(
    start: StartRun, hanging: Settings, tmp_path: Path
) -> None:
    patient = hanging | {"run.stall_s": 30.0}  # longer than a slow machine needs until its worker hangs
    run = start(*arguments(patient))
    assert run.end(160) == 5, run.output
    dump = (tmp_path / "run" / "logs" / "stall.txt").read_text()
    for component in ("controller", "engine-0", "learner", "worker-0"):
        assert component in dump
    assert "grading." in dump, "the stack of the waiting worker"
    assert run.remaining_processes() == []
