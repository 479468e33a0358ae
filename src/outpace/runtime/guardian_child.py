"""The inside of a guardian, `python -I -S guardian_child.py MARK INDEX DIRECTORY …`. It outlives a killed controller
briefly.

    controller ── child MARK PID START, sweep MARK, bye ──▶ standard input

`MARK` of the run is the beginning of the marks of its parts. After `bye`, and where the pipe closes without one since
the controller was killed, it kills what is left of the run, removes the shared memory of what it killed, and leaves;
the directories it removes in the second case only. It is a session of its own and deaf to what is sent to a process
group.

`INDEX` is a directory with one file per session that the run has started, `MARK` + `LEADER.START`. Its lines are the
shared-memory segments that the processes of that session were last seen to map (`outpace.runtime.guardian`).

Invariants
- A process is killed that was told and has not been replaced by another of the same number, that carries the mark of
  this run in its environment, or that is in a session which somebody with that mark has begun and noted. Nobody else
  is. The last way leads to those who write over their environment, as programs do that change how `ps` shows them.
- A shared-memory segment is removed only if a process of this run mapped it, its name is one that a library generates
  (`GENERATED`), it is still the same file, it is our user's, and no living process maps it.
- The resource trackers of Python's multiprocessing are killed last. A tracker removes the segments and semaphores that
  its processes have created as soon as all of them are dead.
- Standard library only, and little of it: it costs a few megabytes and no time while the run lives.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator

VARIABLE = "OUTPACE_RUN_MARK"
"""The environment variable that carries the mark, from a part to all who descend from it."""

SESSIONS = "OUTPACE_RUN_SESSIONS"
"""The environment variable that names the index."""

SHARED_MEMORY = "/dev/shm"
GENERATED = ("psm_", "sem.mp-", "torch_", "nccl-", "vllm")
"""How names of segments begin that are generated and used for one run of a program: Python's shared memory and
semaphores, torch, NCCL, vLLM. Anything else in shared memory, such as a dataset, may be there on purpose."""

TRACKER = b"multiprocessing.resource_tracker"
TRACKER_PASSES = 40
"""For so many passes resource trackers are left to finish."""

PASSES = 200
PAUSE_S = 0.05
ENDED = "ZX"
"""States of a process that has ended and that nobody has asked for yet."""


Segment = tuple[str, int]
"""A file in shared memory: name and inode."""


def main(mark: str, index: str, directories: list[str]) -> None:
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
            end({}, about, index)
    end(dict(told.values()), mark, index)
    remove(index)
    if order != "bye":
        for directory in directories:
            remove(directory)


def end(told: dict[int, str], mark: str, index: str) -> None:
    """Kill until nobody is found any more, then remove the shared memory that they used."""
    segments: set[Segment] = set()
    for number_of_pass in range(PASSES):
        found = {number for number, start in told.items() if start and start_of(number) == start}
        found |= marked(mark) | in_sessions(noted(index, mark))
        if not found:
            break
        segments |= mapped(found)
        spared = set(filter(_is_tracker, found)) if number_of_pass < TRACKER_PASSES else set()
        for number in found - spared:
            try:
                os.kill(number, signal.SIGKILL)
            except OSError:
                continue  # it has ended by itself, or is not ours
        time.sleep(PAUSE_S)
    for note in _notes(index, mark):
        segments |= read_note(os.path.join(index, note))
    unlink(segments)


def start_of(number: int) -> str:
    """When a process was started, in the system's own words; empty where there is none, or none that lives."""
    if not os.path.isdir("/proc/self"):
        return _ps("-o", "lstart=", "-p", str(number)).strip()
    fields = _stat(number)
    return "" if not fields or fields[0] in ENDED else fields[19]


def noted(index: str, mark: str) -> set[int]:
    """The leaders of the sessions that were begun under `mark`. While a session lasts, its number is nobody else's; if
    another process has it, the session is over."""
    leaders = set()
    for name in _notes(index, mark):
        _, number, start = name.rsplit(".", 2)
        if start_of(int(number)) in ("", start):
            leaders.add(int(number))
    return leaders


def _notes(index: str, mark: str) -> list[str]:
    return [name for name in os.listdir(index) if name.startswith(mark)] if os.path.isdir(index) else []


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


def _is_tracker(number: int) -> bool:
    try:
        with open(f"/proc/{number}/cmdline", "rb") as file:
            return TRACKER in file.read()
    except OSError:
        return False


def _ps(*arguments: str) -> str:
    """For systems without /proc."""
    import subprocess

    return subprocess.run(["ps", *arguments], capture_output=True, text=True, check=False).stdout


# ------------------------------------------------------------------------------------------------------ shared memory


def mapped(processes: Iterable[int]) -> set[Segment]:
    """The segments with generated names that these processes map."""
    inodes = _mapped_inodes(processes)
    return {(name, inode) for name, inode in _listed() if inode in inodes}


def unlink(segments: Iterable[Segment]) -> None:
    """Remove those that no living process maps."""
    left = {segment for segment in segments if _is_ours(segment)}
    inodes = _mapped_inodes(int(name) for name in os.listdir("/proc") if name.isdigit()) if left else set()
    for name, inode in left:
        try:
            if inode not in inodes:
                os.unlink(os.path.join(SHARED_MEMORY, name))
        except OSError:
            continue  # removed meanwhile, or not ours to remove


def _mapped_inodes(processes: Iterable[int]) -> set[int]:
    """Not the names: a semaphore is mapped under a temporary name, which it had before its own."""
    found: set[int] = set()
    for number in processes:
        try:
            with open(f"/proc/{number}/maps", "rb") as file:
                found.update(int(line.split(None, 5)[4]) for line in file if b" /dev/shm/" in line)
        except OSError:
            continue  # it has ended, or is somebody else's
    return found


def _listed() -> set[Segment]:
    try:
        entries = list(os.scandir(SHARED_MEMORY))
    except OSError:
        return set()
    return {(entry.name, entry.inode()) for entry in entries if entry.name.lower().startswith(GENERATED)}


def _is_ours(segment: Segment) -> bool:
    name, inode = segment
    try:
        status = os.lstat(os.path.join(SHARED_MEMORY, name))
    except OSError:
        return False
    return status.st_ino == inode and status.st_uid == os.getuid()


def read_note(note: str) -> set[Segment]:
    """The segments that a file of the index lists."""
    try:
        with open(note) as file:
            lines = [line.split() for line in file]
    except OSError:
        return set()
    return {(line[0], int(line[1])) for line in lines if len(line) == 2 and "/" not in line[0]}


def write_note(note: str, segments: Iterable[Segment]) -> None:
    """Replaces the file as a whole: a process may be killed at any moment."""
    folder, name = os.path.split(note)
    unfinished = os.path.join(folder, f".{name}")
    with open(unfinished, "w") as file:
        file.writelines(f"{name} {inode}\n" for name, inode in sorted(segments))
    os.rename(unfinished, note)


# -------------------------------------------------------------------------------------------------------- directories


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
