"""Machines sleep and clocks are set: nothing that waits may look at the time of day."""

from __future__ import annotations

import ast
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.watching import Runs, Settings, steps_of, words

SOURCE = Path(__file__).parents[2] / "src" / "outpace"
TIMES_OF_DAY = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
NO_WAIT = {"config/validation.py", "rollouts/gateway/openai.py", "runtime/cleanup.py"}
"""Where the time of day is a name of a run directory, a field of a reply, and what files are dated by."""


def calls_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ".".join(ast.unparse(node.func).split(".")[-2:])


def test_only_monotonic_clocks_are_looked_at() -> None:
    looking = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if TIMES_OF_DAY & set(calls_of(ast.parse(path.read_text())))
    }
    assert looking <= NO_WAIT


def test_a_look_at_the_time_of_day_would_be_noticed() -> None:
    assert TIMES_OF_DAY & set(calls_of(ast.parse("deadline = time.time() + 5")))
    assert TIMES_OF_DAY & set(calls_of(ast.parse("datetime.datetime.now()")))


@pytest.mark.slow
@pytest.mark.alone
def test_a_machine_that_was_asleep_for_longer_than_any_patience_goes_on(
    start: Runs, settings: Settings, tmp_path: Path
) -> None:
    """The sleep is a stop signal to every process, for longer than a part may be silent and a run may stand still."""
    patience = {"supervise__silent_s": 4.0, "supervise__probe_s": 0.5, "run__stall_s": 5.0, "supervise__restarts": 0}
    run = start(*words(settings, run__steps=100_000, **patience))
    before = run.until(lambda: len(steps_of(tmp_path / "run")) >= 3 and len(steps_of(tmp_path / "run")))
    run.signal_all(signal.SIGSTOP)
    time.sleep(8.0)
    run.signal_all(signal.SIGCONT)
    time.sleep(6.0)  # long enough for whoever took the sleep for a silence
    run.until(lambda: len(steps_of(tmp_path / "run")) > before + 3, 120)
    run.signal(signal.SIGINT)
    assert run.end(90) == 3, run.said
