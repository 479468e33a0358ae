"""Tasks that arrive during the run: the journal of what a `TaskStream` or a data producer supplies.

    TaskStream.next_task ─┬─▶ journal/tasks.jsonl, synced ─▶ the scheduler may admit it ─▶ workers read it by visit
    DataProducer.produce ─┘

The file has one task per line. A `Round` line groups the next `count` tasks into one round. A task outside of a round,
as from a stream, is a round by itself. Each of the `passes` over a round visits all of its tasks once, until the round
has had `limit` visits. Later passes write nothing: visit numbers are mapped to tasks.

A task is used only after its whole round is on disk, so a resumed run has every round that it ever used and requests
the next one. Only a round that was produced but not yet on disk is requested again.
"""

from __future__ import annotations

import os
import threading
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from outpace.errors import BadInput, one_line
from outpace.runtime import wire
from outpace.tasks.fingerprint import Fingerprint
from outpace.types import Task, Version

FILE = "tasks.jsonl"
"""Name of the file in the journal directory."""

ENDLESS = 2**62
"""Number of tasks in the single epoch of a stream: more than any run uses."""

STREAM_FINGERPRINT = Fingerprint(ENDLESS, "", ())


class Round(msgspec.Struct, frozen=True):
    """Header line before the tasks of a round."""

    round: int
    count: int  # tasks
    passes: int = 1
    limit: int | None = None  # maximum number of visits over all passes
    step: Version = 0  # learner step when the round was requested
    rng: str = ""  # random state of the producer's process after the round; empty: unchanged

    @property
    def visits(self) -> int:
        total = self.count * self.passes
        return total if self.limit is None else min(total, self.limit)


HEADER = b'{"round":'
"""Start of a `Round` line. A task line starts with the task's id."""


@dataclass
class _Span:
    """Consecutive visits: those of one round, or of consecutive rounds of one task each."""

    round: int
    visit: int
    task: int
    tasks: int
    visits: int
    single: bool  # rounds of one task each

    @property
    def rounds(self) -> int:
        return self.tasks if self.single else 1


class StreamedTasks:
    """The journaled tasks by visit. One instance appends; any number of instances, threads and processes read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # guards the fields below
        self._spans: list[_Span] = []
        self._starts = array("q")  # file offset of each task's line
        self._end = 0  # file offset of the end of the last complete round
        self._rng = ""

    def __len__(self) -> int:
        """Read new rounds from disk and return the number of visits in all complete rounds."""
        with self._lock:
            if self._path.exists():
                self._read()
            return self._visits

    def __getitem__(self, visit: int) -> Task:
        if visit >= self._visits and visit >= len(self):
            raise IndexError(f"{self._path}: task {visit} is not journaled")
        span = self._spans[bisect_right(self._spans, visit, key=lambda span: span.visit) - 1]
        with self._path.open("rb") as file:
            file.seek(self._starts[span.task + (visit - span.visit) % span.tasks])
            return wire.decode_json(file.readline(), Task)

    # ------------------------------------------------------------------------------------------------------- rounds

    @property
    def rounds(self) -> int:
        """Number of complete rounds, as last read."""
        return self._spans[-1].round + self._spans[-1].rounds if self._spans else 0

    @property
    def rng(self) -> str:
        """Random state of the producer's process after the last round, as last read; empty if it is not known."""
        return self._rng

    def visits_before(self, number: int) -> int:
        """Return how many visits the rounds before round `number` have."""
        index = bisect_right(self._spans, number, key=lambda span: span.round) - 1
        if index < 0:
            return 0
        span, within = self._spans[index], number - self._spans[index].round
        return span.visit + (within if span.single else span.visits if within else 0)

    def round_of(self, visit: int) -> int:
        """Return the round of a visit. A visit after the last round belongs to the next one."""
        index = bisect_right(self._spans, visit, key=lambda span: span.visit) - 1
        if index < 0:
            return 0
        span, within = self._spans[index], visit - self._spans[index].visit
        return span.round + (min(within, span.tasks) if span.single else within >= span.visits)

    # ------------------------------------------------------------------------------------------------------ writing

    def append(self, task: Task) -> None:
        """Journal a task as a separate round; on return it is on disk."""
        self._write(_encoded(task))

    def append_round(self, header: Round, tasks: Sequence[Task]) -> None:
        """Journal a round; on return it is on disk. A kill leaves either the whole round readable or none of it."""
        assert header.count == len(tasks) > 0
        self._write(b"".join([msgspec.json.encode(header) + b"\n", *map(_encoded, tasks)]))

    def _write(self, lines: bytes) -> None:
        len(self)  # reads to the end of the last complete round
        is_new = not self._path.exists()
        with self._path.open("ab") as file:
            file.truncate(self._end)  # removes a round that a kill left incomplete
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            directory = os.open(self._path.parent, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)
        len(self)  # reads the new lines

    # ------------------------------------------------------------------------------------------------------ reading

    @property
    def _visits(self) -> int:
        return self._spans[-1].visit + self._spans[-1].visits if self._spans else 0

    def _read(self) -> None:
        """Read the rounds that were completed since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._end)
            while (line := file.readline()).endswith(b"\n"):  # else: being written, or torn by a kill
                if not line.startswith(HEADER):
                    self._add_single(len(line))
                    continue
                header = msgspec.json.decode(line, type=Round)
                lengths = [len(line)]
                while len(lengths) <= header.count and (line := file.readline()).endswith(b"\n"):
                    lengths.append(len(line))
                if len(lengths) <= header.count:
                    return
                self._add_round(header, lengths)

    def _add_single(self, length: int) -> None:
        self._add_starts([length])
        if self._spans and self._spans[-1].single:
            self._spans[-1].tasks += 1
            self._spans[-1].visits += 1
        else:
            self._add_span(tasks=1, visits=1, single=True)

    def _add_round(self, header: Round, lengths: list[int]) -> None:
        self._end += lengths[0]
        self._add_starts(lengths[1:])
        self._add_span(header.count, header.visits, single=False)
        self._rng = header.rng or self._rng

    def _add_starts(self, lengths: list[int]) -> None:
        for length in lengths:
            self._starts.append(self._end)
            self._end += length

    def _add_span(self, tasks: int, visits: int, single: bool) -> None:
        """Add the tasks whose starts were added last. Readers in other threads see them from then on."""
        self._spans.append(_Span(self.rounds, self._visits, len(self._starts) - tasks, tasks, visits, single))


def _encoded(task: Task) -> bytes:
    try:
        msgspec.json.encode((task.prompt, task.columns))  # must be plain JSON: arrays are restored only in episodes
        line = wire.encode_json(task)
        wire.decode_json(line, Task)  # a task that cannot be read back would fail in every start of the run
        return line + b"\n"
    except (TypeError, ValueError, NotImplementedError, wire.WireError) as error:
        raise BadInput(f"tasks: task {one_line(task.id, 60)} cannot be journaled: {one_line(error)}") from error
