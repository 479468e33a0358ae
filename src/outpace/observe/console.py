"""Live progress for people.

On a terminal a calm panel that redraws itself a few times a second, in a notebook the same panel in one output that is
updated in place; elsewhere a plain line now and then, first and last step always. `quiet` prints nothing but the final
report's last line. On a terminal, drawing happens on rich's own thread; what the run calls here only notes numbers.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from outpace.observe.format import clock_text, number, percent, printable, si, sparkline
from outpace.observe.notebook import NotebookView
from outpace.observe.summary import EvalResult, Summary
from outpace.types import EpisodeView, Failure
from outpace.wording import plural

LINE_EVERY_S = 2.0
SMOOTHED_OVER = 10
"""The reward shown is the plain mean of the first so many steps, then a running one that forgets at this pace."""

STARTING_SHOWN_S = 10.0
"""A start that took less is not worth a word."""

HISTORY = 60
EXAMPLES = 3
SHOWN_FAILURES = 5


class RunView:
    """What is known of the run so far, smoothed for reading.

    The drawing thread reads while the run writes: values are replaced whole, and series copied before they are drawn.
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
        self.rewarded = 0  # steps with a reward
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
            self.rewarded += 1
            before = self.reward or 0.0
            self.reward = before + (reward - before) / min(self.rewarded, SMOOTHED_OVER)
            self.rewards.append(self.reward)

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.began

    @property
    def starting_s(self) -> float:
        """From the beginning until the parts were up: servers take minutes."""
        return self.training_began - self.began

    @property
    def remaining_s(self) -> float | None:
        """By the pace since the first step seen, start-up left out; None before it, and without a known end."""
        if self.total is None or self.first_step is None:
            return None
        if self.step == self.first_step:
            pace_s = self.first_step_at - self.training_began
        else:
            pace_s = (self.last_step_at - self.first_step_at) / (self.step - self.first_step)
        return pace_s * max(self.total - self.step, 0)

    def rate(self, name: str) -> str:
        return number(self.metrics.get(name))

    def wait_share(self, name: str) -> float | None:
        step_s, wait_s = self.metrics.get("time/step_s"), self.metrics.get(f"wait/{name}_s")
        return wait_s / step_s if step_s and wait_s is not None else None


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Whoever listened has gone, as in `outpace train | head`. The run goes on; its files have everything."""
        self.quiet = True
        if self.file is sys.stdout:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class ProgressConsole:
    """Shows a run. Use `start`, `step`, `evaluation`, `status`, `finish`; `close` always."""

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
        """What goes on outside the steps: starting, evaluating, saving."""
        self.view.status = text
        self._redraw()
        if self._plain:
            self._say(text)

    def warning(self, text: str) -> None:
        """What must not scroll past or be overwritten: on a terminal it stays above the panel."""
        self.view.status = text
        if not self._quiet:
            self._say(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step n is done: it made version n."""
        is_first = self.view.first_step is None
        self.view.update(step, metrics)
        self._redraw(now=is_first or step == self.view.total)
        is_due = self.view.clock() - self._last_line_s >= LINE_EVERY_S
        if self._plain and (is_first or is_due or step == self.view.total):
            self._last_line_s = self.view.clock()
            self._say(plain_line(self.view))

    def evaluation(self, result: EvalResult) -> None:
        self.view.evals.append(result)
        self._redraw()
        if self._plain:
            self._say(f"{_score_name([result])} at version {result.version}: {_score(result)}{_over_tasks(result)}")

    def finish(self, summary: Summary, run_dir: str | Path, views: Sequence[EpisodeView] = ()) -> None:
        """Close the live view and print the report."""
        notebook = self._notebook
        self.close()
        if notebook is not None:
            notebook.show(Group(final_report(summary, self.view, views), Text(f"everything is in   {run_dir}")))
        elif self._quiet:
            held_out = f"{_score_name(summary.evals)} {_before_after(summary)}"
            self._say(f"{run_dir}: {plural(summary.steps, 'step')}, {held_out}")
        else:
            self.console.print(final_report(summary, self.view, views))
            self._say(f"everything is in   {run_dir}")  # a path is never cut, whatever the width

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
        """In a notebook; a terminal's panel redraws itself."""
        if self._notebook is not None:
            self._notebook.show(self._panel(), now)

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def _panel(self) -> RenderableType:
        return live_panel(self.view, self.title)


def plain_line(view: RunView) -> str:
    """One line for logs."""
    parts = [f"step {view.step}{f'/{view.total}' if view.total else ''}", f"reward {number(view.reward)}"]
    if view.evals:
        parts.append(f"held-out {_score(view.evals[-1])}{_over_tasks(view.evals[-1])}")
    parts.append(f"lag {view.rate('lag/mean')} (max {view.rate('lag/max')})")
    sampled, trained = view.metrics.get("throughput/sampled_tok_s"), view.metrics.get("throughput/trained_tok_s")
    parts.append(f"tok/s {si(sampled)} sampled, {si(trained)} trained")
    parts.append(f"waits trainer {percent(view.wait_share('trainer'))} engine {percent(view.wait_share('engine'))}")
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
        facts.add_row("held-out", Text.assemble((history, "bold"), _over_tasks(last)))
    facts.add_row("lag", f"mean {view.rate('lag/mean')}   max {view.rate('lag/max')}")
    sampled, trained = view.metrics.get("throughput/sampled_tok_s"), view.metrics.get("throughput/trained_tok_s")
    facts.add_row("tok/s", f"{si(sampled)} sampled   {si(trained)} trained")
    facts.add_row(
        "waits", f"trainer {percent(view.wait_share('trainer'))}   engine {percent(view.wait_share('engine'))}"
    )
    facts.add_row("groups", f"{view.rate('queue/running')} running   {view.rate('queue/finished')} finished")
    body = Group(bar, Text(), facts)
    subtitle = f"[dim]version {view.step} · {escape(view.status)}[/dim]"
    return Panel(body, title=escape(title), title_align="left", subtitle=subtitle, subtitle_align="right", width=88)


def final_report(summary: Summary, view: RunView, views: Sequence[EpisodeView] = ()) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    facts.add_row(_score_name(summary.evals), Text(_before_after(summary), style="bold"))
    facts.add_row("reward", f"{number(summary.reward_first)} → {number(summary.reward_last)}")
    facts.add_row("steps", _steps_and_times(summary, view))
    sampled, trained = si(summary.tokens_sampled), si(summary.tokens_trained)
    wasted = percent(summary.waste_fraction)
    filtered = si(summary.tokens_filtered)
    facts.add_row("tokens", f"{sampled} sampled: {trained} trained, {filtered} in filtered groups, {wasted} wasted")
    facts.add_row("lag", f"at most {summary.lag_max}")
    if summary.efficiency is not None:
        facts.add_row("T*/T", f"{percent(summary.efficiency)} of the fastest possible schedule")
    for label, line in zip(("failures", *[""] * SHOWN_FAILURES), _failures(summary.failures), strict=False):
        facts.add_row(label, Text(line))
    if summary.reason:
        facts.add_row("ended", Text(summary.reason))
    parts: list[RenderableType] = [*_examples(views), facts]
    return Group(*parts)


def _steps_and_times(summary: Summary, view: RunView) -> str:
    """How long training took, and before it the start, where there is something to wait for."""
    if view.starting_s < STARTING_SHOWN_S:
        return f"{summary.steps} in {clock_text(summary.wall_s)}"
    return f"{summary.steps} in {clock_text(summary.train_s)}, after {clock_text(view.starting_s)} of starting"


def _score_name(evals: Sequence[EvalResult]) -> str:
    return "held-out accuracy" if evals and all(result.binary for result in evals) else "held-out reward"


def _score(result: EvalResult, stderr: bool = True) -> str:
    shown = percent if result.binary else number
    error = f" ± {shown(result.stderr)}" if stderr and result.stderr is not None else ""
    return f"{shown(result.reward)}{error}"


def _over_tasks(result: EvalResult) -> str:
    return f" ({plural(result.tasks, 'task')})"


def _before_after(summary: Summary) -> str:
    """First and last held-out score, each with its standard error, and the number of tasks."""
    if not summary.evals:
        return "not measured"
    first, last = summary.evals[0], summary.evals[-1]
    if len(summary.evals) == 1:
        return f"{_score(first)}{_over_tasks(first)} at version {first.version}, not measured since"
    tasks = "" if first.tasks == last.tasks else _over_tasks(first)
    return f"{_score(first)}{tasks} → {_score(last)}{_over_tasks(last)}"


def _failures(failures: Sequence[Failure]) -> list[str]:
    """The most frequent ones, a line each."""
    lines = [
        f"{failure.count:,} × {failure.source}: {_one_line(failure.reason).plain}"
        for failure in failures[:SHOWN_FAILURES]
    ]
    if rest := sum(failure.count for failure in failures[SHOWN_FAILURES:]):
        lines.append(f"{rest:,} × others, all in summary.json")
    return lines


def _examples(views: Sequence[EpisodeView]) -> list[RenderableType]:
    """A few of the best and a few of the rest. Rewards of 0 and 1 are shown as ✗ and ✓, others as numbers."""
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
        table.add_row(Text(*mark), _one_line(view.prompt), _one_line(view.completion))
    return [table, Text()]


def _one_line(text: str) -> Text:
    """Model and user text is shown, never interpreted: no markup, no control characters."""
    return Text(printable(text))
