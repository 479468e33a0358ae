"""Pacing: how many groups may start now, by when each must be trained, and how much lag is allowed.

Admission invariants (B = groups per batch, v = learner version, e = oldest serving version)
- A group admitted while the allowed lag is l gets min_version a = e and deadline a + l. None of its tokens is older
  than a, so training it in a batch v <= a + l keeps every token's lag within l. The allowed lag is 0 during warmup and
  the governor's otherwise, which is at most max_lag. When it decreases, later groups may be due before earlier ones.
- At admission, outstanding groups never exceed (l + 1 - (v - e)) * B, including those with later deadlines. Hence every
  admitted group can still be trained in time, in whatever order deadlines come: for every d, the groups with a
  deadline <= d fit into the batches up to d. The batcher preserves this (proof there).
- Nothing is admitted that the remaining steps or epochs do not need.
- A decrease of the allowed lag cannot deadlock. If B or more groups are outstanding, they fill the open batch. If fewer
  are, only e < v - l can block admission, until the engines have loaded the newest published version p. That is enough:
  if l >= publish_every - 1, then v - p <= publish_every - 1; if l is smaller, every version is published, starting with
  the step that lowered l.

In deterministic mode, depth does not limit admission, so the groups of a version depend on outcomes only. Before a
checkpoint, no group is admitted for a batch after it. So nothing is outstanding at a checkpoint, and a resumed run
repeats exactly what the uninterrupted one does.

Governor: after every step it checks how off-policy the batch was. If the effective sample size is too low or the
mismatch KL too high, the allowed lag decreases by one; `patience` good batches in a row raise it by one. A change
affects later admissions only, never the deadline of an admitted group.

Governor invariants
- min_lag <= allowed lag <= max_lag, and it changes by at most one per step.
- After a decrease, only a bad batch made entirely of groups admitted since then causes the next one. A decrease shows
  in batches only when the groups admitted before it are used up, `lag` versions later; until then bad batches carry no
  new information and are ignored.
- Between a change and the next raise there are `patience` good batches and no bad one, made only of groups admitted
  since that change: groups sampled under another lag say nothing about this one.
- A bad batch of groups admitted before a raise does count: it was bad at less than the current lag.

Groups are numbered in admission order, across resumes too, so "since" is a comparison of numbers. Every group admitted
before a change is trained or gone within `max_lag` + 1 batches (later only if on_stale = train moves deadlines), so the
governor never ignores batches forever.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, Self

import msgspec

from outpace.config.algorithm import DifficultyConfig, GovernorConfig, ReplayConfig, RerollConfig
from outpace.controller.events import Confirmable
from outpace.types import Version


class GovernorState(msgspec.Struct, frozen=True):
    """Checkpointed governor state."""

    lag: int | None = None  # None: max_lag, as set when the run resumes
    good: int = 0
    lowered_at: int = 0
    changed_at: int = 0


class Governor:
    """Adapts the allowed lag to how off-policy batches are. Without settings, the lag is always `max_lag`."""

    def __init__(self, settings: GovernorConfig | None, max_lag: int, state: GovernorState) -> None:
        self._settings = settings
        self._max = max_lag
        self._min = max_lag if settings is None else min(settings.min_lag, max_lag)
        self.lag = max(self._min, max_lag if state.lag is None else min(state.lag, max_lag))
        self._good = state.good
        self._lowered_at = state.lowered_at  # first group admitted since the last decrease
        self._changed_at = state.changed_at  # first group admitted since the last change

    def state(self) -> GovernorState:
        if self._settings is None:
            return GovernorState()
        lag = None if self.lag == self._max else self.lag
        return GovernorState(lag, self._good, self._lowered_at, self._changed_at)

    def record(self, ess: float, kl: float, oldest: int, next_group: int) -> int:
        """Record a trained batch whose first admitted group was `oldest`; return the change of the allowed lag.

        `next_group` is the number of the next group to be admitted. NaN metrics count as bad."""
        if self._settings is None or oldest < self._lowered_at:
            return 0
        if not (ess >= self._settings.ess_min and kl <= self._settings.kl_max):
            return self._move(-1, next_group)
        if oldest >= self._changed_at:
            self._good += 1
        return self._move(+1, next_group) if self._good >= self._settings.patience else 0

    def _move(self, by: int, next_group: int) -> int:
        self._good = 0
        if not self._min <= self.lag + by <= self._max:
            return 0
        self.lag += by
        self._changed_at = next_group
        if by < 0:
            self._lowered_at = next_group
        return by


OnStale = Literal["wait", "requeue", "drop", "train"]


@dataclass(frozen=True)
class SchedulerSettings:
    groups_per_step: int
    group_size: int
    max_lag: int
    depth: float
    chunk_groups: int
    max_running: int  # episodes
    on_stale: OnStale
    warmup_steps: int
    publish_every: int
    update: Literal["inflight", "drain"]
    deterministic: bool
    steps: int | None  # None: no limit
    epochs: int | None  # None: no limit
    tasks: int  # in one epoch
    eval_every: int  # 0: only the first and the last version
    eval_enabled: bool
    checkpoint_every: int  # 0: only at the end
    governor: GovernorConfig | None = None  # None: the allowed lag is always max_lag
    difficulty: DifficultyConfig | None = None  # None: no task is skipped
    replay: ReplayConfig | None = None  # None: no group is trained twice
    reroll: RerollConfig | None = None  # None: no visit is repeated because its task was not solved
    streamed: bool = False  # tasks arrive during the run, as `TasksAdded`
    confirm: bool = False  # callbacks confirm each step before the next batch is trained
    eval_start: bool = True  # evaluate version 0
    eval_end: bool = True  # evaluate the last version
    eval_pinned: bool = True  # False: engines have one weight set, and evaluation uses the serving one

    @classmethod
    def of(cls, sections: Any, **others: Any) -> Self:
        """Return the settings of a run or a simulation. `sections` is its config; `others` are the fields that differ
        between the two."""
        pacing = sections.pacing
        return cls(
            groups_per_step=pacing.groups_per_step,
            max_lag=pacing.max_lag,
            depth=pacing.depth,
            chunk_groups=pacing.chunk_groups,
            on_stale=pacing.on_stale,
            warmup_steps=pacing.warmup_steps,
            publish_every=sections.weights.every,
            update=sections.weights.update,
            deterministic=sections.run.deterministic,
            steps=sections.run.steps,
            checkpoint_every=sections.checkpoint.every,
            **others,
        )

    def __post_init__(self) -> None:
        assert self.max_lag >= self.publish_every - 1, "the engines would never get weights fresh enough to serve"
        assert self.governor is None or not self.deterministic, "deterministic mode needs a fixed lag"

    def is_last(self, version: Version) -> bool:
        return self.steps is not None and version >= self.steps

    def is_checkpointed(self, version: Version) -> bool:
        return self.checkpoint_every > 0 and version % self.checkpoint_every == 0

    def is_boundary(self, version: Version) -> bool:
        """Return whether a resume from this version is exact in deterministic mode.

        If nothing is outstanding, the next group gets this version as its min_version, as it does after a resume, which
        loads no other version."""
        return self.max_lag == 0 or version <= self.warmup_steps or self.is_checkpointed(version)

    def is_evaluated(self, version: Version) -> bool:
        if version == 0:
            return self.eval_enabled and self.eval_start
        due = self.eval_every > 0 and version % self.eval_every == 0
        return self.eval_enabled and (due or (self.eval_end and self.is_last(version)))

    def newest_evaluated(self, version: Version) -> Version:
        """Return the newest version up to this one that is to be evaluated, -1 if none."""
        if self.is_evaluated(version):
            return version
        due = version // self.eval_every * self.eval_every if self.eval_every else 0
        return due if self.is_evaluated(due) else -1

    def is_published(self, version: Version, lag: int) -> bool:
        """Return whether this version is published: every k-th version and every version that is needed.

        Needed are warmup versions and the one after them (no older weights are allowed), evaluated versions,
        checkpoints in deterministic mode (a resumed run starts from those weights), the last version, and every
        version while the governor holds the lag below what publishing every k-th version needs."""
        return (
            version % self.publish_every == 0
            or version <= self.warmup_steps
            or lag < self.publish_every - 1
            or self.is_last(version)
            or self.is_evaluated(version)
            or (self.deterministic and self.is_checkpointed(version))
        )


class StepGate:
    """With `confirm`, holds back training and admission until callbacks return. The next batch waits for those of the
    last step, its checkpoint and its weights, admission only for those of the weights. Stores callbacks' requests.
    """

    def __init__(self, confirm: bool) -> None:
        self._confirm = confirm
        self._unconfirmed: list[tuple[Confirmable, Version]] = []
        self.requests: set[Literal["checkpoint", "evaluation"]] = set()

    @property
    def closed(self) -> bool:
        return bool(self._unconfirmed)

    @property
    def admits(self) -> bool:
        """Whether the callbacks of the newest weights in the engines have returned."""
        return all(kind != "policy" for kind, _ in self._unconfirmed)

    def wait_for(self, kind: Confirmable, version: Version) -> None:
        if self._confirm:
            self._unconfirmed.append((kind, version))

    def confirm(self, kind: Confirmable, version: Version) -> None:
        self._unconfirmed.remove((kind, version))

    def take(self, kind: Literal["checkpoint", "evaluation"]) -> bool:
        """Return whether this was requested, and clear the request."""
        requested = kind in self.requests
        self.requests.discard(kind)
        return requested

    def waiting_for(self) -> list[str]:
        return [f"{kind} {version}" for kind, version in self._unconfirmed]


@dataclass(frozen=True)
class PipelineLoad:
    """The state of the pipeline that admission depends on, in groups."""

    version: Version  # of the learner
    oldest: Version  # oldest serving version
    running: int
    outstanding: int  # running, or finished and not yet trained
    tasks_left: int | None  # None: no limit
    lag: int  # the governor's limit; warmup can lower it further


@dataclass(frozen=True)
class TaskDemand:
    """The pipeline state that decides when to ask for more tasks, if tasks arrive during the run."""

    issued: int  # visits since the run began
    oldest_open: int  # the first visit that is not finalized
    starved: bool  # nothing runs, and nothing can be trained without further tasks
    on_policy: bool  # every engine serves the newest version
    needed: bool = True  # the remaining steps need more visits than there are


class Pacing:
    """The admission rule. Stateless: every call takes the current load."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        # Rounded, so that 1.1 * 10 = 11.000000000000002 does not admit a twelfth group.
        self._depth_limit = ceil(round((1 + settings.depth) * settings.groups_per_step, 6))
        self._running_limit = max(1, settings.max_running // settings.group_size)

    def lag(self, load: PipelineLoad) -> int:
        """Return the allowed lag. In deterministic mode it depends on min_version, not on the learner's progress."""
        return self.lag_at(load.oldest if self.settings.deterministic else load.version, load.lag)

    def lag_at(self, version: Version, lag: int) -> int:
        return 0 if version < self.settings.warmup_steps else lag

    def deadline(self, load: PipelineLoad) -> Version:
        """Return the last batch that may train a group admitted now."""
        return load.oldest + self.lag(load)

    def can_admit(self, load: PipelineLoad, min_version: Version) -> bool:
        """Return whether a group with an older `min_version` than the current one, and so an earlier deadline, can
        be admitted: there must be time even if everything outstanding is trained first."""
        batches = min_version + self.lag(load) + 1 - load.version
        return min_version <= load.oldest and batches * self.settings.groups_per_step > load.outstanding

    def limits(self, load: PipelineLoad) -> dict[str, int]:
        """Return how many more groups each rule would admit. The smallest number applies."""
        size = self.settings.groups_per_step
        limits = {
            "max_running": self._running_limit - load.running,
            "max_lag": (self.deadline(load) + 1 - load.version) * size - load.outstanding,
        }
        if self.settings.deterministic:
            if every := self.settings.checkpoint_every:
                next_checkpoint = (load.oldest // every + 1) * every
                limits["checkpoint"] = (next_checkpoint - load.version) * size - load.outstanding
        else:
            limits["depth"] = self._depth_limit - load.outstanding
        if self.settings.steps is not None:
            limits["steps"] = (self.settings.steps - load.version) * size - load.outstanding
        if load.tasks_left is not None:
            limits["epochs"] = load.tasks_left
        return limits

    def needs_tasks(self, load: PipelineLoad) -> bool:
        """Return whether the remaining steps need more visits than are left."""
        steps = self.limits(load).get("steps")
        return steps is None or steps > (load.tasks_left or 0)

    def limited_by(self, load: PipelineLoad) -> str:
        """Return the rule that blocks admission now, or ""."""
        limits = self.limits(load)
        rule = min(limits, key=limits.__getitem__)
        return rule if limits[rule] <= 0 else ""

    def room(self, load: PipelineLoad) -> int:
        """Return how many groups may be admitted now."""
        return max(0, min(self.limits(load).values()))
