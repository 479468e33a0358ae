"""Tasks that arrive during the run: the journal of what a `TaskStream` gave.

    TaskStream.next_task ─▶ journal/tasks.jsonl, synced ─▶ the scheduler may admit it ─▶ workers read it by index

A task is used only after it is on disk, so a resumed run has every task that was ever given and takes the next one from
the stream. Only a task that was given but not yet on disk is asked for again.
"""

from __future__ import annotations

import os
import threading
from array import array
from pathlib import Path

import msgspec

from outpace.errors import BadInput, one_line
from outpace.runtime import wire
from outpace.tasks.fingerprint import Fingerprint
from outpace.types import Task

FILE = "tasks.jsonl"
"""Name of the file in the journal directory."""

ENDLESS = 2**62
"""Number of tasks in the single epoch of a stream: more than any run uses."""

STREAM_FINGERPRINT = Fingerprint(ENDLESS, "", ())


class StreamedTasks:
    """The journaled tasks of a stream, by index. One object appends; any number read, in any thread and process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ends = array("q")  # end of each complete line, as far as the file was read
        self._lock = threading.Lock()  # of `_ends`

    def __len__(self) -> int:
        """Return how many tasks are on disk."""
        with self._lock:
            if self._path.exists():
                with self._path.open("rb") as file:
                    file.seek(self._ends[-1] if self._ends else 0)
                    for line in file:
                        if line.endswith(b"\n"):  # else: being written, or torn by a kill
                            self._ends.append((self._ends[-1] if self._ends else 0) + len(line))
            return len(self._ends)

    def __getitem__(self, index: int) -> Task:
        if index >= len(self._ends) and index >= len(self):
            raise IndexError(f"{self._path}: task {index} is not journaled")
        with self._path.open("rb") as file:
            file.seek(self._ends[index - 1] if index else 0)
            return wire.decode_json(file.readline(), Task)

    def repair(self) -> int:
        """Remove an incomplete last line, left by a kill, and return how many tasks there are. Call before the first
        `append`."""
        count = len(self)
        if self._path.exists():
            os.truncate(self._path, self._ends[-1] if count else 0)
        return count

    def append(self, task: Task) -> None:
        """Journal a task; on return it is on disk."""
        try:
            msgspec.json.encode((task.prompt, task.columns))  # arrays are restored in episodes only
            line = wire.encode_json(task) + b"\n"
        except (TypeError, ValueError) as error:
            raise BadInput(f"tasks: task {one_line(task.id, 60)} cannot be journaled: {one_line(error)}") from error
        with self._path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if not self._ends:  # the file is new, and so is its name
            directory = os.open(self._path.parent, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)
        len(self)  # reads the new line
