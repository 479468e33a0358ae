from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from outpace.config.loading import dump_toml, make_config
from outpace.config.rules import resolve
from outpace.errors import BadInput

HERE = "http://127.0.0.1:8000"
THERE = "http://there:8000"
URLS = {"engine.kind": "vllm", "engine.urls": [HERE, THERE]}


@pytest.mark.parametrize(
    ("values", "key", "said"),
    [
        ({"engine.urls": [HERE]}, "engine.urls", "set it to vllm or sglang"),
        ({"launch.gpu_memory": 0.5}, "launch.gpu_memory", "nothing is launched"),
        ({"engine.api_key_env": "KEY"}, "engine.api_key_env", "no server to send it to"),
        ({"engine.seeded": True}, "engine.seeded", "no server to send it to"),
        ({"weights.transport": "memory"}, "weights.transport", "embedded engine"),
        ({"weights.dir": "/tmp"}, "weights.dir", "set weights.delta"),
        ({**URLS, "engine.count": 3}, "engine.count", "names 2 servers, not 3"),
        ({**URLS, "launch.args": ["--quiet"]}, "launch.args", "are running already"),
        ({"engine.kind": "vllm", "engine.urls": ["there:8000"]}, "engine.urls", "write http://host:port"),
        ({"engine.kind": "vllm", "engine.urls": ["http://there:x"]}, "engine.urls", "write http://host:port"),
        ({"engine.kind": "vllm", "engine.urls": ["http://"]}, "engine.urls", "write http://host:port"),
        ({"engine.kind": "vllm", "engine.urls": [HERE, f"{HERE}/"]}, "engine.urls", "the same server"),
        ({"engine.kind": "vllm", "engine.urls": [HERE, HERE]}, "engine.urls", "the same server"),
        *(
            ({"engine.kind": "vllm", "engine.urls": [one, other]}, "engine.urls", "the same server")
            for one, other in [
                ("http://localhost:8000", "http://127.0.0.1:8000"),
                ("http://localhost:8000", "http://[::1]:8000/"),
                ("http://h", "http://h:80"),
                ("https://h:443", "https://h/"),
                ("http://Host:8000", "HTTP://host:8000"),
            ]
        ),
        ({"engine.kind": "vllm", "lora.rank": 1000}, "lora.rank", "512"),
        ({"engine.kind": "vllm", "launch.port": 65535, "engine.count": 2}, "launch.port", "beyond 65535"),
        ({"engine.kind": "vllm", "engine.path": "fast"}, "engine.path", "leave this out"),
        ({"engine.kind": "vllm", "run.deterministic": True}, "run.deterministic", "not repeatable"),
        ({"engine.kind": "sglang", "run.deterministic": True}, "run.deterministic", "not repeatable"),
        ({"engine.kind": "vllm", "run.runtime": "inline"}, "run.runtime", '"local"'),
        (
            {"engine.kind": "vllm", "weights.transport": "ipc", "run.device": "cpu"},
            "weights.transport",
            "memory of a GPU",
        ),
        ({"engine.kind": "vllm", "lora.rank": 4, "weights.transport": "memory"}, "weights.transport", "as files"),
        ({"engine.kind": "vllm", "lora.rank": 4, "weights.delta": True}, "weights.delta", "leave this out"),
        ({"engine.kind": "sglang", "weights.transport": "collective"}, "weights.transport", "sglang takes weights as"),
        ({"lora.alpha": 4.0}, "lora.alpha", "set a rank"),
        ({"lora.targets": ["q_proj"]}, "lora.targets", "set a rank"),
        ({"lora.rank": 4, "lora.targets": []}, "lora.targets", "names no module"),
        ({"lora.rank": 4, "lora.targets": ["q_proj", "q_proj"]}, "lora.targets", "q_proj is there twice"),
    ],
)
def test_settings_of_engines_that_cannot_work_together_are_refused(values: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        make_config(values)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(f"{key}: ")
    assert said in message


@pytest.mark.parametrize(
    "values",
    [
        {**URLS, "engine.count": 2},
        {"engine.kind": "vllm", "engine.urls": ["https://there/behind/a/proxy", "http://[::1]:8000"]},
        {"engine.kind": "vllm", "launch.port": 65535},
        {"engine.kind": "vllm", "weights.transport": "ipc"},
        {"engine.kind": "sglang", "lora.rank": 4, "weights.transport": "files"},
        {"engine.kind": "vllm", "lora.rank": 512},
        {"engine.kind": "vllm", "engine.urls": ["http://localhost:8000", "http://localhost:8001", "http://h:8000"]},
        {"weights.delta": True, "weights.dir": "/tmp"},
        {"lora.rank": 4, "run.deterministic": True, "run.runtime": "inline"},
    ],
)
def test_settings_of_engines_at_the_edge_of_the_rules_are_accepted(values: dict[str, Any]) -> None:
    config = resolve(make_config(values))
    assert resolve(make_config(tomllib.loads(dump_toml(config)))) == config


def test_there_are_as_many_engines_as_urls_and_one_without() -> None:
    assert resolve(make_config({})).engine.count == 1
    assert resolve(make_config(URLS)).engine.count == 2


def test_enough_episodes_run_to_fill_all_engines() -> None:
    assert resolve(make_config({**URLS, "engine.slots": 8})).pacing.max_running == 32
    assert resolve(make_config({"engine.kind": "vllm", "engine.count": 3, "engine.slots": 8})).pacing.max_running == 48


def test_adapters_learn_ten_times_faster_and_their_scale_goes_with_their_rank() -> None:
    config = resolve(make_config({"lora.rank": 8}))
    assert (config.lora.alpha, config.learner.lr) == (16.0, pytest.approx(3e-3))
    assert resolve(make_config({"lora.rank": 8, "model.path": "some/model"})).learner.lr == pytest.approx(1e-5)
    assert resolve(make_config({"lora.rank": 8, "learner.lr": 0.1, "lora.alpha": 3.0})).learner.lr == 0.1
    assert resolve(make_config({})).lora.alpha is None


def test_files_on_this_machine_are_named_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").touch()
    files = {"launch.python": "python", "weights.delta": True, "weights.dir": "made/later"}
    config = resolve(make_config({"engine.kind": "vllm", **files}))
    assert (config.launch.python, config.weights.dir) == (f"{tmp_path}/python", f"{tmp_path}/made/later")
