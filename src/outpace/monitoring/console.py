"""Console output of a run: live progress, startup messages and the final report.

    terminal     a panel that redraws itself four times a second, on rich's own thread
    notebook     the same panel, in one output cell that is updated in place (`NotebookView`)
    otherwise    a plain line at most every `LINE_EVERY_S` seconds, and always for the first and last step
    quiet        one line at the end

On a terminal the run's calls only store numbers; they never draw.

Starting a server may take minutes. Meanwhile `EngineLogWatcher` follows the engines' logs and shows their messages:

    engine-0: the server is starting, 35 s so far: Loading weights took 1.2 seconds

The text after the elapsed seconds is the last line of the server's own log.

Invariants
- Text from models, tasks and users is never interpreted: no markup, no control characters.
- A closed pipe (`outpace train | head`) silences the output and does not end the run.
"""

from __future__ import annotations

import asyncio
import importlib
import io
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from outpace.errors import plural
from outpace.monitoring.format import clock_text, number, percent, printable, si, sparkline
from outpace.monitoring.summary import EvalResult, Summary, averaged_steps
from outpace.types import EpisodeView, Failure

NOTEBOOK_REFRESH_S = 0.5
NOTEBOOK_WIDTH = 90
NOTEBOOK_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace">{code}</pre>'


class NotebookView:
    """Displays a renderable in one notebook output cell, updated in place."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._output: Any = None  # IPython display handle
        self._updated = 0.0

    def show(self, renderable: RenderableType, now: bool = True) -> None:
        """Replace the content of the output cell. Unless `now`, skip updates closer than NOTEBOOK_REFRESH_S."""
        shown_at = self._clock()
        if not now and self._output is not None and shown_at - self._updated < NOTEBOOK_REFRESH_S:
            return
        self._updated = shown_at
        if self._output is None:
            display = importlib.import_module("IPython.display").display
            self._output = display(_render_mime(renderable), raw=True, display_id=True)
        else:
            self._output.update(_render_mime(renderable), raw=True)


def _render_mime(renderable: RenderableType) -> dict[str, str]:
    """Render to HTML and plain text, keyed by MIME type."""
    console = Console(file=io.StringIO(), record=True, width=NOTEBOOK_WIDTH, force_terminal=True, force_jupyter=False)
    console.print(renderable)
    html = console.export_html(inline_styles=True, code_format=NOTEBOOK_HTML, clear=False)
    return {"text/html": html, "text/plain": console.export_text()}


LINE_EVERY_S = 2.0
SMOOTHING_STEPS = 10
"""The displayed reward is the mean of all steps up to this many, then an exponential moving average (weight 1/10)."""

MIN_STARTUP_SHOWN_S = 10.0
"""The final report mentions the startup time only if it took at least this long."""

HISTORY = 60
EXAMPLES = 3
SHOWN_FAILURES = 5


class RunView:
    """Displayed state of a run, with a smoothed reward.

    The drawing thread reads while the run writes. Values are therefore replaced rather than mutated, and series are
    copied before they are drawn.
    """

    def __init__(self, total_steps: int | None, clock: Callable[[], float]) -> None:
        self.total = total_steps
        self.clock = clock
        self.began = clock()
        self.first_step: int | None = None
        self.training_began = self.first_step_at = self.last_step_at = self.began
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.reward: float | None = None
        self.reward_steps = 0  # steps with a reward
        self.rewards: deque[float] = deque(maxlen=HISTORY)
        self.evals: list[EvalResult] = []
        self.status = "starting"

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        self.last_step_at = self.clock()
        if self.first_step is None:
            self.first_step, self.first_step_at = step, self.last_step_at
            self.training_began = self.last_step_at - metrics.get("time/step_s", self.last_step_at - self.began)
        self.step, self.status = step, "training"
        self.metrics = dict(metrics)
        reward = metrics.get("reward/mean")
        if reward is not None:
            self.reward_steps += 1
            before = self.reward or 0.0
            self.reward = before + (reward - before) / min(self.reward_steps, SMOOTHING_STEPS)
            self.rewards.append(self.reward)

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.began

    @property
    def startup_s(self) -> float:
        """Seconds until all components were up. Servers take minutes."""
        return self.training_began - self.began

    @property
    def remaining_s(self) -> float | None:
        """Estimated seconds left, at the pace since the first step and without startup. None before the first step or
        if the number of steps is unknown."""
        if self.total is None or self.first_step is None:
            return None
        if self.step == self.first_step:
            pace_s = self.first_step_at - self.training_began
        else:
            pace_s = (self.last_step_at - self.first_step_at) / (self.step - self.first_step)
        return pace_s * max(self.total - self.step, 0)

    def metric_text(self, name: str) -> str:
        return number(self.metrics.get(name))

    def wait_share(self, name: str) -> float | None:
        """Return the share of the last step that the learner or the engines spent waiting."""
        step_s, wait_s = self.metrics.get("time/step_s"), self.metrics.get(f"idle/{name}_s")
        return wait_s / step_s if step_s and wait_s is not None else None


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Go silent when the reader has closed the pipe (`outpace train | head`). The run continues."""
        self.quiet = True
        if self.file is sys.stdout:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class ProgressConsole:
    """Displays a run. Call `start`, then `status`, `step` and `evaluation`, then `finish`; always call `close`."""

    def __init__(
        self,
        total_steps: int | None,
        *,
        quiet: bool = False,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        title: str = "outpace",
    ) -> None:
        self.console = _Console(file=file, highlight=False)
        self.view = RunView(total_steps, clock)
        self.title = title
        self._quiet = quiet
        self._live: Live | None = None
        self._notebook: NotebookView | None = None
        self._last_line_s = -1e9

    def start(self) -> None:
        if self._quiet:
            return
        if self.console.is_jupyter:
            self._notebook = NotebookView(self.view.clock)
            self._redraw()
        elif self.console.is_terminal:
            self._live = Live(get_renderable=self._panel, console=self.console, refresh_per_second=4, transient=True)
            self._live.start()

    def status(self, text: str) -> None:
        """Show what happens outside of steps: starting, evaluating, saving."""
        self.view.status = text
        self._redraw()
        if self._plain:
            self._print(text)

    def warning(self, text: str) -> None:
        """Show a message that must not be overwritten: on a terminal it stays above the panel."""
        self.view.status = text
        if not self._quiet:
            self._print(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step. Step n produces version n."""
        is_first = self.view.first_step is None
        self.view.update(step, metrics)
        self._redraw(now=is_first or step == self.view.total)
        is_due = self.view.clock() - self._last_line_s >= LINE_EVERY_S
        if self._plain and (is_first or is_due or step == self.view.total):
            self._last_line_s = self.view.clock()
            self._print(plain_line(self.view))

    def evaluation(self, result: EvalResult, name: str = "") -> None:
        """Show an evaluation result. Results of named held-out sets appear neither in the panel nor in the report."""
        if not name:
            self.view.evals.append(result)
            self._redraw()
        if self._plain:
            what = f"{_score_name([result])}{f' of {name}' if name else ''} at version {result.version}"
            self._print(f"{what}: {_score(result)}{_task_count(result)}")

    def finish(self, summary: Summary, run_dir: str | Path, views: Sequence[EpisodeView] = ()) -> None:
        """Close the live view and print the final report."""
        notebook = self._notebook
        self.close()
        if notebook is not None:
            notebook.show(Group(final_report(summary, self.view, views), Text(f"run directory   {run_dir}")))
        elif self._quiet:
            held_out = f"{_score_name(summary.evals)} {_before_after(summary)}"
            self._print(f"{run_dir}: {plural(summary.steps, 'step')}, {held_out}")
        else:
            self.console.print(final_report(summary, self.view, views))
            self._print(f"run directory   {run_dir}")  # outside of the table, which would truncate a long path

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        self._redraw()
        self._notebook = None

    @property
    def _plain(self) -> bool:
        return self._live is None and self._notebook is None and not self._quiet

    def _redraw(self, now: bool = True) -> None:
        """Redraw the panel in a notebook. On a terminal it redraws itself."""
        if self._notebook is not None:
            self._notebook.show(self._panel(), now)

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def _panel(self) -> RenderableType:
        return live_panel(self.view, self.title)


def plain_line(view: RunView) -> str:
    """Format the current progress as one line."""
    parts = [f"step {view.step}{f'/{view.total}' if view.total else ''}", f"reward {number(view.reward)}"]
    if view.evals:
        parts.append(f"held-out {_score(view.evals[-1])}{_task_count(view.evals[-1])}")
    parts.append(f"lag {view.metric_text('lag/mean')}, at most {view.metric_text('lag/max')}")
    sampled, trained = view.metrics.get("throughput/sampled_tok_s"), view.metrics.get("throughput/trained_tok_s")
    parts.append(f"tok/s {si(sampled)} sampled, {si(trained)} trained")
    parts.append(f"waiting: learner {percent(view.wait_share('learner'))}, engine {percent(view.wait_share('engine'))}")
    if view.remaining_s is not None:
        parts.append(f"{clock_text(view.remaining_s)} left")
    return "  ".join(parts)


def live_panel(view: RunView, title: str) -> Panel:
    left = "" if view.remaining_s is None else f"{clock_text(view.remaining_s)} left"
    bar = Table.grid(expand=True, padding=(0, 1))
    bar.add_column()
    bar.add_column(ratio=1)
    bar.add_column(justify="right")
    steps = f"{view.step}/{view.total}" if view.total else str(view.step)
    bar.add_row(
        Text(f"step {steps}"),
        ProgressBar(total=view.total or 1, completed=view.step if view.total else 0, pulse=view.first_step is None),
        Text(f"{clock_text(view.elapsed_s)}  {left}", style="dim"),
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    facts.add_row("reward", Text.assemble(number(view.reward), "  ", (sparkline(list(view.rewards)), "green")))
    if view.evals:
        *earlier, last = view.evals[-6:]
        history = "  ".join([*(_score(result, stderr=False) for result in earlier), _score(last)])
        facts.add_row("held-out", Text.assemble((history, "bold"), _task_count(last)))
    facts.add_row("lag", f"mean {view.metric_text('lag/mean')}   max {view.metric_text('lag/max')}")
    sampled, trained = view.metrics.get("throughput/sampled_tok_s"), view.metrics.get("throughput/trained_tok_s")
    facts.add_row("tok/s", f"{si(sampled)} sampled   {si(trained)} trained")
    facts.add_row(
        "waiting", f"learner {percent(view.wait_share('learner'))}   engine {percent(view.wait_share('engine'))}"
    )
    running, finished = view.metric_text("queue/running"), view.metric_text("queue/finished")
    facts.add_row("groups", f"{running} running   {finished} finished")
    body = Group(bar, Text(), facts)
    subtitle = f"[dim]version {view.step} · {escape(view.status)}[/dim]"
    return Panel(body, title=escape(title), title_align="left", subtitle=subtitle, subtitle_align="right", width=88)


def final_report(summary: Summary, view: RunView, views: Sequence[EpisodeView] = ()) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    facts.add_row(_score_name(summary.evals), Text(_before_after(summary), style="bold"))
    ends = plural(averaged_steps(summary.steps), "step")
    rewards = f"{number(summary.reward_first)} → {number(summary.reward_last)}"
    facts.add_row("reward", f"{rewards}, means of the first and last {ends}")
    facts.add_row("steps", _steps_and_times(summary, view))
    sampled, trained = si(summary.tokens_sampled), si(summary.tokens_trained)
    wasted = percent(summary.waste_fraction)
    filtered = si(summary.tokens_filtered)
    facts.add_row("tokens", f"{sampled} sampled: {trained} trained, {filtered} in filtered groups, {wasted} wasted")
    facts.add_row("lag", f"max {summary.lag_max}")
    if summary.efficiency is not None:
        facts.add_row("T*/T", f"{percent(summary.efficiency)} of the speed that these cores or GPUs allow at best")
    for label, line in zip(("failures", *[""] * SHOWN_FAILURES), _failures(summary.failures), strict=False):
        facts.add_row(label, Text(line))
    if summary.reason:
        facts.add_row("ended", Text(summary.reason))
    parts: list[RenderableType] = [*_examples(views), facts]
    return Group(*parts)


def _steps_and_times(summary: Summary, view: RunView) -> str:
    """Format the number of steps and their duration, and the startup time if it was noticeable."""
    if view.startup_s < MIN_STARTUP_SHOWN_S:
        return f"{summary.steps} in {clock_text(summary.wall_s)}"
    return f"{summary.steps} in {clock_text(summary.train_s)}, after {clock_text(view.startup_s)} of startup"


def _score_name(evals: Sequence[EvalResult]) -> str:
    return "held-out accuracy" if evals and all(result.binary for result in evals) else "held-out reward"


def _score(result: EvalResult, stderr: bool = True) -> str:
    formatted = percent if result.binary else number
    error = f" ± {formatted(result.stderr)}" if stderr and result.stderr is not None else ""
    return f"{formatted(result.reward)}{error}"


def _task_count(result: EvalResult) -> str:
    return f" ({plural(result.tasks, 'task')})"


def _before_after(summary: Summary) -> str:
    """Format the first and last held-out score with standard errors and the number of tasks."""
    if not summary.evals:
        return "not evaluated"
    first, last = summary.evals[0], summary.evals[-1]
    if len(summary.evals) == 1:
        return f"{_score(first)}{_task_count(first)} at version {first.version}, not evaluated since"
    tasks = "" if first.tasks == last.tasks else _task_count(first)
    return f"{_score(first)}{tasks} → {_score(last)}{_task_count(last)}"


def _failures(failures: Sequence[Failure]) -> list[str]:
    """Format the most frequent failures, one line each."""
    lines = [
        f"{failure.count:,} × {failure.source}: {_safe_text(failure.reason).plain}"
        for failure in failures[:SHOWN_FAILURES]
    ]
    if rest := sum(failure.count for failure in failures[SHOWN_FAILURES:]):
        lines.append(f"{rest:,} × other failures, listed in summary.json")
    return lines


def _examples(views: Sequence[EpisodeView]) -> list[RenderableType]:
    """Show a few of the best episodes and a few of the others. Rewards appear as ✗ and ✓ if all are 0 or 1, otherwise
    as numbers."""
    if not views:
        return []
    binary = all(view.reward in (0.0, 1.0) for view in views)
    top = max(view.reward for view in views)
    best = [view for view in views if view.reward == top and not (binary and top == 0)][:EXAMPLES]
    rest = [view for view in views if view.reward < top or (binary and top == 0)][:EXAMPLES]
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, show_edge=False)
    table.add_column()
    table.add_column(overflow="ellipsis", no_wrap=True, max_width=50, style="dim")
    table.add_column(overflow="ellipsis", no_wrap=True, max_width=50)
    for view in (*best, *rest):
        mark = (("✗", "red"), ("✓", "green"))[view.reward == 1.0] if binary else (number(view.reward), "")
        table.add_row(Text(*mark), _safe_text(view.prompt), _safe_text(view.completion))
    return [table, Text()]


def _safe_text(text: str) -> Text:
    """Put model or user text on one line, without markup or control characters."""
    return Text(printable(text))


LOG_POLL_S = 10.0
LOG_TAIL_BYTES = 4096
PROGRESS = "the server is starting, "
"""Start of the message that a starting server logs every few seconds."""


class EngineLogWatcher:
    """Reports the latest server message in each engine's log. Ignores what the logs contained at construction."""

    def __init__(self, logs: Path, engines: Iterable[str], report: Callable[[str], None]) -> None:
        self._report = report
        self._reported = {logs / f"{name}.log": "" for name in engines}
        self._initial_sizes = {log: log.stat().st_size for log in self._reported if log.exists()}

    async def follow(self, every_s: float = LOG_POLL_S) -> None:
        """Poll the logs until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await self._poll()

    async def finish(self) -> None:
        """Report messages since the last poll, without progress. Call when all engines have started."""
        await self._poll(progress=False)

    async def _poll(self, progress: bool = True) -> None:
        for log, reported in self._reported.items():
            message = await asyncio.to_thread(latest_message, log, self._initial_sizes.get(log, 0))
            if message not in ("", reported) and (progress or not message.startswith(PROGRESS)):
                self._reported[log] = message
                self._report(f"{log.stem}: {message}")


def latest_message(log: Path, begin: int = 0) -> str:
    """Return the last server message ("the server is …") after byte `begin`, without timestamp and logger name; empty
    if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(begin, log.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    messages = [line[line.index("the server is ") :] for line in lines if "the server is " in line]
    return printable(messages[-1]) if messages else ""
