"""Held-out reward of a model on the puzzles of the example scripts."""

from __future__ import annotations

import runpy
from pathlib import Path

import outpace

EXAMPLES = Path(__file__).parents[2] / "examples"


def heldout_reward(model: str | Path) -> float:
    script = runpy.run_path(str(EXAMPLES / "trl_grpo.py"))
    tasks = script["puzzles"]("heldout", 256)
    config = {"eval.count": 256, "rollout.max_tokens": 32}
    trainer = outpace.Trainer(model, tasks, [script["solved"]], config, eval_tasks=tasks, quiet=True)
    reward = trainer.evaluate().reward
    assert reward is not None
    return reward
