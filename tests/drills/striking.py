"""Killing a random process of a run at a random moment."""

from __future__ import annotations

import os
import random
import signal
import time

from drills.following import Run

LATEST_S = 16.0
"""A drill takes about so long; one that has ended before its moment came is struck in the middle of nothing."""


class AtRandom:
    """A hook for `Run.start`: strikes once, in the first start."""

    def __init__(self, seed: int, latest_s: float = LATEST_S) -> None:
        self._draw = random.Random(seed)
        self._moment = time.time() + self._draw.uniform(0.0, latest_s)
        self.struck_at: float | None = None
        self.struck = ""

    def __call__(self, run: Run) -> None:
        if self.struck_at is None and time.time() >= self._moment:
            self.struck = strike(run, self._draw)
            self.struck_at = time.time() if self.struck else None


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
