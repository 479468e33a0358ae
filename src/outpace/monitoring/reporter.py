"""Reporter process: sends a run directory to experiment trackers, outside of the training path.

    metrics.jsonl, evals.jsonl, rollouts/, resolved.toml, summary.json
        └─▶ RunFollower ─▶ Delivery ─▶ tracker      one thread for each tracker
                              └─▶ trackers/NAME.json: what it has

`python -P -c BOOTSTRAP PACKAGE check|report ORDER`, where ORDER is JSON (`ReportOrder`). Standard output takes lines
for the user. The process follows the run until its standard input closes, then sends the rest and exits: with code 0 if
all trackers have everything.

Invariants
- The run never waits for this process, and does not need it: everything is in its files, and what a tracker misses is
  sent later. So nothing is buffered here, and it does not matter when this process is killed.
- A tracker that blocks or raises does not hold up the others. It is reported once, and again when it recovers.
- One process at a time sends a run to a tracker (`trackers/NAME.lock`).
- What libraries print goes to standard error, the log of the process.
- Uses only the standard library and the tracker packages: it runs in the environment of those (`report.python`).
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
import tomllib
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outpace.errors import BadInput, OutpaceError, one_line, plural
from outpace.monitoring.line_file import write_atomically
from outpace.monitoring.run_follower import Position, RunFollower
from outpace.monitoring.trackers import BUILT_IN, SETTING, TrackedRun, Tracker, load_tracker

FOLDER = "trackers"
"""Folder in the run directory."""

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
EXIT_BEHIND = 4


@dataclass(frozen=True)
class ReportOrder:
    """What to send where."""

    run: str
    trackers: list[str]
    project: str
    name: str
    tables_every: int
    finish_s: float | None  # limit after the run has ended; None: no limit, and the first error ends a tracker
    active: bool = False  # the run may write more although it is not followed
    niceness: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def resend_command(run: str | Path, tracker: str = "") -> str:
    return f"outpace report {run}" + (f" --to {tracker}" if tracker else "")


class Delivery:
    """Keeps one tracker up to date. It has no thread and does not sleep: `advance` does some work, or raises nothing
    and returns how long to wait."""

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
        self._settled = Position()  # what is sure to be stored, and on disk
        self._unsettled: deque[tuple[float, Position]] = deque()
        self._failures = 0
        self._last_reason = ""  # of a failure
        self._said_blocked = False

    @property
    def position(self) -> Position:
        return self._position

    def advance(self, ended: bool) -> float:
        """Send some of what the tracker does not have. Returns seconds until there may be more; `ended`: the run writes
        no more."""
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
        """Say once that a call has not returned for a long time. For another thread."""
        since = self.busy_since
        if since is None or self._said_blocked or self._failures or self._clock() - since < BLOCKED_S:
            return
        self._said_blocked = True
        self._say(f"{self.name}: has not answered for {BLOCKED_S:.0f} s; {self._consequence()}")

    def describe_rest(self) -> str:
        """Say what the tracker still lacks, and how to send it."""
        return (
            f"{self.name}: has received {plural(self._settled.metrics, 'step')} so far; "
            f"send the rest with: {resend_command(self._run, self._reference)}"
        )

    def close(self) -> None:
        """Release the lock, so that another process can send to this tracker."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _deliver(self, ended: bool) -> bool:
        """Send one batch. Returns whether there was one."""
        if self._lock is None:
            self._open()
        position = self._follower.rolled_back(self._position)
        if position != self._position or self._tracker is None:
            if position.finished and ended:  # by an earlier process, and nothing has happened since
                self.done = True
                return False
            self._connect(position)
        assert self._tracker is not None
        items = self._follower.next_batch(self._position, ended)
        for item in items:
            if item.rows is None:
                self._tracker.metrics(item.step, item.values, item.at)
            else:
                self._tracker.table(item.step, item.rows)
        if items:
            self._tracker.flush()
            self._position = items[-1].after
        elif ended:
            self._finish(self._tracker)
        self._save_stored()
        return bool(items)

    def _open(self) -> None:
        """Lock the tracker for this process and read what it has."""
        self._state.parent.mkdir(exist_ok=True)
        lock = os.open(self._state.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise BlockingIOError("another process is sending this run to it") from None
        except OSError as error:  # a file system without locks
            print(f"{self._state}: cannot be locked: {error}", file=sys.stderr)
        try:
            self._position = self._settled = _read_position(self._state)
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock

    def _connect(self, position: Position) -> None:
        self._tracker = None
        self._follower.rewind()
        tracker = self._make()
        run = TrackedRun(
            project=self._order.project,
            name=self._order.name,
            directory=self._run,
            config=_read_config(self._run),
            run_id=position.run_id,
            step=position.metrics,
        )
        self._position = replace(position, run_id=tracker.start(run))
        self._tracker = tracker
        self._unsettled.clear()
        self._save(self._position)

    def _finish(self, tracker: Tracker) -> None:
        summary = None if self._order.active else _read_summary(self._run)
        tracker.finish(summary)
        self._unsettled.clear()
        self._position = replace(self._position, finished=summary is not None)
        self._save(self._position)
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
        reason = one_line(error) if isinstance(error, OutpaceError) else f"{type(error).__name__}: {one_line(error)}"
        if reason != self._last_reason:
            traceback.print_exception(error)  # to the log
        self._last_reason = reason
        self._tracker = None
        self._position = self._settled
        self._follower.rewind()
        self._failures += 1
        if self._order.finish_s is None:
            self.done = self.failed = True
        if self._failures == 1:
            self._say(f"{self.name}: {reason}; {self._consequence()}")
        return min(MAX_PAUSE_S, 2.0 ** min(self._failures, 10))

    def _consequence(self) -> str:
        command = resend_command(self._run, self._reference)
        if self._order.finish_s is None:
            return f"run the command again to send the rest: {command}"
        return f"training continues, and it gets what it misses later, or with: {command}"


class Reporter:
    """Runs one thread per tracker until the run has ended and all have everything, or the time is up."""

    def __init__(self, order: ReportOrder, say: Callable[[str], None]) -> None:
        self._order = order
        self._say = say
        self._ended = threading.Event()
        self._deliveries = [
            Delivery(name.rpartition(":")[2], load_tracker(name), order, say) for name in order.trackers
        ]
        self._threads = [
            threading.Thread(target=self._deliver, args=[each], name=each.name, daemon=True)
            for each in self._deliveries
        ]

    def run(self, follow: Callable[[], bool]) -> int:
        """Follow the run as long as `follow` returns true, which it does after at most a second or so."""
        for thread in self._threads:
            thread.start()
        while follow():
            self._report_blocked()
        self._ended.set()
        deadline = None if self._order.finish_s is None else time.monotonic() + self._order.finish_s
        while any(thread.is_alive() for thread in self._threads) and (deadline is None or time.monotonic() < deadline):
            for thread in self._threads:
                thread.join(0.05)
            self._report_blocked()
        behind = [each for each in self._deliveries if not each.done]
        for delivery in behind:
            self._say(delivery.describe_rest())
        return EXIT_BEHIND if behind or any(each.failed for each in self._deliveries) else 0

    def _deliver(self, delivery: Delivery) -> None:
        while not delivery.done:
            ended = self._ended.is_set()
            pause = delivery.advance(ended)
            if pause and not delivery.done:
                # The end of the run wakes a waiting thread; after it, a failed tracker is tried every second.
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


def _read_config(run: Path) -> dict[str, Any]:
    """Return the settings of the run, without the values of `launch.env`, which may be secrets."""
    config = tomllib.loads((run / "resolved.toml").read_text())
    if env := config.get("launch", {}).get("env"):
        config["launch"]["env"] = dict.fromkeys(env, "***")
    return config


def _read_summary(run: Path) -> dict[str, Any] | None:
    """Return the summary; None if the run was killed before it could write one."""
    try:
        summary = json.loads((run / "summary.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def find_problems(trackers: Sequence[str], python: str) -> list[str]:
    """Return one line per tracker that cannot be created. `python`: value of `report.python`, empty if not set."""
    problems = []
    for name in trackers:
        if name in BUILT_IN and find_spec(name) is None:
            where = f" in the environment of report.python ({python})" if python else ""
            extra = name if python else f"'outpace[{name}]'"
            problems.append(f"{SETTING}: {name} is not installed{where}; pip install {extra}, or leave it out")
        elif name not in BUILT_IN:
            try:
                load_tracker(name)
            except BadInput as error:
                problems.append(str(error))
    return problems


def _own_channel() -> int:
    """Return a copy of standard output for our lines, and make it the same as standard error for everything else."""
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
    # Sent to a whole process group, these are for the run, which then closes our standard input.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    os.nice(order.niceness)
    code = Reporter(order, say).run(_input_is_open)
    # Not `sys.exit`: that waits for threads of a blocked tracker.
    os._exit(code)


def _input_is_open() -> bool:
    """Wait up to `POLL_S` for standard input to close."""
    ready, _, _ = select.select([0], [], [], POLL_S)
    return not ready or bool(os.read(0, 4096))
