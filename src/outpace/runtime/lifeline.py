"""A child's half of a promise: it does not outlive its parent. Light, since every kind of child imports it first.

A program that cannot promise it is started through this file, as `python -I -S lifeline.py PARENT FD PROGRAM …`, which
promises it and becomes the program. `FD` closes when that has worked; otherwise the error's number comes out of it.

Two things about the kernel's part of it (Linux)
- The parent is the thread that has started the child, not the process: start children from a thread that stays.
- It is forgotten where the child becomes a set-uid program, and does not pass on to the child's own children.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

PR_SET_PDEATHSIG = 1
CANNOT_START = 127
"""The exit code of a launcher that could not become the program, as shells have it."""


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when the thread that started it ends. Only Linux can; elsewhere a closed
    socket has to do. Where `parent`, by its number, has ended before it could be asked, this process leaves now."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(CANNOT_START)


def launched(command: Sequence[str], told: int) -> list[str]:
    """How to start `command` so that it dies with this process; it has to inherit `told`, the writing end of a pipe."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(told), *command]


def main(parent: int, told: int, command: list[str]) -> int:
    die_with_parent(parent)
    os.set_inheritable(told, False)
    for name in ("SIGPIPE", "SIGXFSZ"):  # which Python ignores, and what is ignored would stay so
        with suppress(AttributeError):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, os.environ)
    except OSError as error:
        os.write(told, str(error.errno).encode())
    return CANNOT_START


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
