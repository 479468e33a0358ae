"""On which record a visit's end stands: with the step that follows it, or before a checkpoint between two steps.

Invariants
- Every settled visit is put on record once; the records up to a checkpoint hold exactly what its ledger has settled.
- In lockstep, a step has on its record what was admitted before its last group. All of that has closed by then, and
  who was fast changes nothing. What came later waits for its own step.
"""

from __future__ import annotations

from bisect import insort
from operator import itemgetter

from outpace.pipeline.events import Account, Action, Settle
from outpace.types import Version


class Records:
    def __init__(self, lockstep: bool, settled: int) -> None:
        """`settled` visits are on record already."""
        self._lockstep = lockstep
        self._recorded = settled
        self._waiting: list[tuple[float, Settle]] = []  # lockstep: with their places in the order of admission

    @property
    def complete(self) -> bool:
        """Everything settled is on record."""
        return not self._waiting

    def settle(self, settle: Settle, next_group: int) -> list[Action]:
        """A visit was settled without being trained. One that was skipped stands before the group admitted next."""
        if not self._lockstep:
            return [settle]
        place = next_group - 0.5 if settle.group is None else settle.group
        insort(self._waiting, (place, settle), key=itemgetter(0))
        return []

    def step(self, version: Version, last_group: int, settled: int) -> list[Action]:
        """The record of the step that made `version`; `settled` visits are, in all."""
        ready = [settle for place, settle in self._waiting if place < last_group]
        del self._waiting[: len(ready)]
        self._recorded = settled - len(self._waiting)
        return [*ready, Account(version, self._recorded, trained=True)]

    def between(self, version: Version, settled: int) -> list[Action]:
        """A record of its own for what a checkpoint of `version` relies on, if there is anything."""
        ready, self._waiting = [settle for _, settle in self._waiting], []
        if settled == self._recorded:
            return []
        self._recorded = settled
        return [*ready, Account(version, settled, trained=False)]
