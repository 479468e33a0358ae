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
        if (self.tasks, self.seed, self.shuffle) != (order.count, order.seed, order.shuffle):
            raise BadInput(
                f"the checkpoint was made with {self.tasks} tasks, seed {self.seed}, shuffle {self.shuffle}; "
                f"now there are {order.count} tasks, seed {order.seed}, shuffle {order.shuffle}"
            )


def state_of(snapshot: dict[str, object]) -> CoreState:
    """The state of a `Checkpoint`, after a way through JSON."""
    return msgspec.convert(snapshot, CoreState, strict=False)  # whose keys are text
