"""Machines sleep and clocks are set, so no timeout may use the wall clock."""

from __future__ import annotations

import ast
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.watching import Settings, StartRun, arguments, steps_of

SOURCE = Path(__file__).parents[2] / "src" / "outpace"
WALL_CLOCK_CALLS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
ALLOWED = {
    "config/defaults.py", "monitoring/run_directory.py", "monitoring/trackers.py", "rollouts/gateway/openai.py",
    "rollouts/gateway/responses.py", "runtime/cleanup.py",
}  # fmt: skip
"""Uses that are not timeouts: the name of a run directory, when a run was started, when a tracker's event happened, a
field of a response, the age of a file."""


def called_functions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ".".join(ast.unparse(node.func).split(".")[-2:])


def test_only_listed_modules_read_the_wall_clock() -> None:
    found = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if WALL_CLOCK_CALLS & set(called_functions(ast.parse(path.read_text())))
    }
    assert found <= ALLOWED


def test_wall_clock_calls_are_detected() -> None:
    assert WALL_CLOCK_CALLS & set(called_functions(ast.parse("deadline = time.time() + 5")))
    assert WALL_CLOCK_CALLS & set(called_functions(ast.parse("datetime.datetime.now()")))


@pytest.mark.slow
@pytest.mark.alone
def test_a_run_continues_after_the_machine_slept_longer_than_every_timeout(
    start: StartRun, settings: Settings, tmp_path: Path
) -> None:
    """The sleep is a SIGSTOP to every process, for longer than `supervise.silent_s` and `run.stall_s`."""
    timeouts = {"supervise__silent_s": 4.0, "supervise__probe_s": 0.5, "run__stall_s": 5.0, "supervise__restarts": 0}
    run = start(*arguments(settings, run__steps=100_000, **timeouts))
    before = run.until(lambda: len(steps_of(tmp_path / "run")) >= 3 and len(steps_of(tmp_path / "run")))
    run.signal_all(signal.SIGSTOP)
    time.sleep(8.0)
    run.signal_all(signal.SIGCONT)
    time.sleep(6.0)  # long enough for any timeout that counted the sleep to fire
    run.until(lambda: len(steps_of(tmp_path / "run")) > before + 3, 120)
    run.signal(signal.SIGINT)
    assert run.end(90) == 3, run.output
