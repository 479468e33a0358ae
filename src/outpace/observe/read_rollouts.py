"""`outpace.read_rollouts` and `outpace show`: what a run has recorded in `rollouts/`, also while it is under way."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from outpace.errors import BadInput
from outpace.observe.rollout_files import (
    OUTCOMES,
    RecordedAttempt,
    read_group,
    read_step,
    recorded_steps,
    untrained_groups,
)
from outpace.observe.runlog import steps_of_settled


def read_rollouts(
    run: str | Path, *, step: int | None = None, outcome: str | None = None, task: str | int | None = None
) -> Iterator[RecordedAttempt]:
    """The recorded attempts of a run, one by one: those of each step in order, then those that were not trained on.

    `step` keeps what a step was trained on and what was settled otherwise by its end; `outcome` is `trained`,
    `filtered`, `failed` or `dropped`; `task` is an id, or an index among the tasks. Raises `BadInput` at once where
    there is no run, or where it has recorded nothing of that step.
    """
    directory = Path(run)
    if not (directory / "config.toml").is_file():
        raise BadInput(f"{directory}: not a run directory, it has no config.toml")
    if outcome is not None and outcome not in OUTCOMES:
        raise BadInput(f"outcome: {outcome!r} is none of {', '.join(OUTCOMES)}")
    settled = steps_of_settled(directory)
    if step is not None and step not in recorded_steps(directory) and step not in settled.values():
        raise BadInput(f"{directory}: nothing of step {step} is recorded; {described_steps(directory)}")
    return _attempts(directory, settled, step, outcome, task)


def described_steps(run: Path) -> str:
    """Which steps are recorded; where none is, why that may be."""
    steps = recorded_steps(run)
    if steps:
        return f"recorded: {len(steps)} between {steps[0]} and {steps[-1]}"
    if tomllib.loads((run / "config.toml").read_text()).get("run", {}).get("show_rollouts") == 0:
        return "run.show_rollouts = 0 records none"
    return "no step is recorded yet"


def _attempts(
    run: Path, settled: dict[int, int], step: int | None, outcome: str | None, task: str | int | None
) -> Iterator[RecordedAttempt]:
    for attempt in _everything(run, settled, step):
        has_task = task is None or task in (attempt.task_id, attempt.task, str(attempt.task))
        if has_task and outcome in (None, attempt.outcome):
            yield attempt


def _everything(run: Path, settled: dict[int, int], step: int | None) -> Iterator[RecordedAttempt]:
    for number in recorded_steps(run) if step is None else [step]:
        yield from read_step(run, number)
    for group, outcome in untrained_groups(run).items():
        if step in (None, settled.get(group)):
            for attempt in read_group(run, group, outcome):
                yield msgspec.structs.replace(attempt, step=settled.get(group))
