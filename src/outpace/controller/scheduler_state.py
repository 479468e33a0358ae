"""Scheduler state: the records of outstanding groups, and what a checkpoint stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from outpace.controller.batcher import ReplayEntry
from outpace.controller.curriculum import CurriculumState
from outpace.controller.ledger import LedgerState
from outpace.controller.pacing import GovernorState
from outpace.errors import BadInput, plural
from outpace.tasks.order import TaskOrder
from outpace.types import Version


class PromptVisit(NamedTuple):
    """One scheduled use of a task. `position` counts over all epochs."""

    position: int
    epoch: int
    task: int


@dataclass(frozen=True)
class AdmittedGroup:
    """An outstanding group."""

    visit: PromptVisit
    min_version: Version
    reward_std: float = 0.0  # set when the group finishes


class SchedulerState(msgspec.Struct, frozen=True):
    """Checkpointed scheduler state. Tokens stay in the journal, which keeps them as long as this state refers to
    them."""

    tasks: int
    seed: int
    shuffle: bool
    version: Version = 0
    next_group: int = 0
    ledger: LedgerState = LedgerState()
    governor: GovernorState = GovernorState()
    difficulty: CurriculumState = CurriculumState()
    replay: dict[int, ReplayEntry] = {}

    def check(self, order: TaskOrder) -> None:
        """Raise `BadInput` if the tasks or their order differ from the run's."""
        if self.tasks != order.count:
            raise BadInput(f"--resume: the run started with {plural(self.tasks, 'task')}, there are {order.count} now")
        if self.seed != order.seed:
            raise BadInput(f"--resume: run.seed is {order.seed}, but the run started with {self.seed}")
        if self.shuffle != order.shuffle:
            before, now = str(self.shuffle).lower(), str(order.shuffle).lower()
            raise BadInput(f"--resume: tasks.shuffle is {now}, but the run started with {before}")


def decode_state(snapshot: dict[str, object]) -> SchedulerState:
    """Decode the state of a `Checkpoint` after a round trip through JSON."""
    return msgspec.convert(snapshot, SchedulerState, strict=False)  # JSON keys are strings
