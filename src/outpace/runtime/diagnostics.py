"""Diagnostics of this process: waits, asyncio tasks and thread stacks; garbage collector settings; crash points.

Every wait that may be long is registered (`waiting`), so that the watchdog can report it. Crash points are labeled
places in the code where a fault-injection test can kill the process.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

_waits: dict[int, tuple[str, float]] = {}
_ids = itertools.count()


class waiting:  # noqa: N801 - used like `suppress`
    """Context manager that registers a wait until the block ends. Thread-safe."""

    __slots__ = ("_number", "_reason")

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __enter__(self) -> None:
        self._number = next(_ids)
        _waits[self._number] = (self._reason, time.monotonic())

    def __exit__(self, *_: object) -> None:
        del _waits[self._number]


MOST_WAITS = 20
MOST_TASKS = 50
MOST_FRAMES = 12


def describe_waits() -> str:
    """Return the longest registered waits, one per line."""
    now = time.monotonic()
    oldest = sorted(_waits.values(), key=lambda wait: wait[1])
    return (
        _lines([f"{reason}, for {now - since:.1f} s" for reason, since in oldest], MOST_WAITS) or "no registered waits"
    )


def describe_tasks() -> str:
    """Return one line per task of the running loop: its await chain, from its coroutine to the innermost frame."""
    by_name = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    return _lines([f"{task.get_name()}: {_await_chain(task)}" for task in by_name], MOST_TASKS)


def _lines(lines: list[str], most: int) -> str:
    return "\n".join(lines[:most] + ([f"and {len(lines) - most} more"] if len(lines) > most else []))


def describe_threads() -> str:
    """Return the stack of every thread, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame, MOST_FRAMES))}"
        for number, frame in sys._current_frames().items()
    )


def _await_chain(task: asyncio.Task[Any]) -> str:
    frames = _awaiting(task.get_coro())
    shown = [f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}:{frame.f_lineno}" for frame in frames]
    return " > ".join(shown) or "not started, or done"


def _awaiting(awaited: Any) -> list[FrameType]:
    """Return the frames from a coroutine to the innermost Python frame. `Task.get_stack` stops at the first one."""
    frames: list[FrameType] = []
    while awaited is not None and len(frames) < MOST_FRAMES:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            frames.append(frame)
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return frames


GC_THRESHOLDS = (20_000, 20, 20)
"""Arguments of `gc.set_threshold`: new objects per young collection, and collections per next older generation."""


def tune_gc() -> None:
    """Tune the garbage collector of a long-lived process. Call once, when the process is ready for work.

    A full collection stops the process and visits every object; with a thousand episodes in flight that takes longer
    than anything else an event loop does. Objects that exist now are frozen and never scanned again, because they do
    not become garbage. Young objects are collected less often, because most of them outlive an engine's reply."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


_process_name = "controller"
_crash_process, _, _crash_label = os.environ.get("OUTPACE_CRASH", "").partition("@")
_crash_label, _, _crash_count = _crash_label.partition("#")
_passes_left = int(_crash_count or 1)


def set_crash_process(name: str) -> None:
    """Set the name of this process, which `OUTPACE_CRASH` is matched against."""
    global _process_name
    _process_name = name


def crash_point(label: str) -> None:
    """Kill this process with SIGKILL if `OUTPACE_CRASH` names it and this label: `COMPONENT@LABEL`, or
    `COMPONENT@LABEL#N` for the N-th pass. `COMPONENT` may be a prefix of the process name."""
    global _passes_left
    if not _crash_process or label != _crash_label or not _process_name.startswith(_crash_process):
        return
    _passes_left -= 1
    if _passes_left == 0 and _is_first_crash():
        os.kill(os.getpid(), signal.SIGKILL)


def _is_first_crash() -> bool:
    """Return whether to crash. `OUTPACE_CRASH_MARK` names a file that is created before the first crash. If it exists,
    the process does not crash again, so that a recovered run can pass this point."""
    mark = os.environ.get("OUTPACE_CRASH_MARK")
    if mark is None:
        return True
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
