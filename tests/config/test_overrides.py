"""An override of a choice replaces the file settings that only apply to the old choice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from outpace.config.load import combine, dump_settings, load_config, make_config
from outpace.errors import BadInput
from support import names, resolved

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


PPO = {"policy_loss.name": "ppo"}


@pytest.mark.parametrize(
    ("chosen", "closed", "override"),
    [
        (PPO, {"correction.cap": 3.0, "correction.floor": 0.1}, "--correction.weight=none"),
        ({"correction.masks": ["token"]}, {"correction.token_low": 0.2}, "--correction.masks=none"),
        ({"lora.rank": 4}, {"lora.alpha": 3.0, "lora.targets": ["q_proj"]}, "--lora.rank=0"),
        ({"kl.coefficient": 0.1}, {"kl.place": "reward"}, "--kl.coefficient=0"),
        (PPO, {"policy_loss.clip_low": 0.1}, "--policy_loss.name=reinforce"),
        ({"advantage.name": "gae"}, {"advantage.gamma": 0.9, "advantage.gae_lambda": 0.5}, "--advantage.name=rloo"),
        ({"algorithm.preset": "ppo"}, {"advantage.gae_lambda": 0.5, "critic.clip": 0.5}, "--algorithm.preset=grpo"),
        ({"algorithm.preset": "grpo"}, {"policy_loss.clip_low": 0.1}, "--algorithm.preset=vespo"),
        ({"algorithm.preset": "decoupled_ppo"}, {"correction.cap": 3.0}, "--algorithm.preset=default"),
        ({"replay.fraction": 0.5}, {"replay.times": 2}, "--replay.fraction=0"),
        ({}, {"governor.patience": 2}, "--run.deterministic=true"),
        ({"difficulty.easy_above": 0.9}, {"difficulty.rest_epochs": 2}, "--difficulty.easy_above=none"),
        ({"weights.delta": True}, {"weights.dir": "/shared"}, "--weights.delta=false"),
        (RUNNING, {"engine.retries": 3}, "--engine.kind=embedded"),
    ],
)
def test_an_override_drops_the_settings_that_it_leaves_unread_and_names_them(
    tmp_path: Path,
    chosen: dict[str, Any],
    closed: dict[str, Any],
    override: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write_run_config(tmp_path, {**chosen, **closed})
    config = load_config(file, [override])
    (line,) = capsys.readouterr().err.splitlines()
    assert names(line, " ".join(closed))
    assert config == load_config(write_run_config(tmp_path, chosen), [override])
    file = write_run_config(tmp_path, {**chosen, **closed})
    for key, value in closed.items():
        with pytest.raises(BadInput, match=f"^{re.escape(key)}: "):
            load_config(file, [override, f"--{key}={_as_argument(value)}"])


def _as_argument(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def test_an_override_does_not_hide_a_setting_that_nothing_read_before(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text("[kl]\nplace = 'reward'\n\n[lora]\nrank = 4\nalpha = 3.0\n")
    with pytest.raises(BadInput, match=r"^kl\.place: "):
        load_config(file, ["--lora.rank", "0"])


def test_an_override_that_closes_nothing_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_config(write_run_config(tmp_path, LAUNCHED), ["--run.steps=7"])
    assert capsys.readouterr().err == ""


def test_an_override_that_corrects_the_file_still_replaces_its_servers(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text("[policy_loss]\nname = 'gone.py:loss'\n\n[engine]\nkind = 'vllm'\n\n[launch]\npython = 'python3'\n")
    config = load_config(file, ["--policy_loss.name=ppo", "--engine.urls=http://host:1"])
    assert (config.engine.urls, config.launch.python) == (["http://host:1"], None)


def test_explicit_defaults_of_servers_are_accepted_with_the_embedded_engine(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text("[weights]\ntransport = 'auto'\n\n[launch]\nstart_s = 600.0\nport = 0\n")
    assert load_config(file).engine.kind == "embedded"


def test_a_preset_that_is_not_text_is_rejected_by_name() -> None:
    with pytest.raises(BadInput, match=r"^algorithm\.preset: "):
        make_config(combine({"run.steps": 1}, {"algorithm.preset": ["grpo"]}))
