"""Which past groups a batch trains once more, beside its own.

Invariants (B = groups in a batch)
- Batch v replays at most floor(fraction * B) groups, each of them first trained in one of the batches v - max_age to
  v - 1, and each at most `times` times in all. Fewer where the pool holds fewer.
- The most useful go first: the widest spread of rewards, ties by the newest. Groups without any spread teach nothing
  and never enter the pool. The choice depends on what was trained and on nothing else.
- A replayed group is not a visit: the ledger does not move, and its lag may exceed max_lag on purpose.
- Every group trained leaves exactly once, at the end of some batch: until then its place in the journal must stay.
- The pool is part of a checkpoint. After a resume it holds those of its groups that the journal still has: all of them
  if the checkpoint is the newest, perhaps not if it is an older one.

Only numbers are kept here. Tokens, and the logprobs they were sampled with, stay in the journal; anchors are computed
anew from the weights at hand each time a group is trained, and nothing of an old anchor is stored anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor

import msgspec

from outpace.types import Version


@dataclass(frozen=True)
class ReplaySettings:
    fraction: float
    max_age: int
    times: int


class Pooled(msgspec.Struct):
    """A group that may be trained again."""

    spread: float
    trained: Version  # the batch that trained it first
    left: int  # how often it may still be replayed


class Replay:
    """Without settings, or where the fraction comes to no group at all, nothing is pooled."""

    def __init__(
        self, settings: ReplaySettings | None, groups_per_step: int, pool: Mapping[int, Pooled] | None = None
    ) -> None:
        self._settings = settings
        # Rounded, lest 0.29 * 100 = 28.999999999999996 cost a group.
        self._count = 0 if settings is None else floor(round(settings.fraction * groups_per_step, 6))
        kept = pool if pool is not None and self._count > 0 else {}
        self._pool = {group: msgspec.structs.replace(pooled) for group, pooled in kept.items()}

    def state(self) -> dict[int, Pooled]:
        return {group: msgspec.structs.replace(pooled) for group, pooled in self._pool.items()}

    @property
    def pools(self) -> bool:
        """Whether trained groups are kept at all."""
        return self._count > 0

    def choose(self) -> tuple[int, ...]:
        """The groups that the open batch replays, the most useful first."""
        ranked = sorted(self._pool, key=lambda group: (-self._pool[group].spread, -group))
        return tuple(ranked[: self._count])

    def batch_trained(self, batch: Version, spreads: dict[int, float], replayed: tuple[int, ...]) -> tuple[int, ...]:
        """`batch` is done: `spreads` are those of its own groups. Returns the groups that nobody needs any more."""
        if self._settings is None or not self.pools:
            return ()
        for group in replayed:
            self._pool[group].left -= 1
        oldest = batch + 1 - self._settings.max_age  # the oldest batch whose groups the next one may replay
        gone = [group for group, pooled in self._pool.items() if not pooled.left or pooled.trained < oldest]
        for group in gone:
            del self._pool[group]
        for group, spread in spreads.items():
            if spread > 0:
                self._pool[group] = Pooled(spread, batch, self._settings.times)
            else:
                gone.append(group)
        return tuple(gone)
