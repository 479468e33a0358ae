"""The controller's mind: one event in, the actions it calls for out. No clock, no I/O, no tensors.

         tasks ──▶ pacing: may a group start? ──Admit──▶ workers ──GroupClosed──▶ batcher: which batch takes it?
                      ▲ oldest version that serves                                    │ TrainChunk … CloseBatch
                      │                                                               ▼
         courier ──LoadWeights──▶ engines        Publish, Checkpoint, Evaluate ◀── learner: BatchTrained
            ▲                                        │
            └──────────── Published ◀────────────────┘

What pacing and batches are bent by, each a machine of its own: the governor (the lag in force, by BatchTrained), the
tasks at rest (visits skipped at admission, by GroupClosed), the pool of groups to train once more (the last chunk of a
batch).

Who waits for whom, and who ends the wait
- admission waits for room (a group trained or gone), or for an engine to load (EngineLoaded);
- the open batch waits for running groups (GroupClosed);
- the learner is serial: one chunk or step at a time (ChunkTrained, BatchTrained). Its calls run in the order given, so
  a Publish or Checkpoint needs no waiting: whatever is ordered after it happens after it;
- an engine waits for nobody but, when draining or in lockstep, for its running groups;
- an evaluation waits for its version to be published and for the one under way (EvaluationDone);
- the end waits for the learner, publications and evaluations; a requested stop not for evaluations.

After every event everything is looked at again, in a fixed order, so no event can be missed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import msgspec

from outpace.pipeline.batcher import Batcher
from outpace.pipeline.courier import Courier, Evaluations
from outpace.pipeline.difficulty import Difficulty
from outpace.pipeline.events import (
    Action,
    Admit,
    BatchTrained,
    Cancel,
    Checkpoint,
    ChunkTrained,
    CloseBatch,
    EngineJoined,
    EngineLeft,
    EngineLoaded,
    EngineLost,
    EpochEnded,
    EpochStarted,
    Evaluate,
    EvaluationDone,
    Event,
    Finish,
    GroupClosed,
    LagChanged,
    LoadFailed,
    LoadLate,
    LoadWeights,
    PolicyUpdated,
    Publish,
    Published,
    Retire,
    Settle,
    Started,
    StopRequested,
    TrainChunk,
)
from outpace.pipeline.governor import Governor
from outpace.pipeline.ledger import Ledger, Settled
from outpace.pipeline.pacing import CoreSettings, Load, Pacing
from outpace.pipeline.records import Records
from outpace.pipeline.replay import Replay
from outpace.pipeline.state import CoreState, state_of
from outpace.pipeline.survivors import NOTHING, Survivors, group_closed
from outpace.tasks.order import Order
from outpace.types import Kept, Version

__all__ = ["Core", "CoreSettings"]

MAX_WAITING = 2
"""Evaluations that may wait in lockstep before nothing is loaded any more: each of them leases a snapshot."""


class Visit(NamedTuple):
    """A task at its turn: `position` counts over all epochs."""

    position: int
    epoch: int
    task: int


@dataclass(frozen=True)
class Admitted:
    """An outstanding group."""

    visit: Visit
    stamp: Version
    spread: float = 0.0  # of its rewards, once it has finished


class Core:
    def __init__(
        self,
        settings: CoreSettings,
        order: Order,
        state: CoreState | None = None,
        survivors: Survivors = NOTHING,
        evaluated: Version = -1,
    ) -> None:
        """`state` and `survivors` are what an earlier start has left; `evaluated` is the newest version of which the
        result is known."""
        self.settings = settings
        self.order = order
        self._committed = state  # what was last ordered to be committed
        state = state or CoreState(order.count, order.seed, order.shuffle)
        state.check(order)
        assert settings.tasks == order.count
        self.version: Version = state.version
        self._next_group = max([state.next_group, *(kept.order.group + 1 for kept in survivors.finished)])
        self._groups: dict[int, Admitted] = {}
        self._cancelled: set[int] = set()
        self._requeued: set[int] = set()  # positions
        self._pacing = Pacing(settings)
        self._batcher = Batcher(
            settings.groups_per_step, settings.chunk_groups, in_order=settings.deterministic, version=state.version
        )
        finished = {kept.order.position for kept in survivors.finished}
        self._ledger = Ledger(order.count, settings.epochs, state.ledger, finished)
        self._recorded = dict(survivors.recorded or {})
        self._governor = Governor(settings.governor, settings.max_lag, state.governor)
        self._difficulty = Difficulty(settings.difficulty, order.count, settings.deterministic, state.difficulty)
        pool = {kept.order.group: state.replay[kept.order.group] for kept in survivors.pooled}
        self._replay = Replay(settings.replay, settings.groups_per_step, pool)
        self._replayed: tuple[int, ...] | None = None  # in the open batch; None: not chosen yet
        self._courier = Courier("lockstep" if settings.deterministic else settings.update)
        self._evaluations = Evaluations(settings.deterministic, evaluated)
        self._evaluated = evaluated
        self._policy = state.version  # the newest version that every serving engine has had
        self._learner: Literal["idle", "chunk", "step"] = "idle"
        self._publishing: set[Version] = set()
        self._started = self._stopping = self._finished = False
        self._records = Records(settings.deterministic, self._ledger.settled)
        self._actions: list[Action] = []
        for kept in survivors.finished:
            self._adopt(kept)
        self._boundary = self._state()  # lockstep: the newest one that can be gone on from exactly

    def _adopt(self, kept: Kept) -> None:
        """A group that an earlier start has finished; how long it may wait is a matter of its stamp, as ever."""
        order, closed = kept.order, group_closed(kept.report)
        visit = Visit(order.position, order.epoch, order.task)
        self._groups[order.group] = Admitted(visit, order.min_version, closed.spread)
        self._batcher.adopt(order.group, order.min_version + self._pacing.lag(self._load))
        self._difficulty.hear(order.group, order.task, order.epoch, closed.reward)

    # ---------------------------------------------------------------------------------------------- state and facts

    @classmethod
    def restore(
        cls,
        settings: CoreSettings,
        order: Order,
        snapshot: dict[str, object],
        survivors: Survivors = NOTHING,
        evaluated: Version = -1,
    ) -> Self:
        """Go on from the state of a `Checkpoint`: tasks under way then are issued again, first and in order, unless
        their groups have survived."""
        return cls(settings, order, state_of(snapshot), survivors, evaluated)

    def _state(self) -> CoreState:
        return CoreState(
            tasks=self.order.count,
            seed=self.order.seed,
            shuffle=self.order.shuffle,
            version=self.version,
            next_group=self._next_group,
            ledger=self._ledger.state(),
            governor=self._governor.state(),
            difficulty=self._difficulty.state(),
            replay=self._replay.state(),
        )

    @property
    def running(self) -> int:
        """Groups being rolled out."""
        return self._batcher.running

    @property
    def finished(self) -> int:
        """Groups finished and not yet trained."""
        return self._batcher.finished

    @property
    def outstanding(self) -> int:
        return self._batcher.outstanding

    @property
    def counts(self) -> dict[str, int]:
        """Since the run began: visits trained, filtered, failed, dropped, skipped; requeued; deadlines extended."""
        return self._ledger.counts()

    @property
    def max_lag(self) -> int:
        """The lag that the governor allows now."""
        return self._governor.lag

    @property
    def resting(self) -> int:
        """Tasks that are left out for now."""
        return self._difficulty.resting

    def evaluates(self, version: Version) -> bool:
        """Whether the evaluation of this version or of an older one is still to come or under way."""
        return self._evaluations.is_open(version)

    @property
    def pools(self) -> bool:
        """Whether trained groups are kept to be replayed, until a Retire names them."""
        return self._replay.pools

    @property
    def pool(self) -> tuple[int, ...]:
        """The groups that may be replayed."""
        return tuple(self._replay.state())

    @property
    def _over(self) -> bool:
        """Training is: the steps are done, or the data and all that came of it."""
        return self.settings.is_last(self.version) or (self._ledger.left == 0 and not self.outstanding)

    @property
    def _serving(self) -> Version:
        """The oldest version that groups are admitted for. One that is too old to be trained in time, and whose engine
        is behind, is not counted on: it must not hold up the others."""
        if self.settings.deterministic:
            return self._courier.oldest
        return self._courier.oldest_from(self.version - self._pacing.lag_at(self.version, self._governor.lag))

    @property
    def _load(self) -> Load:
        return Load(
            version=self.version,
            oldest=self._serving,
            running=self.running,
            outstanding=self.outstanding,
            tasks_left=self._ledger.left,
            lag=self._governor.lag,
        )

    # ------------------------------------------------------------------------------------------------------- events

    def handle(self, event: Event) -> list[Action]:
        if self._finished:
            return []
        self._hear(event)
        self._announce_policy()
        if self._stopping:
            self._leave()
        elif self._started:
            self._advance()
        actions, self._actions = self._actions, []
        return actions

    def _hear(self, event: Event) -> None:
        match event:
            case Started(engines):
                self._start(engines)
            case GroupClosed():
                self._group_closed(event)
            case ChunkTrained(version):
                assert (self._learner, version) == ("chunk", self.version)
                self._learner = "idle"
            case BatchTrained():
                self._batch_trained(event)
            case Published(version):
                self._publishing.remove(version)
                self._courier.published(version)
                self._evaluations.published(version)
            case EngineLoaded(engine, version):
                self._courier.loaded(engine, version)
            case LoadLate(engine, version):
                self._courier.late(engine, version)
            case LoadFailed(engine, _, torn):
                self._courier.failed(engine, torn)
            case EngineLost(engine):
                self._courier.lost(engine)
            case EngineJoined(engine):
                self._courier.joined(engine)
            case EngineLeft(engine):
                self._courier.left(engine)
            case EvaluationDone(version):
                self._evaluations.done(version)
            case StopRequested():
                self._stopping = True

    def _announce_policy(self) -> None:
        served = self._courier.served_by_all
        if served is not None and served > self._policy:
            self._policy = served
            self._actions.append(PolicyUpdated(served))

    def _start(self, engines: dict[str, Version]) -> None:
        assert not self._started
        self._started = True
        self._courier.start(engines, self.version)
        self._actions.extend(EpochStarted(epoch) for epoch in self._ledger.begun)
        self._publish()
        if self.settings.newest_evaluated(self.version) > self._evaluated:
            self._evaluations.ask(self.version, published=False)

    def _group_closed(self, event: GroupClosed) -> None:
        if event.group in self._cancelled:
            self._cancelled.remove(event.group)
            return
        group = self._groups[event.group]
        self._difficulty.hear(event.group, group.visit.task, group.visit.epoch, event.reward)
        if event.outcome == "finished":
            assert event.oldest >= group.stamp, f"group {event.group} has tokens older than its stamp {group.stamp}"
            self._groups[event.group] = replace(group, spread=event.spread)
            self._batcher.finish(event.group)
            self._ledger.finish(group.visit.position)
        else:
            self._batcher.discard(event.group)
            self._settle(event.group, event.outcome)

    def _batch_trained(self, event: BatchTrained) -> None:
        version = event.version
        assert (self._learner, version) == ("step", self.version + 1)
        self._learner = "idle"
        trained = self._batcher.close()
        self._govern(event, oldest_group=min(trained))
        self._difficulty.batch_trained(version, last_group=max(trained))
        self._update_pool(version, trained)
        for group in trained:
            self._settle(group, "trained")
        self.version = version
        self._actions += self._records.step(version, max(trained), self._ledger.settled)
        if not self.outstanding and self.settings.is_boundary(version) and self._records.complete:
            self._boundary = self._state()
        if self._stopping:
            return
        if self.settings.is_published(version, self._governor.lag):
            self._publish()
        if self.settings.is_evaluated(version):
            self._evaluations.ask(version, published=False)
        if self.settings.is_checkpointed(version):
            self._checkpoint()

    def _govern(self, event: BatchTrained, oldest_group: int) -> None:
        if event.version <= self.settings.warmup_steps:  # no lag in it, so nothing to be learned about lag
            return
        if by := self._governor.hear(event.ess, event.kl, oldest_group, self._next_group):
            self._actions.append(LagChanged(self._governor.lag, by))

    def _update_pool(self, version: Version, trained: list[int]) -> None:
        spreads = {group: self._groups[group].spread for group in trained}
        gone = self._replay.batch_trained(version - 1, spreads, self._replayed or ())
        self._replayed = None
        if gone:
            self._actions.append(Retire(gone))

    def _settle(self, group: int, outcome: Settled) -> None:
        self._book(self._groups.pop(group).visit, outcome, group)

    def _book(self, visit: Visit, outcome: Settled, group: int | None = None) -> None:
        self._requeued.discard(visit.position)
        ended = self._ledger.settle(visit.position, outcome)
        if outcome != "trained":
            settle = Settle(visit.task, visit.epoch, outcome, group)
            self._actions += self._records.settle(settle, self._next_group)
        if ended:
            self._actions.append(EpochEnded(visit.epoch))

    # ------------------------------------------------------------------------------------------------------ actions

    def _advance(self) -> None:
        self._fill_batch()
        self._admit()
        self._feed_learner()
        if self._over:
            self._wind_up()
        awaited = self._courier.stale or not self.settings.eval_pinned
        if not self._over or (awaited and not self._evaluations.idle):
            # In lockstep all evaluations wait their turn, and loading waits before their snapshots fill the memory.
            busy = self.running or (self.settings.deterministic and self._evaluations.waiting > MAX_WAITING)
            loads = self._courier.deliver(busy=bool(busy))
            self._actions.extend(LoadWeights(engine, version) for engine, version in loads)
        if (version := self._evaluations.next()) is not None:
            self._actions.append(Evaluate(version))
        if self._over and self._learner == "idle" and not self._publishing and self._evaluations.idle:
            self._finish("done")

    def _fill_batch(self) -> None:
        self._batcher.fill()
        while self.settings.on_stale != "wait" and (group := self._batcher.overdue()) is not None:
            self._give_up(group)
            self._batcher.fill()

    def _give_up(self, group: int) -> None:
        """A running group keeps a batch from closing: let it miss its deadline, one way or another."""
        if self.settings.on_stale == "train":
            self._batcher.extend(group)
            self._ledger.extended += 1
            return
        self._batcher.discard(group)
        self._cancelled.add(group)
        self._actions.append(Cancel(group))
        if self.settings.on_stale == "requeue":
            position = self._groups.pop(group).visit.position
            self._requeued.add(position)
            self._ledger.requeue(position)
        else:
            self._settle(group, "dropped")

    def _admit(self) -> None:
        if self._courier.holds_admission:
            return
        self._difficulty.catch_up(self._serving)
        lag = self._pacing.lag(self._load)
        for _ in range(self._pacing.room(self._load)):
            if (visit := self._next_visit()) is None:
                return
            stamp, recorded = self._stamp(visit.position)
            group, self._next_group = self._next_group, self._next_group + 1
            self._groups[group] = Admitted(visit, stamp)
            self._batcher.admit(group, stamp + lag)
            again = visit.position in self._requeued
            self._actions.append(Admit(group, visit.task, visit.epoch, stamp, visit.position, recorded, again))

    def _stamp(self, position: int) -> tuple[Version, bool]:
        """The oldest version that may serve this visit, and whether an earlier start has recorded answers of it: these
        keep the stamp that they were sampled under, where it leaves the group time enough."""
        newest = self._serving
        stamp = self._recorded.pop(position, None)
        if stamp is None:
            return newest, False
        return (stamp if self._pacing.may_start(self._load, stamp) else newest), True

    def _next_visit(self) -> Visit | None:
        """The next one whose task is not at rest; those passed over are settled. None: the data has ended."""
        while self._ledger.left != 0:
            position, epoch_begins = self._ledger.issue()
            visit = Visit(position, *self.order.task(position))
            if epoch_begins:
                self._actions.append(EpochStarted(visit.epoch))
            if not self._difficulty.skips(visit.task, visit.epoch):
                return visit
            self._book(visit, "skipped")
        return None

    def _feed_learner(self) -> None:
        if self._learner != "idle" or not self._batcher.batch:
            return
        # Only the last batch of a run may lack groups: no task is left, and all that ran are in the batch.
        last = self._ledger.left == 0 and self.outstanding == len(self._batcher.batch)
        complete = not self._batcher.missing or last
        if chunk := self._batcher.next_chunk(complete):
            self._learner = "chunk"
            self._actions.append(TrainChunk(self.version, chunk))
        elif complete:
            self._complete_batch()

    def _complete_batch(self) -> None:
        """The batch's own groups are trained: what is replayed beside them goes next, then the step."""
        if self._replayed is None:
            self._replayed = self._replay.choose()
            if self._replayed:
                self._learner = "chunk"
                self._actions.append(TrainChunk(self.version, self._replayed, replayed=True))
                return
        self._learner = "step"
        self._actions.append(CloseBatch(self.version, tuple(self._batcher.batch), self._replayed))

    def _publish(self) -> None:
        leased = self._courier.leases() | self._evaluations.leases() | self._publishing
        self._publishing.add(self.version)
        self._actions.append(Publish(self.version, tuple(sorted(leased))))

    def _checkpoint(self) -> None:
        """Order a checkpoint, unless the last one ordered says the same.

        In lockstep a stop between two periodic checkpoints can be gone on from exactly only where the last step has
        left a boundary. Otherwise the newest checkpoint stands, and what came after it is done again."""
        state = self._state()
        if self.settings.deterministic and self._stopping and not self._over:
            state = self._boundary
            if state.version != self.version or self.evaluates(self.version - 1):
                return
        else:
            self._actions += self._records.between(self.version, self._ledger.settled)
        if state != self._committed:
            self._committed = state
            self._actions.append(Checkpoint(self.version, msgspec.to_builtins(state, str_keys=True)))

    def _wind_up(self) -> None:
        """Training is over: publish, commit and evaluate what it made. The commit does not wait for the evaluation."""
        published = self._courier.newest == self.version
        if not published and self.version not in self._publishing:
            self._publish()
        self._checkpoint()
        if self.settings.eval_enabled:
            self._evaluations.ask(self.version, published)

    def _leave(self) -> None:
        """Stop as soon as the learner is between two orders; an open batch is abandoned, its tasks stay open."""
        if self._learner == "idle" and not self._publishing:
            self._checkpoint()
            self._finish("stopped")

    def _finish(self, reason: str) -> None:
        self._finished = True
        self._actions.append(Finish(reason))

    # -------------------------------------------------------------------------------------------------- for people

    def waiting_reason(self) -> str:
        """Who waits for whom, in one line."""
        if not self._started:
            return "the parts have not started"
        reasons = [self._learner_state(), *self._admission_state()]
        reasons += [f"the snapshot of version {version} is being taken" for version in sorted(self._publishing)]
        reasons += [f"engine {name} is loading version {load}" for name, load in self._courier.loading.items()]
        if self._evaluations.current is not None:
            reasons.append(f"version {self._evaluations.current} is being evaluated")
        return "; ".join(reasons)

    def _learner_state(self) -> str:
        if self._learner == "chunk":
            return f"learner works on a chunk of batch {self.version}"
        if self._learner == "step":
            return f"learner takes the step of batch {self.version}"
        if self._over:
            return "training is over"
        if due := self._batcher.awaited():
            names = ", ".join(map(str, due[:10])) + (", …" if len(due) > 10 else "")
            return f"learner waits for {_groups(len(due), 'running due ')} {names}"
        return f"learner waits for {_groups(self._batcher.missing, 'more ')} of batch {self.version}"

    def _admission_state(self) -> list[str]:
        if self._over or self._stopping:
            return []
        if self._courier.holds_admission:
            return ["admission waits for the engines to load"]
        limits = self._pacing.limits(self._load)
        rule = min(limits, key=limits.__getitem__)
        return [f"{_groups(self.running)} running, admission is full by {rule}"] if limits[rule] <= 0 else []


def _groups(count: int, which: str = "") -> str:
    return f"{count} {which}group{'' if count == 1 else 's'}"
