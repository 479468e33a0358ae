"""What the controller hears (events) and what it orders (actions).

The core turns one event into a list of actions and does nothing else. Whoever drives it (asyncio for real parts, a
virtual clock for modelled ones) carries the actions out and reports back with further events.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outpace.types import Outcome, Version

# ---------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class Started:
    """The parts are up: `engines` maps each engine's name to the version it serves."""

    engines: dict[str, Version]


@dataclass(frozen=True)
class GroupClosed:
    """A worker has closed a group. `oldest` is the smallest version among its trainable tokens."""

    group: int
    outcome: Outcome
    oldest: Version = 0
    reward: float | None = None  # mean over its attempts; None: it failed, or nothing was judged
    spread: float = 0.0  # standard deviation of the rewards over its attempts


@dataclass(frozen=True)
class ChunkTrained:
    version: Version


@dataclass(frozen=True)
class BatchTrained:
    """The optimizer step is done: the learner is now at `version`. The rest says how well the batch fitted it."""

    version: Version
    ess: float = 1.0  # effective sample size, as a share of the tokens
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
    """A load takes much longer than loads do. It may still succeed."""

    engine: str
    version: Version


@dataclass(frozen=True)
class LoadFailed:
    """A load has failed: the engine serves the version that it had or, when `torn`, nothing before the next one."""

    engine: str
    version: Version
    torn: bool


@dataclass(frozen=True)
class EngineLost:
    """An engine has died or left: it serves nothing, and a load that was under way will not be heard of."""

    engine: str


@dataclass(frozen=True)
class EngineJoined:
    """An engine has come up, for the first time or again. It serves nothing before its first load."""

    engine: str


@dataclass(frozen=True)
class EngineLeft:
    """An engine has been lost for good: nobody expects it back."""

    engine: str


@dataclass(frozen=True)
class EvaluationDone:
    version: Version


@dataclass(frozen=True)
class StopRequested:
    """Somebody asked the run to stop: no further admission, the step under way completes, then finish."""


Event = (
    Started
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
    | StopRequested
)

# --------------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True)
class Admit:
    """Start this group: task number `task` of the source, served by versions >= `min_version` only.

    `position` is the visit in the order of tasks over all epochs. `recorded`: an earlier start of the run was at it,
    and what it has recorded may be used again. `again`: it was given up before, for taking too long."""

    group: int
    task: int
    epoch: int
    min_version: Version
    position: int = 0
    recorded: bool = False
    again: bool = False


@dataclass(frozen=True)
class Cancel:
    """Stop a running group that has outlived its deadline (on_stale = drop or requeue). No event is expected back."""

    group: int


@dataclass(frozen=True)
class TrainChunk:
    """Forward and backward over these groups, in this order, as part of batch `version`. Answer: ChunkTrained.

    `replayed`: they were trained before, in another batch; such a chunk is the last of its batch."""

    version: Version
    groups: tuple[int, ...]
    replayed: bool = False


@dataclass(frozen=True)
class CloseBatch:
    """Take the optimizer step of batch `version`, made of its own `groups` and of the `replayed` ones in all.

    Answer: BatchTrained(version + 1)."""

    version: Version
    groups: tuple[int, ...]
    replayed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Retire:
    """These trained groups will not be replayed any more: their journal segments may go. Only where there is replay."""

    groups: tuple[int, ...]


@dataclass(frozen=True)
class Publish:
    """Snapshot the learner's weights, now of `version`; buffers of `leased` versions must stay. Answer: Published."""

    version: Version
    leased: tuple[Version, ...] = ()


@dataclass(frozen=True)
class LoadWeights:
    """Bring a published version to an engine. Answer: EngineLoaded or LoadFailed; before that perhaps LoadLate."""

    engine: str
    version: Version


@dataclass(frozen=True)
class Evaluate:
    """Measure held-out reward on exactly this published version. Answer: EvaluationDone."""

    version: Version


@dataclass(frozen=True)
class Checkpoint:
    """Commit everything as of `version`. `state` is the core's own part of it."""

    version: Version
    state: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Settle:
    """This visit has come to its end without being trained, and goes on record; a `skipped` one has no group."""

    task: int
    epoch: int
    outcome: str
    group: int | None = None


@dataclass(frozen=True)
class Account:
    """What was named by `Settle` since the last of these is put on record with step `version`, and with it `settled`
    visits since the run began.

    `trained`: together with the groups that this step has trained. Otherwise a checkpoint is about to be made between
    two steps, and they get a record of their own. The record comes before the checkpoint that relies on it."""

    version: Version
    settled: int
    trained: bool


@dataclass(frozen=True)
class LagChanged:
    """The governor moved the lag in force, to `lag`: for people to know."""

    lag: int
    by: int


@dataclass(frozen=True)
class EpochStarted:
    epoch: int


@dataclass(frozen=True)
class EpochEnded:
    """Every task of this epoch is accounted for."""

    epoch: int


@dataclass(frozen=True)
class PolicyUpdated:
    """Every serving engine has this version or a newer one, for the first time."""

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
    | Settle
    | Account
    | LagChanged
    | EpochStarted
    | EpochEnded
    | PolicyUpdated
    | Finish
)
