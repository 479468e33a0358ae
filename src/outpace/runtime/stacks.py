"""Diagnostics of this process: waits, asyncio tasks and thread stacks; garbage collector settings; crash points.

Every wait that may be long is registered, so that the watchdog can report it:

    with waiting("group 12: worker-0"):
        report = await worker.run(order)

Crash points are labeled places in the code where a fault-injection test can kill the process:

    crash_point("step.before")    does nothing unless OUTPACE_CRASH names this process and label

A run that recovers would crash at the same point again. `OUTPACE_CRASH_MARK` names a file that is created before the
first crash; if it exists, crash points do nothing.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from outpace.runtime.waits import longest

MOST_TASKS = 50
MOST_FRAMES = 12


def tasks(most: int = MOST_TASKS) -> str:
    """Return one line per task of the running loop: its await chain, from its coroutine to the innermost frame."""
    by_name = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    lines = [f"{task.get_name()}: {_await_chain(task)}" for task in by_name[:most]]
    return "\n".join(lines + ([f"and {len(by_name) - most} more tasks"] if len(by_name) > most else []))


def threads() -> str:
    """Return the stack of every thread, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame, MOST_FRAMES))}"
        for number, frame in sys._current_frames().items()
    )


def waits() -> str:
    """Return the longest registered waits, one per line."""
    return "\n".join(longest()) or "no registered waits"


def _await_chain(task: asyncio.Task[Any]) -> str:
    frames = _awaiting(task.get_coro())
    shown = [f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}:{frame.f_lineno}" for frame in frames]
    return " > ".join(shown) or "not started, or done"


def _awaiting(awaited: Any) -> list[FrameType]:
    """Return the frames from a coroutine to the innermost Python frame. `Task.get_stack` stops at the first."""
    frames: list[FrameType] = []
    while awaited is not None and len(frames) < MOST_FRAMES:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            frames.append(frame)
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return frames
