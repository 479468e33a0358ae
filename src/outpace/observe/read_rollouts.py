"""MERGED"""

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
    steps_of_settled,
    untrained_groups,
)


def read_rollouts(
    run: str | Path, *, step: int | None = None, outcome: str | None = None, task: str | int | None = None
) -> Iterator[RecordedAttempt]:
    """Iterate over the recorded attempts of a run: first those of each step in order, then those not trained on.

    `step` selects the attempts that a step was trained on, and those finalized without training by that step.
    `outcome` is `trained`, `filtered`, `failed` or `dropped`. `task` is a task id or index. Raises `BadInput`
    immediately if there is no run, or if it has no record of that step.
    """
    directory = Path(run)
    if not (directory / "config.toml").is_file():
        raise BadInput(f"{directory}: not a run directory, config.toml is missing")
    if outcome is not None and outcome not in OUTCOMES:
        raise BadInput(f"outcome: {outcome!r} is invalid; choose one of {', '.join(OUTCOMES)}")
    finalized = steps_of_settled(directory)
    if step is not None and step not in recorded_steps(directory) and step not in finalized.values():
        raise BadInput(f"{directory}: step {step} has no recorded rollouts; {described_steps(directory)}")
    return _matching(directory, finalized, step, outcome, task)


def described_steps(run: Path) -> str:
    """Describe which steps are recorded, or why none is."""
    steps = recorded_steps(run)
    if steps:
        return f"recorded steps: {len(steps)} between {steps[0]} and {steps[-1]}"
    if tomllib.loads((run / "config.toml").read_text()).get("run", {}).get("show_rollouts") == 0:
        return "recording of steps is off (run.show_rollouts = 0)"
    return "no steps are recorded yet"


def _matching(
    run: Path, finalized: dict[int, int], step: int | None, outcome: str | None, task: str | int | None
) -> Iterator[RecordedAttempt]:
    for attempt in _all_attempts(run, finalized, step):
        has_task = task is None or task in (attempt.task_id, attempt.task, str(attempt.task))
        if has_task and outcome in (None, attempt.outcome):
            yield attempt


def _all_attempts(run: Path, finalized: dict[int, int], step: int | None) -> Iterator[RecordedAttempt]:
    for number in recorded_steps(run) if step is None else [step]:
        yield from read_step(run, number)
    for group, outcome in untrained_groups(run).items():
        if step in (None, finalized.get(group)):
            for attempt in read_group(run, group, outcome):
                yield msgspec.structs.replace(attempt, step=finalized.get(group))
