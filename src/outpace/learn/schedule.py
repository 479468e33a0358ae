"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(peak: float, step: int, total_steps: int | None, schedule: Schedule, warmup_steps: int) -> float:
    """The rate of step number `step`, counted from 0.

    Warm-up rises linearly to `peak`, which step `warmup_steps` is the first to have; the very first step already
    moves. `linear` and `cosine` then fall towards 0, which the step after the last would reach. Without a known
    end, and beyond it, they have nowhere to fall from or to: constant, and 0.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "constant" or total_steps is None:
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
