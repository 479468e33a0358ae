"""`outpace show`: print recorded rollouts, to a terminal or a pipe.

Text from models and tasks is never interpreted: no markup, no control characters.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from outpace.errors import BadInput, clip
from outpace.monitoring.format import number, printable
from outpace.monitoring.rollout_files import (
    RecordedAttempt,
    RecordedTurn,
    describe_recorded_steps,
    read_group,
    read_rollouts,
    read_step,
    recorded_steps,
    steps_of_untrained_groups,
    untrained_groups,
)

STYLES = {"trained": "green", "filtered": "yellow", "failed": "red", "dropped": "magenta"}
NEWEST_GROUPS = 4
"""Number of untrained groups shown if no step is recorded and none is requested."""


def show(
    run: Path,
    *,
    step: int | None = None,
    task: str | None = None,
    outcome: str | None = None,
    max_chars: int = 2000,
    file: TextIO | None = None,
) -> None:
    """Print the matching rollouts. Without an outcome or task: the groups that a step was trained on, by default the
    newest step, or the newest groups if no step is recorded. `max_chars` limits the text of each turn; 0: no limit."""
    console = Console(file=file, highlight=False, soft_wrap=True)
    attempts = read_rollouts(run, step=step, task=task, outcome=outcome)
    untrained = ""
    if task is None and outcome is None:
        steps = recorded_steps(run)
        newest = steps[-1] if step is None and steps else step
        if newest in steps:
            attempts, untrained = read_step(run, newest), _untrained_counts(run, newest)
        elif step is None:
            attempts = _newest_groups(run)
    shown = False
    for _, group in itertools.groupby(attempts, key=lambda attempt: (attempt.step, attempt.group)):
        console.print(_group(list(group), max_chars))
        shown = True
    if untrained:
        console.print(untrained)
    if not shown:
        options = {"--step": step, "--task": task, "--outcome": outcome}
        given = " ".join(f"{option} {value}" for option, value in options.items() if value is not None)
        problem = f"no recorded rollouts match {given}" if given else "no rollouts are recorded"
        raise BadInput(f"{run}: {problem}; {describe_recorded_steps(run)}")


def _untrained_counts(run: Path, step: int) -> str:
    """Count the untrained groups of a step. They are shown only on request, since there may be many."""
    finalized = steps_of_untrained_groups(run)
    counts = Counter(outcome for group, outcome in untrained_groups(run).items() if finalized.get(group) == step)
    listed = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return f"groups not trained on by the end of step {step}: {listed} (show them with --outcome)" if listed else ""


def _newest_groups(run: Path) -> Iterator[RecordedAttempt]:
    """Read the newest untrained groups, for a run without recorded steps."""
    for group, outcome in list(untrained_groups(run).items())[-NEWEST_GROUPS:]:
        yield from read_group(run, group, outcome)


def _group(attempts: list[RecordedAttempt], max_chars: int) -> RenderableType:
    first = attempts[0]
    step = "" if first.step is None else f"step {first.step} · "
    title = f"{step}group {first.group} · task {printable(first.task_id)} · epoch {first.epoch}"
    parts: list[RenderableType] = [Rule(Text(title, style="bold"), align="left", characters="─")]
    shared = first.prompt if all(attempt.prompt == first.prompt for attempt in attempts) else None
    if shared:
        parts.append(_turn("prompt", shared, max_chars))
    for attempt in attempts:
        parts += [Text(), *_attempt(attempt, shared, max_chars)]
    return Group(*parts, Text())


def _attempt(attempt: RecordedAttempt, shared_prompt: str | None, max_chars: int) -> Iterator[RenderableType]:
    yield Text.assemble(
        f"attempt {attempt.attempt}  ",
        (attempt.outcome, STYLES[attempt.outcome]),
        *([f": {printable(attempt.reason)}"] if attempt.reason else []),
        f"  {_numbers(attempt)}",
    )
    if not attempt.trajectories and attempt.prompt != shared_prompt:
        yield _turn("prompt", attempt.prompt, max_chars)
    for index, trajectory in enumerate(attempt.trajectories):
        if len(attempt.trajectories) > 1:
            own = "" if trajectory.reward is None else f", reward {number(trajectory.reward)}"
            yield Text(f"trajectory {index}, role {printable(trajectory.role)}{own}", style="italic")
        for turn in _without_prompt(trajectory.turns, shared_prompt):
            yield _turn(turn.source, turn.text, max_chars)


def _without_prompt(turns: Iterable[RecordedTurn], prompt: str | None) -> Iterator[RecordedTurn]:
    """Skip the first turn if it is the prompt that all attempts of the group share: it is printed once."""
    for index, turn in enumerate(turns):
        if index or turn.text != prompt:
            yield turn


def _numbers(attempt: RecordedAttempt) -> str:
    """Format reward, advantage, versions and stop reason. Rewards by function are included only if they differ from the
    total."""
    facts = [f"reward {number(attempt.reward)}"]
    if attempt.rewards and list(attempt.rewards.values()) != [attempt.reward]:
        facts.append(
            "(" + ", ".join(f"{printable(name)} {number(value)}" for name, value in attempt.rewards.items()) + ")"
        )
    if attempt.advantage is not None:
        facts.append(f"advantage {number(attempt.advantage)}")
    if attempt.newest >= 0:
        only = attempt.oldest == attempt.newest
        facts.append(f"version {attempt.newest}" if only else f"versions {attempt.oldest} to {attempt.newest}")
    return "  ".join([*facts, f"stop {attempt.stop}"])


def _turn(source: str, text: str, max_chars: int) -> Text:
    limited = clip(text, max_chars) if max_chars else text
    lines = printable(limited, lines=True).split("\n")
    style = "" if source == "assistant" else "dim"
    label = f"  [{printable(source)}] "
    return Text.assemble((label, "bold cyan"), (("\n" + " " * len(label)).join(lines), style))
