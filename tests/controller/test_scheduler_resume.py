"""Stopping a run and resuming it from its checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.scripted import SMALL, Script, started
from controller.simulated import Simulation, make_scheduler, resume, steady
from outpace.controller.events import (
    Admit,
    BatchTrained,
    Checkpoint,
    ChunkTrained,
    EngineJoined,
    EngineLoaded,
    EngineLost,
    Evaluate,
    EvaluationDone,
    Finish,
    LoadWeights,
    Publish,
    Published,
    RunStarted,
    StopRequested,
    WriteRecord,
)
from outpace.controller.pacing import SchedulerSettings
from outpace.errors import BadInput
from support import naming

# ------------------------------------------------------------------------------------------------------------- stopping


def test_a_stop_abandons_the_open_batch_and_keeps_its_tasks_open() -> None:
    script = started(replace(SMALL, chunk_groups=1))
    script.close(0)
    assert script.send(StopRequested()) == [], "the stop waits for the current chunk"
    checkpoint, finish = script.send(ChunkTrained(0))
    assert finish == Finish("stopped")
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.version == 0
    ledger = checkpoint.state["ledger"]
    assert isinstance(ledger, dict)
    assert (ledger["running"], ledger["finished"]) == ([1, 2, 3], [0])


def test_a_stop_lets_the_current_step_complete_and_publishes_nothing_more() -> None:
    script = started(replace(SMALL, checkpoint_every=1))
    script.close(0, 1)
    script.send(ChunkTrained(0))
    assert script.send(StopRequested()) == []
    assert not any(isinstance(action, Admit) for action in script.close(2, outcome="filtered"))
    record, checkpoint, finish = script.send(BatchTrained(1))
    assert record == WriteRecord(1, finalized=3, trained=True)
    assert isinstance(checkpoint, Checkpoint)
    assert (checkpoint.version, finish) == (1, Finish("stopped"))


def test_a_stop_waits_for_a_snapshot_but_not_for_an_evaluation() -> None:
    script = Script(replace(SMALL, eval_enabled=True))
    script.send(RunStarted({"e0": 0}), StopRequested())
    assert not script.of(Finish)
    assert [type(action) for action in script.send(Published(0))] == [Checkpoint, Finish]
    script = started(replace(SMALL, eval_enabled=True))
    assert [type(action) for action in script.send(StopRequested())] == [Checkpoint, Finish]


def test_a_stop_before_the_start_ends_at_once() -> None:
    assert [type(action) for action in Script(SMALL).send(StopRequested())] == [Checkpoint, Finish]


# ------------------------------------------------------------------------------------------------------------- resuming


def stopped_at(version: int, settings: SchedulerSettings) -> Checkpoint:
    every = replace(settings, checkpoint_every=1)
    trace = Simulation(make_scheduler(every), steady()).run(until=lambda trace: len(trace.checkpoints) == version)
    return trace.checkpoints[-1]


def test_a_resumed_run_publishes_and_loads_its_weights_before_it_admits_groups() -> None:
    settings = replace(SMALL, max_lag=3, eval_enabled=True)
    script = Script(settings, resume(settings, stopped_at(1, settings)))
    assert script.send(RunStarted({"e0": 0, "e1": 0})) == [Publish(1)]
    assert script.send(Published(1)) == [LoadWeights("e0", 1), LoadWeights("e1", 1)]
    script.send(EngineLoaded("e0", 1))
    assert {admit.min_version for admit in script.of(Admit)} == {1}
    assert not script.of(Evaluate)


def test_a_resumed_run_issues_open_tasks_first_under_new_group_numbers() -> None:
    script = started(replace(SMALL, checkpoint_every=1))
    script.close(0)
    script.close(2)
    script.send(ChunkTrained(0), BatchTrained(1))
    (checkpoint,) = script.of(Checkpoint)
    settings = replace(SMALL, depth=5.0, max_lag=9)
    again = Script(settings, resume(settings, checkpoint))
    again.send(RunStarted({"e0": 1}))
    order = again.scheduler.order
    assert [(a.group, a.task) for a in again.of(Admit)][:4] == [
        (4, order.task(1)[1]), (5, order.task(3)[1]), (6, order.task(4)[1]), (7, order.task(5)[1])
    ]  # fmt: skip


def test_an_engine_that_dies_during_the_last_evaluation_loads_its_weights_again() -> None:
    script = started(replace(SMALL, steps=1, max_lag=0, eval_enabled=True))
    script.send(EvaluationDone(0))
    script.train(0, 1)
    assert script.send(Published(1)) == [Evaluate(1)]
    assert script.send(EngineLost("e0")) == []
    assert script.send(EngineJoined("e0")) == [LoadWeights("e0", 1)]


def test_in_deterministic_mode_pending_evaluations_hold_back_the_engines() -> None:
    settings = replace(SMALL, deterministic=True, max_lag=0, steps=None, eval_every=1, eval_enabled=True)
    simulation = Simulation(make_scheduler(settings), steady(evaluate=1e9))
    trace = simulation.run(until=lambda trace: len(trace.of(Evaluate)) == 2)  # the first one takes very long
    assert 2 <= len(trace.batches) <= 5


def test_a_finished_run_that_is_resumed_only_evaluates_and_ends() -> None:
    settings = replace(SMALL, steps=2, eval_enabled=True)
    trace = Simulation(make_scheduler(settings), steady()).run()
    again = Simulation(resume(settings, trace.checkpoints[-1]), steady()).run()
    assert again.actions == [Publish(2), LoadWeights("e0", 2), Evaluate(2), Finish("done")]


def test_a_finished_run_that_is_resumed_with_more_steps_continues() -> None:
    trace = Simulation(make_scheduler(replace(SMALL, steps=2)), steady()).run()
    longer = replace(SMALL, steps=5)
    again = Simulation(resume(longer, trace.checkpoints[-1]), steady()).run()
    assert [batch.version for batch in again.batches] == [2, 3, 4]
    assert min(again.admitted) == 4


def test_a_checkpoint_with_another_number_of_tasks_or_another_seed_is_rejected() -> None:
    checkpoint = stopped_at(1, SMALL)
    with pytest.raises(BadInput, match=naming("--resume", "10 tasks", "11")):
        resume(replace(SMALL, tasks=11), checkpoint)
    with pytest.raises(BadInput, match=naming("run.seed", "0", "1")):
        resume(SMALL, checkpoint, seed=1)
