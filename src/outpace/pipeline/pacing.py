"""How many groups may be started now, and until when each must be trained.

Invariants (B = groups in a batch, v = the learner's version, e = the oldest version that serves)
- A group admitted while the lag in force is l gets the stamp a = e and the deadline a + l: none of its tokens is older
  than a, so training it in a batch v <= a + l keeps every token's lag within l. The lag in force is 0 in warm-up, else
  the governor's, which is at most max_lag. When it falls, later groups may be due before earlier ones.
- Outstanding groups never exceed (l + 1 - (v - e)) * B at admission, those with later deadlines counted too. Hence
  whatever is admitted can still be trained in time, in whatever order deadlines come: for every d, the groups with a
  deadline <= d fit into the batches up to d. The batcher keeps it that way (proof there).
- Nothing is admitted that the remaining steps or epochs do not need.
- Nobody waits for ever when the lag in force falls. If B groups or more are outstanding, they make the open batch. If
  fewer are, admission lacks room only because e < v - l, and ends so when the engines have loaded the newest published
  version p: where l >= publish_every - 1, v - p is at most that; where l is smaller, every version is published, from
  the very step that lowered it.

In lockstep (`deterministic`) the depth does not limit admission, so that the groups of a stamp depend on nothing but
outcomes; and no group is admitted before a checkpoint for a batch behind it, so that a checkpoint finds nothing
outstanding and a resumed run repeats exactly what the uninterrupted one does.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from outpace.errors import BadInput
from outpace.pipeline.difficulty import DifficultySettings
from outpace.pipeline.governor import GovernorSettings
from outpace.pipeline.replay import ReplaySettings
from outpace.types import Version
from outpace.wording import plural

OnStale = Literal["wait", "requeue", "drop", "train"]


@dataclass(frozen=True)
class CoreSettings:
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
    governor: GovernorSettings | None = None  # None: the lag in force is max_lag
    difficulty: DifficultySettings | None = None  # None: no task is left out
    replay: ReplaySettings | None = None  # None: no group is trained twice
    eval_pinned: bool = True  # False: engines have one weight set, and evaluation goes by what serves

    def __post_init__(self) -> None:
        for name in ("groups_per_step", "group_size", "chunk_groups", "max_running", "publish_every", "tasks"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_lag", "depth", "warmup_steps", "eval_every", "checkpoint_every"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name} must not be negative, but is {getattr(self, name)}")
        if self.max_lag < self.publish_every - 1:
            raise BadInput(
                f"publishing every {plural(self.publish_every, 'version')} needs max_lag >= {self.publish_every - 1}, "
                f"not {self.max_lag}: else the engines never become fresh enough to serve"
            )
        if self.governor is not None and self.deterministic:
            raise BadInput("the governor follows what was measured: in lockstep the lag must be fixed")

    def is_last(self, version: Version) -> bool:
        return self.steps is not None and version >= self.steps

    def is_checkpointed(self, version: Version) -> bool:
        return self.checkpoint_every > 0 and version % self.checkpoint_every == 0

    def is_boundary(self, version: Version) -> bool:
        """Whether in lockstep, with nothing outstanding, the next group is bound to get this version as its stamp, as
        it does after a resume, which loads no other."""
        return self.max_lag == 0 or version <= self.warmup_steps or self.is_checkpointed(version)

    def is_evaluated(self, version: Version) -> bool:
        due = version == 0 or self.is_last(version) or (self.eval_every > 0 and version % self.eval_every == 0)
        return self.eval_enabled and due

    def newest_evaluated(self, version: Version) -> Version:
        """The newest version up to this one that is to be evaluated; -1 if none is."""
        if not self.eval_enabled:
            return -1
        if self.is_evaluated(version):
            return version
        return version // self.eval_every * self.eval_every if self.eval_every else 0

    def is_published(self, version: Version, lag: int) -> bool:
        """Every k-th version, and each that somebody needs: warm-up and the step after it (they know no older weights),
        an evaluation, in lockstep a checkpoint (a resumed run starts from those weights), and the last. While the
        governor holds the lag below what every k-th version needs, all of them."""
        return (
            version % self.publish_every == 0
            or version <= self.warmup_steps
            or lag < self.publish_every - 1
            or self.is_last(version)
            or self.is_evaluated(version)
            or (self.deterministic and self.is_checkpointed(version))
        )


@dataclass(frozen=True)
class Load:
    """What admission looks at, in groups."""

    version: Version  # the learner's
    oldest: Version  # of the engines
    running: int
    outstanding: int  # running, or finished and not yet trained
    tasks_left: int | None  # None: endless
    lag: int  # the governor's word on the most there may be; warm-up can lower it further


class Pacing:
    """The admission rule. It holds no state: the load comes with every question."""

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        # Rounded, lest 1.1 * 10 admit a twelfth group for the sake of 11.000000000000002.
        self._depth_limit = ceil(round((1 + settings.depth) * settings.groups_per_step, 6))
        self._running_limit = max(1, settings.max_running // settings.group_size)

    def lag(self, load: Load) -> int:
        """The lag in force. In lockstep it is a matter of the stamp, not of how far the learner happens to be."""
        return self.lag_at(load.oldest if self.settings.deterministic else load.version, load.lag)

    def lag_at(self, version: Version, lag: int) -> int:
        return 0 if version < self.settings.warmup_steps else lag

    def deadline(self, load: Load) -> Version:
        """The last batch that may train a group admitted now."""
        return load.oldest + self.lag(load)

    def may_start(self, load: Load, stamp: Version) -> bool:
        """Whether a group with an older stamp than that of the hour, and so with an earlier deadline, can be admitted:
        there is time enough even if everything outstanding is trained first."""
        batches = stamp + self.lag(load) + 1 - load.version
        return stamp <= load.oldest and batches * self.settings.groups_per_step > load.outstanding

    def limits(self, load: Load) -> dict[str, int]:
        """How many more groups each rule would admit; the smallest of them counts."""
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

    def room(self, load: Load) -> int:
        """How many groups may be admitted now."""
        return max(0, min(self.limits(load).values()))
