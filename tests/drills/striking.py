"""Killing a random process of a run at a random moment."""

from __future__ import annotations

import os
import random
import signal
import time

from drills.following import Run

LAST_STEP = 5
"""A drill has some eight: so there is always something left to be disturbed."""
START_UP_S = 10.0
STEP_S = 0.3


class AtRandom:
    """A hook for `SimulatedRun.start`: strikes once, a random moment after a random step, or before the first."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._step = self._draw.randint(0, LAST_STEP)
        self._wait_s = self._draw.uniform(0.0, STEP_S if self._step else START_UP_S)
        self._since: float | None = None
        self.struck_at: float | None = None

    def __call__(self, run: Run) -> None:
        if self.struck_at is not None or run.marks.last < self._step:
            return
        self._since = self._since or time.time()
        if time.time() >= self._since + self._wait_s and strike(run, self._draw):
            self.struck_at = time.time()


def strike(run: Run, draw: random.Random) -> str:
    """Kill one process, every role being as likely as the others; returns what it was, if anything was there."""
    roles = sorted(set(run.processes().values()) - {"other"})
    role = draw.choice(roles) if roles else ""
    return role if strike_role(run, role, draw) else ""


def strike_role(run: Run, role: str, draw: random.Random) -> bool:
    """Kill one process of this role; whether there was one."""
    pids = sorted(pid for pid, its in run.processes().items() if its == role)
    if not pids:
        return False
    try:
        os.kill(draw.choice(pids), signal.SIGKILL)
    except ProcessLookupError:  # it ended by itself in this very moment
        return False
    return True
