"""Ending a child process together with everything it has started.

The child is started as the leader of a session and with a mark in its environment, which its descendants inherit. Three
ways lead to them, since each alone has a hole:

- the process group: all at once, however fast they fork, but a process can leave it;
- the tree of parents: also those that left the group, but a process whose parent has ended drops out of it;
- the mark: also those, wherever they are, unless they were executed with an environment of their own.

Not found is a process that left the group, lost its parent and dropped the mark. Not surely stopped is one that left
the group and goes on replacing itself by new processes faster than they can be listed.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import psutil

MARK = "OUTPACE_FAMILY"
"""The environment variable that carries the mark."""

PASSES = 100
PAUSE_S = 0.01


def end_family(leader: int, mark: str) -> bool:
    """Kill the group of `leader`, its descendants and whoever carries `mark`; True once none of them is left.

    Blocks, mostly for one look at the list of processes. The leader itself is not reaped: that is its parent's part.
    """
    for attempt in range(PASSES):
        members = _members(leader, mark)
        if attempt == 0:  # later the number may be somebody else's
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(leader, signal.SIGKILL)
        if not members:
            return True
        for process in members:
            with suppress(psutil.Error):
                process.kill()  # looks first whether it is still the same process
        time.sleep(PAUSE_S)
    return False


def how_it_ended(status: int) -> str:
    """An exit status in words, to stand behind the name of the process."""
    if status < 0:
        with suppress(ValueError):  # a signal that Python has no name for
            return f"was killed by {signal.Signals(-status).name}"
    return f"exited with code {status}"


def _members(leader: int, mark: str) -> list[psutil.Process]:
    found = {process.pid: process for process in psutil.process_iter() if _carries(process, mark)}
    with suppress(psutil.Error):
        found |= {process.pid: process for process in psutil.Process(leader).children(recursive=True)}
    return [process for process in found.values() if process.pid != os.getpid() and _lives(process)]


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except (psutil.Error, OSError):  # it ended, or is somebody else's
        return False


def _lives(process: psutil.Process) -> bool:
    """A zombie has ended; whoever started it has not looked yet."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
