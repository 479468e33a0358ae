"""A program that uses the official `openai` client, and not outpace, is trained through its base URL alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outpace
from outpace.algorithms.token_advantages import turn_numbers
from support import as_arguments, journalled, read_lines, run_command

AGENT = Path(__file__).parents[2] / "examples" / "openai_agent.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_tool_calling_agent_with_and_without_streaming_is_trained_while_weights_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_LOG", str(tmp_path / "agent.jsonl"))
    settings: dict[str, Any] = {
        "model.path": "starter-agent",
        "tasks.name": "calculator",
        "rewards.functions": ["number"],
        "rollout.agent": [sys.executable, str(AGENT)],
        "rollout.group_size": 4,
        "pacing.groups_per_step": 2,
        "pacing.chunk_groups": 1,
        "pacing.max_running": 8,
        "filter.uniform": False,
        "eval.count": 0,
        "run.steps": 4,
        "run.dir": str(tmp_path / "run"),
    }
    ended = run_command("train", *as_arguments(settings), within_s=500)
    assert ended.returncode == 0, ended.stderr
    seen = [json.loads(line) for line in (tmp_path / "agent.jsonl").read_text().splitlines()]
    assert not any("outpace" in name for line in seen for name in line["modules"])
    assert max(line["turns"] for line in seen) >= 2, "no agent called its tool"
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    rows = [row for record in journalled(tmp_path / "run" / "journal").values() for row in record.rows]
    several_turns = [row for row in rows if len(np.unique(turn_numbers(row.mask))) >= 2]
    assert several_turns, "no trajectory of several turns was journalled"
    assert max(int(row.versions.max()) for row in rows) >= 1, "no episode was sampled by trained weights"
    recorded = [kept for attempt in outpace.read_rollouts(tmp_path / "run") for kept in attempt.trajectories]
    sources = {tuple(turn.source for turn in kept.turns) for kept in recorded}
    assert ("prompt", "assistant", "tool", "assistant") in sources, "the turns of the agent are not recorded separately"
