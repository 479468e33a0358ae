"""Which checkpoint is the best one, by held-out reward.

Only versions that were evaluated and have a checkpoint are compared. Of equals the newest is the best.
"""

from __future__ import annotations

from pathlib import Path

from outpace.checkpoint import commit
from outpace.observe.linefile import read_lines

CHECKPOINTS = "checkpoints"
EVALUATIONS = "evals.jsonl"
REWARD = "eval/reward"


def best_step(run: str | Path) -> int | None:
    """The step of the best checkpoint of a run; None if none was evaluated."""
    return next(iter(best_first(run)), None)


def best_first(run: str | Path) -> list[int]:
    """The steps of all checkpoints that were evaluated. Whether they are whole is another question."""
    rewards = _rewards(Path(run) / EVALUATIONS)
    evaluated = [step for step in commit.steps(Path(run) / CHECKPOINTS) if step in rewards]
    return sorted(evaluated, key=lambda step: (rewards[step], step), reverse=True)


def _rewards(path: Path) -> dict[int, float]:
    """By version. One that was evaluated twice, before and after a resume, has its later reward."""
    return {
        line["step"]: float(line[REWARD])
        for line in read_lines(path)
        if isinstance(line.get("step"), int) and isinstance(line.get(REWARD), int | float)
    }
