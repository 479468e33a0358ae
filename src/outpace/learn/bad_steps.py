"""MERGED"""

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

BAD_STEPS_FOLDER = "bad_steps"
LIMIT = 8

_ARRAYS = ("tokens", "mask", "logprobs", "versions", "advantages", "turn_rewards")
_FLOAT_ARRAYS = ("logprobs", "advantages", "turn_rewards")


class BadSteps:
    """Writes the groups of bad steps to `bad_steps/` in the run directory, for at most `limit` steps."""

    def __init__(self, journal_directory: Path, limit: int = LIMIT) -> None:
        self._journal = journal_directory
        self._folder = journal_directory.parent / BAD_STEPS_FOLDER
        self._remaining = limit
        self._steps = 0

    @property
    def kept(self) -> str:
        """Describe where groups were written; empty if none were."""
        return f"the groups of these steps are in {self._folder}" if self._steps else ""

    def keep(self, step: int, places: Sequence[Place]) -> bool:
        """Write the groups of `step`. Return whether that was done."""
        if self._remaining == 0:
            return False
        self._remaining -= 1
        target = self._folder / f"step-{step:06d}"
        try:
            records = [journal.read(self._journal, place) for place in places]
            shutil.rmtree(target, ignore_errors=True)  # left by an earlier start of this run
            target.mkdir(parents=True)
            _write_groups(target, records)
        except Exception as error:  # what broke the step may also break writing its groups
            log.warning("step %d had a non-finite loss or gradient; its groups could not be written: %r", step, error)
            return False
        log.warning("step %d had a non-finite loss or gradient; its groups are in %s", step, target)
        self._steps += 1
        return True


def _write_groups(target: Path, records: Sequence[GroupRecord]) -> None:
    tensors = {
        f"{record.group}/{number}/{name}": torch.tensor(getattr(row, name))
        for record in records
        for number, row in enumerate(record.rows)
        for name in _ARRAYS
    }
    write_tensors(target / "rows.safetensors", tensors)
    text = json.dumps([_describe_group(record) for record in records], indent=1)
    write_bytes(target / "groups.json", text.encode() + b"\n")


def _describe_group(record: GroupRecord) -> dict[str, Any]:
    return {
        "group": record.group,
        "task_id": record.task_id,
        "epoch": record.epoch,
        "admitted": record.admitted,
        "rewards": record.rewards,
        "parts": record.parts,
        "rows": [_describe_row(row) for row in record.rows],
    }


def _describe_row(row: Row) -> dict[str, Any]:
    values = {name: np.asarray(getattr(row, name)) for name in _FLOAT_ARRAYS}
    finite = {name: np.abs(array[np.isfinite(array)]) for name, array in values.items()}
    return {
        "episode": row.episode,
        "role": row.role,
        "tokens": len(row.tokens),
        "trained": int(row.mask.sum()),
        "largest": {name: float(array.max()) for name, array in finite.items() if array.size},
        "not_finite": {name: array.size - finite[name].size for name, array in values.items()},
    }
