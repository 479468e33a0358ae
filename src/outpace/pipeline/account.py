"""`outpace ledger`: what became of every task, as of a run's newest complete checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from outpace.checkpoint import commit
from outpace.errors import BadInput
from outpace.observe.linefile import read_lines
from outpace.pipeline.ledger import by_epoch
from outpace.pipeline.state import state_of

STATE_FILE = "controller.json"
"""The controller's part of a checkpoint."""


def account_of(run: Path) -> dict[str, Any]:
    """Per epoch, how many tasks are planned, running, finished and settled in which way; and any trained twice."""
    checkpoint = commit.newest_complete(run / "checkpoints")
    if checkpoint is None:
        raise BadInput(f"ledger: {run} has no complete checkpoint")
    state = state_of(json.loads((checkpoint / STATE_FILE).read_text())["core"])
    return {
        "version": state.version,
        "tasks": state.tasks,
        "epochs": by_epoch(state.tasks, state.ledger),
        "trained_twice": _trained_twice(run / "batches.jsonl", state.version),
    }


def _trained_twice(batches: Path, version: int) -> list[str]:
    seen = Counter(
        f"epoch {group['epoch']}: {group['task_id']}"
        for line in read_lines(batches)
        if line["version"] < version
        for group in line["groups"]
        if not group.get("replay")  # trained again on purpose: no visit
    )
    return sorted(name for name, times in seen.items() if times > 1)
