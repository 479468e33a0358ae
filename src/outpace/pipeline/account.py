"""`outpace ledger`: what became of every task, as of a run's newest complete checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from outpace.checkpoint import commit
from outpace.errors import BadInput
from outpace.observe.linefile import read_lines
from outpace.pipeline.ledger import Ledger, by_epoch
from outpace.pipeline.state import state_of

STATE_FILE = "controller.json"
"""The controller's part of a checkpoint."""


def account_of(run: Path) -> dict[str, Any]:
    """Per epoch, how many tasks are planned, running, finished and settled in which way; and, by the run's own records,
    which visits came to an end twice, and which of the epochs that are over never did."""
    checkpoint = commit.newest_complete(run / "checkpoints")
    if checkpoint is None:
        raise BadInput(f"ledger: {run} has no complete checkpoint")
    state = state_of(json.loads((checkpoint / STATE_FILE).read_text())["core"])
    epochs = by_epoch(state.tasks, state.ledger)
    ends = _ends(run / "batches.jsonl", state.version, Ledger(state.tasks, None, state.ledger).settled)
    return {
        "version": state.version,
        "tasks": state.tasks,
        "epochs": epochs,
        "twice": [_named(visit) for visit, times in sorted(ends.items()) if times > 1],
        "never": [
            _named((row["epoch"], task))
            for row in epochs
            if not row["planned"] + row["running"] + row["finished"]
            for task in range(state.tasks)
            if (row["epoch"], task) not in ends
        ],
    }


def _named(visit: tuple[int, int]) -> str:
    return f"epoch {visit[0]}: task {visit[1]}"


def _ends(batches: Path, version: int, accounted: int) -> Counter[tuple[int, int]]:
    """How often each visit (epoch, task) came to an end, up to a checkpoint."""
    return Counter(
        (entry["epoch"], entry["task"])
        for line in read_lines(batches)
        if line["step"] <= version and line.get("accounted", 0) <= accounted
        for entry in [*line["groups"], *line.get("settled", [])]
        if not entry.get("replay")  # trained again on purpose: no visit
    )
