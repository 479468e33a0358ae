"""An override of a choice replaces the file settings that only apply to the old choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outpace.config.load import dump_settings, load_config
from outpace.errors import BadInput
from support import resolved

LAUNCHED: dict[str, Any] = {
    "engine.kind": "vllm", "engine.count": 2, "engine.seeded": True, "launch.python": "/opt/vllm/bin/python",
    "launch.args": ["--flag"], "launch.start_s": 99.0, "weights.transport": "memory",
}  # fmt: skip
RUNNING: dict[str, Any] = {"engine.kind": "vllm", "engine.urls": ["http://a:1", "http://b:1"], "weights.dir": "/shared"}


def write_run_config(directory: Path, settings: dict[str, Any]) -> Path:
    file = directory / "config.toml"
    file.write_text(dump_settings(resolved(settings)))
    return file


@pytest.mark.parametrize("settings", [LAUNCHED, RUNNING])
def test_a_run_with_server_engines_can_switch_to_the_embedded_engine(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = load_config(write_run_config(tmp_path, settings), ["--engine.kind", "embedded"])
    assert (config.engine.kind, config.engine.urls, config.engine.count) == ("embedded", [], None)
    assert (config.launch.python, config.weights.transport, config.weights.dir) == (None, "auto", None)


def test_a_run_with_the_embedded_engine_can_switch_to_server_engines(tmp_path: Path) -> None:
    file = write_run_config(tmp_path, {"engine.decoder": "general"})
    assert load_config(file, ["--engine.kind=vllm"]).engine.decoder == "auto"


def test_running_servers_replace_launched_servers_and_vice_versa(tmp_path: Path) -> None:
    config = load_config(write_run_config(tmp_path, LAUNCHED), ["--engine.urls", "http://c:1"])
    assert (config.engine.urls, config.launch.python, config.launch.args) == (["http://c:1"], None, [])
    config = load_config(write_run_config(tmp_path, RUNNING), ["--launch.python", "/opt/python"])
    assert (config.engine.urls, config.launch.python) == ([], "/opt/python")


def test_a_conflicting_setting_given_with_the_override_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^launch\.port: .*engine\.kind"):
        load_config(write_run_config(tmp_path, LAUNCHED), ["--engine.kind=embedded", "--launch.port=8000"])


def test_an_override_with_the_same_engine_kind_keeps_the_other_settings(tmp_path: Path) -> None:
    config = load_config(write_run_config(tmp_path, LAUNCHED), ["--engine.kind=vllm", "--run.steps=7"])
    assert (config.launch.python, config.launch.args, config.engine.count) == ("/opt/vllm/bin/python", ["--flag"], 2)


def test_another_policy_loss_or_estimator_replaces_the_settings_of_the_one_in_the_file(tmp_path: Path) -> None:
    chosen = {"policy_loss.name": "ppo", "policy_loss.clip_low": 0.1, "policy_loss.old_policy": "rollout"}
    file = write_run_config(tmp_path, {**chosen, "advantage.name": "grpo", "advantage.std_epsilon": 0.5})
    loss = load_config(file, ["--policy_loss.name", "gspo"]).policy_loss
    assert (loss.name, loss.old_policy, loss.model_extra) == ("gspo", "rollout", {})
    advantage = load_config(file, ["--advantage.name", "rloo"]).advantage
    assert (advantage.name, advantage.model_extra) == ("rloo", {})
    with_preset = write_run_config(tmp_path, {"algorithm.preset": "grpo", "policy_loss.clip_low": 0.1})
    assert load_config(with_preset, ["--policy_loss.name", "ppo"]).policy_loss.model_extra == {"clip_low": 0.1}
    file = write_run_config(tmp_path, chosen)
    kept = load_config(file, ["--policy_loss.name", "ppo", "--policy_loss.clip_high", "0.4"]).policy_loss
    assert kept.model_extra == {"clip_low": 0.1, "clip_high": 0.4}


def test_servers_of_another_kind_keep_the_settings_that_both_kinds_have(tmp_path: Path) -> None:
    file = write_run_config(tmp_path, {**LAUNCHED, "engine.retries": 5})
    config = load_config(file, ["--engine.kind", "sglang"])
    assert (config.engine.retries, config.engine.seeded, config.launch.args) == (5, False, [])
