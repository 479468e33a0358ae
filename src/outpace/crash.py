"""Places where a process may be told to die, so that a test can kill it exactly there.

`reached("step.before")` does nothing, unless this process is the one that `OUTPACE_CRASH` names: `PART@LABEL` or
`PART@LABEL#N` for the N-th time it gets there. Then it is killed as by anybody else: SIGKILL, with no last words.

A run that recovers would die at the same place again and again; `OUTPACE_CRASH_MARK` names a file that the one who dies
makes first, and whoever finds it there lives on.
"""

from __future__ import annotations

import os
import signal

_me = "controller"
_part, _, _label = os.environ.get("OUTPACE_CRASH", "").partition("@")
_label, _, _times = _label.partition("#")
_left = int(_times or 1)


def be(part: str) -> None:
    """Say who this process is."""
    global _me
    _me = part


def reached(label: str) -> None:
    """Die here, if somebody wants that."""
    global _left
    if not _part or label != _label or not _me.startswith(_part):
        return
    _left -= 1
    if _left == 0 and _is_first():
        os.kill(os.getpid(), signal.SIGKILL)


def _is_first() -> bool:
    mark = os.environ.get("OUTPACE_CRASH_MARK")
    if mark is None:
        return True
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
