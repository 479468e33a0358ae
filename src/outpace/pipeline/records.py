"""MERGED"""

from __future__ import annotations

from bisect import insort
from operator import itemgetter

from outpace.pipeline.events import Account, Action, Settle
from outpace.types import Version


class Records:
    """Decides which record a finalized visit belongs to: the step that follows it, or one before a checkpoint
    between steps.

    Every finalized visit is recorded once, and the records up to a checkpoint contain exactly what its ledger has
    finalized. In deterministic mode a step records the visits admitted before its last group. All of them have
    closed by then, so completion order has no effect; later visits wait for their own step."""

    def __init__(self, lockstep: bool, settled: int) -> None:
        """`finalized` visits are already on record."""
        self._deterministic = lockstep
        self._recorded = settled
        self._waiting: list[tuple[float, Settle]] = []  # deterministic: with their rank in admission order

    @property
    def complete(self) -> bool:
        """Whether everything finalized is on record."""
        return not self._waiting

    def settle(self, settle: Settle, next_group: int) -> list[Action]:
        """Add a visit finalized without being trained. A skipped visit ranks just before the next group to be
        admitted."""
        if not self._deterministic:
            return [settle]
        rank = next_group - 0.5 if settle.group is None else settle.group
        insort(self._waiting, (rank, settle), key=itemgetter(0))
        return []

    def step(self, version: Version, last_group: int, settled: int) -> list[Action]:
        """Return the record of the step that made `version`; `finalized` is the total number of finalized visits."""
        ready = [settle for rank, settle in self._waiting if rank < last_group]
        del self._waiting[: len(ready)]
        self._recorded = settled - len(self._waiting)
        return [*ready, Account(version, self._recorded, trained=True)]

    def between(self, version: Version, settled: int) -> list[Action]:
        """Return the record that a checkpoint of `version` relies on, or [] if nothing is missing."""
        ready, self._waiting = [settle for _, settle in self._waiting], []
        if settled == self._recorded:
            return []
        self._recorded = settled
        return [*ready, Account(version, settled, trained=False)]
