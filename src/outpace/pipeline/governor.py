"""MERGED"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True)
class GovernorSettings:
    ess_min: float
    kl_max: float
    patience: int
    min_lag: int


class GovernorState(msgspec.Struct, frozen=True):
    """Checkpointed governor state."""

    lag: int | None = None  # None: max_lag, as set when the run resumes
    good: int = 0
    lowered_at: int = 0
    changed_at: int = 0


class Governor:
    """Adjusts the allowed lag by how off-policy batches are. Without settings it is always `max_lag`."""

    def __init__(self, settings: GovernorSettings | None, max_lag: int, state: GovernorState) -> None:
        self._settings = settings
        self._max = max_lag
        self._min = max_lag if settings is None else min(settings.min_lag, max_lag)
        self.lag = max(self._min, max_lag if state.lag is None else min(state.lag, max_lag))
        self._good = state.good
        self._lowered_at = state.lowered_at  # first group admitted since the last decrease
        self._changed_at = state.changed_at  # first group admitted since the last change

    def state(self) -> GovernorState:
        if self._settings is None:
            return GovernorState()
        lag = None if self.lag == self._max else self.lag
        return GovernorState(lag, self._good, self._lowered_at, self._changed_at)

    def hear(self, ess: float, kl: float, oldest: int, next_group: int) -> int:
        """Record a trained batch whose first admitted group was `oldest`; return the change of the allowed lag.

        `next_group` is the number of the next group to be admitted. NaN metrics count as bad."""
        if self._settings is None or oldest < self._lowered_at:
            return 0
        if not (ess >= self._settings.ess_min and kl <= self._settings.kl_max):
            return self._move(-1, next_group)
        if oldest >= self._changed_at:
            self._good += 1
        return self._move(+1, next_group) if self._good >= self._settings.patience else 0

    def _move(self, by: int, next_group: int) -> int:
        self._good = 0
        if not self._min <= self.lag + by <= self._max:
            return 0
        self.lag += by
        self._changed_at = next_group
        if by < 0:
            self._lowered_at = next_group
        return by
