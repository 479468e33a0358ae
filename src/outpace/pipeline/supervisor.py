"""What to do about a part that has died. Pure: the time comes with every question.

    learner    the run ends, resumable: nothing but its checkpoint can replace it, and a failed learner never commits
    engine     it is started again and serves nothing before its first load
    worker     it is started again, and what it was at is done anew

A part that keeps dying is no bad luck: `restarts` within `window_s` is the budget of each.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Literal

from outpace.wording import plural

Role = Literal["learner", "engine", "worker"]

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class SuperviseSettings:
    restarts: int
    window_s: float


@dataclass(frozen=True)
class Restart:
    """Start it again after a pause, which grows while it keeps dying."""

    pause_s: float


@dataclass(frozen=True)
class GiveUp:
    """The run ends; `reason` goes behind the part's own account."""

    reason: str


Decision = Restart | GiveUp


class Supervisor:
    def __init__(self, settings: SuperviseSettings) -> None:
        self._settings = settings
        self._deaths: defaultdict[str, deque[float]] = defaultdict(deque)
        self.restarts = 0

    def died(self, part: str, role: Role, now: float) -> Decision:
        if role == "learner":
            return GiveUp("the run can be resumed from its newest checkpoint")
        recent = self._deaths[part]
        while recent and recent[0] <= now - self._settings.window_s:
            recent.popleft()
        if len(recent) >= self._settings.restarts:
            return GiveUp(self._spent())
        pause_s = 0.0 if not recent else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (len(recent) - 1))
        recent.append(now)
        self.restarts += 1
        return Restart(pause_s)

    def _spent(self) -> str:
        if self._settings.restarts == 0:
            return "supervise.restarts = 0"
        times = plural(self._settings.restarts, "time")
        return f"it was started again {times} within {self._settings.window_s:g} s already"
