"""A run whose tasks arrive while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import outpace as api
from outpace.controller.ledger import ledger_report
from outpace.types import Task
from support import INLINE, read_lines

TASKS = 12


class Numbers:
    """A stream of a fixed number of tasks that remembers what it was asked for."""

    def __init__(self, count: int = TASKS) -> None:
        self.count = count
        self.asked: list[int] = []

    def next_task(self, number: int, /) -> Task | None:
        self.asked.append(number)
        return Task(f"t{number}", f"say {number}") if number < self.count else None


def test_a_resumed_run_uses_every_task_of_a_stream_once(settings: dict[str, Any], tmp_path: Path) -> None:
    run, streams = tmp_path / "streamed", (Numbers(), Numbers())
    values = {key: value for key, value in settings.items() if key not in ("tasks.path", "run.steps")}
    values |= {"run.dir": str(run), **INLINE, "eval.count": 0}
    first = api.Trainer(config={**values, "run.steps": 1}, tasks=streams[0], quiet=True).train()
    assert first.steps == 1
    api.Trainer(config={**values, "run.epochs": 1}, tasks=streams[1], quiet=True).train(resume=True)
    (ended,) = [number for number in streams[1].asked if number == TASKS]
    assert ended == TASKS
    asked = [number for stream in streams for number in stream.asked if number < TASKS]
    assert asked == list(range(TASKS)), "every task is taken once, over all starts"
    lines = read_lines(run / "batches.jsonl")
    used = [each["task_id"] for line in lines for each in [*line["groups"], *line.get("settled", [])]]
    assert sorted(used) == sorted(f"t{number}" for number in range(TASKS))
    report = ledger_report(run)
    assert (report["tasks"], report["twice"], report["never"]) == (TASKS, [], [])


def test_unsolved_tasks_of_a_stream_are_visited_once_more_also_by_a_resumed_run(
    settings: dict[str, Any], rewards: Path, tmp_path: Path
) -> None:
    run, count = tmp_path / "streamed", 30
    values = {key: value for key, value in settings.items() if key not in ("tasks.path", "run.steps")}
    values |= {"run.dir": str(run), **INLINE, "rewards.functions": [f"{rewards}:odd_only"], "filter.uniform": True}
    values |= {"reroll.max_times": 1, "reroll.after_steps": 1, "pacing.max_lag": 1}
    api.Trainer(config={**values, "run.steps": 2}, tasks=Numbers(count), quiet=True).train()
    api.Trainer(config={**values, "run.epochs": 1}, tasks=Numbers(count), quiet=True).train(resume=True)
    lines = read_lines(run / "batches.jsonl")
    ends = [(each["task"], each.get("reroll", 0)) for line in lines for each in [*line["groups"], *line["settled"]]]
    assert len(set(ends)) == len(ends), "no visit ends twice"
    assert [task for task, reroll in sorted(ends) if reroll == 0] == list(range(count))
    again = [task for task, reroll in ends if reroll]
    assert again
    assert all(task % 2 == 0 for task in again)
    report = ledger_report(run)
    assert (report["twice"], report["never"]) == ([], [])
    assert report["rerolls"]["filtered"] == len(again)
    assert report["rerolls"]["planned"] == count // 2 - len(again), "those that were not due before the last task"
    assert sum(line["reroll/visits"] for line in read_lines(run / "metrics.jsonl")) == len(again)
