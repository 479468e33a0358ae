"""The rules of the scheduler one by one, as short scripts of events."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from controller.scripted import SMALL, Script, groups, started
from controller.simulated import PLAIN, Simulation, make_scheduler, steady
from outpace.controller.events import (
    Action,
    Admit,
    BatchTrained,
    Cancel,
    Checkpoint,
    ChunkTrained,
    CloseBatch,
    EngineLoaded,
    EpochEnded,
    EpochStarted,
    Evaluate,
    EvaluationDone,
    Finish,
    GroupClosed,
    LoadWeights,
    PolicyUpdated,
    Publish,
    Published,
    RunStarted,
    StopRequested,
    TrainChunk,
    WriteRecord,
)
from outpace.controller.pacing import SchedulerSettings
from outpace.tasks.order import TaskOrder
from outpace.types import Outcome


def one_clause_names(reason: str, *keys: str) -> bool:
    return any(all(key in clause for key in keys) for clause in reason.split("; "))


# -------------------------------------------------------------------------------------------------- start and admission


def test_a_run_starts_by_publishing_version_0_and_filling_the_pipeline() -> None:
    script = Script(SMALL)
    actions = script.send(RunStarted({"e0": 0}))
    assert actions[:2] == [Publish(0), EpochStarted(0)]
    assert groups(script.of(Admit)) == [0, 1, 2, 3]
    assert {admit.min_version for admit in script.of(Admit)} == {0}


def test_tasks_are_admitted_in_the_seeded_order() -> None:
    script = Script(SMALL)
    script.send(RunStarted({"e0": 0}))
    order = TaskOrder(SMALL.tasks, 0, shuffle=True)
    assert [(admit.epoch, admit.task) for admit in script.of(Admit)] == [order.task(position) for position in range(4)]


def test_min_version_is_the_oldest_version_among_the_engines() -> None:
    script = Script(replace(SMALL, max_lag=3, depth=5.0, max_running=8))
    script.send(RunStarted({"e0": 0, "e1": 0}), Published(0))
    script.train(0, 1)
    script.send(Published(1))
    assert script.of(LoadWeights) == [LoadWeights("e0", 1), LoadWeights("e1", 1)]
    script.send(EngineLoaded("e0", 1), GroupClosed(2, "filtered"))
    assert [admit.min_version for admit in script.of(Admit)] == [0]
    script.send(EngineLoaded("e1", 1), GroupClosed(3, "filtered"))
    assert [admit.min_version for admit in script.of(Admit)] == [1]


@pytest.mark.parametrize("outcome", ["filtered", "failed"])
def test_a_filtered_or_failed_group_is_replaced_at_once(outcome: Outcome) -> None:
    script = started(SMALL)
    script.close(1, outcome=outcome)
    assert groups(script.of(Admit)) == [4]
    assert script.scheduler.counts[outcome] == 1
    assert script.scheduler.outstanding == 4


def test_a_group_with_tokens_older_than_its_min_version_fails_an_assertion() -> None:
    script = started(replace(SMALL, max_lag=0))
    script.train(0, 1)
    script.send(Published(1), EngineLoaded("e0", 1))
    with pytest.raises(AssertionError, match=r"group 2\b"):
        script.send(GroupClosed(2, "finished", oldest=0))


def test_a_group_whose_attempts_came_with_its_task_may_have_older_tokens_and_keeps_its_deadline() -> None:
    script = started(replace(SMALL, max_lag=0))
    script.train(0, 1)
    script.send(Published(1), EngineLoaded("e0", 1))
    script.send(GroupClosed(2, "finished", oldest=0, supplied=True))
    assert script.close(3) == [TrainChunk(1, (2, 3))]


def test_with_zero_lag_nothing_is_admitted_until_the_engines_have_the_newest_weights() -> None:
    script = started(replace(SMALL, max_lag=0))
    script.train(0, 1)
    assert not script.of(Admit)
    assert script.send(Published(1)) == [LoadWeights("e0", 1)]
    assert script.send(EngineLoaded("e0", 1)) == [
        PolicyUpdated(1),
        *(
            Admit(number, script.scheduler.order.task(number)[1], 0, 1, size=2, position=number, draw=number, version=1)
            for number in (2, 3)
        ),
    ]


# ---------------------------------------------------------------------------------------------------------- the learner


def test_the_learner_gets_one_chunk_at_a_time_and_then_the_step() -> None:
    script = started(replace(SMALL, groups_per_step=4))
    assert script.close(2) == []
    assert script.close(0) == [TrainChunk(0, (2, 0))]
    assert script.close(1, 3) == []
    assert script.send(ChunkTrained(0)) == [TrainChunk(0, (1, 3))]
    assert script.send(ChunkTrained(0)) == [CloseBatch(0, (2, 0, 1, 3))]
    script.send(BatchTrained(1))
    assert script.scheduler.version == 1
    assert script.scheduler.counts["trained"] == 4


def test_a_new_version_is_published_before_the_learner_gets_more_work() -> None:
    script = started(SMALL)
    script.close(2, 0, 1)
    script.send(ChunkTrained(0))
    script.close(3)
    actions = script.send(BatchTrained(1))
    assert actions.index(Publish(1, leased=(0,))) < actions.index(TrainChunk(1, (1, 3)))


def test_the_learner_does_not_wait_for_the_publication() -> None:
    script = started(SMALL)
    script.train(0, 1)
    assert script.close(2, 3) == [TrainChunk(1, (2, 3))]


def test_the_last_batch_is_partial_when_the_tasks_run_out() -> None:
    script = started(replace(SMALL, steps=None, epochs=1, tasks=3))
    script.train(0, 1)
    script.send(Published(1))
    assert script.close(2) == [TrainChunk(1, (2,))]
    assert script.send(ChunkTrained(1)) == [CloseBatch(1, (2,))]
    script.send(BatchTrained(2))
    assert script.of(EpochEnded) == [EpochEnded(0)]
    assert script.of(Publish)
    script.send(Published(2))
    assert script.of(Finish) == [Finish("done")]


def test_a_chunk_already_trained_becomes_the_last_batch_when_the_other_groups_are_filtered() -> None:
    script = started(replace(SMALL, groups_per_step=3, steps=None, epochs=1, tasks=3))
    assert script.close(0, 1) == [TrainChunk(0, (0, 1))]
    assert script.send(ChunkTrained(0)) == []
    script.close(2, outcome="filtered")
    assert script.of(CloseBatch) == [CloseBatch(0, (0, 1))]


def test_a_run_whose_groups_are_all_filtered_takes_no_step_and_ends() -> None:
    script = started(replace(SMALL, steps=None, epochs=2, tasks=3, eval_enabled=True))
    script.send(EvaluationDone(0))
    script.close(0, 1, 2, 3, 4, 5, outcome="filtered")
    assert script.of(EpochEnded) == [EpochEnded(0), EpochEnded(1)]
    assert [type(action) for action in script.actions[-2:]] == [Checkpoint, Finish]
    assert script.scheduler.version == 0
    assert script.scheduler.counts["filtered"] == 6


def test_a_run_limited_by_steps_continues_past_filtered_groups_within_its_bound() -> None:
    script = started(SMALL)
    for group in range(1000):
        script.close(group, outcome="filtered")
        assert script.scheduler.outstanding == 4
    assert script.scheduler.counts["filtered"] == 1000


# ------------------------------------------------------------------------------ publication, evaluation and checkpoints


def test_every_kth_version_and_the_last_are_published() -> None:
    trace = Simulation(make_scheduler(replace(PLAIN, publish_every=2, steps=5)), steady()).run()
    assert [action.version for action in trace.of(Publish)] == [0, 2, 4, 5]


def test_an_evaluation_starts_when_its_version_is_published() -> None:
    script = Script(replace(SMALL, eval_enabled=True, eval_every=1))
    script.send(RunStarted({"e0": 0}))
    assert not script.of(Evaluate)
    script.send(Published(0))
    assert script.of(Evaluate) == [Evaluate(0)]


def test_a_newer_evaluation_replaces_the_waiting_one() -> None:
    script = started(replace(SMALL, eval_enabled=True, eval_every=1))
    for version in (1, 2):
        script.train(2 * version - 2, 2 * version - 1)
        script.send(Published(version), EngineLoaded("e0", version))
        assert not script.of(Evaluate)
    script.send(EvaluationDone(0))
    assert script.of(Evaluate) == [Evaluate(2)]
    script.send(EvaluationDone(2))
    assert not script.of(Evaluate)


def test_snapshots_being_loaded_or_evaluated_are_leased() -> None:
    script = started(replace(SMALL, eval_enabled=True))
    script.train(0, 1)
    assert script.of(Publish) == [Publish(1, leased=(0,))]
    script.send(Published(1))
    script.train(2, 3)
    assert script.of(Publish) == [Publish(2, leased=(0, 1))], "0 is being evaluated, 1 is being loaded"
    script.send(Published(2), EvaluationDone(0))
    script.send(EngineLoaded("e0", 1))
    assert script.of(LoadWeights) == [LoadWeights("e0", 2)]
    script.send(EngineLoaded("e0", 2))
    script.train(4, 5)
    assert script.of(Publish) == [Publish(3, leased=(2,))]


def test_an_unconfirmed_publication_is_leased() -> None:
    script = started(replace(SMALL, depth=2.0))
    script.train(0, 1)
    script.train(2, 3)
    assert script.of(Publish) == [Publish(2, leased=(0, 1))]


def test_the_end_of_the_run_waits_for_the_last_evaluation_but_the_checkpoint_does_not() -> None:
    script = started(replace(SMALL, steps=1, eval_enabled=True))
    script.send(EvaluationDone(0))
    script.train(0, 1)
    assert [type(action) for action in script.actions] == [WriteRecord, Publish, Checkpoint]
    assert script.send(Published(1)) == [Evaluate(1)]
    assert script.send(EvaluationDone(1)) == [Finish("done")]
    assert script.send(StopRequested()) == []


def test_the_last_version_is_published_and_evaluated_even_if_the_last_group_is_filtered() -> None:
    script = started(replace(SMALL, steps=None, epochs=1, tasks=3, publish_every=2, eval_enabled=True))
    script.send(EvaluationDone(0))
    script.train(0, 1)
    assert not script.of(Publish)
    script.close(2, outcome="filtered")
    assert script.of(Publish) == [Publish(1, leased=(0,))]
    assert script.send(Published(1)) == [Evaluate(1)]
    assert script.send(EvaluationDone(1)) == [Finish("done")]


def test_a_checkpoint_that_would_repeat_the_newest_one_is_not_written() -> None:
    script = started(replace(SMALL, steps=1, checkpoint_every=1))
    script.train(0, 1)
    assert len(script.of(Checkpoint)) == 1
    assert script.send(Published(1)) == [Finish("done")]


def test_a_checkpoint_is_json_and_keeps_open_groups_open() -> None:
    script = started(replace(SMALL, checkpoint_every=1))
    script.close(2)
    script.close(0)
    script.send(ChunkTrained(0), BatchTrained(1))
    (checkpoint,) = script.of(Checkpoint)
    assert json.loads(json.dumps(checkpoint.state)) == checkpoint.state
    ledger = checkpoint.state["ledger"]
    assert isinstance(ledger, dict)
    assert (ledger["cursor"], ledger["running"], ledger["finished"]) == (4, [1, 3], [])
    assert checkpoint.state["version"] == checkpoint.version == 1


# ----------------------------------------------------------------------------------------------- stragglers and weights


def straggling(settings: SchedulerSettings) -> Script:
    """Batch 1 is open and group 3 has finished. Group 2, admitted at version 0, is due in it and still running."""
    script = started(replace(settings, max_lag=1, depth=9.0))
    script.train(0, 1)
    script.send(Published(1), EngineLoaded("e0", 1))
    script.close(3)
    return script


def test_with_on_stale_wait_the_batch_waits_for_a_due_straggler() -> None:
    script = straggling(SMALL)
    assert script.close(4, 5) == []
    assert one_clause_names(script.scheduler.waiting_reason(), "learner", "group 2")
    assert script.close(2) == [TrainChunk(1, (3, 2))]


def test_with_on_stale_drop_a_due_straggler_is_cancelled_once_other_groups_can_fill_the_batch() -> None:
    script = straggling(replace(SMALL, on_stale="drop"))
    actions = script.close(4)
    assert actions[0] == Cancel(2)
    assert script.of(TrainChunk) == [TrainChunk(1, (3, 4))]
    assert len(script.of(Admit)) == 1
    assert script.scheduler.counts["dropped"] == 1
    assert script.close(2) == [], "its late report is ignored"


def test_with_on_stale_requeue_a_due_straggler_is_admitted_again_with_a_new_number_and_min_version() -> None:
    script = straggling(replace(SMALL, on_stale="requeue"))
    script.close(4)
    (admit,) = script.of(Admit)
    assert (admit.group, admit.task, admit.min_version) == (6, script.scheduler.order.task(2)[1], 1)
    assert script.scheduler.counts["requeued"] == 1
    assert script.scheduler.counts["dropped"] == 0


def test_with_on_stale_train_a_due_straggler_is_trained_after_its_deadline() -> None:
    script = straggling(replace(SMALL, on_stale="train"))
    assert script.close(4) == [TrainChunk(1, (3, 4))]
    assert script.scheduler.counts["extended"] == 1
    script.send(ChunkTrained(1), BatchTrained(2))
    script.send(GroupClosed(2, "finished", oldest=0), GroupClosed(5, "finished", oldest=1))
    assert script.of(TrainChunk) == [TrainChunk(2, (2, 5))]


def test_draining_blocks_admission_until_running_groups_have_finished_and_the_weights_are_loaded() -> None:
    script = started(replace(SMALL, update="drain", max_lag=3, depth=9.0, max_running=14))
    script.train(0, 1)
    assert script.send(Published(1)) == []
    assert not any(isinstance(action, Admit) for action in script.close(2, 3, 4, 5))
    script.close(6)
    assert not script.of(LoadWeights)
    script.close(7)
    assert script.of(LoadWeights) == [LoadWeights("e0", 1)]
    assert not script.of(Admit)
    script.send(EngineLoaded("e0", 1))
    assert {admit.min_version for admit in script.of(Admit)} == {1}


def test_an_engine_skips_versions_published_while_it_was_loading() -> None:
    script = started(replace(SMALL, max_lag=3, depth=3.0))
    for version in (1, 2, 3):
        script.train(2 * version - 2, 2 * version - 1)
        script.send(Published(version))
        assert script.of(LoadWeights) == ([LoadWeights("e0", 1)] if version == 1 else [])
    script.send(EngineLoaded("e0", 1))
    assert script.of(LoadWeights) == [LoadWeights("e0", 3)]


def test_in_deterministic_mode_a_straggler_does_not_make_the_engine_skip_a_version() -> None:
    settings = replace(PLAIN, deterministic=True, max_lag=3, groups_per_step=2, steps=8)
    trace = Simulation(
        make_scheduler(settings), lambda kind, action: 50.0 if getattr(action, "group", 0) % 5 == 4 else 0.01
    ).run()
    min_versions = [admit.min_version for admit in trace.admitted.values()]
    assert min_versions == [0] * 8 + [1, 1, 2, 2, 3, 3, 4, 4]
    assert [batch.groups for batch in trace.batches] == [(2 * v, 2 * v + 1) for v in range(8)]


# -------------------------------------------------------------------------------------------- speed and waiting reasons


def test_with_a_slow_learner_outstanding_groups_and_lag_stay_bounded() -> None:
    trace = Simulation(
        make_scheduler(replace(PLAIN, max_lag=4, steps=10)), steady(chunk=50.0, step=50.0, group=1.0)
    ).run()
    assert trace.most_outstanding == 8
    assert max(lag for _, lag in trace.lags) <= 2, "groups waiting for the learner are bounded by depth, not by the lag"


def test_with_slow_generation_the_waiting_reason_names_the_learner_and_the_missing_groups() -> None:
    script = started(PLAIN)
    script.close(0)
    reason = script.scheduler.waiting_reason()
    assert one_clause_names(reason, "learner", "3", "batch 0")
    assert one_clause_names(reason, "7", "max_lag")


def test_overlapping_generation_and_training_nearly_halves_the_time() -> None:
    def pace(kind: str, action: Action) -> float:
        if isinstance(action, TrainChunk):
            return 2.5 * len(action.groups)
        return 10.0 if isinstance(action, Admit) else 0.0

    overlapped = Simulation(make_scheduler(replace(PLAIN, max_lag=1, steps=20)), pace).run()
    sequential = Simulation(make_scheduler(replace(PLAIN, max_lag=0, steps=20)), pace).run()
    assert sequential.seconds == 20 * (10 + 10)
    assert overlapped.seconds < 0.55 * sequential.seconds


def test_the_waiting_reason_names_every_busy_component() -> None:
    script = Script(replace(SMALL, eval_enabled=True))
    assert "start" in script.scheduler.waiting_reason()
    script.send(RunStarted({"e0": 0}))
    assert "version 0" in script.scheduler.waiting_reason()
    script.send(Published(0))
    script.train(0, 1)
    script.send(Published(1))
    script.close(2, 3)
    reason = script.scheduler.waiting_reason()
    assert one_clause_names(reason, "learner", "chunk", "batch 1")
    assert one_clause_names(reason, "e0", "load", "version 1")
    assert one_clause_names(reason, "version 0", "evaluat")
    script.send(ChunkTrained(1))
    assert one_clause_names(script.scheduler.waiting_reason(), "learner", "step", "batch 1")
