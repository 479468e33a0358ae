"""MERGED"""

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
    """Restart the component after a pause, which doubles while it keeps dying."""

    pause_s: float


@dataclass(frozen=True)
class GiveUp:
    """End the run; `reason` is appended to the component's own error."""

    reason: str


Decision = Restart | GiveUp


class Supervisor:
    """Decides whether to restart a dead component: at most `restarts` times within `window_s`. Pure: takes the time
    as an argument."""

    def __init__(self, settings: SuperviseSettings) -> None:
        self._settings = settings
        self._deaths: defaultdict[str, deque[float]] = defaultdict(deque)
        self.restarts = 0

    def died(self, component: str, role: Role, now: float) -> Decision:
        if role == "learner":
            return GiveUp("the run can be resumed from its newest checkpoint")
        recent = self._deaths[component]
        while recent and recent[0] <= now - self._settings.window_s:
            recent.popleft()
        if len(recent) >= self._settings.restarts:
            return GiveUp(self._budget_spent())
        pause_s = 0.0 if not recent else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (len(recent) - 1))
        recent.append(now)
        self.restarts += 1
        return Restart(pause_s)

    def _budget_spent(self) -> str:
        if self._settings.restarts == 0:
            return "supervise.restarts = 0"
        times = plural(self._settings.restarts, "time")
        return f"it was already restarted {times} within {self._settings.window_s:g} s (supervise.restarts)"
