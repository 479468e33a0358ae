"""A synchronous, deterministic run computes exactly what the plain script computes."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import outpace
from support import journalled, read_lines

SCRIPT = Path(__file__).parents[2] / "examples" / "plain_grpo.py"
STEPS = 3
GROUPS = 8


def plain_run(directory: Path) -> list[dict[str, Any]]:
    out = directory / "plain.json"
    words = [str(SCRIPT), "--steps", str(STEPS), "--groups", str(GROUPS), "--context", "64", "--json", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        runpy.run_path(str(SCRIPT), run_name="__main__")
    steps: list[dict[str, Any]] = json.loads(out.read_text())["steps"]
    return steps


def test_tokens_rewards_and_losses_equal_the_plain_scripts_bit_for_bit(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = {
        "pacing.max_lag": 0,
        "pacing.groups_per_step": GROUPS,
        "engine.context": 64,
        "eval.count": 0,
        "run.deterministic": True,
        "run.runtime": "inline",
        "run.steps": STEPS,
        "run.dir": str(run),
    }
    outpace.Trainer(config=settings, quiet=True).train()
    plain = plain_run(tmp_path)
    metrics = read_lines(run / "metrics.jsonl")
    assert [line["loss/policy"] for line in metrics] == [step["loss"] for step in plain]
    assert [line["grad_norm"] for line in metrics] == [step["grad_norm"] for step in plain]
    assert [line["reward/mean"] for line in metrics] == pytest.approx([step["accuracy"] for step in plain])
    records = journalled(run / "journal")
    trained = [group for step in plain for group in step["groups"] if group["trained"]]
    assert sorted(records) == [group["group"] for group in trained]
    for group in trained:
        record = records[group["group"]]
        assert record.task_id == group["task"]
        assert record.rewards == group["rewards"]
        assert [row.tokens[row.mask].tolist() for row in record.rows] == group["tokens"]
