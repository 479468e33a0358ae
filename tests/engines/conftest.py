"""Tiny random models with reference logits and logprobs, and one real vLLM server shared by all tests that use it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from engines_support import VOCABULARY, build
from outpace.config.load import make_config
from outpace.engines.server.checks import TOKENIZER_TEXTS
from outpace.engines.server.launch import LaunchPlan, launch_server
from outpace.models.loading import load_tokenizer
from outpace.types import Manifest
from outpace.weights.shared_memory import SnapshotWriter
from servers_support import SMALL, START_S, RunningVllm, vllm_python


@pytest.fixture(scope="session")
def model_of() -> Callable[..., PreTrainedModel]:
    return build


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def tokenizer_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the tokenizer that a server is checked against here. The process that does it imports for a second."""

    async def expected_token_ids(model: str, trust_remote_code: bool) -> dict[str, list[int]]:
        return _token_ids(model)

    monkeypatch.setattr("outpace.engines.server.build.expected_token_ids", expected_token_ids)


@cache
def _token_ids(model: str) -> dict[str, list[int]]:
    tokenizer: Any = load_tokenizer(model)
    return {text: tokenizer.encode(text, add_special_tokens=False) for text in TOKENIZER_TEXTS}


@pytest.fixture
def prompts() -> Callable[..., list[NDArray[np.int32]]]:
    def make(*lengths: int, seed: int = 0) -> list[NDArray[np.int32]]:
        random = np.random.default_rng(seed)
        return [random.integers(0, VOCABULARY, length).astype(np.int32) for length in lengths]

    return make


@pytest.fixture
def forced_logits() -> Callable[..., torch.Tensor]:
    """Row i: the logits from which a plain forward pass draws output token i."""

    def compute(model: PreTrainedModel, prompt: NDArray[np.int32], output: NDArray[np.int32]) -> torch.Tensor:
        tokens = torch.from_numpy(np.concatenate((prompt, output)).astype(np.int64)).unsqueeze(0).to(model.device)
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
            return logits.float().cpu()

    return compute


@pytest.fixture
def forced_logprobs(forced_logits: Callable[..., torch.Tensor]) -> Callable[..., NDArray[np.float32]]:
    """The logprob of each output token in a plain forward pass at a temperature."""

    def compute(
        model: PreTrainedModel, prompt: NDArray[np.int32], output: NDArray[np.int32], temperature: float = 1.0
    ) -> NDArray[np.float32]:
        logprobs = (forced_logits(model, prompt, output) / temperature).log_softmax(-1)
        return logprobs.gather(1, torch.from_numpy(output.astype(np.int64)).unsqueeze(1)).squeeze(1).numpy()

    return compute


@pytest.fixture
def publish(tmp_path: Path) -> Callable[..., Manifest]:
    writer = SnapshotWriter(tmp_path, "test")

    def make(model: PreTrainedModel, version: int) -> Manifest:
        return writer.publish(version, dict(model.named_parameters()), leased=())

    return make


T = TypeVar("T")


class BackgroundLoop:
    """An event loop in its own thread, so that objects on it outlive the loop of a single test."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, work: Callable[[], Awaitable[T]], within_s: float) -> T:
        async def whole() -> T:
            return await work()

        future: Future[T] = asyncio.run_coroutine_threadsafe(whole(), self._loop)
        return future.result(within_s)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a server run in one process."""
    for item in items:
        if "vllm" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("one server"))


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningVllm]:
    config = make_config(SMALL | {"launch.python": vllm_python()})
    directory = tmp_path_factory.mktemp("vllm")
    loop = BackgroundLoop()
    try:

        async def start() -> Any:
            recipe = await LaunchPlan.of(config, directory)
            return await launch_server(recipe, 0, directory / "server.log", print)

        started = loop.run(start, START_S + 60)
        try:
            yield RunningVllm(started.server.url, started.process.pid, started.process.log_path, config)
        finally:
            loop.run(started.stop, 30)
    finally:
        loop.close()
