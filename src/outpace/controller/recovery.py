"""Recovery: the state in a checkpoint, and the earlier work that a resumed run can still use. Pure.

A run resumes from a checkpoint of version c. The journal also holds groups that finished later, some of them trained in
versions that no longer exist. Invariants of the selection:

- No token is newer than c: the weights that sampled it are the checkpoint's or older.
- Each group belongs to a visit that is open in the checkpoint's ledger, and no two belong to the same visit.
- All groups can be trained by their deadlines: at most (d + 1 - c) * B of them are due by d. The earlier start had such
  a schedule; if settings have changed, groups that no longer fit are dropped.
- In deterministic mode nothing is recovered: in-flight work gives the same result when rerun under the same number.

Groups in the replay pool were trained before c; the checkpoint lists them by number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import fmean
from typing import Literal

import msgspec

from outpace.controller.batcher import ReplayEntry
from outpace.controller.curriculum import CurriculumState
from outpace.controller.events import GroupClosed
from outpace.controller.ledger import LedgerState
from outpace.controller.pacing import Governor, GovernorState, Pacing, SchedulerSettings
from outpace.errors import BadInput, plural
from outpace.tasks.order import REROLL, TaskOrder, first_visit
from outpace.types import FinishedGroup, GroupReport, Version


class SchedulerState(msgspec.Struct, frozen=True):
    """Checkpointed scheduler state. Tokens stay in the journal, which keeps them as long as this state refers to
    them."""

    tasks: int
    seed: int
    shuffle: bool
    version: Version = 0
    next_group: int = 0
    ledger: LedgerState = LedgerState()
    governor: GovernorState = GovernorState()
    difficulty: CurriculumState = CurriculumState()
    replay: dict[int, ReplayEntry] = {}

    def check(self, order: TaskOrder) -> None:
        """Raise `BadInput` if the tasks or their order differ from the run's."""
        if self.tasks != order.count:
            raise BadInput(f"--resume: the run started with {plural(self.tasks, 'task')}, there are {order.count} now")
        if self.seed != order.seed:
            raise BadInput(f"--resume: run.seed is {order.seed}, but the run started with {self.seed}")
        if self.shuffle != order.shuffle:
            before, now = str(self.shuffle).lower(), str(order.shuffle).lower()
            raise BadInput(f"--resume: tasks.shuffle is {now}, but the run started with {before}")


def decode_state(snapshot: dict[str, object]) -> SchedulerState:
    """Decode the state of a `Checkpoint` after a round trip through JSON."""
    return msgspec.convert(snapshot, SchedulerState, strict=False)  # JSON keys are strings


@dataclass(frozen=True)
class RecoveredWork:
    """Work of an earlier start that this start continues with."""

    finished: tuple[FinishedGroup, ...] = ()
    pooled: tuple[FinishedGroup, ...] = ()
    recorded: Mapping[int, Version] | None = None  # visits with recorded completions -> their minimum version


NO_RECOVERED_WORK = RecoveredWork()


def choose_recovered(
    found: Iterable[FinishedGroup], state: SchedulerState, settings: SchedulerSettings
) -> RecoveredWork:
    """Select the groups to recover. If two groups belong to the same visit, the first one counts."""
    use = recovery_rule(state, settings)
    finished: dict[int, FinishedGroup] = {}
    pooled: dict[int, FinishedGroup] = {}
    for kept in found:
        if (how := use(kept)) == "replay":
            pooled.setdefault(kept.order.group, kept)
        elif how == "train":
            finished.setdefault(kept.order.position, kept)
    lag = _allowed_lag(state, settings)
    return RecoveredWork(
        tuple(_trainable_in_time(finished.values(), state.version, settings, lag)), tuple(pooled.values())
    )


def recovery_rule(
    state: SchedulerState, settings: SchedulerSettings
) -> Callable[[FinishedGroup], Literal["train", "replay"] | None]:
    """Return a function that decides what a journaled group is used for."""
    lag, is_open = _allowed_lag(state, settings), _open_visits(state, settings)

    def use(kept: FinishedGroup) -> Literal["train", "replay"] | None:
        order = kept.order
        if kept.report.newest > state.version:
            return None
        if order.group in state.replay and first_visit(order.position) < state.ledger.cursor:
            return "replay"
        in_time = order.min_version + lag >= state.version
        return "train" if not settings.deterministic and in_time and is_open(order.position) else None

    return use


def recorded(
    min_versions: Mapping[int, Version],
    finished: Iterable[FinishedGroup],
    state: SchedulerState,
    settings: SchedulerSettings,
) -> dict[int, Version]:
    """Return the visits with recorded completions (and their minimum version) that still have to run."""
    if settings.deterministic:
        return {}
    recovered, is_open = {kept.order.position for kept in finished}, _open_visits(state, settings)
    return {
        position: min_version
        for position, min_version in min_versions.items()
        if position not in recovered and min_version <= state.version and is_open(position)
    }


def _allowed_lag(state: SchedulerState, settings: SchedulerSettings) -> int:
    governor = Governor(settings.governor, settings.max_lag, state.governor)
    return Pacing(settings).lag_at(state.version, governor.lag)


def _open_visits(state: SchedulerState, settings: SchedulerSettings) -> Callable[[int], bool]:
    """Return a function that tells whether the visit at a position still has to be finalized. Excludes re-rolls issued
    after the checkpoint: they may never be planned again."""
    issued, cursor = state.ledger.open, state.ledger.cursor
    limit = REROLL if settings.epochs is None else min(REROLL, settings.epochs * settings.tasks)
    return lambda position: position in issued or cursor <= position < limit


def _trainable_in_time(
    finished: Iterable[FinishedGroup], version: Version, settings: SchedulerSettings, lag: int
) -> list[FinishedGroup]:
    """Return as many groups as fit, earliest deadline first: the n-th one is trained in batch version + n // B."""
    fitting: list[FinishedGroup] = []
    for kept in sorted(finished, key=lambda kept: (kept.order.min_version, kept.order.group)):
        batch = version + len(fitting) // settings.groups_per_step
        if batch <= kept.order.min_version + lag and not settings.is_last(batch):
            fitting.append(kept)
    return fitting


def group_closed_event(report: GroupReport) -> GroupClosed:
    """Return the `GroupClosed` event for a report. A failed group has no reward."""
    rewards = report.rewards if report.outcome != "failed" else []
    reward = fmean(rewards) if rewards else None
    reward_std = sqrt(fmean((value - reward) ** 2 for value in rewards)) if reward is not None else 0.0
    best = max(rewards, default=None)
    return GroupClosed(report.group, report.outcome, report.oldest, reward, reward_std, best, report.supplied)
