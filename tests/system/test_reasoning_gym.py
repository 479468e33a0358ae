"""A task of reasoning-gym, chosen by its name, trained on with a real chat model on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support import journalled, read_lines

pytest.importorskip("reasoning_gym")
pytestmark = [pytest.mark.smollm2, pytest.mark.nightly, pytest.mark.timeout(800)]

STEPS = 10
EASY = "min_terms=2,max_terms=2,max_digits=1,allow_parentheses=false,allow_negation=false,size=500,seed=1"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reasoning_gym") / "run"
    result = subprocess.run(
        [
            sys.executable, "-m", "outpace.cli", "train", "--quiet", "--model.path=smollm2-135m",
            "--tasks.name=reasoning_gym/basic_arithmetic", f"--tasks.options={EASY}", f"--run.dir={directory}",
            f"--run.steps={STEPS}", "--rollout.group_size=4", "--rollout.max_tokens=16", "--rollout.temperature=0.6",
            "--pacing.groups_per_step=2", "--engine.slots=16", "--engine.context=128", "--filter.uniform=false",
            "--eval.count=0",
        ],
        capture_output=True, text=True, timeout=700, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return directory


def test_the_run_trains_on_the_sampled_tokens(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["exit"]) == (STEPS, 0)
    assert summary["tokens_trained"] > 100


def test_the_answers_are_rewarded_and_some_rewards_are_positive(run: Path) -> None:
    records = journalled(run / "journal").values()
    rewards = np.array([reward for record in records for reward in record.rewards])
    assert len(rewards) > STEPS
    assert np.isfinite(rewards).all()
    assert rewards.min() >= 0
    assert 0 < rewards.mean() <= 1
    lines = read_lines(run / "metrics.jsonl")
    assert any(line.get("reward/reasoning_gym", 0) > 0 for line in lines), "under the name of the function"


def test_every_task_is_one_of_the_chosen_kind(run: Path) -> None:
    tasks = {record.task_id for record in journalled(run / "journal").values()}
    assert len(tasks) > 1
    assert all(task.startswith("reasoning_gym/basic_arithmetic/train/") for task in tasks)
