"""Scheduler state: the records of outstanding groups, and what a checkpoint stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from outpace.errors import BadInput
from outpace.pipeline.difficulty import DifficultyState
from outpace.pipeline.governor import GovernorState
from outpace.pipeline.ledger import LedgerState
from outpace.pipeline.replay import Pooled
from outpace.tasks.order import Order
from outpace.types import Version
from outpace.wording import plural


class Visit(NamedTuple):
    """One scheduled use of a task. `position` counts over all epochs."""

    position: int
    epoch: int
    task: int


@dataclass(frozen=True)
class Admitted:
    """An outstanding group."""

    visit: Visit
    min_version: Version
    reward_std: float = 0.0  # set when the group finishes


class CoreState(msgspec.Struct, frozen=True):
    """Checkpointed scheduler state. Tokens stay in the journal, which keeps them as long as this state refers to
    them."""

    tasks: int
    seed: int
    shuffle: bool
    version: Version = 0
    next_group: int = 0
    ledger: LedgerState = LedgerState()
    governor: GovernorState = GovernorState()
    difficulty: DifficultyState = DifficultyState()
    replay: dict[int, Pooled] = {}

    def check(self, order: Order) -> None:
        """Raise `BadInput` if the tasks or their order differ from the run's."""
        if self.tasks != order.count:
            raise BadInput(f"--resume: the run started with {plural(self.tasks, 'task')}, there are {order.count} now")
        if self.seed != order.seed:
            raise BadInput(f"--resume: run.seed is {order.seed}, but the run started with {self.seed}")
        if self.shuffle != order.shuffle:
            before, now = str(self.shuffle).lower(), str(order.shuffle).lower()
            raise BadInput(f"--resume: tasks.shuffle is {now}, but the run started with {before}")


def state_of(snapshot: dict[str, object]) -> CoreState:
    """Decode the state of a `Checkpoint` after a round trip through JSON."""
    return msgspec.convert(snapshot, CoreState, strict=False)  # JSON keys are strings
