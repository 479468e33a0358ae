"""Fixtures of the fault tests: runs that take seconds, as in the system tests."""

import pytest

from faults.watching import LiveRun, Runs
from system.conftest import rewards, settings, tasks, toy_model

__all__ = ["rewards", "settings", "start", "tasks", "toy_model"]


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Runs:
    """Start runs, each in its own process group, which is killed at the end of the test."""

    def begin(*words: str) -> LiveRun:
        run = LiveRun(*words)
        request.addfinalizer(run.kill)
        return run

    return begin
