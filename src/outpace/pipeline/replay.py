"""MERGED"""

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
    """A trained group that may be trained again. Its fields are stored in checkpoints."""

    spread: float  # standard deviation of the group's rewards
    trained: Version  # the batch that first trained it
    left: int  # replays left


class Replay:
    """Chooses past groups to train again. Disabled without settings, or if the fraction rounds down to no group."""

    def __init__(
        self, settings: ReplaySettings | None, groups_per_step: int, pool: Mapping[int, Pooled] | None = None
    ) -> None:
        self._settings = settings
        # Rounded, so that 0.29 * 100 = 28.999999999999996 does not lose a group.
        self._count = 0 if settings is None else floor(round(settings.fraction * groups_per_step, 6))
        kept = pool if pool is not None and self._count > 0 else {}
        self._pool = {group: msgspec.structs.replace(pooled) for group, pooled in kept.items()}

    def state(self) -> dict[int, Pooled]:
        return {group: msgspec.structs.replace(pooled) for group, pooled in self._pool.items()}

    @property
    def pools(self) -> bool:
        """Whether trained groups are kept for replay."""
        return self._count > 0

    def choose(self) -> tuple[int, ...]:
        """Return the groups that the open batch replays, highest reward standard deviation first."""
        ranked = sorted(self._pool, key=lambda group: (-self._pool[group].spread, -group))
        return tuple(ranked[: self._count])

    def batch_trained(self, batch: Version, deviations: dict[int, float], replayed: tuple[int, ...]) -> tuple[int, ...]:
        """Update the pool after `batch`; `deviations` are the reward standard deviations of its own groups. Return
        the groups no longer needed."""
        if self._settings is None or not self.pools:
            return ()
        for group in replayed:
            self._pool[group].left -= 1
        oldest = batch + 1 - self._settings.max_age  # oldest batch whose groups the next batch may replay
        gone = [group for group, pooled in self._pool.items() if not pooled.left or pooled.trained < oldest]
        for group in gone:
            del self._pool[group]
        for group, spread in deviations.items():
            if spread > 0:
                self._pool[group] = Pooled(spread, batch, self._settings.times)
            else:
                gone.append(group)
        return tuple(gone)
