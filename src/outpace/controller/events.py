"""Events that go into the scheduler, and actions that come out of it.

The scheduler turns one event into a list of actions and does nothing else. The driver (asyncio, real components) or the
simulator (virtual clock, modelled components) carries the actions out and reports back with further events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from outpace.types import GroupOrder, Outcome, Version

Confirmable = Literal["step", "checkpoint", "policy"]

# ---------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class RunStarted:
    """All components are up. `engines` maps each engine's name to the version it serves."""

    engines: dict[str, Version]


@dataclass(frozen=True)
class GroupClosed:
    """A worker is done with a group. `oldest` is the smallest version among its trainable tokens."""

    group: int
    outcome: Outcome
    oldest: Version = 0
    reward: float | None = None  # mean over its attempts; None: it failed or no attempt was scored
    reward_std: float = 0.0  # standard deviation of the rewards over its attempts
    best: float | None = None  # highest reward of an attempt; None as for `reward`
    supplied: bool = False  # its attempts came with the task, and may be older than its min_version


@dataclass(frozen=True)
class ChunkTrained:
    version: Version


@dataclass(frozen=True)
class BatchTrained:
    """The optimizer step is done and the learner is at `version`. `ess` and `kl` say how off-policy the batch was."""

    version: Version
    ess: float = 1.0  # effective sample size, as a fraction of the tokens
    kl: float = 0.0  # mismatch KL per token


@dataclass(frozen=True)
class Published:
    """The snapshot of `version` is complete and can be loaded."""

    version: Version


@dataclass(frozen=True)
class EngineLoaded:
    engine: str
    version: Version


@dataclass(frozen=True)
class LoadLate:
    """A load takes much longer than usual. It may still succeed."""

    engine: str
    version: Version


@dataclass(frozen=True)
class LoadFailed:
    """A load failed. The engine still serves its old version; if `torn`, its weights are inconsistent and it serves
    nothing until the next load."""

    engine: str
    version: Version
    torn: bool


@dataclass(frozen=True)
class EngineLost:
    """An engine died or is leaving. It serves nothing, and a load in progress will not be reported."""

    engine: str


@dataclass(frozen=True)
class EngineJoined:
    """An engine came up, for the first time or after a restart. It serves nothing before its first load."""

    engine: str


@dataclass(frozen=True)
class EngineLeft:
    """An engine is gone for good and will not come back."""

    engine: str


@dataclass(frozen=True)
class EvaluationDone:
    version: Version


@dataclass(frozen=True)
class TasksAdded:
    """A stream has given `total` tasks so far, all of them on disk. `ended`: there will be no more."""

    total: int
    ended: bool = False


@dataclass(frozen=True)
class Confirmed:
    """The callbacks for this step, for its checkpoint, or for its weights reaching the engines have returned. Sent only
    with `confirm`."""

    kind: Confirmable
    version: Version


@dataclass(frozen=True)
class Requested:
    """A callback requested a checkpoint or an evaluation after the current step."""

    kind: Literal["checkpoint", "evaluation"]


@dataclass(frozen=True)
class StopRequested:
    """A stop was requested: admit nothing more, complete the current step, then finish."""


Event = (
    RunStarted
    | GroupClosed
    | ChunkTrained
    | BatchTrained
    | Published
    | EngineLoaded
    | LoadLate
    | LoadFailed
    | EngineLost
    | EngineJoined
    | EngineLeft
    | EvaluationDone
    | TasksAdded
    | Confirmed
    | Requested
    | StopRequested
)

# --------------------------------------------------------------------------------------------------------- actions


Admit = GroupOrder
"""Start this group. Reply: GroupClosed."""


@dataclass(frozen=True)
class Cancel:
    """Cancel a running group that missed its deadline (on_stale = drop or requeue). No event is expected back."""

    group: int


@dataclass(frozen=True)
class TrainChunk:
    """Run forward and backward over these groups, in this order, as part of batch `version`. Reply: ChunkTrained.

    `replayed`: the groups were trained before, in another batch. Such a chunk is the last of its batch."""

    version: Version
    groups: tuple[int, ...]
    replayed: bool = False


@dataclass(frozen=True)
class CloseBatch:
    """Take the optimizer step of batch `version`, which consists of its own `groups` and the `replayed` ones.

    Reply: BatchTrained(version + 1)."""

    version: Version
    groups: tuple[int, ...]
    replayed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Retire:
    """These trained groups will not be replayed again, so the journal may drop them. Only with replay enabled."""

    groups: tuple[int, ...]


@dataclass(frozen=True)
class Publish:
    """Snapshot the learner's weights, now at `version`. Buffers of `leased` versions must be kept. Reply: Published."""

    version: Version
    leased: tuple[Version, ...] = ()


@dataclass(frozen=True)
class LoadWeights:
    """Load a published version into an engine. Reply: EngineLoaded or LoadFailed, possibly LoadLate before that."""

    engine: str
    version: Version


@dataclass(frozen=True)
class Evaluate:
    """Measure held-out reward on exactly this published version. Reply: EvaluationDone."""

    version: Version


@dataclass(frozen=True)
class Checkpoint:
    """Commit everything as of `version`. `state` is the scheduler's own state."""

    version: Version
    state: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Finalize:
    """A prompt visit ended without being trained and must be recorded. A `skipped` visit has no group."""

    task: int
    epoch: int
    outcome: str
    group: int | None = None
    reroll: int = 0  # n: the n-th repeat of the visit


@dataclass(frozen=True)
class WriteRecord:
    """Write the visits named by `Finalize` since the last record to the record of step `version`. `finalized` counts
    all finalized visits since the run began.

    `trained`: the record also has the groups that this step trained. Otherwise it has only these visits, because a
    checkpoint between two steps is about to be made. The record is written before the checkpoint that relies on
    it."""

    version: Version
    finalized: int
    trained: bool


@dataclass(frozen=True)
class LagChanged:
    """The governor changed the allowed lag to `lag`. For metrics only."""

    lag: int
    by: int


@dataclass(frozen=True)
class EpochStarted:
    epoch: int


@dataclass(frozen=True)
class EpochEnded:
    """Every task of this epoch is finalized."""

    epoch: int


@dataclass(frozen=True)
class PolicyUpdated:
    """For the first time, every serving engine has this version or a newer one."""

    version: Version


@dataclass(frozen=True)
class Finish:
    """Nothing is left to do."""

    reason: str


Action = (
    Admit
    | Cancel
    | TrainChunk
    | CloseBatch
    | Retire
    | Publish
    | LoadWeights
    | Evaluate
    | Checkpoint
    | Finalize
    | WriteRecord
    | LagChanged
    | EpochStarted
    | EpochEnded
    | PolicyUpdated
    | Finish
)
