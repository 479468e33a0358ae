"""Misbehaving reward functions. Loaded from this file in grader processes and in threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


def good(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def pid(completions: list[str]) -> list[float]:
    return [float(os.getpid())] * len(completions)


def silent(completions: list[str]) -> list[None]:
    return [None] * len(completions)


def not_a_number(**_: Any) -> list[float]:
    return [1.0, float("nan")]


def infinite(**_: Any) -> list[float]:
    return [float("-inf"), 1.0]


def too_few(**_: Any) -> list[float]:
    return [1.0]


def no_list(**_: Any) -> float:
    return 1.0


def text(**_: Any) -> str:
    return "ab"


def raises(**_: Any) -> list[float]:
    raise ValueError("two\nlines")


def raises_unencodable_message(**_: Any) -> list[float]:
    raise ValueError("half a pair: \ud800")


def exits(**_: Any) -> list[float]:
    sys.exit(3)


def interrupts(**_: Any) -> list[float]:
    raise KeyboardInterrupt


def returns_a_coroutine(completions: list[str]) -> Any:
    async def later() -> list[float]:
        return [7.0] * len(completions)

    return later()


# ------------------------------------------------------------------------------------------------- process failures


def hangs(note: list[str]) -> list[float]:
    _append_line(note[0], os.getpid())
    while True:
        time.sleep(60)


def leaves(**_: Any) -> list[float]:
    os._exit(3)


def crashes(**_: Any) -> list[float]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def is_killed(completions: list[str], note: list[str], times: list[int]) -> list[float]:
    """Killed with SIGKILL in the first `times` calls."""
    _append_line(note[0], os.getpid())
    with open(note[0]) as file:
        if len(file.readlines()) <= times[0]:
            os.kill(os.getpid(), signal.SIGKILL)
    return [1.0] * len(completions)


def closes_everything(**_: Any) -> list[float]:
    os.closerange(3, 256)
    return [1.0, 1.0]


def devours_memory(**_: Any) -> list[float]:
    return [float(len(bytearray(4 << 30)))] * 2


def forges_an_answer(completions: list[str]) -> list[float]:
    from outpace.runtime import wire
    from outpace.runtime.rpc import RpcReply

    forged = RpcReply(10**6, wire.encode([100.0] * len(completions)))
    os.write(int(sys.argv[1]), wire.frame(wire.encode(forged)))
    return [0.0] * len(completions)


def sends_rubbish(completions: list[str]) -> list[float]:
    os.write(int(sys.argv[1]), b"\xff" * 64)
    return [0.0] * len(completions)


# ----------------------------------------------------------------------------------------------------- synchronization


def waits_for(gate: list[str], note: list[str]) -> list[float]:
    _append_line(note[0], os.getpid())
    while not Path(gate[0]).exists():
        time.sleep(0.002)
    return [float(os.getpid())] * len(gate)


# ------------------------------------------------------------------------------------------------- signals and output


def uses_an_alarm(**_: Any) -> list[float]:
    def ring(*_: Any) -> None:
        raise TimeoutError

    assert threading.current_thread() is threading.main_thread()
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        while True:
            time.sleep(60)
    except TimeoutError:
        return [0.5, 0.5]


def leaves_an_alarm_behind(**_: Any) -> list[float]:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    return [left, left]


def prints(**_: Any) -> list[float]:
    print("to people")
    print("to engineers", file=sys.stderr)
    subprocess.run(["echo", "from a child"], check=True)
    return [1.0, 1.0]


def floods(**_: Any) -> list[float]:
    os.write(1, b"start ")
    for _ in range(256):
        os.write(1, b"y" * 4096)
    return [1.0, 1.0]


# --------------------------------------------------------------------------------------------------------- descendants


def has_children(note: list[str], end: list[str]) -> list[float]:
    """Start a child, a child in its own session and an orphan in its own session; then end as `end` specifies."""
    for session, orphan in ((False, False), (True, False), (True, True)):
        _fork(note[0], session, orphan)
    _wait_for_lines(note[0], 3)
    if end[0] == "hang":
        time.sleep(600)
    if end[0] == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    return [1.0, 1.0]


def _fork(note: str, session: bool, orphan: bool) -> None:
    child = os.fork()
    if child:
        if orphan:
            os.waitpid(child, 0)
        return
    if session:
        os.setsid()
    if orphan and os.fork():
        os._exit(0)
    _append_line(note, os.getpid())
    time.sleep(600)
    os._exit(0)


def reproduces(note: list[str]) -> list[float]:
    """Each process forks the next one and exits, so every list of process ids is outdated."""
    if os.fork():
        time.sleep(600)
    while True:
        _append_line(note[0], os.getpid())
        if os.fork():
            os._exit(0)


def returns_twice(completions: list[str]) -> list[float]:
    copy = os.fork() == 0
    return [100.0 if copy else 1.0] * len(completions)


def sees_a_gpu(completions: list[str]) -> list[float]:
    return [float(os.environ["CUDA_VISIBLE_DEVICES"] != "")] * len(completions)


def _append_line(note: str, what: int) -> None:
    with open(note, "a") as file:
        file.write(f"{what}\n")


def _wait_for_lines(note: str, count: int) -> None:
    while not Path(note).exists() or len(Path(note).read_text().splitlines()) < count:
        time.sleep(0.002)
