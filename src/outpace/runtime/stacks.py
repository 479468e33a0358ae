"""What this process is doing, in words: its asyncio tasks, its threads, its registered waits."""

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
    """Where each task of the running loop is, from its coroutine down to what it awaits. One line each."""
    everyone = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    lines = [f"{task.get_name()}: {_place(task)}" for task in everyone[:most]]
    return "\n".join(lines + ([f"and {len(everyone) - most} more tasks"] if len(everyone) > most else []))


def threads() -> str:
    """The stack of every thread, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame, MOST_FRAMES))}"
        for number, frame in sys._current_frames().items()
    )


def waits() -> str:
    return "\n".join(longest()) or "nothing is registered as waiting"


def _place(task: asyncio.Task[Any]) -> str:
    frames = _awaiting(task.get_coro())
    shown = [f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}:{frame.f_lineno}" for frame in frames]
    return " > ".join(shown) or "not started, or done"


def _awaiting(awaited: Any) -> list[FrameType]:
    """The frames from a coroutine down to the innermost that Python code has. `Task.get_stack` stops at the first."""
    frames: list[FrameType] = []
    while awaited is not None and len(frames) < MOST_FRAMES:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            frames.append(frame)
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return frames
