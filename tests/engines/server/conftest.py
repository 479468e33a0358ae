"""One real vLLM server, started the way outpace starts it and shared by all tests that use the `vllm` fixture."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest

from outpace.config.load import make_config
from outpace.engines.server.launch import LaunchPlan, launch_server
from servers_support import SMALL, START_S, RunningVllm, vllm_python

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
