"""Parent side of the reporter process, for a run or `outpace report`: checks, start, messages, end.

The child (`outpace.monitoring.reporter`) has its own runtime directory and cleanup process, because it sends the
summary after the components have stopped. Its death does not end the run.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import outpace
from outpace.config import Config
from outpace.config.load import CONFIG_FILE, load_config, read_resolved
from outpace.errors import BadInput, ComponentFailed, one_line
from outpace.monitoring.reporter import BOOTSTRAP, EXIT_INCOMPLETE, IMPORTING, NICENESS, ReportOrder, resend_command
from outpace.monitoring.run_directory import LOCK_FILE, is_lock_held
from outpace.run.objects import tracker_references
from outpace.runtime.child_process import describe_exit, end_program, start_program
from outpace.runtime.cleanup import RuntimeDirectory
from outpace.runtime.registry import TRACKERS

CHECK_S = 60.0
"""Time limit of the check that the trackers are installed."""
NOTICE_S = 2.0
"""If sending at the end of a run takes longer than this, the user is told."""
SEND_SHARE = 0.9
"""Fraction of `report.finish_s` for sending. The rest is for reporting what is missing."""

_OTHER_PYTHON = ("PYTHONPATH", "PYTHONHOME")
"""Variables that must not reach the Python of another environment."""


def report_order(config: Config, run: Path) -> ReportOrder:
    report = config.report
    return ReportOrder(
        run=str(run.absolute()),  # the process may work in another directory
        trackers=tracker_references(config.run.report_to),
        project=report.project,
        name=report.name or run.absolute().name,
        tables_every=report.tables_every,
        finish_s=SEND_SHARE * report.finish_s,
        niceness=NICENESS,
    )


async def check_trackers(config: Config, run: Path) -> None:
    """Raise `BadInput` if the reporter's Python does not have a tracker."""
    if not config.run.report_to:
        return
    python, lines = _python(config), list[str]()
    try:
        child = await _Child.start(
            config, "check", report_order(config, run), config.report.python or "", stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        raise BadInput(f"report.python: cannot start {python}: {error.strerror}") from None
    try:
        async with asyncio.timeout(CHECK_S):
            errors = await _read_check(child.process, lines)
    except TimeoutError:
        slow = lines[-1].removeprefix(IMPORTING) if lines else ""
        what = f"{TRACKERS.setting}: {slow}: the import takes" if slow else f"report.python {python}: the start takes"
        raise BadInput(f"{what} longer than {CHECK_S:g} s") from None
    finally:
        await child.end()
    if status := child.process.returncode:
        last = one_line(errors.strip().rpartition("\n")[2]) or describe_exit(status)
        raise BadInput(f"report.python {python}: not a usable Python 3.11 or later: {last}")
    for line in lines:
        if not line.startswith(IMPORTING):
            raise BadInput(line)


async def _read_check(process: asyncio.subprocess.Process, lines: list[str]) -> str:
    """Wait until the check ends. Appends its stdout to `lines` as it arrives, and returns its stderr."""
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.ensure_future(process.stderr.read())
    while line := await process.stdout.readline():
        lines.append(line.decode(errors="replace").rstrip())
    await process.wait()
    return (await errors).decode(errors="replace")


def _python(config: Config) -> str:
    return os.path.expanduser(config.report.python) if config.report.python else sys.executable


def _environment(config: Config) -> dict[str, str]:
    hidden = _OTHER_PYTHON if config.report.python else ()
    return {name: value for name, value in os.environ.items() if name not in hidden}


def _open_log(run: Path) -> BinaryIO:
    (run / "logs").mkdir(exist_ok=True)
    return open(run / "logs" / "reporter.log", "ab")


class _Child:
    """A reporter process, in its own session. It dies with this process."""

    def __init__(self, process: asyncio.subprocess.Process, mark: str, directory: RuntimeDirectory) -> None:
        self.process = process
        self._mark = mark
        self._directory = directory

    @classmethod
    async def start(cls, config: Config, mode: str, order: ReportOrder, *arguments: str, **streams: Any) -> _Child:
        """Raises `BadInput` or `OSError` if it cannot be started."""
        directory = await asyncio.to_thread(RuntimeDirectory)
        try:
            mark = directory.cleanup.new_mark()
            environment = _environment(config) | directory.cleanup.marked(mark) | {"TMPDIR": str(directory.files)}
            package = str(Path(outpace.__file__).parent)
            command = [_python(config), "-P", "-c", BOOTSTRAP, package, mode, order.to_json(), *arguments]
            return cls(await start_program(command, environment, mark, "report.python", **streams), mark, directory)
        except BaseException:
            await asyncio.to_thread(directory.remove)
            raise

    async def end(self) -> None:
        if self.process.returncode is None:
            await end_program(self.process, self._mark, "reporter")
        await asyncio.to_thread(self._directory.remove)


class RunReporter:
    """Parent side of the reporter. Does nothing if `run.report_to` is empty."""

    def __init__(self, config: Config, run: Path, say: Callable[[str], None]) -> None:
        self._config = config
        self._run = run
        self._say = say
        self._child: _Child | None = None
        self._messages: asyncio.Task[None] | None = None
        self._finishing = False

    async def start(self, order: ReportOrder | None = None) -> None:
        """Start the process. A failure is only reported, because the run does not depend on it."""
        order = order or report_order(self._config, self._run)
        if not order.trackers:
            return
        try:
            with await asyncio.to_thread(_open_log, self._run) as log:
                self._child = await _Child.start(
                    self._config, "report", order,
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                )  # fmt: skip
        except (OSError, BadInput) as error:
            self._say(f"trackers: {one_line(error)}; nothing is sent; send it later with: {self._remedy}")
            return
        self._messages = asyncio.create_task(self._forward(self._child.process), name="messages of the reporter")

    @property
    def _remedy(self) -> str:
        return resend_command(self._run)

    async def _forward(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self._say(line.decode(errors="replace").rstrip())
        status = await process.wait()
        if not self._finishing or status not in (0, EXIT_INCOMPLETE):
            self._say(
                f"trackers: the reporter {describe_exit(status)}; the run does not need it; "
                f"send what is missing with: {self._remedy}"
            )

    async def finish(self, within_s: float | None, aborted: bool = False) -> int | None:
        """Wait up to `within_s` (None: no limit) while the process sends the rest, not at all if the run was aborted.
        Then end it and clean up. Returns its exit code; None: it had to be killed, or there is none."""
        try:
            if self._child is None or self._messages is None:
                return None
            self._finishing = True
            if not aborted and not self._messages.done():
                await self._wait(self._child.process, self._messages, within_s)
            return self._child.process.returncode
        finally:
            await self._remove()

    async def _wait(
        self, process: asyncio.subprocess.Process, messages: asyncio.Task[None], within_s: float | None
    ) -> None:
        assert process.stdin is not None
        process.stdin.close()
        limit = math.inf if within_s is None else within_s
        done, waiting = await asyncio.wait([messages], timeout=min(limit, NOTICE_S))
        if waiting and limit > NOTICE_S:
            self._say("trackers: sending what they do not have yet")
            done, _ = await asyncio.wait(waiting, timeout=None if within_s is None else within_s - NOTICE_S)
        if not done:
            self._say(f"trackers: not everything was sent within {limit:g} s; send the rest with: {self._remedy}")

    async def _remove(self) -> None:
        if self._messages is not None:
            self._messages.cancel()
            await asyncio.gather(self._messages, return_exceptions=True)  # its errors must not end the run
        if self._child is not None:
            await self._child.end()
        self._child = self._messages = None


def send_run(run: Path, to: Sequence[str], settings: Sequence[str], say: Callable[[str], None]) -> None:
    """Send trackers the parts of a run that they do not have yet, and report one line per tracker. Raises `BadInput`
    for unknown trackers, `ComponentFailed` if not everything was sent."""
    read_resolved(run)  # raises if this is not a run
    chosen = [f"--run.report_to={','.join(to)}"] if to else []
    config = load_config(run / CONFIG_FILE, [*settings, *chosen])
    if not config.run.report_to:
        raise BadInput("--to: the run has no run.report_to; name a tracker, such as --to tensorboard")
    active = is_lock_held(run / LOCK_FILE)
    order = replace(report_order(config, run), finish_s=None, follow=False, active=active, niceness=0)

    async def send() -> int | None:
        await check_trackers(config, run)
        reporter = RunReporter(config, run, say)
        await reporter.start(order)
        return await reporter.finish(None)

    if asyncio.run(send()) != 0:
        raise ComponentFailed("report", f"not everything was sent; see {run / 'logs' / 'reporter.log'}")
