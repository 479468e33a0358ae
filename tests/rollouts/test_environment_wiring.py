"""How an environment gets into a run: named in the config or given to the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outpace.config.loading import make_config
from outpace.config.rules import resolve
from outpace.errors import BadInput
from outpace.parts import _rollout
from outpace.planning import Objects, make_plan
from outpace.rollouts.single_turn import single_turn
from outpace.runtime import code

FILE = """
class Judging:
    def reset(self, **columns): ...
    def get_reward(self) -> float:
        return 1.0


class Playing:
    def reset(self, **columns): ...


class Broken(Playing):
    def tool(self, x: int) -> int:
        return x


class NoReset: ...


async def roll(task, client): ...
"""
ROWS = [{"prompt": f"say {number}"} for number in range(8)]


class Local:
    """What a script may define next to its trainer."""

    def reset(self, **columns: Any) -> None: ...

    def get_reward(self) -> float:
        return 1.0


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("outpace.planning.resolve_model", Path)
    path = tmp_path / "games.py"
    path.write_text(FILE)
    return str(path)


def plan(settings: dict[str, Any], **objects: Any) -> Any:
    return make_plan(make_config(settings), Objects(tasks=ROWS, **objects))


def test_an_environment_that_judges_needs_no_reward_function(file: str) -> None:
    assert plan({"rollout.environment": f"{file}:Judging"}).config.rewards.functions == []


def test_an_environment_that_does_not_judge_needs_one(file: str) -> None:
    with pytest.raises(BadInput, match=r"^rewards\.functions: name at least one"):
        plan({"rollout.environment": f"{file}:Playing"})
    plan({"rollout.environment": f"{file}:Playing"}, rewards=(lambda completions: [0.0] * len(completions),))


@pytest.mark.parametrize(
    ("name", "said"),
    [("Broken", "needs a docstring"), ("NoReset", "has no method reset"), ("Absent", "has no function Absent")],
)
def test_an_environment_that_cannot_work_is_refused_before_the_start(file: str, name: str, said: str) -> None:
    with pytest.raises(BadInput, match=r"^rollout\.environment: ") as caught:
        plan({"rollout.environment": f"{file}:{name}"})
    assert said in str(caught.value)


def test_a_config_names_a_rollout_or_an_environment() -> None:
    with pytest.raises(BadInput, match=r"^rollout\.environment: .*keep one of the two"):
        make_config({"rollout.function": "m:f", "rollout.environment": "m:C"})
    named = make_config({"tasks.path": "a.jsonl", "rollout.environment": "m:C"})
    assert resolve(named).rewards.functions == []


def test_a_script_gives_one_of_them_too(file: str) -> None:
    with pytest.raises(BadInput, match=r"^rollout: .* keep one"):
        plan({}, rollout=single_turn, environment=Local)
    with pytest.raises(BadInput, match=r"^rollout: .* keep one"):
        plan({"rollout.environment": f"{file}:Judging"}, environment=Local)


def test_a_class_that_is_given_reaches_the_worker_by_value(file: str) -> None:
    carried = code.unpack(plan({}, environment=Local).code)
    assert carried["environment"].__name__ == "Local"
    assert "rollout" not in carried


def test_the_worker_rolls_out_what_is_given_or_named(file: str) -> None:
    named = make_config({"rollout.environment": f"{file}:Judging"})
    assert _rollout(make_config({}), None) is single_turn
    assert _rollout(make_config({}), Local).__qualname__.startswith("as_rollout")
    assert _rollout(named, None).__qualname__.startswith("as_rollout")
    assert _rollout(make_config({"rollout.function": f"{file}:roll"}), None).__name__ == "roll"
