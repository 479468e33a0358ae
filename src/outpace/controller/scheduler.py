"""Scheduler: the controller's pure state machine. `handle(event)` returns the actions to take.

No clock, no I/O, no tensors: the driver and the simulator run the same code.

     tasks ──▶ pacing: start a group? ──Admit──▶ workers ──GroupClosed──▶ batcher: which batch trains it?
                  ▲ oldest serving version                                    │ TrainChunk … CloseBatch
                  │                                                           ▼
     weight publisher ──LoadWeights──▶ engines   Publish, Checkpoint, Evaluate ◀── learner: BatchTrained
        ▲                                            │
        └──────────────── Published ◀────────────────┘

Three more state machines adjust pacing and batches: the governor (allowed lag, updated by BatchTrained), the curriculum
(tasks skipped or visited again, updated by GroupClosed) and the replay pool (groups trained again, last chunk of a
batch).

What waits for what
- admission: room (a group is trained or leaves), or an engine loading weights (EngineLoaded);
- the open batch: running groups (GroupClosed);
- the learner: its calls run one at a time, in order (ChunkTrained, BatchTrained). The scheduler does not wait for
  Publish and Checkpoint: the learner runs later calls after them;
- an engine: nothing, except for its running groups when draining or in deterministic mode;
- with `confirm`, a new batch: the callbacks of the step before, of its evaluation and its checkpoint (Confirmed);
- an evaluation: its version to be published and the running evaluation to finish (EvaluationDone);
- the end of the run: the learner, publications and evaluations. A requested stop does not wait for evaluations.

Every event re-evaluates everything in a fixed order, so no wakeup can be missed.
"""

from __future__ import annotations

import msgspec

from outpace.controller import events as ev
from outpace.controller.batcher import Batcher, LearnerCalls, ReplayPool
from outpace.controller.curriculum import Curriculum, RerollQueue
from outpace.controller.ledger import FinalOutcome, Ledger, OutcomeRecords
from outpace.controller.pacing import Governor, Pacing, PipelineLoad, SchedulerSettings, StepGate, TaskDemand
from outpace.controller.recovery import NO_RECOVERED_WORK, RecoveredWork, SchedulerState, group_closed_event
from outpace.controller.weight_publisher import EvaluationQueue, WeightPublisher
from outpace.errors import plural
from outpace.tasks.order import REPEATED_DRAWS, TaskOrder, reroll_number
from outpace.types import FinishedGroup, GroupOrder, Version

MAX_QUEUED_EVALUATIONS = 2
"""Deterministic mode stops loading weights when more evaluations wait than this: each leases a snapshot."""


class Scheduler:
    """Turns each event into actions. `state` and `recovered` restore an earlier start of the run: visits that were in
    flight are issued again first, in order, unless their groups were recovered."""

    def __init__(
        self,
        settings: SchedulerSettings,
        order: TaskOrder,
        state: SchedulerState | None = None,
        recovered: RecoveredWork = NO_RECOVERED_WORK,
        evaluated: Version = -1,
    ) -> None:
        """`evaluated` is the newest version whose evaluation result is known, -1 if none."""
        self.settings = settings
        self.order = order
        self._last_checkpoint = state  # the state of the newest checkpoint ordered
        state = state or SchedulerState(order.count, order.seed, order.shuffle)
        state.check(order)
        assert settings.tasks == order.count
        self.version: Version = state.version
        self._next_group = max([state.next_group, *(kept.order.group + 1 for kept in recovered.finished)])
        self._groups: dict[int, GroupOrder] = {}  # outstanding
        self._cancelled: set[int] = set()
        self._requeued: set[int] = set()  # positions of prompt visits
        self._pacing = Pacing(settings)
        self._batcher = Batcher(
            settings.groups_per_step, settings.chunk_groups, in_order=settings.deterministic, version=state.version
        )
        finished = {kept.order.position for kept in recovered.finished}
        self.rerolls = RerollQueue(settings.reroll, settings.deterministic, state.ledger.rerolls)
        self._ledger = Ledger(order.count, settings.epochs, state.ledger, finished, settings.streamed, self.rerolls)
        self._recorded_versions = dict(recovered.recorded or {})
        self._governor = Governor(settings.governor, settings.max_lag, state.governor)
        self._difficulty = Curriculum(settings.difficulty, order.count, settings.deterministic, state.difficulty)
        pool = {kept.order.group: state.replay[kept.order.group] for kept in recovered.pooled}
        self.replay = ReplayPool(settings.replay, settings.groups_per_step, pool)
        self._batcher.allow_filled(self.replay.fillable)
        self._publisher = WeightPublisher("lockstep" if settings.deterministic else settings.update)
        self._evaluations = EvaluationQueue(settings.deterministic, evaluated)
        self._evaluated = evaluated
        self._announced = state.version  # newest version that every serving engine has reached
        self._learner = LearnerCalls(self._batcher, self.replay)
        self._publishing: set[Version] = set()
        self._gate = StepGate(settings.confirm)
        self._started = self._stopping = self._finished = False
        self._records = OutcomeRecords(settings.deterministic, self._ledger.finalized)
        self._actions: list[ev.Action] = []
        for kept in recovered.finished:
            self._restore_group(kept)
        self._exact_state = self._state()  # deterministic mode: newest state that resumes exactly

    def _restore_group(self, kept: FinishedGroup) -> None:
        """Restore a group that an earlier start finished. Its deadline still follows from its `min_version`."""
        order, closed = kept.order, group_closed_event(kept.report)
        self._groups[order.group] = order
        self.replay.group_finished(order.group, closed.reward_std)
        self._batcher.adopt(order.group, order.min_version + self._pacing.lag(self._load))
        self._difficulty.record(order.group, order.task, order.epoch, closed.reward)
        self.rerolls.group_closed(order, closed)

    # -------------------------------------------------------------------------------------------------------- state

    def _state(self) -> SchedulerState:
        return SchedulerState(
            tasks=self.order.count,
            seed=self.order.seed,
            shuffle=self.order.shuffle,
            version=self.version,
            next_group=self._next_group,
            ledger=self._ledger.state(),
            governor=self._governor.state(),
            difficulty=self._difficulty.state(),
            replay=self.replay.state(),
        )

    @property
    def running(self) -> int:
        """Number of groups being rolled out."""
        return self._batcher.running

    @property
    def finished(self) -> int:
        """Number of groups finished and not yet trained."""
        return self._batcher.finished

    @property
    def outstanding(self) -> int:
        return self._batcher.outstanding

    @property
    def counts(self) -> dict[str, int]:
        """Totals over the whole run: visits by final outcome, visits requeued, deadlines extended."""
        return self._ledger.counts()

    @property
    def max_lag(self) -> int:
        """The lag the governor allows now."""
        return self._governor.lag

    @property
    def resting(self) -> int:
        """Number of tasks that the curriculum skips for now."""
        return self._difficulty.resting

    def has_pending_evaluation(self, version: Version) -> bool:
        """Return whether an evaluation of this or an older version is pending or running."""
        return self._evaluations.is_pending(version)

    @property
    def _training_done(self) -> bool:
        """Whether all steps are done, or all tasks are used up and no group is outstanding."""
        return self.settings.is_last(self.version) or (self._ledger.exhausted and not self.running + self.finished)

    @property
    def demand(self) -> TaskDemand:
        starved = (
            self._started and self._ledger.left == 0 and not self.running and self._learner.idle and not self._held
        )
        on_policy = not self._publishing and self._publisher.all_newest
        needed = self._pacing.needs_tasks(self._load)
        return TaskDemand(self._ledger.cursor, self._ledger.oldest_open, starved, on_policy, needed)

    @property
    def _oldest_serving(self) -> Version:
        """Oldest version that may sample new groups. Ignores a lagging engine whose version is too old to be trained in
        time, so that it does not hold up the others."""
        if self.settings.deterministic:
            return self._publisher.oldest
        return self._publisher.oldest_from(self.version - self._pacing.lag_at(self.version, self._governor.lag))

    @property
    def _load(self) -> PipelineLoad:
        return PipelineLoad(
            version=self.version,
            oldest=self._oldest_serving,
            running=self.running,
            outstanding=self.outstanding,
            tasks_left=self._ledger.left,
            lag=self._governor.lag,
        )

    # ------------------------------------------------------------------------------------------------------- events

    def handle(self, event: ev.Event) -> list[ev.Action]:
        """Apply an event and return the actions it leads to, in the order to carry them out."""
        if self._finished:
            return []
        self._apply(event)
        self._announce_policy()
        if self._stopping:
            self._stop()
        elif self._started:
            self._advance()
        actions, self._actions = self._actions, []
        return actions

    def _apply(self, event: ev.Event) -> None:
        match event:
            case ev.RunStarted(engines):
                self._start(engines)
            case ev.GroupClosed():
                self._group_closed(event)
            case ev.ChunkTrained():
                self._learner.done("chunk")
            case ev.BatchTrained():
                self._batch_trained(event)
            case ev.Published(version):
                self._publishing.remove(version)
                self._publisher.published(version)
                self._evaluations.published(version)
            case ev.EvaluationDone(version):
                self._evaluations.done(version)
            case ev.TasksAdded(total, ended):
                self._ledger.extend(total, ended)
            case ev.Confirmed(kind, version):
                self._gate.confirm(kind, version)
            case ev.Requested(kind):
                self._gate.requests.add(kind)
            case ev.StopRequested():
                self._stopping = True
            case _:
                self._publisher.handle(event)

    def _announce_policy(self) -> None:
        served = self._publisher.served_by_all
        if served is not None and served > self._announced:
            self._announced = served
            self._gate.wait_for("policy", served)
            self._actions.append(ev.PolicyUpdated(served))

    def _start(self, engines: dict[str, Version]) -> None:
        assert not self._started
        self._started = True
        self._publisher.start(engines, self.version)
        self._actions.extend(ev.EpochStarted(epoch) for epoch in self._ledger.new_epochs)
        self._publish()
        if self.settings.newest_evaluated(self.version) > self._evaluated:
            self._evaluations.request(self.version, published=False)

    def _group_closed(self, event: ev.GroupClosed) -> None:
        if event.group in self._cancelled:
            self._cancelled.remove(event.group)
            return
        group = self._groups[event.group]
        self._difficulty.record(event.group, group.task, group.epoch, event.reward)
        self.rerolls.group_closed(group, event)
        if event.outcome == "finished":
            assert event.supplied or event.oldest >= group.min_version, f"group {event.group} has older tokens"
            self.replay.group_finished(event.group, event.reward_std)
            self._batcher.finish(event.group)
            self._ledger.finish(group.position)
            return
        if event.outcome == "filtered" and self.replay.fills:
            self._batcher.vacate(event.group)
        else:
            self._batcher.discard(event.group)
        self._finalize_group(event.group, event.outcome)

    def _batch_trained(self, event: ev.BatchTrained) -> None:
        version = event.version
        assert version == self.version + 1
        self._learner.done("step")
        last_group, trained = self._batcher.last_group, self._batcher.close()
        if version > self.settings.warmup_steps and (  # warmup batches have no lag to learn from
            by := self._governor.record(event.ess, event.kl, min(trained), self._next_group)
        ):
            self._actions.append(ev.LagChanged(self._governor.lag, by))
        self._difficulty.batch_trained(version, last_group)
        self.rerolls.batch_trained(version, last_group)
        if gone := self.replay.batch_trained(version - 1, trained):
            self._actions.append(ev.Retire(gone))
        self._batcher.allow_filled(self.replay.fillable)
        for group in trained:
            self._finalize_group(group, "trained")
        self.version = version
        self._actions += self._records.step(version, last_group, self._ledger.finalized)
        self._gate.wait_for("step", version)
        if not self.outstanding and self.settings.is_boundary(version) and self._records.complete:
            self._exact_state = self._state()
        if self._stopping:
            return
        if self.settings.is_published(version, self._governor.lag):
            self._publish()
        if self.settings.is_evaluated(version):
            self._evaluations.request(version, published=False)
        if self.settings.is_checkpointed(version):
            self._checkpoint()

    def _finalize_group(self, group: int, outcome: FinalOutcome) -> None:
        order = self._groups.pop(group)
        self._finalize_visit(order.position, order.epoch, order.task, outcome, group)

    def _finalize_visit(
        self, position: int, epoch: int, task: int, outcome: FinalOutcome, group: int | None = None
    ) -> None:
        self._requeued.discard(position)
        ended = self._ledger.finalize(position, outcome)
        if outcome != "trained":
            finalize = ev.Finalize(task, epoch, outcome, group, reroll_number(position))
            self._actions += self._records.finalize(finalize, self._next_group)
        if ended:
            self._actions.append(ev.EpochEnded(epoch))

    # ------------------------------------------------------------------------------------------------------ actions

    def _advance(self) -> None:
        self._fill_batch()
        self._carry_out_requests()
        self._admit()
        self._feed_learner()
        if self._training_done and not self._gate.closed:
            self._finish_training()
        awaited = self._publisher.stale or not self.settings.eval_pinned
        if not self._training_done or (awaited and not self._evaluations.idle):
            # In deterministic mode no evaluation is skipped, so stop loading before their snapshots fill the memory. A
            # group that replaces a filtered one must have the same min_version however fast the learner is.
            held = self._batcher.undecided or self._evaluations.waiting > MAX_QUEUED_EVALUATIONS
            loads = self._publisher.next_loads(busy=self.running > 0 or (self.settings.deterministic and held))
            self._actions.extend(ev.LoadWeights(engine, version) for engine, version in loads)
        if (version := self._evaluations.next()) is not None:
            self._actions.append(ev.Evaluate(version))
        busy = not self._learner.idle or self._publishing or self._gate.closed or not self._evaluations.idle
        if self._training_done and not busy:
            self._finish("done")

    def _carry_out_requests(self) -> None:
        """Order the checkpoint and the evaluation that were requested, once the learner is between two steps."""
        if not self._learner.idle or self._batcher.started:
            return
        if self._gate.take("evaluation") and self.settings.eval_enabled:
            self._evaluations.request(self.version, published=self._publish_newest())
        if self._can_checkpoint and self._gate.take("checkpoint"):
            self._checkpoint(exact=True)

    def _fill_batch(self) -> None:
        self._batcher.fill()
        while self.settings.on_stale != "wait" and (group := self._batcher.overdue()) is not None:
            self._handle_overdue(group)
            self._batcher.fill()

    def _handle_overdue(self, group: int) -> None:
        """Apply `on_stale` to a running group that keeps a batch from closing."""
        if self.settings.on_stale == "train":
            self._batcher.extend(group)
            self._ledger.extended += 1
            return
        self._batcher.discard(group)
        self._cancelled.add(group)
        self._actions.append(ev.Cancel(group))
        if self.settings.on_stale == "requeue":
            position = self._groups.pop(group).position
            self._requeued.add(position)
            self._ledger.requeue(position)
        else:
            self._finalize_group(group, "dropped")

    def _admit(self) -> None:
        if self._publisher.blocks_admission or not self._gate.admits:
            return
        self._difficulty.catch_up(self._oldest_serving)
        self.rerolls.catch_up(self._oldest_serving)
        lag = self._pacing.lag(self._load)
        for _ in range(self._pacing.room(self._load)):
            if (visit := self._next_visit()) is None:
                return
            position, epoch, task = visit
            min_version, recorded = self._min_version(position)
            group, self._next_group = self._next_group, self._next_group + 1
            self._groups[group] = ev.Admit(
                group,
                task,
                epoch,
                min_version,
                self.settings.group_size,
                position=position,
                recorded=recorded,
                version=min_version if self.settings.deterministic else self.version,  # not timing
                # Seeded by the visit: rerunning it after a kill samples the same completions, so that kills do not
                # favor short ones. A visit that was cancelled for being slow gets a fresh draw.
                draw=REPEATED_DRAWS + group if position in self._requeued else position,
            )
            self._batcher.admit(group, min_version + lag)
            self._actions.append(self._groups[group])

    def _min_version(self, position: int) -> tuple[Version, bool]:
        """Return the minimum version for this visit, and whether an earlier start recorded completions for it. In that
        case the visit keeps their minimum version if there is time to train it."""
        newest = self._oldest_serving
        min_version = self._recorded_versions.pop(position, None)
        if min_version is None:
            return newest, False
        return (min_version if self._pacing.can_admit(self._load, min_version) else newest), True

    def _next_visit(self) -> tuple[int, int, int] | None:
        """Return position, epoch and task of the next visit to run; finalize skipped ones on the way. None when no task
        is left."""
        while self._ledger.left != 0:
            position, epoch_begins = self._ledger.issue()
            epoch, task = self.order.task(position)
            if epoch_begins:
                self._actions.append(ev.EpochStarted(epoch))
            if not self._difficulty.should_skip(task, epoch):
                return position, epoch, task
            self._finalize_visit(position, epoch, task, "skipped")
        return None

    def _feed_learner(self) -> None:
        if self._held and not self._batcher.started:
            return
        # Only the last batch of a run may be short: no task is left and every outstanding group is in the batch.
        last = self._ledger.exhausted and self.running + self.finished == len(self._batcher.batch)
        self._actions += self._learner.next(complete=not self._batcher.missing or last)

    def _publish_newest(self) -> bool:
        """Return whether the newest version is published; if not, order its publication."""
        published = self._publisher.newest == self.version
        if not published and self.version not in self._publishing:
            self._publish()
        return published

    def _publish(self) -> None:
        leased = self._publisher.leases() | self._evaluations.leases() | self._publishing
        self._publishing.add(self.version)
        self._actions.append(ev.Publish(self.version, tuple(sorted(leased))))

    @property
    def _held(self) -> bool:
        """Whether the next batch waits for callbacks."""
        return self._gate.closed or (self.settings.confirm and not self._evaluations.idle)

    @property
    def _can_checkpoint(self) -> bool:
        """Whether a checkpoint between two periodic ones can be made now. In deterministic mode a resume from it must
        be exact: the last step left nothing outstanding, and all earlier evaluations are done."""
        exact = self._exact_state.version == self.version and not self.has_pending_evaluation(self.version - 1)
        return exact or not self.settings.deterministic

    def _checkpoint(self, exact: bool = False) -> None:
        """Order a checkpoint, unless the newest one ordered has the same state. `exact`: for a stop, or a request (at
        most once per version); in deterministic mode, it has the state that the last step left."""
        state = self._exact_state if exact and self.settings.deterministic else self._state()
        if exact and not self._stopping and self._last_checkpoint and self._last_checkpoint.version == self.version:
            return
        if not exact or not self.settings.deterministic:
            self._actions += self._records.between(self.version, self._ledger.finalized)
        if state != self._last_checkpoint:
            self._last_checkpoint = state
            self._gate.wait_for("checkpoint", self.version)
            self._actions.append(ev.Checkpoint(self.version, msgspec.to_builtins(state, str_keys=True)))

    def _finish_training(self) -> None:
        """Publish, checkpoint and evaluate the final version. The checkpoint does not wait for the evaluation."""
        published = self._publish_newest()
        self._checkpoint()
        if self.settings.eval_enabled and self.settings.eval_end:
            self._evaluations.request(self.version, published)

    def _stop(self) -> None:
        """Stop once the learner is idle. The open batch is abandoned; its visits stay open for a resume."""
        if self._learner.idle and not self._publishing:
            if self._training_done or self._can_checkpoint:
                self._checkpoint(exact=not self._training_done)
            self._finish("stopped")

    def _finish(self, reason: str) -> None:
        self._finished = True
        self._actions.append(ev.Finish(reason))

    # -------------------------------------------------------------------------------------------------- diagnostics

    def waiting_reason(self) -> str:
        """Return one line saying what the run waits for."""
        if not self._started:
            return "the components have not started"
        waits = "training is over" if self._training_done else f"learner waits for {self._batcher.waiting_for()}"
        learner = f"learner is {self._learner.current} {self.version}" if self._learner.current else waits
        reasons = [learner, *self._admission_state()]
        reasons += [f"learner is publishing version {version}" for version in sorted(self._publishing)]
        reasons += [f"callbacks of {name} have not returned" for name in self._gate.waiting_for()]
        reasons += [f"engine {name} is loading version {load}" for name, load in self._publisher.loading.items()]
        if self._evaluations.current is not None:
            reasons.append(f"version {self._evaluations.current} is being evaluated")
        return "; ".join(reasons)

    def _admission_state(self) -> list[str]:
        if self._training_done or self._stopping:
            return []
        if self._publisher.blocks_admission:
            return ["admission waits for the engines to load weights"]
        rule = self._pacing.limited_by(self._load)
        if rule == "epochs" and not self._ledger.exhausted:
            rule = "the stream of tasks"
        return [f"{plural(self.running, 'group')} running, admission is limited by {rule}"] if rule else []
