"""An override of the engine kind replaces the file settings that only apply to the old kind."""

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
    file = write_run_config(tmp_path, {"engine.path": "general"})
    assert load_config(file, ["--engine.kind=vllm"]).engine.path == "auto"


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
