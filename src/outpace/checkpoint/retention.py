"""MERGED"""

from __future__ import annotations

from pathlib import Path

from outpace.checkpoint import commit
from outpace.observe.linefile import read_lines

CHECKPOINTS = "checkpoints"
EVALUATIONS = "evals.jsonl"
REWARD = "eval/reward"


def best_step(run: str | Path) -> int | None:
    """Return the step of the best checkpoint of a run, or None if none was evaluated."""
    return next(iter(best_first(run)), None)


def best_first(run: str | Path) -> list[int]:
    """Return the steps of all evaluated checkpoints, best first. They may be incomplete."""
    rewards = _rewards(Path(run) / EVALUATIONS)
    evaluated = [step for step in commit.steps(Path(run) / CHECKPOINTS) if step in rewards]
    return sorted(evaluated, key=lambda step: (rewards[step], step), reverse=True)


def _rewards(path: Path) -> dict[int, float]:
    """Return held-out rewards by version. After a resume, the later evaluation of a version counts."""
    return {
        line["step"]: float(line[REWARD])
        for line in read_lines(path)
        if isinstance(line.get("step"), int) and isinstance(line.get(REWARD), int | float)
    }
