"""A run on attempts that were made elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import outpace as api
from outpace.tasks.produced import tasks_of
from support import INLINE, read_lines

GROUPS, ATTEMPTS = 6, 4


def rows(group: int) -> list[dict[str, Any]]:
    """Finished attempts of version 0 at one prompt."""
    noise = np.random.default_rng(group)
    return [
        {
            "prompt": f"say {group}",
            "prompt_ids": [65, 66, 67],
            "completion_ids": noise.integers(60, 90, 5),
            "logprobs": -noise.exponential(1.0, 5),
            "versions": 0,
            "reward": float(attempt),
            "group": group,
        }
        for attempt in range(ATTEMPTS)
    ]


def test_attempts_of_an_old_version_are_trained_on_beyond_the_lag_that_sampling_is_allowed(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    tasks = tasks_of([row for group in range(GROUPS) for row in rows(group)], 0, version=0)
    values = {key: value for key, value in settings.items() if key != "tasks.path"} | INLINE
    values |= {"pacing.groups_per_step": 2, "pacing.max_lag": 0, "run.dir": str(tmp_path / "run"), "run.steps": 3}
    summary = api.Trainer(config=values, tasks=tasks, quiet=True).train()
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [(line["lag/max"], line["throughput/trained_tokens"]) for line in steps] == [(lag, 40) for lag in range(3)]
    assert (summary.steps, summary.tokens_sampled) == (3, 0)
    assert {
        group["task_id"] for line in read_lines(tmp_path / "run" / "batches.jsonl") for group in line["groups"]
    } == {task.id for task in tasks}
