"""What a file says of one kind of engine does not stand in the way of another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outpace.config.load import dump_toml, load_config
from outpace.errors import BadInput
from support import resolved

LAUNCHED: dict[str, Any] = {
    "engine.kind": "vllm", "engine.count": 2, "engine.seeded": True, "launch.python": "/opt/vllm/bin/python",
    "launch.args": ["--flag"], "launch.start_s": 99.0, "weights.transport": "memory",
}  # fmt: skip
RUNNING: dict[str, Any] = {"engine.kind": "vllm", "engine.urls": ["http://a:1", "http://b:1"], "weights.dir": "/shared"}


def left_by_a_run(directory: Path, settings: dict[str, Any]) -> Path:
    file = directory / "config.toml"
    file.write_text(dump_toml(resolved(settings)))
    return file


@pytest.mark.parametrize("settings", [LAUNCHED, RUNNING])
def test_a_run_with_servers_goes_on_with_the_embedded_engine(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = load_config(left_by_a_run(tmp_path, settings), ["--engine.kind", "embedded"])
    assert (config.engine.kind, config.engine.urls, config.engine.count) == ("embedded", [], None)
    assert (config.launch.python, config.weights.transport, config.weights.dir) == (None, "auto", None)


def test_a_run_with_the_embedded_engine_goes_on_with_servers(tmp_path: Path) -> None:
    file = left_by_a_run(tmp_path, {"engine.path": "general"})
    assert load_config(file, ["--engine.kind=vllm"]).engine.path == "auto"


def test_servers_that_run_take_the_place_of_those_to_be_started_and_the_other_way_round(tmp_path: Path) -> None:
    config = load_config(left_by_a_run(tmp_path, LAUNCHED), ["--engine.urls", "http://c:1"])
    assert (config.engine.urls, config.launch.python, config.launch.args) == (["http://c:1"], None, [])
    config = load_config(left_by_a_run(tmp_path, RUNNING), ["--launch.python", "/opt/python"])
    assert (config.engine.urls, config.launch.python) == ([], "/opt/python")


def test_what_is_said_beside_the_choice_does_not_give_way(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^launch\.port: .*engine\.kind"):
        load_config(left_by_a_run(tmp_path, LAUNCHED), ["--engine.kind=embedded", "--launch.port=8000"])


def test_without_another_choice_everything_stays(tmp_path: Path) -> None:
    config = load_config(left_by_a_run(tmp_path, LAUNCHED), ["--engine.kind=vllm", "--run.steps=7"])
    assert (config.launch.python, config.launch.args, config.engine.count) == ("/opt/vllm/bin/python", ["--flag"], 2)
