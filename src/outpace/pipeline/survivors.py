"""What of an earlier start's work can still be used when its run goes on. Pure: a selection among what the journal has.

A run goes on from a checkpoint of version c, and the journal knows more than it: groups that were finished later, and
even trained, in versions that are no more. Invariants of what is chosen:

- No token is newer than c: the weights that sampled it exist, or are the ancestors of those that do.
- Each group makes a visit that is open in the checkpoint's ledger, and no two make the same one.
- All of them can be trained before their deadlines: of those due by d, there are at most B for each batch from c to d.
  The earlier start had found such a schedule; after a change of settings the last ones may have to go.
- In lockstep none: what was under way comes out the same when it is done again, under its own number.

What is pooled to be replayed was trained before c; the checkpoint names it by group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import fmean
from typing import Self

from outpace.pipeline.events import GroupClosed
from outpace.pipeline.pacing import CoreSettings
from outpace.pipeline.state import CoreState
from outpace.types import GroupReport, Kept, Version


@dataclass(frozen=True)
class Survivors:
    finished: tuple[Kept, ...] = ()
    pooled: tuple[Kept, ...] = ()
    recorded: Mapping[int, Version] | None = None  # visits of which there are answers -> the stamp these have


NOTHING = Survivors()


@dataclass(frozen=True)
class Rules:
    """What decides about a group, as of the checkpoint."""

    version: Version
    open: frozenset[int]  # visits below the cursor that have not come to their end
    cursor: int
    limit: int | None  # of positions; None: endless
    lag: int
    groups_per_step: int
    steps: int | None
    pool: frozenset[int]  # groups
    lockstep: bool = False

    @classmethod
    def of(cls, state: CoreState | None, settings: CoreSettings) -> Self:
        """`state` is the checkpoint's; None: there is none yet, and the run begins anew."""
        state = state or CoreState(settings.tasks, 0, False)
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
            lockstep=settings.deterministic,
        )


def choose(found: Iterable[Kept], rules: Rules) -> Survivors:
    """Of two groups that make the same visit the first one counts."""
    finished: dict[int, Kept] = {}
    pooled: dict[int, Kept] = {}
    for kept in found:
        if kept.report.newest > rules.version:
            continue
        if kept.order.group in rules.pool and kept.order.position < rules.cursor:
            pooled.setdefault(kept.order.group, kept)
        elif not rules.lockstep and _is_wanted(kept, rules):
            finished.setdefault(kept.order.position, kept)
    return Survivors(tuple(_in_time(finished.values(), rules)), tuple(pooled.values()))


def recorded(stamps: Mapping[int, Version], finished: Iterable[Kept], rules: Rules) -> dict[int, Version]:
    """Of the visits that answers were recorded of (with the stamp they have), those that are still to be made."""
    if rules.lockstep:
        return {}
    there = {kept.order.position for kept in finished}
    return {
        position: stamp
        for position, stamp in stamps.items()
        if position not in there and _is_open(position, rules) and stamp <= rules.version
    }


def _is_open(position: int, rules: Rules) -> bool:
    later = position >= rules.cursor and (rules.limit is None or position < rules.limit)
    return later or position in rules.open


def _is_wanted(kept: Kept, rules: Rules) -> bool:
    return _is_open(kept.order.position, rules) and kept.order.min_version + rules.lag >= rules.version


def _in_time(finished: Iterable[Kept], rules: Rules) -> list[Kept]:
    """As many as fit, the earliest deadline first: the n-th to be trained goes into batch version + n // B."""
    room = None if rules.steps is None else max(0, rules.steps - rules.version) * rules.groups_per_step
    fitting: list[Kept] = []
    for kept in sorted(finished, key=lambda kept: (kept.order.min_version, kept.order.group)):
        batch = rules.version + len(fitting) // rules.groups_per_step
        if batch <= kept.order.min_version + rules.lag and (room is None or len(fitting) < room):
            fitting.append(kept)
    return fitting


def group_closed(report: GroupReport) -> GroupClosed:
    """What the core needs to know of a closed group. One that failed says nothing about its task."""
    judged = report.rewards if report.outcome != "failed" else []
    reward = fmean(judged) if judged else None
    spread = sqrt(fmean((value - reward) ** 2 for value in judged)) if reward is not None else 0.0
    return GroupClosed(report.group, report.outcome, report.oldest, reward, spread)
