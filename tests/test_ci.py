"""The stages script of continuous integration, with short commands in place of the suites."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest

from support import names

STAGES = Path(__file__).parents[1] / ".ci" / "stages.sh"
PYTEST_LOG = "collected 3 items\\n== short test summary info ==\\nSKIPPED [1] test_a.py:3: no GPU\\n== 2 passed ==\\n"


def run_stages(body: str, limit_s: int = 600) -> subprocess.CompletedProcess[str]:
    script = f"set -euo pipefail\nCI_LIMIT_S={limit_s} CI_MACHINE=test\n. {STAGES}\n{body}"
    with tempfile.TemporaryDirectory(prefix="logs-") as logs:
        environment = {**os.environ, "TMPDIR": logs}
        return subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, timeout=100, check=False, env=environment
        )


def running(mark: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if mark in " ".join(process.info["cmdline"] or [])]


def test_a_passing_stage_prints_its_summary_and_duration() -> None:
    done = run_stages(f'stage "fast suite" 60 printf "{PYTEST_LOG}"')
    assert done.returncode == 0
    assert "collected" not in done.stdout
    assert "SKIPPED [1] test_a.py:3: no GPU\n== 2 passed ==" in done.stdout
    _, _, minutes = done.stdout.partition("(test)\n")
    fast, whole = minutes.splitlines()
    assert re.fullmatch(r" +\d+:\d\d  fast suite", fast)
    assert re.match(r" +\d+:\d\d  ", whole)


def test_a_failing_stage_prints_its_whole_log_stops_all_stages_and_lists_durations() -> None:
    mark = uuid.uuid4().hex
    done = run_stages(
        f'begin "beside" 60 bash -c "setsid sleep 99 & exec -a {mark} sleep 99"\n'
        'stage "suite" 60 bash -c "echo first; seq 100; exit 3"\nstage "later" 60 true'
    )
    assert done.returncode == 1
    assert "first\n1\n2\n" in done.stdout
    assert any(names(line, "suite failed 3") for line in done.stdout.splitlines())
    assert "beside  not finished\n" in done.stdout
    assert "suite  failed\n" in done.stdout
    assert "later" not in done.stdout
    assert running(mark) == []


@pytest.mark.parametrize(("stage_limit", "whole_limit"), [(1, 600), (600, 1)])
def test_a_hanging_stage_ends_at_its_own_limit_or_the_overall_limit(stage_limit: int, whole_limit: int) -> None:
    done = run_stages(f'stage "hung" {stage_limit} sleep 99', whole_limit)
    assert done.returncode == 1
    assert any(names(line, "hung 1") for line in done.stdout.splitlines())


def test_a_failed_background_stage_fails_the_build_when_it_is_finished() -> None:
    done = run_stages(
        'begin "installs" 60 bash -c "echo no such package; exit 1"\nstage "suite" 60 true\nfinish "installs"'
    )
    assert done.returncode == 1
    assert "no such package" in done.stdout


def test_a_process_that_a_stage_leaves_in_its_own_session_is_killed() -> None:
    mark = uuid.uuid4().hex
    done = run_stages(f'stage "suite" 60 bash -c "setsid -f bash -c \'exec -a {mark} sleep 99\'"')
    assert done.returncode == 0
    assert running(mark) == []
