from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from outpace.config import Config
from outpace.config.defaults import evaluation_config
from outpace.config.load import load_config, make_config
from outpace.config.validation import resolve
from outpace.errors import BadInput
from support import names


@pytest.mark.parametrize(
    ("values", "key", "expected"),
    [
        ({"rollout.top_p": 0.9}, "rollout.top_p", "1.0"),
        ({"rollout.top_k": 50}, "rollout.top_k", "0"),
        ({"rollout.temperature": 0}, "rollout.temperature", "greedy eval.temperature"),
        ({"rollout.stop": ["\n", ""]}, "rollout.stop", "empty"),
        ({"eval.stop": [""]}, "eval.stop", "empty"),
        ({"eval.k": [1, 8], "eval.attempts": 4}, "eval.k", "8 eval.attempts 4"),
        ({"eval.k": [0]}, "eval.k", "0"),
        ({"eval.sets": {"a/b": "guess"}}, "eval.sets", "'a/b'"),
        ({"eval.sets": {"reward": "guess"}}, "eval.sets", "'reward'"),
        ({"tasks.name": "countdown", "tasks.path": "a.jsonl"}, "tasks.path", "tasks.name countdown"),
        ({"weights.every": 6}, "weights.every", "pacing.max_lag 4 5"),
        ({"weights.every": 2, "pacing.max_lag": 0}, "weights.every", "pacing.max_lag 0 1"),
        ({"rewards.functions": ["a", "b"], "rewards.weights": [1.0]}, "rewards.weights", "2 1"),
        ({"rewards.functions": ["m:score", "m:score"]}, "rewards.functions", "m:score"),
        ({"rewards.isolation": "thread", "rewards.memory_mb": 512}, "rewards.memory_mb", "rewards.isolation"),
        ({"run.deterministic": True, "weights.update": "drain"}, "weights.update", "run.deterministic"),
        ({"run.deterministic": True, "pacing.on_stale": "drop"}, "pacing.on_stale", 'run.deterministic "drop" "wait"'),
        ({"run.deterministic": True, "run.device": "cuda"}, "run.device", "run.deterministic cpu"),
    ],
)
def test_conflicting_settings_are_refused(values: dict[str, Any], key: str, expected: str) -> None:
    with pytest.raises(BadInput) as caught:
        make_config(values)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(f"{key}: ")
    assert names(message, expected)


@pytest.mark.parametrize(
    "values",
    [
        {"weights.every": 3},
        {"pacing.max_lag": 0},
        {"eval.temperature": 0, "eval.top_p": 0.9, "eval.top_k": 20},
        {"eval.k": [1, 4], "eval.attempts": 4, "eval.sets": {"aime-24.v2": "aime.jsonl"}},
        {"run.deterministic": True, "run.device": "cpu"},
    ],
)
def test_settings_at_the_limits_of_the_rules_are_accepted(values: dict[str, Any]) -> None:
    make_config(values)


def test_the_starter_model_gets_its_own_defaults() -> None:
    config = resolve(Config(), now=datetime(2030, 1, 2, 3, 4, 5))
    assert config.learner.lr == 3e-4
    assert config.rollout.max_tokens == 32
    assert config.tasks.name == "countdown"
    assert config.rewards.functions == ["countdown"]
    assert config.run.steps == 100
    assert config.run.dir == "runs/20300102-030405"
    assert (config.engine.slots, config.pacing.max_running) == (512, 1024)
    assert config.eval.temperature == 1.0


@pytest.mark.parametrize(
    ("values", "slots"),
    [
        ({"pacing.groups_per_step": 32}, 256),
        ({"pacing.groups_per_step": 2}, 64),
        ({"pacing.groups_per_step": 512}, 512),
        ({"engine.count": 2}, 256),
        ({"engine.slots": 7}, 7),
        ({"model.path": "some/model"}, 64),
        ({"engine.kind": "vllm"}, 64),
        ({"run.deterministic": True}, 64),
    ],
)
def test_small_models_decode_a_batch_at_once(values: dict[str, Any], slots: int) -> None:
    assert resolve(make_config(values)).engine.slots == slots


def test_other_models_get_their_own_defaults() -> None:
    config = resolve(make_config({"model.path": "some/model"}))
    assert (config.learner.lr, config.rollout.max_tokens) == (1e-6, 512)


def test_given_settings_are_kept() -> None:
    given = {
        "learner.lr": 1e-4,
        "rollout.max_tokens": 7,
        "rollout.temperature": 0.7,
        "pacing.max_running": 3,
        "eval.temperature": 0,
        "run.dir": "here",
        "run.steps": 5,
        "tasks.name": "arithmetic",
        "rewards.functions": ["mine:score"],
        "run.device": "cpu",
        "run.deterministic": True,
    }
    config = make_config(given)
    resolved = resolve(config)
    assert resolved.rewards == config.rewards
    assert resolved.eval.temperature == 0
    assert resolved.run == config.run
    assert resolved.learner.lr == config.learner.lr
    assert resolved.rollout == config.rollout
    assert resolved.tasks == config.tasks


def test_evaluation_follows_the_training_temperature() -> None:
    assert resolve(make_config({"rollout.temperature": 0.7})).eval.temperature == 0.7


def test_epochs_replace_the_default_number_of_steps() -> None:
    assert resolve(make_config({"run.epochs": 2})).run.steps is None
    assert resolve(make_config({"run.epochs": 2, "run.steps": 5})).run.steps == 5


def test_a_chunk_is_never_larger_than_the_batch() -> None:
    assert resolve(make_config({"pacing.groups_per_step": 4})).pacing.chunk_groups == 4


def test_the_arithmetic_task_brings_its_reward() -> None:
    assert resolve(make_config({"tasks.name": "arithmetic"})).rewards.functions == ["number"]


def test_deterministic_runs_use_the_cpu() -> None:
    assert resolve(make_config({"run.deterministic": True})).run.device == "cpu"


@pytest.mark.parametrize("values", [{"tasks.path": "a.jsonl"}, {"tasks.name": "mine"}])
def test_tasks_without_a_reward_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"^rewards\.functions: "):
        resolve(make_config(values))


def test_a_custom_rollout_needs_no_reward_function() -> None:
    assert resolve(make_config({"tasks.path": "a.jsonl", "rollout.function": "m:f"})).rewards.functions == []


def test_reward_weights_are_checked_against_the_default_rewards() -> None:
    with pytest.raises(BadInput, match=r"^rewards\.weights: (?=.*\b1\b).*\b2\b"):
        resolve(make_config({"rewards.weights": [1, 2]}))


def test_python_objects_need_no_task_or_reward_names() -> None:
    config = resolve(Config(), own_tasks=True, own_rewards=True)
    assert config.tasks.name is None
    assert config.rewards.functions == []


def test_resolving_twice_changes_nothing() -> None:
    once = resolve(Config())
    assert resolve(once) == once


def test_resolving_makes_paths_of_function_files_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {
        "tasks.name": "mine.py:tasks",
        "rewards.functions": ["mine.py:score", "number"],
        "tools.functions": ["mine.py:add", "package.tools:add"],
        "environment.kinds": {"maze": "mine.py:Maze", "grid": "package.games:Grid"},
    }
    config = resolve(make_config(settings))
    assert config.tasks.name == f"{tmp_path}/mine.py:tasks"
    assert config.rewards.functions == [f"{tmp_path}/mine.py:score", "number"]
    assert config.tools.functions == [f"{tmp_path}/mine.py:add", "package.tools:add"]
    assert config.environment.kinds == {"maze": f"{tmp_path}/mine.py:Maze", "grid": "package.games:Grid"}
    assert resolve(config) == config


def test_the_environment_of_a_task_can_be_disabled() -> None:
    config = resolve(load_config(None, ["--tasks.name=calculator", "--rollout.environment=none"]))
    assert config.rollout.environment_class is None
    assert config.rewards.functions == ["number"], "the task keeps its reward"
    assert resolve(make_config({"rollout.environment": "none", "rollout.function": "m:f"})).rollout.function == "m:f"


def test_resolving_makes_task_paths_absolute_so_that_a_run_can_resume_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a"}')
    monkeypatch.chdir(tmp_path)
    config = resolve(
        make_config({"tasks.path": "tasks.jsonl", "tasks.eval_path": "owner/dataset", "rewards.functions": ["exact"]})
    )
    assert config.tasks.path == str(tmp_path / "tasks.jsonl")
    assert config.tasks.eval_path == "owner/dataset", "a name on the Hugging Face Hub is not a path"


def test_evaluation_samples_as_training_does_unless_it_has_settings_of_its_own() -> None:
    trained = {"rollout.temperature": 0.7, "rollout.max_tokens": 24, "rollout.stop": ["a"], "run.seed": 3}
    same = evaluation_config(make_config(trained))
    assert same.rollout == make_config(trained).rollout
    assert same.run.seed == same.eval.seed
    own = {"eval.temperature": 0.0, "eval.max_tokens": 99, "eval.stop": [], "eval.top_p": 0.9, "eval.top_k": 5}
    rollout = evaluation_config(make_config(trained | own)).rollout
    assert (rollout.temperature, rollout.max_tokens, rollout.stop) == (0.0, 99, [])
    assert (rollout.top_p, rollout.top_k) == (0.9, 5)


def test_the_sampling_settings_of_evaluation_are_resolved() -> None:
    chosen = resolve(make_config({"rollout.stop": ["x"], "rollout.temperature": 0.5})).eval
    assert (chosen.temperature, chosen.max_tokens, chosen.stop) == (0.5, 32, ["x"])
    assert resolve(make_config({"rollout.max_tokens": 9})).eval.max_tokens == 9


def test_paths_of_held_out_sets_and_the_rollout_of_evaluation_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "aime.jsonl").write_text("")
    sets = {"aime": "aime.jsonl", "hub": "owner/name", "task": "guess", "own": "tasks.py:make"}
    config = resolve(make_config({"eval.sets": sets, "eval.rollout": "agents.py:careful"}))
    assert config.eval.sets == {
        **sets, "aime": str(tmp_path / "aime.jsonl"), "own": f"{tmp_path / 'tasks.py'}:make"
    }  # fmt: skip
    assert config.eval.rollout == f"{tmp_path / 'agents.py'}:careful"
