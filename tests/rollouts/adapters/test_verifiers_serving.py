"""What episodes of a verifiers environment share is started once. The package itself is not needed for this."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from outpace.rollouts.adapters.verifiers import VerifiersEnvironment


class SharedLater:
    """An environment with a shared tool server, which cannot be started at first."""

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


async def test_what_could_not_be_started_is_tried_again_by_the_next_episode(monkeypatch: pytest.MonkeyPatch) -> None:
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
