"""MERGED"""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(peak: float, step: int, total_steps: int | None, schedule: Schedule, warmup_steps: int) -> float:
    """Return the learning rate of step `step`, counted from 0.

    Warm-up rises linearly; step 0 is already above 0, and step `warmup_steps` is the first at `peak`. `linear` and
    `cosine` then decay to 0, reached one step after the last. Without `total_steps` they stay at `peak`; beyond
    `total_steps` they stay at 0.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "constant" or total_steps is None:
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
