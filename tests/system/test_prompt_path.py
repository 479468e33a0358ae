"""The script that lists the files one prompt enters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SUBJECTS = {
    "controller/scheduler.py",
    "rollouts/worker.py",
    "engines/embedded/decode_batch.py",
    "rewards/grading.py",
    "checkpoint/journal.py",
    "learner/core.py",
    "algorithms/losses.py",
}


@pytest.mark.slow
def test_the_path_of_a_prompt_leads_through_every_process_and_not_through_the_run_directory() -> None:
    command = [sys.executable, "scripts/prompt_path.py", "--list"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout
    count, *files = printed.splitlines()
    assert int(count.split()[0]) == len(files)
    assert set(files) >= SUBJECTS
    assert "monitoring/run_directory.py" not in files
