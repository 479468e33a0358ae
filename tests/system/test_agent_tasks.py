"""A few steps on the built-in agent tasks improve the built-in model, with its tools and real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import as_arguments, read_lines, run_command

COMMON: dict[str, Any] = {
    "model.path": "starter-agent",
    "pacing.groups_per_step": 16,
    "pacing.chunk_groups": 8,
    "eval.count": 256,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("task", "settings", "reward_metric"),
    [
        ("calculator", {"rollout.max_turns": 3, "filter.uniform": False, "run.steps": 6}, "reward/number"),
        ("guess", {"rollout.max_turns": 4, "run.steps": 20}, "reward/environment"),
    ],
)
def test_a_short_run_raises_the_held_out_reward(
    tmp_path: Path, task: str, settings: dict[str, Any], reward_metric: str
) -> None:
    run = tmp_path / "run"
    words = as_arguments({**COMMON, **settings, "tasks.name": task, "run.dir": str(run)})
    result = run_command("train", *words, within_s=800)
    assert result.returncode == 0, result.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert 0.2 <= summary["eval_first"] <= 0.5, "room to improve, and something to find"
    assert summary["eval_last"] >= summary["eval_first"] + 0.1
    assert summary["lag_max"] <= 4
    rewarded = [line for line in read_lines(run / "metrics.jsonl") if reward_metric in line]
    assert rewarded
    assert rewarded[-1]["episode/tool_calls"] > 0
