"""The inside of a guardian, `python -I -S guardian_child.py MARK SESSIONS DIRECTORY …`. It outlives a killed controller
briefly.

    controller ── child MARK PID START, sweep MARK, bye ──▶ standard input

`MARK` of the run is the beginning of the marks of its parts. After `bye`, and where the pipe closes without one since
the controller was killed, it kills what is left of the run and leaves; the directories it removes in the second case
only. It is a session of its own and deaf to what is sent to a process group.

Invariants
- A process is killed that was told and has not been replaced by another of the same number, that carries the mark of
  this run in its environment, or that is in a session which somebody with that mark has begun and noted. Nobody else
  is. The last way leads to those who write over their environment, as programs do that change how `ps` shows them.
- Standard library only, and little of it: it costs a few megabytes and no time while the run lives.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

VARIABLE = "OUTPACE_RUN_MARK"
"""The environment variable that carries the mark, from a part to all who descend from it."""

SESSIONS = "OUTPACE_RUN_SESSIONS"
"""The environment variable that names the directory where sessions are noted: files `MARK` + `LEADER.START`."""

PASSES = 200
PAUSE_S = 0.05
ENDED = "ZX"
"""States of a process that has ended and that nobody has asked for yet."""


def main(mark: str, sessions: str, directories: list[str]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    told: dict[str, tuple[int, str]] = {}  # by the mark of the part
    order = ""
    for line in sys.stdin:
        order, _, about = line.strip().partition(" ")
        if order == "child":
            part, pid, start = about.split(" ", 2)
            told[part] = int(pid), start
        elif order == "sweep":
            told.pop(about, None)  # it has ended, and its number may be given to somebody else
            end({}, about, sessions)
    end(dict(told.values()), mark, sessions)
    remove(sessions)
    if order != "bye":
        for directory in directories:
            remove(directory)


def end(told: dict[int, str], mark: str, sessions: str) -> None:
    """Kill until nobody is found any more."""
    for _ in range(PASSES):
        found = {number for number, start in told.items() if start and start_of(number) == start}
        found |= marked(mark) | in_sessions(noted(sessions, mark))
        if not found:
            return
        for number in found:
            try:
                os.kill(number, signal.SIGKILL)
            except OSError:
                continue  # it has ended by itself, or is not ours
        time.sleep(PAUSE_S)


def start_of(number: int) -> str:
    """When a process was started, in the system's own words; empty where there is none, or none that lives."""
    if not os.path.isdir("/proc/self"):
        return _ps("-o", "lstart=", "-p", str(number)).strip()
    fields = _stat(number)
    return "" if not fields or fields[0] in ENDED else fields[19]


def noted(sessions: str, mark: str) -> set[int]:
    """The leaders of the sessions that were begun under `mark`. While a session lasts, its number is nobody else's; if
    another process has it, the session is over."""
    leaders = set()
    for name in os.listdir(sessions) if os.path.isdir(sessions) else ():
        if name.startswith(mark):
            _, number, start = name.rsplit(".", 2)
            if start_of(int(number)) in ("", start):
                leaders.add(int(number))
    return leaders


def in_sessions(leaders: set[int]) -> set[int]:
    """Whoever lives in these sessions."""
    if not leaders or not os.path.isdir("/proc/self"):
        return set()
    numbers = map(int, filter(str.isdigit, os.listdir("/proc")))
    stats = ((number, _stat(number)) for number in numbers)
    return {number for number, stat in stats if stat and stat[0] not in ENDED and int(stat[3]) in leaders}


def _stat(number: int) -> list[str]:
    """State, parent, group, session and so on; nothing where there is no such process."""
    try:
        with open(f"/proc/{number}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def marked(mark: str) -> set[int]:
    """Whose environment says that they belong to `mark`, or to a part of it."""
    carried = f"{VARIABLE}={mark}"
    return {number for number, environment in _environments() if carried in environment} - {os.getpid()}


def _environments() -> Iterator[tuple[int, str]]:
    if not os.path.isdir("/proc/self"):
        for line in _ps("-A", "-E", "-ww", "-o", "pid=,command=").splitlines():
            number, _, command = line.strip().partition(" ")
            yield int(number), command
        return
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", errors="replace") as file:
                yield int(name), file.read()
        except OSError:
            continue  # it has ended, or is somebody else's


def _ps(*arguments: str) -> str:
    """For systems without /proc."""
    import subprocess

    return subprocess.run(["ps", *arguments], capture_output=True, text=True, check=False).stdout


def remove(directory: str) -> None:
    """Our own directory with all that is in it. Nothing outside of it is touched, be it only its permissions."""
    import shutil  # late: it brings half of its size along

    for _ in range(PASSES):
        if not os.path.lexists(directory):
            return
        shutil.rmtree(directory, ignore_errors=True)
        _open_up(directory)
        time.sleep(PAUSE_S)


def _open_up(name: str, within: int | None = None) -> None:
    """What could not be listed is ours to allow, mostly; the next pass gets further. `within` is an open directory: by
    its path somebody could put a link in the place of one of those above. Links are not followed."""
    try:
        _allow(name, within)
        directory = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=within)
    except OSError:
        return  # it is no directory, is somebody else's, or has just gone
    try:
        for entry in os.scandir(directory):
            if entry.is_dir(follow_symlinks=False):
                _open_up(entry.name, directory)
    except OSError:
        return  # it cannot be read to its end
    finally:
        os.close(directory)


def _allow(name: str, within: int | None) -> None:
    """Make a directory ours to list and to change; a link in its place is left as it is, or raises `OSError`."""
    if os.chmod in os.supports_follow_symlinks:
        os.chmod(name, 0o700, dir_fd=within, follow_symlinks=False)
        return
    # A descriptor that permits nothing needs no permission, and stands for the directory itself.
    itself = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=within)
    try:
        os.chmod(f"/proc/self/fd/{itself}", 0o700)
    finally:
        os.close(itself)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
