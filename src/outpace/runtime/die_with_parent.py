"""Makes a child process die with its parent. Every kind of child imports this module first, so it must stay light.

A program that cannot call `die_with_parent` itself is started through this file, as
`python -I -S die_with_parent.py PARENT FD PROGRAM ...`, which calls it and then executes the program. `FD` is the write
end of a pipe: it closes on success and receives the errno on failure.

Hazards of the kernel feature (Linux)
- The parent is the thread that started the child, not the process: start children from a long-lived thread.
- It is reset when the child executes a set-uid program, and the child's own children do not inherit it.
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
"""Exit code if the program could not be executed, as in shells."""


def die_with_parent(parent: int | None = None, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends. Linux only; elsewhere the
    process must notice a closed socket. If the process with pid `parent` has already ended, this process exits
    immediately."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os._exit(CANNOT_START)


def command_dying_with_parent(command: Sequence[str], error_fd: int) -> list[str]:
    """Return the command line that starts `command` so that it dies with this process. It must inherit the file
    descriptor `error_fd`, the write end of a pipe."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(error_fd), *command]


def main(parent: int, error_fd: int, command: list[str]) -> int:
    die_with_parent(parent)
    os.set_inheritable(error_fd, False)
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores these, and ignored signals stay ignored after exec
        with suppress(AttributeError):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, os.environ)
    except OSError as error:
        os.write(error_fd, str(error.errno).encode())
    return CANNOT_START


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
