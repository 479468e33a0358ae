"""What a checkpoint keeps of the controller."""

from __future__ import annotations

import msgspec

from outpace.errors import BadInput
from outpace.pipeline.difficulty import DifficultyState
from outpace.pipeline.governor import GovernorState
from outpace.pipeline.ledger import LedgerState
from outpace.pipeline.replay import Pooled
from outpace.tasks.order import Order
from outpace.types import Version
from outpace.wording import plural


class CoreState(msgspec.Struct, frozen=True):
    """What a checkpoint keeps of the core. Tokens are in the journal, which keeps them as long as this needs them."""

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
        """Refuse to go on with tasks in another order."""
        if self.tasks != order.count:
            raise BadInput(f"--resume: the run began with {plural(self.tasks, 'task')}, now there are {order.count}")
        if self.seed != order.seed:
            raise BadInput(f"--resume: run.seed is {order.seed}, the run began with {self.seed}")
        if self.shuffle != order.shuffle:
            began, now = str(self.shuffle).lower(), str(order.shuffle).lower()
            raise BadInput(f"--resume: tasks.shuffle is {now}, the run began with {began}")


def state_of(snapshot: dict[str, object]) -> CoreState:
    """The state of a `Checkpoint`, after a way through JSON."""
    return msgspec.convert(snapshot, CoreState, strict=False)  # whose keys are text
