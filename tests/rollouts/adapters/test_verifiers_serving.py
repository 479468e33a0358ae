"""Servers shared by the episodes of a verifiers environment are started once. Does not need the package."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from outpace.rollouts.adapters.verifiers import VerifiersEnvironment


class SharedLater:
    """An environment whose shared tool server fails to start at first."""

    def __init__(self) -> None:
        self.taskset = SimpleNamespace(config=None, toolsets=lambda config: ["search"])
        self.tries = 0

    def start(self) -> None: ...

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        self.tries += 1
        if self.tries < 3:
            raise OSError("not up yet")
        yield


async def test_a_shared_server_that_failed_to_start_is_retried_by_the_next_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package: Any = ModuleType("verifiers")
    package.v1 = ModuleType("verifiers.v1")
    package.v1.Env = SharedLater
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "verifiers.v1", package.v1)
    env = SharedLater()
    environment = VerifiersEnvironment(lambda: env)
    for _ in range(2):
        with pytest.raises(OSError, match="not up yet"):
            await environment._serve()
    for _ in range(2):
        await environment._serve()
    assert env.tries == 3
