"""How stale the data may be right now: the lag in force, between a floor and the configured bound.

After every step the governor hears how well the batch fitted the policy that trained on it. Where the effective sample
size fell too low or the mismatch KL rose too high, the lag in force goes down by one; `patience` good batches in a row
raise it by one again. It changes what is admitted from now on, never the deadline of a group already admitted.

Invariants
- min_lag <= lag in force <= max_lag, and it moves by at most one per step.
- Between two decreases there is a bad batch made of nothing but groups admitted after the former one. A decrease shows
  in batches only when those admitted before it are used up, `lag` versions later; until then bad batches repeat what
  is known already, and are not heard.
- Between a change and the raise after it there are `patience` good batches, no bad one among them, of nothing but
  groups admitted since that change: what was made under another lag does not recommend this one.
- A bad batch from before a raise does count: it was bad at less than the lag in force.

Groups are numbered in the order of admission, over resumes too, so "since" is a comparison of numbers. Every group
admitted before a change is trained or gone within `max_lag` + 1 batches (later only where on_stale = train moves
deadlines), so hearing is never switched off for good.
"""

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
    """What a checkpoint keeps of the governor."""

    lag: int | None = None  # None: max_lag, whatever it is when the run goes on
    good: int = 0
    lowered_at: int = 0
    changed_at: int = 0


class Governor:
    """Without settings the lag in force is `max_lag`, always."""

    def __init__(self, settings: GovernorSettings | None, max_lag: int, state: GovernorState) -> None:
        self._settings = settings
        self._max = max_lag
        self._min = max_lag if settings is None else min(settings.min_lag, max_lag)
        self.lag = max(self._min, max_lag if state.lag is None else min(state.lag, max_lag))
        self._good = state.good
        self._lowered_at = state.lowered_at  # the first group admitted since the last decrease
        self._changed_at = state.changed_at  # the same since the last change

    def state(self) -> GovernorState:
        if self._settings is None:
            return GovernorState()
        lag = None if self.lag == self._max else self.lag
        return GovernorState(lag, self._good, self._lowered_at, self._changed_at)

    def hear(self, ess: float, kl: float, oldest: int, next_group: int) -> int:
        """A batch was trained whose first admitted group was `oldest`; returns by how much the lag in force changed.

        `next_group` is the number of the next group to be admitted. A figure that is no number is no good one."""
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
