"""Building rollouts, environments and tools, named in the config or passed to the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outpace.config.load import make_config
from outpace.config.validation import resolve
from outpace.errors import BadInput
from outpace.rollouts.build import build_rollout
from outpace.rollouts.episode import single_turn
from outpace.rollouts.tool_loop import ToolLoop
from outpace.run.plan import UserObjects, make_plan
from outpace.runtime import by_value

FILE = '''
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


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def untyped(a):
    """Do."""
'''
ROWS = [{"prompt": f"say {number}"} for number in range(8)]


class Local:
    """A class that a script may define next to its trainer."""

    def reset(self, **columns: Any) -> None: ...

    def get_reward(self) -> float:
        return 1.0


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("outpace.run.plan.resolve_model", Path)
    path = tmp_path / "games.py"
    path.write_text(FILE)
    return str(path)


def plan(settings: dict[str, Any], **objects: Any) -> Any:
    return make_plan(make_config(settings), UserObjects(tasks=ROWS, **objects))


def test_an_environment_with_get_reward_needs_no_reward_function(file: str) -> None:
    assert plan({"rollout.environment": f"{file}:Judging"}).config.rewards.functions == []


def test_an_environment_without_get_reward_needs_a_reward_function(file: str) -> None:
    with pytest.raises(BadInput, match=r"^rewards\.functions: "):
        plan({"rollout.environment": f"{file}:Playing"})
    plan({"rollout.environment": f"{file}:Playing"}, rewards=(lambda completions: [0.0] * len(completions),))


@pytest.mark.parametrize(
    ("name", "message"),
    [("Broken", r"Broken\.tool.*docstring"), ("NoReset", r"NoReset.*reset"), ("Absent", r"games\.py.*\bAbsent\b")],
)
def test_an_invalid_environment_is_refused_before_the_run_starts(file: str, name: str, message: str) -> None:
    with pytest.raises(BadInput, match=rf"^rollout\.environment: .*{message}"):
        plan({"rollout.environment": f"{file}:{name}"})


def test_a_config_cannot_name_both_a_rollout_function_and_an_environment() -> None:
    with pytest.raises(BadInput, match=r"^rollout\.environment: .*rollout\.function"):
        make_config({"rollout.function": "m:f", "rollout.environment": "m:C"})
    named = make_config({"tasks.path": "a.jsonl", "rollout.environment": "m:C"})
    assert resolve(named).rewards.functions == []


@pytest.mark.parametrize(
    ("settings", "objects", "message"),
    [
        ({}, {"rollout": single_turn, "environment": Local}, r"^environment: .*rollout"),
        ({"rollout.environment": "games:Judging"}, {"environment": Local}, r"^rollout\.environment: .*\benvironment\b"),
        ({"rollout.agent": ["true"]}, {"rollout": single_turn}, r"^rollout: .*Trainer\(rollout=.*rollout\.agent"),
        ({"rollout.agent": ["true", "missing.py"]}, {"rewards": (len,)}, r"^rollout\.agent: .*missing\.py"),
        (
            {"rollout.agent": ["no-such-agent", "-v"]},
            {"rewards": (len,)},
            r"^rollout\.agent: .*no-such-agent",
        ),
        (
            {"environment.kinds": {"a": "games:Broken"}},
            {},
            r"^environment\.kinds\.a: .*Broken\.tool",
        ),
        ({}, {"rollout": single_turn, "tools": (print,)}, r"^tools: .*rollout"),
        ({"environment.kinds": {"a": "games:Judging"}}, {"environment": Local}, r"^environment\.kinds: .*environment"),
        ({"environment.kinds": {"a": "games:Judging"}}, {}, r"^environment\.column: .*environment"),
        ({"tools.functions": ["games:untyped"]}, {"rewards": (len,)}, r"^tools\.functions: games:untyped.*type hint"),
        ({"tools.functions": ["games:add"]}, {}, r"^rewards\.functions: "),
    ],
)
def test_incompatible_settings_and_arguments_are_refused_before_the_run_starts(
    file: str, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], objects: dict[str, Any], message: str
) -> None:
    monkeypatch.syspath_prepend(Path(file).parent)
    with pytest.raises(BadInput, match=message):
        plan(settings, **objects)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"rollout.function": "m:f", "rollout.agent": ["x"]}, "rollout.agent"),
        ({"rollout.agent": ["x"], "environment.kinds": {"a": "m:C"}}, "environment.kinds"),
        ({"rollout.function": "m:f", "tools.functions": ["m:f"]}, "tools.functions"),
        ({"rollout.agent": ["x"], "tools.mcp": ["x"]}, "tools.mcp"),
    ],
)
def test_a_config_can_name_only_one_kind_of_rollout(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(BadInput, match=f"^{key}: "):
        make_config(settings)


def test_trainer_arguments_reach_the_worker_by_value(file: str) -> None:
    carried = by_value.unpickle_objects(plan({}, environment=Local).code)
    assert carried["environment"].__name__ == "Local"
    assert "rollout" not in carried


async def test_the_worker_builds_the_rollout_that_is_passed_or_named(file: str) -> None:
    assert (await build_rollout(make_config({}))).rollout is single_turn
    assert isinstance((await build_rollout(make_config({}), {"environment": Local})).rollout, ToolLoop)
    assert isinstance((await build_rollout(make_config({"rollout.environment": f"{file}:Judging"}))).rollout, ToolLoop)
    assert isinstance((await build_rollout(make_config({"tools.functions": [f"{file}:add"]}))).rollout, ToolLoop)
    own = (await build_rollout(make_config({"rollout.function": f"{file}:roll"}))).rollout
    assert getattr(own, "__name__", "") == "roll"


async def test_the_tool_loop_has_the_tools_and_limits_of_the_config(file: str) -> None:
    config = make_config({"rollout.max_turns": 3, "tools.functions": [f"{file}:add"], "tools.timeout_s": 2.0})
    rollout = (await build_rollout(config)).rollout
    assert isinstance(rollout, ToolLoop)
    assert rollout.limits == config.rollout
    assert (list(rollout.sources[0].tools), rollout.tool_limits.timeout_s) == (["add"], 2.0)


async def test_evaluation_has_the_rollout_of_training_unless_another_is_passed_or_named(file: str) -> None:
    own = {"eval.rollout": f"{file}:roll"}
    for config, given in (({}, {}), ({}, {"rollout": single_turn}), ({"rollout.function": f"{file}:roll"}, {})):
        built = await build_rollout(make_config(config), given)
        assert built.evaluation is built.rollout
    for training in ({}, {"tools.functions": [f"{file}:add"]}):
        named = await build_rollout(make_config(training | own))
        assert getattr(named.evaluation, "__name__", "") == "roll"
        passed = await build_rollout(make_config(training), {"eval_rollout": single_turn})
        assert passed.evaluation is single_turn
        assert passed.rollout is not named.evaluation


async def test_the_tool_loop_of_evaluation_has_the_token_limit_of_evaluation(file: str) -> None:
    config = make_config({"tools.functions": [f"{file}:add"], "rollout.max_tokens": 8, "eval.max_tokens": 99})
    built = await build_rollout(config)
    assert isinstance(built.rollout, ToolLoop)
    assert isinstance(built.evaluation, ToolLoop)
    assert (built.rollout.limits.max_tokens, built.evaluation.limits.max_tokens) == (8, 99)
    assert built.evaluation.sources is built.rollout.sources


@pytest.mark.parametrize(
    ("settings", "objects", "key"),
    [
        ({"eval.rollout": "games:nothing"}, {}, "eval.rollout"),
        ({"eval.rollout": "games:Playing"}, {}, "eval.rollout"),
        ({"eval.rollout": "games:roll"}, {"eval_rollout": single_turn}, "eval.rollout"),
        ({}, {"eval_rollout": lambda task: None}, "eval_rollout"),
    ],
)
def test_a_rollout_of_evaluation_that_cannot_be_used_is_refused_before_the_run_starts(
    file: str, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], objects: dict[str, Any], key: str
) -> None:
    monkeypatch.syspath_prepend(Path(file).parent)
    with pytest.raises(BadInput, match=f"^{key}: "):
        plan(settings, rewards=(lambda completions: [0.0] * len(completions),), **objects)
