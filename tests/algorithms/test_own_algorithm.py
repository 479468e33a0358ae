"""A user's own surrogate and estimator: one function and one decorator each, shown in the documentation as they are."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import outpace
from outpace.algorithms import ADVANTAGES, POLICY_LOSSES
from outpace.runtime.references import load_function
from support import journalled, read_lines, resolved

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_algorithm.py"
SURROGATE, ADVANTAGE = f"{EXAMPLE}:banded_is", f"{EXAMPLE}:above_median"
LONGEST_SCRIPT = 80

QUICK: dict[str, Any] = {
    "rollout.group_size": 2,
    "rollout.max_tokens": 16,
    "pacing.groups_per_step": 4,
    "pacing.chunk_groups": 2,
    "engine.slots": 16,
    "engine.context": 64,
    "learner.lr": 1e-3,
    "eval.count": 0,
    "run.steps": 2,
    "run.deterministic": True,
    "run.runtime": "inline",
    "run.threads": 1,
}


def trained(directory: Path, **settings: Any) -> list[float]:
    """The losses of a short run; keywords are keys of `[algorithm]`, or of another section with `__` for its dot."""
    named = {key.replace("__", ".") if "__" in key else f"algorithm.{key}": value for key, value in settings.items()}
    outpace.Trainer(config={**QUICK, **named, "run.dir": str(directory)}, quiet=True).train()
    return [line["loss/policy"] for line in read_lines(directory / "metrics.jsonl")]


def source_of(reference: str) -> str:
    return inspect.getsource(load_function(reference, "algorithm"))


@pytest.mark.parametrize("reference", [SURROGATE, ADVANTAGE])
def test_the_documentation_shows_the_code_of_the_example_as_it_is(reference: str) -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    assert f"```python\n{source_of(reference)}```\n" in text


@pytest.mark.parametrize("reference", [SURROGATE, ADVANTAGE])
def test_each_is_one_function_under_one_decorator(reference: str) -> None:
    [function] = ast.parse(source_of(reference)).body
    assert isinstance(function, ast.FunctionDef)
    assert len(function.decorator_list) == 1


def test_nothing_beside_function_and_decorator_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    opening = "from __future__ import annotations\nimport numpy as np\nimport outpace\n"
    file.write_text(opening + source_of(SURROGATE) + source_of(ADVANTAGE))
    settings = {"algorithm.surrogate": f"{file}:banded_is", "algorithm.advantage": f"{file}:above_median"}
    algorithm = resolved(settings).algorithm
    assert (algorithm.cap, algorithm.clip_low, algorithm.anchor) == (2.0, 0.5, "rollout")
    assert (algorithm.credit, algorithm.normalise) == ("episode", "none")


def test_the_registry_finds_both_by_reference_and_takes_neither_for_a_built_in_one() -> None:
    assert POLICY_LOSSES.find(SURROGATE).parameters == {"cap": 2.0, "clip_low": 0.5}
    assert ADVANTAGES.find(ADVANTAGE).additive
    assert "banded_is" not in POLICY_LOSSES.built_in
    assert "above_median" not in ADVANTAGES.built_in


def test_the_surrogate_has_the_gradient_that_its_text_says() -> None:
    logp_N = torch.tensor([-3.0, -1.0, -0.1], dtype=torch.float64, requires_grad=True)
    sampler_N = torch.full((3,), -1.1, dtype=torch.float64)
    advantages_N = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    tokens = outpace.Tokens(logp_N, sampler_N, sampler_N, advantages_N, torch.zeros(3, dtype=torch.int64), 1)
    loss_N = load_function(SURROGATE, "algorithm")(tokens, cap=2.0, clip_low=0.5)
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), logp_N)
    assert gradient_N.tolist() == pytest.approx([-0.5 * 1.0, np.exp(0.1) * 2.0, -2.0 * 0.5])


def test_a_run_with_both_at_the_settings_of_built_in_ones_repeats_their_losses_bit_for_bit(tmp_path: Path) -> None:
    """Without a floor `banded_is` is `truncated_is`; of two attempts the median is the mean."""
    alike: dict[str, Any] = {"correction__masks": ["opsm"]}
    built_in = trained(tmp_path / "built_in", surrogate="truncated_is", advantage="dr_grpo", **alike)
    own = trained(tmp_path / "own", surrogate=SURROGATE, advantage=ADVANTAGE, clip_low=1.0, **alike)
    assert own == built_in
    assert all(loss != 0 for loss in own)


def test_a_run_uses_the_surrogate_and_its_setting(tmp_path: Path) -> None:
    """With the floor at 1 every token that became less likely counts in full, from the first step on."""
    without_floor = trained(tmp_path / "without", surrogate=SURROGATE, clip_low=1.0)
    with_floor = trained(tmp_path / "with", surrogate=SURROGATE, clip_low=0.0)
    assert with_floor[0] != without_floor[0]


def test_a_run_uses_the_estimator(tmp_path: Path) -> None:
    trained(tmp_path / "run", advantage=ADVANTAGE, rollout__group_size=5)
    groups = journalled(tmp_path / "run" / "journal").values()
    for group in groups:
        expected = np.array(group.rewards) - np.median(group.rewards)
        assert [row.advantages[row.mask][0] for row in group.rows] == expected[
            [row.episode for row in group.rows]
        ].tolist()
    assert {float(row.advantages[row.mask][0]) for group in groups for row in group.rows} <= {-1.0, 0.0, 1.0}
    assert len(groups) >= QUICK["run.steps"] * QUICK["pacing.groups_per_step"]


def test_the_example_is_a_complete_script_that_trains_with_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= LONGEST_SCRIPT
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(outpace, "Trainer", Quick)
    load_function(f"{EXAMPLE}:main", "example")()
    assert Quick.given["algorithm.surrogate"] == SURROGATE
    assert Quick.given["algorithm.advantage"] == ADVANTAGE


class Quick(outpace.Trainer):
    """The script's own trainer, with a run of seconds."""

    given: dict[str, Any] = {}

    def __init__(self, model: str, tasks: str, config: dict[str, Any]) -> None:
        Quick.given = config
        super().__init__(model, tasks, config={**config, **QUICK, "eval.count": 4}, quiet=True)
