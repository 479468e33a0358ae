"""Recovery: which work of an earlier start can still be used on resume. Pure: a selection from the journal's contents.

A run resumes from a checkpoint of version c. The journal holds more than that: groups finished later, and even trained
in versions that no longer exist. Invariants of the selection:

- No token is newer than c: the weights that sampled it are the checkpoint's or older.
- Each group belongs to a visit that is open in the checkpoint's ledger, and no two belong to the same visit.
- All groups can be trained before their deadlines: of those due by d, there are at most B per batch from c to d. The
  earlier start had found such a schedule; after a change of settings the last ones may have to go.
- In deterministic mode nothing is recovered: in-flight work gives the same result when repeated under its own number.

Groups in the replay pool were trained before c; the checkpoint lists them by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import fmean
from typing import Self

from outpace.controller.events import GroupClosed
from outpace.controller.pacing import SchedulerSettings
from outpace.controller.scheduler_state import SchedulerState
from outpace.types import FinishedGroup, GroupReport, Version


@dataclass(frozen=True)
class RecoveredWork:
    """Work of an earlier start that this start continues with."""

    finished: tuple[FinishedGroup, ...] = ()
    pooled: tuple[FinishedGroup, ...] = ()
    recorded: Mapping[int, Version] | None = None  # visits with recorded completions -> their minimum version


NO_RECOVERED_WORK = RecoveredWork()


@dataclass(frozen=True)
class RecoveryRules:
    """What decides whether a group is recovered, as of the checkpoint."""

    version: Version
    open: frozenset[int]  # visits below the cursor that are not finalized
    cursor: int
    limit: int | None  # of positions; None: no limit
    lag: int
    groups_per_step: int
    steps: int | None
    pool: frozenset[int]  # groups
    deterministic: bool = False

    @classmethod
    def of(cls, state: SchedulerState | None, settings: SchedulerSettings) -> Self:
        """Build the rules for a checkpoint's `state`; None: there is no checkpoint, and the run starts over."""
        state = state or SchedulerState(settings.tasks, 0, False)
        allowed = settings.max_lag if state.governor.lag is None else min(state.governor.lag, settings.max_lag)
        return cls(
            version=state.version,
            open=frozenset(state.ledger.open),
            cursor=state.ledger.cursor,
            limit=None if settings.epochs is None else settings.epochs * settings.tasks,
            lag=0 if state.version < settings.warmup_steps else allowed,
            groups_per_step=settings.groups_per_step,
            steps=settings.steps,
            pool=frozenset(state.replay),
            deterministic=settings.deterministic,
        )


def choose_recovered(found: Iterable[FinishedGroup], rules: RecoveryRules) -> RecoveredWork:
    """Select the groups to recover. If two groups belong to the same visit, the first one counts."""
    finished: dict[int, FinishedGroup] = {}
    pooled: dict[int, FinishedGroup] = {}
    for kept in found:
        if kept.report.newest > rules.version:
            continue
        if kept.order.group in rules.pool and kept.order.position < rules.cursor:
            pooled.setdefault(kept.order.group, kept)
        elif not rules.deterministic and _is_usable(kept, rules):
            finished.setdefault(kept.order.position, kept)
    return RecoveredWork(tuple(_trainable_in_time(finished.values(), rules)), tuple(pooled.values()))


def recorded(
    min_versions: Mapping[int, Version], finished: Iterable[FinishedGroup], rules: RecoveryRules
) -> dict[int, Version]:
    """Return the visits with recorded completions (and their minimum version) that still have to run."""
    if rules.deterministic:
        return {}
    recovered = {kept.order.position for kept in finished}
    return {
        position: min_version
        for position, min_version in min_versions.items()
        if position not in recovered and _is_open(position, rules) and min_version <= rules.version
    }


def _is_open(position: int, rules: RecoveryRules) -> bool:
    later = position >= rules.cursor and (rules.limit is None or position < rules.limit)
    return later or position in rules.open


def _is_usable(kept: FinishedGroup, rules: RecoveryRules) -> bool:
    return _is_open(kept.order.position, rules) and kept.order.min_version + rules.lag >= rules.version


def _trainable_in_time(finished: Iterable[FinishedGroup], rules: RecoveryRules) -> list[FinishedGroup]:
    """Return as many groups as fit, earliest deadline first: the n-th one is trained in batch version + n // B."""
    room = None if rules.steps is None else max(0, rules.steps - rules.version) * rules.groups_per_step
    fitting: list[FinishedGroup] = []
    for kept in sorted(finished, key=lambda kept: (kept.order.min_version, kept.order.group)):
        batch = rules.version + len(fitting) // rules.groups_per_step
        if batch <= kept.order.min_version + rules.lag and (room is None or len(fitting) < room):
            fitting.append(kept)
    return fitting


def group_closed_event(report: GroupReport) -> GroupClosed:
    """Return the `GroupClosed` event for a report. A failed group has no reward."""
    rewards = report.rewards if report.outcome != "failed" else []
    reward = fmean(rewards) if rewards else None
    reward_std = sqrt(fmean((value - reward) ** 2 for value in rewards)) if reward is not None else 0.0
    return GroupClosed(report.group, report.outcome, report.oldest, reward, reward_std)
