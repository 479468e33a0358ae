"""Killing a random process of a run at a random moment."""

from __future__ import annotations

import os
import random
import signal
import time

from drills.following import Run

LAST_STEP = 5
"""A drill has about eight steps, so some always remain after the kill."""
START_UP_S = 10.0
STEP_S = 0.3


class RandomKill:
    """A hook for `Run.start`: kills once, a random time after a random step or before the first one."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._step = self._draw.randint(0, LAST_STEP)
        self._wait_s = self._draw.uniform(0.0, STEP_S if self._step else START_UP_S)
        self._since: float | None = None
        self.killed_at: float | None = None

    def __call__(self, run: Run) -> None:
        if self.killed_at is not None or run.step_log.last < self._step:
            return
        self._since = self._since or time.time()
        if time.time() >= self._since + self._wait_s and kill_random_role(run, self._draw):
            self.killed_at = time.time()


def kill_random_role(run: Run, draw: random.Random) -> str:
    """Kill one process, with all roles equally likely. Returns its role, or "" if there was no process."""
    roles = sorted(set(run.processes().values()) - {"other"})
    role = draw.choice(roles) if roles else ""
    return role if kill_role(run, role, draw) else ""


def kill_role(run: Run, role: str, draw: random.Random) -> bool:
    """Kill one process of this role. Returns whether there was one."""
    pids = sorted(pid for pid, its_role in run.processes().items() if its_role == role)
    if not pids:
        return False
    try:
        os.kill(draw.choice(pids), signal.SIGKILL)
    except ProcessLookupError:  # it has just ended by itself
        return False
    return True
