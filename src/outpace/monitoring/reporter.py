"""Reporter process: sends a run directory to experiment trackers, off the training path.

    metrics.jsonl, evals.jsonl, rollouts/, resolved.toml, summary.json
        └─▶ RunFollower ─▶ Delivery ─▶ tracker      one thread for each tracker
                              └─▶ trackers/NAME.json: what it has stored

`python -P -c BOOTSTRAP PACKAGE check|report ORDER`, where ORDER is JSON (`ReportOrder`). Standard output takes lines
for the user. The process follows the run until its standard input closes, then sends the rest and exits: with code 0 if
everything was sent. Its working directory is the one in which the run was first reported, because some trackers store
data relative to it.

Invariants
- The run neither waits for this process nor needs it: the run's files contain everything, and what a tracker misses is
  sent later. So nothing is buffered here, and the process may be killed at any time.
- A tracker that blocks or raises does not hold up the others. It is reported once, and again when it recovers.
- One process at a time sends a run to a tracker (`trackers/NAME.lock`).
- What libraries print goes to standard error, the log of the process.
- Uses only the standard library and the tracker packages: it runs in the trackers' environment (`report.python`).
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outpace.errors import BadInput, OutpaceError, one_line, plural
from outpace.monitoring.line_file import write_atomically
from outpace.monitoring.run_follower import KILLED, Item, Position, RunFollower, read_masked_config
from outpace.monitoring.trackers import TrackedRun, Tracker
from outpace.runtime.registry import TRACKERS

FOLDER = "trackers"
"""Folder in the run directory."""
WORKING_DIRECTORY = "working_directory"
"""File in that folder: the directory in which the run was first reported."""

BOOTSTRAP = """
import importlib.util, sys
place = sys.argv.pop(1)
spec = importlib.util.spec_from_file_location("outpace", f"{place}/__init__.py", submodule_search_locations=[place])
sys.modules["outpace"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from outpace.monitoring.reporter import main
main(*sys.argv[1:])
"""
"""Imports outpace from its folder, and nothing else that is installed next to it."""

POLL_S = 1.0
BLOCKED_S = 60.0
"""A call to a tracker that takes longer is reported."""
MAX_PAUSE_S = 60.0
"""Longest pause before a failed tracker is tried again."""
NICENESS = 10
EXIT_INCOMPLETE = 4
IMPORTING = "importing "
"""Prefix of a line that the check prints before each import, so that a slow one can be named."""
TABLE_ATTEMPTS = 3
"""A table is left out after this many failures."""


@dataclass(frozen=True)
class ReportOrder:
    """What to send, and to which trackers."""

    run: str
    trackers: list[str]
    project: str
    name: str
    tables_every: int
    finish_s: float | None  # limit after the run has ended; None: no limit
    follow: bool = True  # send until standard input closes; False: send what is there, and end at the first error
    active: bool = False  # the run may write more although it is not followed
    niceness: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def resend_command(run: str | Path, tracker: str = "") -> str:
    return f"outpace report {run}" + (f" --to {tracker}" if tracker else "")


class Delivery:
    """Keeps one tracker up to date. It has no thread and does not sleep: `advance` does some work, never raises, and
    returns how long to wait."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        order: ReportOrder,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._reference = next((each for each in order.trackers if each.rpartition(":")[2] == name), name)
        self.done = self.failed = False
        self.busy_since: float | None = None
        self._make, self._order, self._say, self._clock = make, order, say, clock
        self._run = Path(order.run)
        self._follower = RunFollower(self._run, order.tables_every)
        self._state = self._run / FOLDER / f"{name}.json"
        self._lock: int | None = None
        self._tracker: Tracker | None = None
        self._position = Position()
        self._settled = Position()  # what the tracker has surely stored; also in the state file
        self._unsettled: deque[tuple[float, Position]] = deque()
        self._failures = 0
        self._last_reason = ""  # of a failure
        self._table_failures = 0  # of the next table, while metrics were accepted
        self._took_metrics = False  # since the last failure of a table
        self._left_out: set[int] = set()  # steps whose tables are not sent
        self._said_blocked = False

    @property
    def position(self) -> Position:
        return self._position

    def advance(self, ended: bool) -> float:
        """Send one batch of what the tracker lacks. Returns the seconds to wait before the next call. `ended`: the run
        writes no more."""
        self.busy_since = self._clock()
        try:
            sent = self._deliver(ended)
        except Exception as error:  # boundary: a tracker may raise anything
            return self._fail(error)
        finally:
            self.busy_since = None
        if self._failures or self._said_blocked:
            self._say(f"{self.name}: receives metrics again")
        self._failures, self._said_blocked = 0, False
        return 0.0 if sent or self.done else POLL_S

    def report_blocked(self) -> None:
        """Report once that a call has not returned for a long time. Called on another thread."""
        since = self.busy_since
        if since is None or self._said_blocked or self._failures or self._clock() - since < BLOCKED_S:
            return
        self._said_blocked = True
        self._say(f"{self.name}: has not answered for {BLOCKED_S:.0f} s; {self._consequence()}")

    def describe_rest(self) -> str:
        """Say what the tracker still lacks, and how to send it."""
        return (
            f"{self.name}: incomplete, after {plural(self._settled.metrics, 'step')}; "
            f"send the rest with: {resend_command(self._run, self._reference)}"
        )

    def close(self) -> None:
        """Release the lock, so that another process can send to this tracker."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _deliver(self, ended: bool) -> bool:
        """Send one batch of metrics or, if there are none, one table. Returns whether anything was sent."""
        if self._lock is None and not self._open():
            return False
        position = self._follower.rolled_back(self._position)
        if position != self._position or self._tracker is None:
            if ended and not self._order.active and position.ended == _read_summary(self._run)[1]:
                self._complete()  # by an earlier process, and nothing has happened since
                return False
            self._connect(position)
        assert self._tracker is not None
        records = self._follower.next_records(self._position)
        for item in records:
            self._tracker.metrics(item.step, item.values, item.at)
        if records:
            self._tracker.flush()
            self._position = records[-1].after
            self._took_metrics = True
        table = None if records else self._follower.next_table(self._position, ended)
        if table is not None:
            self._send_table(self._tracker, table)
        elif ended and not records:
            self._finish(self._tracker)
        self._save_stored()
        return bool(records or table)

    def _send_table(self, tracker: Tracker, table: Item) -> None:
        """Send a table. Leave it out after `TABLE_ATTEMPTS` failures while metrics are accepted."""
        try:
            if table.rows and table.step not in self._left_out:
                tracker.table(table.step, table.rows)
                tracker.flush()
        except Exception as error:  # boundary: a tracker may raise anything
            self._table_failures += self._took_metrics or not self._order.follow
            self._took_metrics = False
            if self._table_failures == TABLE_ATTEMPTS:
                self._left_out.add(table.step)
                self._say(f"{self.name}: the table of step {table.step} is left out: {_reason(error)}")
            raise
        self._table_failures = 0
        self._position = table.after

    def _open(self) -> bool:
        """Lock the tracker for this process and read its position. If another process has the lock: raise if following
        the run, else set `done` and return False."""
        self._state.parent.mkdir(exist_ok=True)
        lock = os.open(self._state.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            if self._order.follow:
                raise BlockingIOError("another process is sending this run to it") from None
            self._say(f"{self.name}: {'the run itself' if self._order.active else 'another process'} sends to it")
            self.done = True
            return False
        except OSError as error:  # a file system without locks
            print(f"{self._state}: cannot be locked: {error}", file=sys.stderr)
        try:
            for left in self._state.parent.glob(f".{self._state.name}.*"):  # by a process killed while it wrote
                left.unlink(missing_ok=True)
            self._position = self._settled = _read_position(self._state)
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        return True

    def _connect(self, position: Position) -> None:
        self._drop_tracker()
        self._follower.rewind()
        self._unsettled.clear()
        self._position = replace(position, new_id=position.new_id or uuid.uuid4().hex[:12])
        self._save(self._position)  # before the start: if that fails, the next one uses the same id
        self._tracker = self._make()
        run = TrackedRun(
            project=self._order.project,
            name=self._order.name,
            directory=self._run,
            config=read_masked_config(self._run),
            new_id=self._position.new_id,
            run_id=position.run_id,
            step=position.metrics,
        )
        try:
            run_id = self._tracker.start(run)
        except Exception as error:  # boundary: a tracker may raise anything
            if position.run_id is None:
                raise
            hint = f"if its run was deleted there, remove {self._state} to send everything again"
            raise OutpaceError(f"{_reason(error)}; {hint}") from error
        self._position = replace(self._position, run_id=run_id)
        self._save(self._position)

    def _drop_tracker(self) -> None:
        """Close the tracker after a failure. Errors while closing are logged."""
        tracker, self._tracker = self._tracker, None
        try:
            getattr(tracker, "close", lambda: None)()
        except Exception:  # boundary: it has failed before
            traceback.print_exc()

    def _finish(self, tracker: Tracker) -> None:
        summary, digest = (None, "") if self._order.active else _read_summary(self._run)
        tracker.finish(summary, self._order.active)
        self._unsettled.clear()
        self._position = replace(self._position, ended=digest)
        self._save(self._position)
        self._complete()

    def _complete(self) -> None:
        if not self._order.follow:
            so_far = " so far" if self._order.active else ""
            self._say(f"{self.name}: everything was sent{so_far}, {plural(self._position.metrics, 'step')}")
        self.done = True

    def _save_stored(self) -> None:
        """Save the newest position that the tracker has surely stored."""
        if self.done:
            return
        now = self._clock()
        if not self._unsettled or self._unsettled[-1][1] != self._position:
            self._unsettled.append((now, self._position))
        settled = self._settled
        while self._unsettled and now - self._unsettled[0][0] >= getattr(self._tracker, "settle_s", 0.0):
            settled = self._unsettled.popleft()[1]
        if settled != self._settled:
            self._save(settled)

    def _save(self, position: Position) -> None:
        self._settled = position
        try:
            write_atomically(self._state, position.to_json(), durable=False)
        except OSError as error:  # a full disk: at worst, what follows is sent twice
            print(f"{self._state}: {error}", file=sys.stderr)

    def _fail(self, error: Exception) -> float:
        reason = _reason(error)
        if reason != self._last_reason:
            traceback.print_exception(error)  # to the log
        self._last_reason = reason
        self._drop_tracker()
        self._position = self._settled
        self._follower.rewind()
        self._failures += 1
        if not self._order.follow and not self._table_failures:
            self.done = self.failed = True
        if self._failures == 1:
            self._say(f"{self.name}: {reason}; {self._consequence()}")
        return min(MAX_PAUSE_S, 2.0 ** min(self._failures, 10))

    def _consequence(self) -> str:
        if not self._order.follow:
            return f"run the command again to send the rest: {resend_command(self._run, self._reference)}"
        return "training continues, and what it misses is sent later"


class Reporter:
    """Runs one thread per tracker until the run has ended and everything was sent, or the time is up."""

    def __init__(self, order: ReportOrder, say: Callable[[str], None]) -> None:
        self._order = order
        self._say = say
        self._ended = threading.Event()
        self._deliveries = [
            # Imported in the thread of the tracker: an import may take long, or never end.
            Delivery(name.rpartition(":")[2], partial(_make_tracker, name), order, say)
            for name in order.trackers
        ]
        self._threads = [
            threading.Thread(target=self._deliver, args=[each], name=each.name, daemon=True)
            for each in self._deliveries
        ]

    def run(self, follow: Callable[[], bool]) -> int:
        """Send until the run has ended, then send the rest. With `order.follow` the run ends when `follow` returns
        False; it is called repeatedly and blocks for up to a second. Returns the exit code."""
        if not self._order.follow:
            self._ended.set()
        for thread in self._threads:
            thread.start()
        while not self._ended.is_set() and follow():
            self._report_blocked()
        self._ended.set()
        deadline = None if self._order.finish_s is None else time.monotonic() + self._order.finish_s
        while any(thread.is_alive() for thread in self._threads) and (deadline is None or time.monotonic() < deadline):
            for thread in self._threads:
                thread.join(0.05)
            self._report_blocked()
        incomplete = [each for each in self._deliveries if not each.done]
        for delivery in incomplete:
            self._say(delivery.describe_rest())
        return EXIT_INCOMPLETE if incomplete or any(each.failed for each in self._deliveries) else 0

    def _deliver(self, delivery: Delivery) -> None:
        while not delivery.done:
            ended = self._ended.is_set()
            pause = delivery.advance(ended)
            if pause and not delivery.done:
                # The end of the run wakes a waiting thread; after it, a failed tracker is retried every second.
                self._ended.wait(pause) if not ended else time.sleep(min(pause, POLL_S))

    def _report_blocked(self) -> None:
        for delivery in self._deliveries:
            delivery.report_blocked()


def _read_position(state: Path) -> Position:
    try:
        return Position.from_json(state.read_text())
    except FileNotFoundError:
        return Position()
    except (ValueError, TypeError) as error:
        raise ValueError(f"{state} is not readable ({error}); remove it to send the run again") from None


def _read_summary(run: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the summary and its digest; None and `KILLED` if the run was killed before it could write one."""
    try:
        content = (run / "summary.json").read_bytes()
        summary = json.loads(content)
    except (FileNotFoundError, ValueError):
        return None, KILLED
    return (summary, blake2b(content, digest_size=8).hexdigest()) if isinstance(summary, dict) else (None, KILLED)


def _reason(error: Exception) -> str:
    return one_line(error) if isinstance(error, OutpaceError) else f"{type(error).__name__}: {one_line(error)}"


def _make_tracker(name: str) -> Tracker:
    made: Tracker = TRACKERS.find(name)()
    return made


def find_problems(trackers: Sequence[str], python: str) -> Iterator[str]:
    """Yield a line per tracker that cannot be created, and, before each import, `IMPORTING` with the tracker's name.
    `python`: value of `report.python`, empty if not set."""
    for name in trackers:
        if name in TRACKERS.built_in and find_spec(name) is None:  # it has the name of its package and of an extra
            where = f" in the environment of report.python ({python})" if python else ""
            extra = name if python else f"'outpace[{name}]'"
            yield f"{TRACKERS.setting}: {name} is not installed{where}; pip install {extra}, or leave it out"
        elif name not in TRACKERS.built_in:
            yield f"{IMPORTING}{name}"
            try:
                TRACKERS.find(name)
            except BadInput as error:
                yield str(error)


def _own_channel() -> int:
    """Return a copy of standard output for our lines, and redirect standard output to standard error."""
    channel = os.dup(1)
    os.dup2(2, 1)
    return channel


def main(mode: str, order_json: str, python: str = "") -> None:
    channel = _own_channel()

    def say(line: str) -> None:
        try:
            os.write(channel, f"{one_line(line, 1000)}\n".encode())
        except OSError:  # the reader is gone; what matters is on disk
            print(line, file=sys.stderr)

    order = ReportOrder(**json.loads(order_json))
    if mode == "check":
        for problem in find_problems(order.trackers, python):
            say(problem)
        return
    # Signals to the process group are for the run, which then closes our standard input.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    os.nice(order.niceness)
    _enter_working_directory(Path(order.run) / FOLDER)
    code = Reporter(order, say).run(_input_is_open)
    # Not `sys.exit`: that waits for threads of a blocked tracker.
    os._exit(code)


def _enter_working_directory(folder: Path) -> None:
    """Change to the directory in which the run was first reported. On the first report, record the current one."""
    sys.path.append(os.getcwd())  # modules of the user's trackers are also looked for here
    file = folder / WORKING_DIRECTORY
    try:
        os.chdir(file.read_text())
    except OSError:
        try:
            folder.mkdir(exist_ok=True)
            write_atomically(file, os.getcwd(), durable=False)
        except OSError as error:  # a full disk
            print(f"{file}: {error}", file=sys.stderr)


def _input_is_open() -> bool:
    """Wait up to `POLL_S` for standard input to close."""
    ready, _, _ = select.select([0], [], [], POLL_S)
    return not ready or bool(os.read(0, 4096))
