"""The reporter as a child of a run or of `outpace report`: checks, start, messages, end.

The child (`outpace.monitoring.reporter`) has a runtime directory of its own, with a cleanup process, because it sends
the summary after the components have stopped. Its death does not end the run.
"""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import outpace
from outpace.config import Config
from outpace.errors import BadInput, one_line
from outpace.monitoring.reporter import BOOTSTRAP, EXIT_BEHIND, NICENESS, ReportOrder, resend_command
from outpace.runtime.child_process import describe_exit, end_program, start_program
from outpace.runtime.cleanup import RuntimeDirectory

CHECK_S = 60.0
"""Limit of the check whether the trackers are installed."""
NOTICE_S = 2.0
"""After this time at the end of a run, say what is being waited for."""
EXIT_S = 5.0
"""How much longer than `report.finish_s` the process may take before it is killed."""

_OTHER_PYTHON = ("PYTHONPATH", "PYTHONHOME")
"""Variables that must not reach the Python of another environment."""


def report_order(config: Config, run: Path) -> ReportOrder:
    report = config.report
    return ReportOrder(
        run=str(run),
        trackers=config.run.report_to,
        project=report.project,
        name=report.name or run.absolute().name,
        tables_every=report.tables_every,
        finish_s=report.finish_s,
        niceness=NICENESS,
    )


def check_trackers(config: Config, run: Path) -> None:
    """Raise `BadInput` for a tracker that the Python of the reporter does not have."""
    if not config.run.report_to:
        return
    command = [*_command(config, "check", report_order(config, run)), config.report.python or ""]
    try:
        done = subprocess.run(
            command, env=_environment(config), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=CHECK_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BadInput(f"report.python {command[0]}: no answer within {CHECK_S:g} s") from None
    except OSError as error:
        raise BadInput(f"report.python {command[0]}: cannot start: {error.strerror}") from None
    if done.returncode:
        last = one_line(done.stderr.strip().rpartition("\n")[2]) or describe_exit(done.returncode)
        raise BadInput(f"report.python {command[0]}: not a usable Python 3.11 or later: {last}")
    for problem in done.stdout.splitlines():
        raise BadInput(problem)


def _command(config: Config, mode: str, order: ReportOrder) -> list[str]:
    python = os.path.expanduser(config.report.python) if config.report.python else sys.executable
    return [python, "-P", "-c", BOOTSTRAP, str(Path(outpace.__file__).parent), mode, order.to_json()]


def _environment(config: Config) -> dict[str, str]:
    hidden = _OTHER_PYTHON if config.report.python else ()
    return {name: value for name, value in os.environ.items() if name not in hidden}


def _open_log(run: Path) -> BinaryIO:
    (run / "logs").mkdir(exist_ok=True)
    return open(run / "logs" / "reporter.log", "ab")


class RunReporter:
    """Parent side of the reporter. Does nothing if `run.report_to` is empty."""

    def __init__(self, config: Config, run: Path, say: Callable[[str], None]) -> None:
        self._config = config
        self._run = run
        self._say = say
        self._directory: RuntimeDirectory | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._mark = ""
        self._messages: asyncio.Task[None] | None = None
        self._finishing = False

    async def start(self, order: ReportOrder | None = None) -> None:
        """Start the process. If that fails, say so: the run does not depend on it."""
        order = order or report_order(self._config, self._run)
        if not order.trackers:
            return
        try:
            self._directory = await asyncio.to_thread(RuntimeDirectory)
            self._mark = self._directory.cleanup.new_mark()
            environment = _environment(self._config) | self._directory.cleanup.marked(self._mark)
            environment |= {"TMPDIR": str(self._directory.files)}
            with await asyncio.to_thread(_open_log, self._run) as log:
                self._process = await start_program(
                    _command(self._config, "report", order), environment, self._mark, "report.python",
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                )  # fmt: skip
        except (OSError, BadInput) as error:
            self._say(f"trackers: {one_line(error)}; nothing is reported; send it later with: {self._remedy}")
            return
        self._messages = asyncio.create_task(self._forward(self._process), name="messages of the reporter")

    @property
    def _remedy(self) -> str:
        return resend_command(self._run)

    async def _forward(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self._say(line.decode(errors="replace").rstrip())
        status = await process.wait()
        if not self._finishing or status not in (0, EXIT_BEHIND):
            self._say(
                f"trackers: the reporter {describe_exit(status)}; the run does not need it; "
                f"send what is missing with: {self._remedy}"
            )

    async def finish(self, within_s: float | None) -> int | None:
        """Have the rest sent, within the limit, and remove everything. Returns the exit code of the process; None: it
        was killed, or there is none."""
        try:
            if self._process is None or self._messages is None or self._messages.done():
                return None if self._process is None else self._process.returncode
            self._finishing = True
            assert self._process.stdin is not None
            self._process.stdin.close()
            limit = math.inf if within_s is None else within_s
            done, waiting = await asyncio.wait([self._messages], timeout=min(limit, NOTICE_S))
            if waiting and limit > NOTICE_S:
                self._say("trackers: sending what they do not have yet")
                done, _ = await asyncio.wait(waiting, timeout=None if within_s is None else within_s - NOTICE_S)
            if not done:
                self._say(f"trackers: the reporter does not answer; send the rest with: {self._remedy}")
            return self._process.returncode
        finally:
            await self._remove()

    async def _remove(self) -> None:
        if self._messages is not None:
            self._messages.cancel()
            await asyncio.gather(self._messages, return_exceptions=True)  # whatever it raised must not end the run
        if self._process is not None and self._process.returncode is None:
            await end_program(self._process, self._mark, "reporter")
        if self._directory is not None:
            await asyncio.to_thread(self._directory.remove)
        self._process = self._messages = self._directory = None
