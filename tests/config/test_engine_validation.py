from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from outpace.config.load import dump_toml, make_config
from outpace.config.validation import resolve
from outpace.errors import BadInput
from support import names

HERE = "http://127.0.0.1:8000"
THERE = "http://there:8000"
URLS = {"engine.kind": "vllm", "engine.urls": [HERE, THERE]}


@pytest.mark.parametrize(
    ("values", "key", "expected"),
    [
        ({"engine.urls": [HERE]}, "engine.urls", "engine.kind vllm sglang"),
        ({"launch.gpu_memory": 0.5}, "launch.gpu_memory", "engine.kind vllm sglang"),
        ({"engine.api_key_env": "KEY"}, "engine.api_key_env", "engine.kind vllm sglang"),
        ({"engine.seeded": True}, "engine.seeded", "engine.kind vllm sglang"),
        ({"engine.retries": 3}, "engine.retries", "engine.kind vllm sglang"),
        ({"engine.idle_s": 3.0}, "engine.idle_s", "engine.kind vllm sglang"),
        ({"weights.transport": "memory"}, "weights.transport", 'engine.kind "embedded"'),
        ({"weights.dir": "/tmp"}, "weights.dir", "weights.delta"),
        ({**URLS, "engine.count": 3}, "engine.count", "engine.urls 2 3"),
        ({**URLS, "launch.args": ["--quiet"]}, "launch.args", "engine.urls"),
        ({"engine.kind": "vllm", "engine.urls": ["there:8000"]}, "engine.urls", "'there:8000' http://host:port"),
        ({"engine.kind": "vllm", "engine.urls": ["http://there:x"]}, "engine.urls", "http://host:port"),
        ({"engine.kind": "vllm", "engine.urls": ["http://"]}, "engine.urls", "http://host:port"),
        ({"engine.kind": "vllm", "engine.urls": [HERE, f"{HERE}/"]}, "engine.urls", f"{HERE} {HERE}/"),
        ({"engine.kind": "vllm", "engine.urls": [HERE, HERE]}, "engine.urls", HERE),
        *(
            ({"engine.kind": "vllm", "engine.urls": [one, other]}, "engine.urls", f"{one} {other}")
            for one, other in [
                ("http://localhost:8000", "http://127.0.0.1:8000"),
                ("http://localhost:8000", "http://[::1]:8000/"),
                ("http://h", "http://h:80"),
                ("https://h:443", "https://h/"),
                ("http://Host:8000", "HTTP://host:8000"),
            ]
        ),
        ({"engine.kind": "vllm", "lora.rank": 1000}, "lora.rank", "512"),
        ({"engine.kind": "vllm", "launch.port": 65535, "engine.count": 2}, "launch.port", "2 65535"),
        ({"engine.kind": "vllm", "engine.decoder": "fast"}, "engine.decoder", "engine.kind vllm"),
        ({"engine.kind": "vllm", "run.deterministic": True}, "run.deterministic", 'vllm engine.kind "embedded"'),
        ({"engine.kind": "sglang", "run.deterministic": True}, "run.deterministic", 'sglang engine.kind "embedded"'),
        ({"engine.kind": "vllm", "run.runtime": "inline"}, "run.runtime", '"local"'),
        (
            {"engine.kind": "vllm", "weights.transport": "ipc", "run.device": "cpu"},
            "weights.transport",
            '"ipc" run.device',
        ),
        ({"engine.kind": "vllm", "lora.rank": 4, "weights.transport": "memory"}, "weights.transport", 'vllm "memory"'),
        ({"engine.kind": "vllm", "lora.rank": 4, "weights.delta": True}, "weights.delta", "lora.rank 0"),
        ({"engine.kind": "sglang", "weights.transport": "collective"}, "weights.transport", 'sglang "collective"'),
        *(
            ({"engine.kind": "vllm", "weights.transport": "ipc", key: value}, "weights.transport", f'"memory" {key}')
            for key, value in (("learner.devices", 2), ("learner.offload", True))
        ),
        ({"lora.alpha": 4.0}, "lora.alpha", "lora.rank 0"),
        ({"lora.targets": ["q_proj"]}, "lora.targets", "lora.rank 0"),
        ({"lora.rank": 4, "lora.targets": []}, "lora.targets", "module"),
        ({"lora.rank": 4, "lora.targets": ["q_proj", "q_proj"]}, "lora.targets", "q_proj"),
    ],
)
def test_conflicting_engine_settings_are_refused(values: dict[str, Any], key: str, expected: str) -> None:
    with pytest.raises(BadInput) as caught:
        make_config(values)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(f"{key}: ")
    assert names(message, expected)


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
def test_engine_settings_at_the_limits_of_the_rules_are_accepted(values: dict[str, Any]) -> None:
    config = resolve(make_config(values))
    assert resolve(make_config(tomllib.loads(dump_toml(config)))) == config


def test_engine_count_defaults_to_the_number_of_urls_or_one() -> None:
    assert resolve(make_config({})).engine.count == 1
    assert resolve(make_config(URLS)).engine.count == 2


def test_max_running_defaults_to_enough_episodes_to_fill_all_engines() -> None:
    assert resolve(make_config({**URLS, "engine.slots": 8})).pacing.max_running == 32
    assert resolve(make_config({"engine.kind": "vllm", "engine.count": 3, "engine.slots": 8})).pacing.max_running == 48


def test_lora_defaults_to_ten_times_the_learning_rate_and_alpha_follows_the_rank() -> None:
    config = resolve(make_config({"lora.rank": 8}))
    assert (config.lora.alpha, config.learner.lr) == (16.0, pytest.approx(3e-3))
    assert resolve(make_config({"lora.rank": 8, "model.path": "some/model"})).learner.lr == pytest.approx(1e-5)
    assert resolve(make_config({"lora.rank": 8, "learner.lr": 0.1, "lora.alpha": 3.0})).learner.lr == 0.1
    assert resolve(make_config({})).lora.alpha is None


def test_resolving_makes_local_paths_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").touch()
    files = {"launch.python": "python", "weights.delta": True, "weights.dir": "made/later"}
    config = resolve(make_config({"engine.kind": "vllm", **files}))
    assert (config.launch.python, config.weights.dir) == (f"{tmp_path}/python", f"{tmp_path}/made/later")
