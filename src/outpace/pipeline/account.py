"""MERGED"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from outpace.checkpoint import commit
from outpace.errors import BadInput
from outpace.observe.linefile import read_lines
from outpace.pipeline.ledger import Ledger, LedgerState, by_epoch
from outpace.types import Version

STATE_FILE = "controller.json"
"""File of a checkpoint that holds the controller's state."""


class _StoredLedger(msgspec.Struct):
    """The part of the checkpointed scheduler state that the report needs."""

    tasks: int
    version: Version = 0
    ledger: LedgerState = LedgerState()


def account_of(run: Path) -> dict[str, Any]:
    """Return what became of every task as of the run's newest complete checkpoint (`outpace ledger`).

    Per epoch: the number of visits planned, running, finished and finalized by outcome. From batches.jsonl: visits
    finalized twice, and visits of complete epochs that were never finalized."""
    checkpoint = commit.newest_complete(run / "checkpoints")
    if checkpoint is None:
        raise BadInput(f"ledger: {run} has no complete checkpoint yet")
    snapshot = json.loads((checkpoint / STATE_FILE).read_text())["core"]
    state = msgspec.convert(snapshot, _StoredLedger, strict=False)
    epochs = by_epoch(state.tasks, state.ledger)
    ends = _ends(run / "batches.jsonl", state.version, Ledger(state.tasks, None, state.ledger).settled)
    return {
        "version": state.version,
        "tasks": state.tasks,
        "epochs": epochs,
        "twice": [_describe_visit(visit) for visit, times in sorted(ends.items()) if times > 1],
        "never": [
            _describe_visit((row["epoch"], task))
            for row in epochs
            if not row["planned"] + row["running"] + row["finished"]
            for task in range(state.tasks)
            if (row["epoch"], task) not in ends
        ],
    }


def _describe_visit(visit: tuple[int, int]) -> str:
    return f"epoch {visit[0]}: task {visit[1]}"


def _ends(batches: Path, version: int, accounted: int) -> Counter[tuple[int, int]]:
    """Count how often each visit (epoch, task) was finalized, up to a checkpoint."""
    return Counter(
        (entry["epoch"], entry["task"])
        for line in read_lines(batches)
        if line["step"] <= version and line.get("accounted", 0) <= accounted
        for entry in [*line["groups"], *line.get("settled", [])]
        if not entry.get("replay")  # a replayed group is not a visit
    )
