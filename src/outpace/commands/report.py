"""`outpace report RUN`: send a run to experiment trackers, as far as they do not have it yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from outpace.config.load import CONFIG_FILE, load_config, read_resolved
from outpace.errors import BadInput, ComponentFailed
from outpace.monitoring.run_directory import LOCK_FILE, is_lock_held
from outpace.run.reporting import RunReporter, check_trackers, report_order


def report(run: Path, to: Sequence[str], settings: Sequence[str], say: Callable[[str], None]) -> None:
    """Send the run, and say a line for each tracker. Raises `BadInput` for unknown trackers, `ComponentFailed` if not
    everything was sent."""
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
