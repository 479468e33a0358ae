"""The groups of a step that could not be made, put where people can look at them.

    bad_steps/step-000012/groups.json        tasks, rewards, and what of each row is out of the ordinary
    bad_steps/step-000012/rows.safetensors   every row as the learner got it: GROUP/ROW/tokens, …/logprobs, …

Only the first few of a start are kept: a run that goes wrong step after step must not fill the disk. Failing to keep
them never fails the run.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outpace.checkpoint import journal
from outpace.checkpoint.durable import write_bytes
from outpace.learn.tensor_file import write_tensors
from outpace.types import GroupRecord, Place, Row

log = logging.getLogger(__name__)

FOLDER = "bad_steps"
LIMIT = 8

_ARRAYS = ("tokens", "mask", "logprobs", "versions", "advantages", "turn_rewards")
_NUMBERS = ("logprobs", "advantages", "turn_rewards")


class BadSteps:
    def __init__(self, journal_directory: Path, limit: int = LIMIT) -> None:
        self._journal = journal_directory
        self._folder = journal_directory.parent / FOLDER
        self._left = limit
        self._steps = 0

    @property
    def kept(self) -> str:
        """Where to look, in words; empty where there is nothing."""
        return f"groups of such steps are in {self._folder}" if self._steps else ""

    def keep(self, step: int, places: Sequence[Place]) -> bool:
        """Whether the groups of `step` are kept."""
        if self._left == 0:
            return False
        self._left -= 1
        target = self._folder / f"step-{step:06d}"
        try:
            records = [journal.read(self._journal, place) for place in places]
            shutil.rmtree(target, ignore_errors=True)  # of an earlier start that got as far
            target.mkdir(parents=True)
            _write(target, records)
        except Exception as error:  # whatever made the step impossible may make its groups impossible to write
            log.warning("the groups of step %d, which could not be made, were not kept: %r", step, error)
            return False
        log.warning("step %d could not be made; its groups are in %s", step, target)
        self._steps += 1
        return True


def _write(target: Path, records: Sequence[GroupRecord]) -> None:
    tensors = {
        f"{record.group}/{number}/{name}": torch.tensor(getattr(row, name))
        for record in records
        for number, row in enumerate(record.rows)
        for name in _ARRAYS
    }
    write_tensors(target / "rows.safetensors", tensors)
    text = json.dumps([_described(record) for record in records], indent=1)
    write_bytes(target / "groups.json", text.encode() + b"\n")


def _described(record: GroupRecord) -> dict[str, Any]:
    return {
        "group": record.group,
        "task_id": record.task_id,
        "epoch": record.epoch,
        "admitted": record.admitted,
        "rewards": record.rewards,
        "parts": record.parts,
        "rows": [_described_row(row) for row in record.rows],
    }


def _described_row(row: Row) -> dict[str, Any]:
    values = {name: np.asarray(getattr(row, name)) for name in _NUMBERS}
    finite = {name: np.abs(array[np.isfinite(array)]) for name, array in values.items()}
    return {
        "episode": row.episode,
        "role": row.role,
        "tokens": len(row.tokens),
        "trained": int(row.mask.sum()),
        "largest": {name: float(array.max()) for name, array in finite.items() if array.size},
        "not_finite": {name: array.size - finite[name].size for name, array in values.items()},
    }
