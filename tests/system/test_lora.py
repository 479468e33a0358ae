"""LoRA in the whole system, with the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import outpace as api
from outpace.errors import BadInput
from support import INLINE, read_lines

Settings = dict[str, Any]


def train(settings: Settings, run: Path, resume: bool = False, **more: Any) -> api.Summary:
    dotted = {key.replace("__", "."): value for key, value in more.items()}
    values = {**settings, "run.dir": str(run), **INLINE, "run.deterministic": True, **dotted}
    return api.Trainer(config=values, quiet=True).train(resume=resume)


def losses_and_rewards(run: Path) -> list[tuple[float, float]]:
    return [(line["loss/policy"], line["reward/mean"]) for line in read_lines(run / "metrics.jsonl")]


@pytest.fixture
def lora_settings(settings: Settings) -> Settings:
    return {**settings, "lora.rank": 4, "learner.lr": 1e-2, "checkpoint.every": 2}


@pytest.mark.slow
def test_a_resumed_lora_run_matches_an_uninterrupted_one(lora_settings: Settings, tmp_path: Path) -> None:
    train(lora_settings, tmp_path / "whole", run__steps=4)
    train(lora_settings, tmp_path / "parts", run__steps=2)
    train(lora_settings, tmp_path / "parts", resume=True, run__steps=4)
    assert losses_and_rewards(tmp_path / "parts") == losses_and_rewards(tmp_path / "whole")
    assert len({reward for _, reward in losses_and_rewards(tmp_path / "whole")}) > 1
    with pytest.raises(BadInput, match=r"^--resume: .*lora\.rank\b.*\b4\b") as caught:
        train(lora_settings, tmp_path / "parts", resume=True, run__steps=6, lora__rank=2)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.slow
def test_lora_learns_the_starter_task_at_its_default_learning_rate(tmp_path: Path) -> None:
    settings = {"lora.rank": 8, "run.steps": 8, "pacing.groups_per_step": 8, "eval.count": 0, "checkpoint.every": 0}
    train(settings, tmp_path / "run", run__threads=1)
    rewards = [reward for _, reward in losses_and_rewards(tmp_path / "run")]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards
