"""Every preset and many combinations in the whole system: sample, reward, journal, train, publish, resume."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

import outpace as api
from outpace.config.presets import PRESETS
from support import INLINE, read_lines

Settings = dict[str, Any]

COMBINATIONS: dict[str, Settings] = {
    "kl in the loss, reference synced": {"kl.coefficient": 0.05, "kl.sync_every": 2, "kl.estimator": "unbiased"},
    "kl in the reward": {"kl.coefficient": 0.05, "kl.place": "reward"},
    "entropy": {"algorithm.entropy_coefficient": 0.01},
    "turn credit": {"advantage.credit": "turn", "advantage.gamma": 0.9},
    "token credit": {"advantage.credit": "token"},
    "token credit, discounted": {"advantage.name": "reinforce_pp", "advantage.gamma": 0.9},
    "every mask": {"correction.masks": ["token", "sequence", "geometric", "veto", "opsm", "m2po"]},
    "updates and passes": {
        "algorithm.preset": "decoupled_ppo",
        "algorithm.minibatches": 2,
        "algorithm.epochs_per_batch": 2,
    },
    "shared critic": {"advantage.name": "gae", "critic.shared": True, "advantage.gae_lambda": 0.95},
    "replay": {"replay.fraction": 0.5, "replay.times": 2},
    "rerolls": {"reroll.max_times": 2, "reroll.after_steps": 1, "reroll.solved_above": 0.2},
    "difficulty": {"difficulty.easy_above": 0.9, "difficulty.hard_below": 0.01},
    "shaping and filters": {"rewards.overlong_buffer": 4, "filter.truncated": "mask", "filter.longer_than": 6},
}


def train(settings: Settings, run: Path, more: Settings, resume: bool = False) -> None:
    values = {**settings, "run.dir": str(run), **INLINE, "run.deterministic": True, **more}
    api.Trainer(config=values, quiet=True).train(resume=resume)


def losses(run: Path) -> list[float]:
    return [line["loss/policy"] for line in read_lines(run / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_trains(settings: Settings, tmp_path: Path, preset: str) -> None:
    train(settings, tmp_path / "run", {"algorithm.preset": preset, "run.steps": 3})
    found = losses(tmp_path / "run")
    assert len(found) == 3
    assert all(math.isfinite(loss) for loss in found)
    written = tomllib.loads((tmp_path / "run" / "resolved.toml").read_text())
    assert written["algorithm"]["preset"] == preset


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_combination_is_reproduced_exactly_across_a_checkpoint(
    settings: Settings, tmp_path: Path, name: str
) -> None:
    more = {**COMBINATIONS[name], "run.steps": 4, "checkpoint.every": 2}
    train(settings, tmp_path / "whole", more)
    expected = losses(tmp_path / "whole")
    assert len(expected) == 4
    assert all(math.isfinite(loss) for loss in expected)
    train(settings, tmp_path / "parts", {**more, "run.steps": 2})
    assert losses(tmp_path / "parts") == expected[:2]
    train(settings, tmp_path / "parts", more, resume=True)
    assert losses(tmp_path / "parts") == expected


@pytest.mark.slow
def test_replayed_groups_take_the_places_of_uniform_ones_and_a_resumed_run_repeats_it_exactly(
    settings: Settings, rewards: Path, tmp_path: Path
) -> None:
    more = {"rewards.functions": [f"{rewards}:odd_only"], "filter.uniform": True, "pacing.max_lag": 1}
    more |= {"replay.fraction": 0.5, "replay.mode": "fill", "run.steps": 4, "checkpoint.every": 2}
    train(settings, tmp_path / "whole", more)
    batches = read_lines(tmp_path / "whole" / "batches.jsonl")
    steps = [line["groups"] for line in batches if line["groups"]]
    assert [len(groups) for groups in steps] == [4] * 4
    filled = [sum(group.get("replay", False) for group in groups) for groups in steps]
    assert filled[0] == 0
    assert set(filled[1:]) <= {1, 2}, "half of the tasks are never solved"
    assert [line["replay/filled"] for line in read_lines(tmp_path / "whole" / "metrics.jsonl")] == filled
    train(settings, tmp_path / "parts", {**more, "run.steps": 2})
    train(settings, tmp_path / "parts", more, resume=True)
    assert read_lines(tmp_path / "parts" / "batches.jsonl") == batches
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
