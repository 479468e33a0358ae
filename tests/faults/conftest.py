"""Fixtures of the fault tests: runs of a few seconds, as in the system tests."""

from collections.abc import Sequence

import pytest

from faults.watching import LiveRun, StartRun
from system.conftest import rewards, settings, tasks, toy_model

__all__ = ["rewards", "settings", "start", "tasks", "toy_model"]


@pytest.fixture
def start(request: pytest.FixtureRequest) -> StartRun:
    """Start runs, each in its own process group, which is killed at the end of the test."""

    def begin(*arguments: str, launcher: Sequence[str] = ()) -> LiveRun:
        run = LiveRun(*arguments, launcher=launcher)
        request.addfinalizer(run.kill)
        return run

    return begin
