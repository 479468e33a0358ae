"""Everybody alive and nobody getting on: said early, ended within the bound, with what everybody was doing.

Shown elsewhere: when the watchdog speaks and when it gives up, and what it forgives (tests/pipeline).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import outpace as api
from faults.watching import Runs, Settings, summary_of, words
from outpace.errors import Stalled

pytestmark = pytest.mark.timeout(400)

HANGING = """
import time

def hanging(prompts, completions, **columns):
    time.sleep(600)
"""


@pytest.fixture
def hanging(settings: Settings, tmp_path: Path) -> Settings:
    """Every producer hangs in its rewards, which are allowed to take long."""
    (tmp_path / "hang.py").write_text(HANGING)
    functions = [f"{tmp_path}/hang.py:hanging"]
    return settings | {"rewards.functions": functions, "rewards.timeout_s": 500.0, "run.stall_s": 4.0}


def test_a_stall_is_said_at_half_time_and_ends_the_run_naming_who_waits_for_whom(
    hanging: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Stalled, match=r"\b\d\.\d s\b.*\blearner\b.*stall\.txt") as caught:
        api.Trainer(config=hanging | {"run.runtime": "inline"}).train()
    assert caught.value.exit_code == 5
    said = re.findall(r"\b\d\.\d s\b.*\blearner\b", capsys.readouterr().out)
    assert len(said) == 2, "once as a warning, once at the end"
    assert summary_of(tmp_path / "run")["exit"] == 5
    dump = (tmp_path / "run" / "logs" / "stall.txt").read_text()
    assert "learner" in dump.splitlines()[0]
    assert "group 0" in dump


@pytest.mark.slow
def test_a_stalled_run_shows_the_stacks_of_all_its_processes_and_leaves_none(
    start: Runs, hanging: Settings, tmp_path: Path
) -> None:
    patient = hanging | {"run.stall_s": 30.0}  # longer than a slow machine takes until its worker hangs
    run = start(*words(patient))
    assert run.end(160) == 5, run.said
    dump = (tmp_path / "run" / "logs" / "stall.txt").read_text()
    for part in ("controller", "engine-0", "learner", "worker-0"):
        assert part in dump
    assert "grading." in dump, "where the worker waits"
    assert run.orphans() == []
