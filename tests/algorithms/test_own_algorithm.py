"""A user-defined policy loss and advantage estimator: one decorated function each, quoted verbatim in the docs."""

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
POLICY_LOSS, ADVANTAGE = f"{EXAMPLE}:banded_is", f"{EXAMPLE}:above_median"
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
    """Return the losses of a short run; keywords are keys of `[policy_loss]`, or dotted keys with `__` for the dot."""
    named = {key.replace("__", ".") if "__" in key else f"policy_loss.{key}": value for key, value in settings.items()}
    outpace.Trainer(config={**QUICK, **named, "run.dir": str(directory)}, quiet=True).train()
    return [line["loss/policy"] for line in read_lines(directory / "metrics.jsonl")]


def source_of(reference: str) -> str:
    return inspect.getsource(load_function(reference, "algorithm"))


@pytest.mark.parametrize("reference", [POLICY_LOSS, ADVANTAGE])
def test_the_documentation_quotes_the_example_verbatim(reference: str) -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    assert f"```python\n{source_of(reference)}```\n" in text


@pytest.mark.parametrize("reference", [POLICY_LOSS, ADVANTAGE])
def test_each_definition_is_one_function_with_one_decorator(reference: str) -> None:
    [function] = ast.parse(source_of(reference)).body
    assert isinstance(function, ast.FunctionDef)
    assert len(function.decorator_list) == 1


def test_a_decorated_function_in_a_file_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    opening = "from __future__ import annotations\nimport numpy as np\nimport outpace\n"
    file.write_text(opening + source_of(POLICY_LOSS) + source_of(ADVANTAGE))
    settings = {"policy_loss.name": f"{file}:banded_is", "advantage.name": f"{file}:above_median"}
    config = resolved(settings)
    assert config.policy_loss.model_extra == {"cap": 2.0, "floor": 0.5}
    assert config.policy_loss.old_policy == "rollout"
    assert (config.advantage.credit, config.advantage.normalizer) == ("episode", "none")


def test_the_registry_finds_both_by_reference_and_lists_neither_as_built_in() -> None:
    assert POLICY_LOSSES.find(POLICY_LOSS).parameters == {"cap": 2.0, "floor": 0.5}
    assert ADVANTAGES.find(ADVANTAGE).additive
    assert "banded_is" not in POLICY_LOSSES.built_in
    assert "above_median" not in ADVANTAGES.built_in


def test_the_policy_loss_has_its_documented_gradient() -> None:
    logp_N = torch.tensor([-3.0, -1.0, -0.1], dtype=torch.float64, requires_grad=True)
    sampler_N = torch.full((3,), -1.1, dtype=torch.float64)
    advantages_N = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    tokens = outpace.Tokens(logp_N, sampler_N, sampler_N, advantages_N, torch.zeros(3, dtype=torch.int64), 1)
    loss_N = load_function(POLICY_LOSS, "algorithm")(tokens, cap=2.0, floor=0.5)
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), logp_N)
    assert gradient_N.tolist() == pytest.approx([-0.5 * 1.0, np.exp(0.1) * 2.0, -2.0 * 0.5])


@pytest.mark.slow
def test_a_run_with_settings_equivalent_to_built_in_functions_repeats_their_losses_bitwise(tmp_path: Path) -> None:
    """Without a floor `banded_is` equals `truncated_is`; the median of two attempts is their mean."""
    alike: dict[str, Any] = {"correction__masks": ["opsm"]}
    built_in = trained(tmp_path / "built_in", name="truncated_is", advantage__name="dr_grpo", **alike)
    own = trained(tmp_path / "own", name=POLICY_LOSS, advantage__name=ADVANTAGE, floor=0.0, **alike)
    assert own == built_in
    assert all(loss != 0 for loss in own)


def test_a_run_uses_the_policy_loss_and_its_setting(tmp_path: Path) -> None:
    """With the floor at 1, every token that became less likely has full weight from the first step on."""
    without_floor = trained(tmp_path / "without", name=POLICY_LOSS, floor=0.0)
    with_floor = trained(tmp_path / "with", name=POLICY_LOSS, floor=1.0)
    assert with_floor[0] != without_floor[0]


def test_a_run_uses_the_estimator(tmp_path: Path) -> None:
    trained(tmp_path / "run", advantage__name=ADVANTAGE, rollout__group_size=5)
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
    assert Quick.given["policy_loss.name"] == POLICY_LOSS
    assert Quick.given["advantage.name"] == ADVANTAGE


class Quick(outpace.Trainer):
    """The trainer of the script, with settings for a run of seconds."""

    given: dict[str, Any] = {}

    def __init__(self, model: str, tasks: str, config: dict[str, Any]) -> None:
        Quick.given = config
        super().__init__(model, tasks, config={**config, **QUICK, "eval.count": 4}, quiet=True)
