"""A run of seconds, as in the tests of the whole system, and the modelled core of the tests of the pipeline."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "pipeline"))

from faults.watching import LiveRun, Runs  # noqa: E402
from system.conftest import rewards, settings, tasks, toy_model  # noqa: E402

__all__ = ["rewards", "settings", "start", "tasks", "toy_model"]


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Runs:
    """Starts runs, each in a process group of its own, of which nothing is left when the test is over."""

    def begin(*words: str) -> LiveRun:
        run = LiveRun(*words)
        request.addfinalizer(run.kill)
        return run

    return begin
