from __future__ import annotations

import signal
from typing import Any

from outpace import trainer
from outpace.trainer import _Background


def test_a_signal_that_comes_twice_in_the_same_moment_is_one(monkeypatch: Any) -> None:
    now = 100.0
    monkeypatch.setattr(trainer.time, "monotonic", lambda: now)
    background = _Background(None, None)  # type: ignore[arg-type]
    background._signalled(signal.SIGINT)
    now = 100.1  # passed on by a wrapper that was in the same process group
    background._signalled(signal.SIGINT)
    assert background._signals == 1
    now = 101.0
    background._signalled(signal.SIGINT)
    assert background._signals == 2


def test_two_different_signals_are_two(monkeypatch: Any) -> None:
    monkeypatch.setattr(trainer.time, "monotonic", lambda: 100.0)
    background = _Background(None, None)  # type: ignore[arg-type]
    background._signalled(signal.SIGINT)
    background._signalled(signal.SIGTERM)
    assert background._signals == 2
