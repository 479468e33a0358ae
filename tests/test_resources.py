from __future__ import annotations

from typing import Any

import pytest

from outpace import resources
from outpace.config import Config
from outpace.errors import BadInput


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


def config(**sections: dict[str, Any]) -> Config:
    return Config.model_validate({"run": {"device": "cuda"}, "engine": {"kind": "vllm"}, **sections})


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("0", 1), ("0,1", 2), ("GPU-aa, GPU-bb", 2), ("-1", 0)])
def test_gpus_are_those_that_the_parts_can_see(monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert resources.gpus() == count


def test_a_learner_alone_on_its_gpu_may_take_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert resources.learner_gpu_share(config()) == 1.0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert resources.learner_gpu_share(config(engine={"kind": "embedded"})) == 1.0
    assert resources.learner_gpu_share(config(engine={"kind": "vllm", "urls": ["http://elsewhere:1"]})) == 1.0


@pytest.mark.usefixtures("one_gpu")
def test_a_learner_beside_servers_gets_what_they_leave() -> None:
    assert resources.learner_gpu_share(config(launch={"gpu_memory": 0.4})) == pytest.approx(0.55)
    two = config(launch={"gpu_memory": 0.4}, engine={"kind": "vllm", "count": 2})
    assert resources.learner_gpu_share(two) == pytest.approx(0.15)


@pytest.mark.usefixtures("one_gpu")
def test_budgets_that_leave_the_learner_nothing_are_refused_with_one_that_would_do() -> None:
    with pytest.raises(BadInput, match=r"launch.gpu_memory: 0.9 for a server .* set 0.85 or less"):
        resources.learner_gpu_share(config(launch={"gpu_memory": 0.9}))
    with pytest.raises(BadInput, match=r"0.45 for each of 2 servers .* set 0.42 or less"):
        resources.learner_gpu_share(config(launch={"gpu_memory": 0.45}, engine={"kind": "vllm", "count": 2}))
    resources.learner_gpu_share(config(launch={"gpu_memory": 0.42}, engine={"kind": "vllm", "count": 2}))


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("sections", "way"),
    [
        ({}, "ipc"),
        ({"run": {"device": "cpu"}}, "memory"),
        ({"engine": {"kind": "embedded"}}, "memory"),
        ({"engine": {"kind": "sglang"}}, "files"),
        ({"engine": {"kind": "vllm", "urls": ["http://elsewhere:1"]}}, "files"),
        ({"lora": {"rank": 8}}, "memory"),
        ({"weights": {"delta": True}}, "memory"),
        ({"weights": {"transport": "collective"}}, "collective"),
    ],
)
def test_weights_take_the_shortest_way_that_surely_exists(sections: dict[str, Any], way: str) -> None:
    assert resources.transport(config(**sections)) == way


def test_a_server_on_another_gpu_takes_weights_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert resources.transport(config()) == "memory"
