from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from outpace.run import background
from outpace.run.background import BackgroundRun, forward_signals


class Recording(BackgroundRun):
    def __init__(self) -> None:
        super().__init__(lambda: pytest.fail("nothing is started here"))
        self.calls: list[str] = []

    def interrupt(self) -> None:
        super().interrupt()
        self.calls.append("interrupt")

    def abort(self) -> None:
        super().abort()
        self.calls.append("abort")


def test_a_signal_received_twice_at_the_same_moment_counts_once(monkeypatch: Any) -> None:
    now = 100.0
    monkeypatch.setattr(background.time, "monotonic", lambda: now)
    run = Recording()
    run.on_signal(signal.SIGINT)
    now = 100.1  # passed on by a wrapper in the same process group
    run.on_signal(signal.SIGINT)
    assert run.calls == ["interrupt"]
    now = 101.0
    run.on_signal(signal.SIGINT)
    assert run.calls == ["interrupt", "abort"]


def test_two_different_signals_count_as_two(monkeypatch: Any) -> None:
    monkeypatch.setattr(background.time, "monotonic", lambda: 100.0)
    run = Recording()
    run.on_signal(signal.SIGINT)
    run.on_signal(signal.SIGTERM)
    assert run.calls == ["interrupt", "abort"]


def test_every_active_run_receives_a_signal_and_the_last_to_end_restores_the_handlers() -> None:
    before = signal.getsignal(signal.SIGINT)
    first: list[int] = []
    second: list[int] = []
    one, two = forward_signals(first.append), forward_signals(second.append)
    one.__enter__()
    two.__enter__()
    os.kill(os.getpid(), signal.SIGINT)
    one.__exit__(None, None, None)  # not in the order of nesting, as tasks end
    os.kill(os.getpid(), signal.SIGTERM)
    two.__exit__(None, None, None)
    assert (first, second) == ([signal.SIGINT], [signal.SIGINT, signal.SIGTERM])
    assert signal.getsignal(signal.SIGINT) == before


async def test_signal_handlers_of_the_program_are_kept_for_a_coroutine() -> None:
    received: list[str] = []
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, received.append, "program")
    try:
        with forward_signals(lambda _: received.append("run"), keep_own=True):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)
            await asyncio.sleep(0.01)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
    assert received == ["program"]
