"""MERGED"""

from __future__ import annotations

import os
import signal

_process_name = "controller"
_crash_process, _, _crash_label = os.environ.get("OUTPACE_CRASH", "").partition("@")
_crash_label, _, _crash_count = _crash_label.partition("#")
_passes_left = int(_crash_count or 1)


def be(name: str) -> None:
    """Set the name of this process, which `OUTPACE_CRASH` is matched against."""
    global _process_name
    _process_name = name


def reached(label: str) -> None:
    """Crash point for fault-injection tests.

    Does nothing unless `OUTPACE_CRASH` names this process and label: `COMPONENT@LABEL`, or `COMPONENT@LABEL#N` for the
    N-th pass. Then the process is killed with SIGKILL. `COMPONENT` may be a prefix of the process name."""
    global _passes_left
    if not _crash_process or label != _crash_label or not _process_name.startswith(_crash_process):
        return
    _passes_left -= 1
    if _passes_left == 0 and _is_first_crash():
        os.kill(os.getpid(), signal.SIGKILL)


def _is_first_crash() -> bool:
    """`OUTPACE_CRASH_MARK` names a file that is created before the first crash. If it exists, the process lives on;
    otherwise a run that recovers would crash at the same point forever."""
    mark = os.environ.get("OUTPACE_CRASH_MARK")
    if mark is None:
        return True
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
