"""The runs of the drills: each takes seconds and includes every kind of work."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drills import toy

TASKS = 24
EPOCHS = 2
CODE = Path(toy.__file__).resolve()


@dataclass(frozen=True)
class Assets:
    model: Path
    tasks: Path
    heldout: Path

    @classmethod
    def write(cls, home: Path, tasks: int = TASKS, with_failures: bool = True) -> Assets:
        home.mkdir(parents=True, exist_ok=True)
        return cls(
            toy.write_model(home / "model"),
            toy.write_tasks(home / "tasks.jsonl", tasks, with_failures),
            toy.write_tasks(home / "heldout.jsonl", 4, with_failures=False),
        )


@dataclass(frozen=True)
class Mode:
    settings: dict[str, Any] = field(default_factory=dict)
    deterministic: bool = False
    tasks: int = TASKS
    epochs: int = EPOCHS
    is_toy: bool = True

    def arguments(self, assets: Assets) -> list[str]:
        settings = {
            **COMMON,
            **(toy_settings(assets) if self.is_toy else {}),
            "tasks.limit": self.tasks,
            "run.epochs": self.epochs,
            "run.deterministic": self.deterministic,
            **self.settings,
        }
        return as_arguments(settings)


def toy_settings(assets: Assets) -> dict[str, Any]:
    return {
        "model.path": str(assets.model),
        "tasks.path": str(assets.tasks),
        "tasks.eval_path": str(assets.heldout),
        "rewards.functions": [f"{CODE}:share"],
        "rollout.max_tokens": 6,
    }


def as_arguments(settings: dict[str, Any]) -> list[str]:
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]


COMMON: dict[str, Any] = {
    "rollout.group_size": 4,
    "pacing.groups_per_step": 4,
    "pacing.chunk_groups": 2,
    "engine.slots": 16,
    "learner.lr": 1e-3,
    "checkpoint.every": 2,
    "eval.every": 3,
    "eval.count": 4,
    "run.stall_s": 120.0,
    "run.threads": 1,
    "run.device": "cpu",
}

MODES = {
    "lag0": Mode({"pacing.max_lag": 0}, deterministic=True),
    "lag2": Mode({"pacing.max_lag": 2, "checkpoint.every": 3}, deterministic=True),
    "free": Mode({"pacing.max_lag": 2, "rollout.workers": 2}),
    "agent": Mode(
        {
            "model.path": "starter-agent",
            "tasks.name": "guess",
            "rollout.max_turns": 3,
            "environment.isolation": "process",
            "pacing.max_lag": 2,
        },
        tasks=12,
        is_toy=False,
    ),
}
