"""Governor, curriculum, replay pool and re-rolls within a run, as short scripts of events."""

from __future__ import annotations

import json
from dataclasses import replace

from controller.scripted import SMALL, Script, groups, started
from controller.simulated import PLAIN, Simulation, Trace, make_scheduler, random_outcomes, resume, steady
from outpace.config.algorithm import DifficultyConfig, GovernorConfig, ReplayConfig, RerollConfig
from outpace.config.load import make_config
from outpace.config.validation import resolve
from outpace.controller.events import (
    Admit,
    BatchTrained,
    Checkpoint,
    ChunkTrained,
    CloseBatch,
    EngineLoaded,
    EpochEnded,
    EpochStarted,
    Finalize,
    Finish,
    GroupClosed,
    LagChanged,
    Publish,
    Published,
    Retire,
    StopRequested,
    TrainChunk,
)
from outpace.controller.pacing import SchedulerSettings
from outpace.controller.recovery import decode_state
from outpace.controller.scheduler import Scheduler
from outpace.run.session import scheduler_settings
from outpace.tasks.order import REROLL

GOVERNOR = GovernorConfig(ess_min=0.5, kl_max=0.1, patience=2, min_lag=0)
EASY = DifficultyConfig(easy_above=1.0, hard_below=None, rest_epochs=1)
REPLAY = ReplayConfig(fraction=0.5, max_age=2, times=1)
REROLLS = RerollConfig(max_times=1, after_steps=1)


def run(settings: SchedulerSettings, bad: range = range(0)) -> Trace:
    """A whole run in which the batches that produce the versions in `bad` have a low ESS."""
    return Simulation(
        make_scheduler(settings), steady(), fit=lambda version: (0.1 if version in bad else 1.0, 0.0)
    ).run()


def train(script: Script, *trained: int, ess: float = 1.0, reward_std: float = 0.0) -> None:
    """Finish these groups, which must complete a batch of one chunk, and train it along with its replayed groups."""
    version = script.scheduler.version
    script.send(*(GroupClosed(group, "finished", version, reward=0.5, reward_std=reward_std) for group in trained))
    script.send(ChunkTrained(version))
    if script.of(TrainChunk):
        script.send(ChunkTrained(version))
    (close,) = script.of(CloseBatch)
    assert close.groups == trained
    script.send(BatchTrained(version + 1, ess=ess))


# ------------------------------------------------------------------------------------------------------------- settings


def test_governor_curriculum_replay_and_rerolls_are_off_unless_the_config_sets_them() -> None:
    def settings(**sections: object) -> SchedulerSettings:
        return scheduler_settings(resolve(make_config(sections)), tasks=10, evaluates=False)

    plain = settings(run={"deterministic": True})
    assert (plain.governor, plain.difficulty, plain.replay, plain.reroll) == (None, None, None, None)
    chosen = settings(
        governor={"enabled": True, "ess_min": 0.25, "kl_max": 0.5, "patience": 3, "min_lag": 1},
        difficulty={"hard_below": 0.125, "rest_epochs": 2},
        replay={"fraction": 0.75, "max_age": 3, "times": 2},
        reroll={"max_times": 1, "after_steps": 4},
    )
    assert chosen.governor == GovernorConfig(enabled=True, ess_min=0.25, kl_max=0.5, patience=3, min_lag=1)
    assert chosen.difficulty == DifficultyConfig(easy_above=None, hard_below=0.125, rest_epochs=2)
    assert chosen.replay == ReplayConfig(fraction=0.75, max_age=3, times=2)
    assert chosen.reroll == RerollConfig(max_times=1, after_steps=4)


# ------------------------------------------------------------------------------------------------------------- governor


def test_a_batch_with_low_ess_lowers_the_lag_for_groups_admitted_afterwards() -> None:
    script = started(replace(SMALL, max_lag=3, depth=9.0, steps=None, governor=GOVERNOR))
    assert script.scheduler.outstanding == 8
    train(script, 0, 1, ess=0.1)
    assert script.of(LagChanged) == [LagChanged(2, -1)]
    script.send(Published(1), EngineLoaded("e0", 1))
    assert script.scheduler.outstanding == 6, "a lag of 2 has room for six groups, all of them already running"
    train(script, 2, 3)
    script.send(Published(2), EngineLoaded("e0", 2))
    assert groups(script.of(Admit)) == [8, 9]


def test_lowering_the_lag_keeps_the_deadline_of_running_groups() -> None:
    script = started(replace(SMALL, max_lag=1, depth=9.0, steps=None, governor=GOVERNOR))
    train(script, 0, 1, ess=0.1)
    assert script.scheduler.max_lag == 0
    script.send(Published(1), EngineLoaded("e0", 1))
    assert not script.of(Admit)
    script.send(GroupClosed(2, "finished", oldest=0), GroupClosed(3, "finished", oldest=0))
    assert script.of(TrainChunk) == [TrainChunk(1, (2, 3))]


def test_a_group_with_an_earlier_deadline_is_trained_before_groups_admitted_earlier() -> None:
    script = started(replace(SMALL, max_lag=3, depth=1.5, steps=None, governor=GOVERNOR))
    assert script.scheduler.outstanding == 5  # 0 to 4, all due in batch 3
    train(script, 0, 1, ess=0.1)
    assert [(admit.group, admit.min_version) for admit in script.of(Admit)] == [(5, 0)]  # due in batch 2
    script.send(*(GroupClosed(group, "finished", oldest=0) for group in (2, 3, 4, 5)))
    assert script.of(TrainChunk) == [TrainChunk(1, (2, 3))]
    script.send(ChunkTrained(1), BatchTrained(2))
    assert script.of(TrainChunk) == [TrainChunk(2, (5, 4))]


def test_bad_batches_admitted_before_a_decrease_do_not_lower_the_lag_again() -> None:
    trace = run(replace(PLAIN, max_lag=4, depth=9.0, steps=12, governor=GOVERNOR), bad=range(1, 6))
    assert [action.lag for action in trace.of(LagChanged)][:2] == [3, 4]


def test_batches_of_the_warm_up_do_not_change_the_lag() -> None:
    trace = run(replace(PLAIN, max_lag=2, warmup_steps=3, steps=3, governor=GOVERNOR), bad=range(9))
    assert trace.of(LagChanged) == []


def test_every_version_is_published_while_the_governed_lag_is_too_small_for_every_kth() -> None:
    settings = replace(
        PLAIN, max_lag=2, publish_every=3, steps=40, governor=GOVERNOR.model_copy(update={"patience": 4})
    )
    trace = run(settings, bad=range(5, 6))
    lowered, raised = (trace.actions.index(action) for action in (LagChanged(1, -1), LagChanged(2, +1)))
    published = [action.version for action in trace.actions[lowered:raised] if isinstance(action, Publish)]
    batches = [action.version + 1 for action in trace.actions[lowered:raised] if isinstance(action, CloseBatch)]
    assert published[0] == 5
    assert published == [5, *batches[:-1]]
    later = [action.version for action in trace.actions[raised:] if isinstance(action, Publish)]
    assert all(version % 3 == 0 for version in later[:-1])


def test_bad_batches_throughout_lower_the_lag_to_its_minimum_and_the_run_still_ends() -> None:
    trace = run(replace(PLAIN, max_lag=5, publish_every=6, steps=40, governor=GOVERNOR), bad=range(100))
    assert trace.finish == "done"
    assert [action.lag for action in trace.of(LagChanged)] == [4, 3, 2, 1, 0]
    assert trace.lags[-1][1] == 0


def test_the_governed_lag_survives_a_resume() -> None:
    settings = replace(PLAIN, max_lag=3, steps=4, checkpoint_every=1, governor=GOVERNOR)
    trace = run(settings, bad=range(1, 2))
    assert resume(settings, trace.checkpoints[0]).max_lag == 2
    assert resume(replace(settings, governor=None), trace.checkpoints[0]).max_lag == 3


def test_a_checkpoint_without_governor_curriculum_and_reroll_state_can_be_resumed() -> None:
    settings = replace(PLAIN, governor=GOVERNOR, difficulty=EASY, replay=REPLAY, reroll=REROLLS)
    state = dict(run(replace(PLAIN, steps=2)).checkpoints[-1].state)
    del state["governor"], state["difficulty"]
    ledger = json.loads(json.dumps(state["ledger"]))
    for tally in (*ledger["epochs"], ledger["earlier"]):
        del tally["skipped"]
    del ledger["rerolls"], ledger["rerolled"]
    scheduler = Scheduler(settings, make_scheduler(settings).order, decode_state({**state, "ledger": ledger}))
    assert scheduler.max_lag == settings.max_lag
    assert Simulation(scheduler, steady()).run().finish == "done"


# ----------------------------------------------------------------------------------------------------------- curriculum


def test_a_task_that_is_too_easy_is_finalized_as_skipped_in_the_next_epoch() -> None:
    script = started(replace(SMALL, tasks=4, max_lag=3, steps=None, epochs=2, max_running=2, difficulty=EASY))
    easy = script.scheduler.order.task(1)[1]
    skipped: list[Finalize] = []
    for group in range(7):  # one at a time: four of the first epoch, three of the second
        script.send(GroupClosed(group, "filtered", reward=1.0 if group == 1 else 0.5))
        skipped += [finalize for finalize in script.of(Finalize) if finalize.outcome == "skipped"]
    assert skipped == [Finalize(easy, 1, "skipped")]
    assert script.of(EpochEnded) == [EpochEnded(1)]
    assert script.scheduler.counts["skipped"] == 1
    assert script.scheduler.counts["filtered"] == 7


def test_a_run_whose_remaining_visits_are_all_skipped_trains_a_partial_batch_and_ends() -> None:
    script = started(replace(SMALL, tasks=2, max_lag=0, steps=None, epochs=2, max_running=2, difficulty=EASY))
    script.send(GroupClosed(0, "filtered", reward=1.0))
    script.send(GroupClosed(1, "finished", reward=1.0))
    assert script.of(EpochStarted) == [EpochStarted(1)]
    assert [finalize.outcome for finalize in script.of(Finalize)].count("skipped") == 2
    assert script.of(TrainChunk) == [TrainChunk(0, (1,))], "no task is left, so the last batch is partial"
    script.send(ChunkTrained(0), BatchTrained(1))
    assert script.of(EpochEnded) == [EpochEnded(0)]
    script.send(Published(1))
    assert script.of(Finish) == [Finish("done")]
    assert script.scheduler.counts["skipped"] == 2


def test_tasks_that_always_stay_too_easy_are_visited_every_other_epoch() -> None:
    settings = replace(PLAIN, steps=10, tasks=4, max_lag=0, difficulty=EASY.model_copy(update={"rest_epochs": 10**9}))
    trace = Simulation(make_scheduler(settings), steady(), reward_rule=lambda _: (1.0, 0.5)).run()
    assert trace.finish == "done"
    assert [admit.epoch for admit in trace.admitted.values()] == [2 * (group // 4) for group in range(40)]


def test_resting_tasks_survive_a_resume_and_their_state_is_json() -> None:
    settings = replace(PLAIN, steps=6, checkpoint_every=1, difficulty=EASY)
    trace = Simulation(make_scheduler(settings), steady(), reward_rule=lambda admit: (float(admit.task % 2), 0.5)).run()
    checkpoint = trace.checkpoints[0]
    assert json.loads(json.dumps(checkpoint.state)) == checkpoint.state
    scheduler = resume(settings, checkpoint)
    assert scheduler.resting > 0
    again = next(action for action in scheduler.handle(StopRequested()) if isinstance(action, Checkpoint))
    assert again.state["difficulty"] == checkpoint.state["difficulty"]


# --------------------------------------------------------------------------------------------------------------- replay


def test_replayed_groups_are_the_last_chunk_of_a_batch_and_do_not_count_as_visits() -> None:
    script = started(replace(SMALL, replay=REPLAY))
    train(script, 0, 1, reward_std=0.5)
    assert not script.of(Retire)
    script.send(Published(1), EngineLoaded("e0", 1))
    script.send(*(GroupClosed(group, "finished", 0, reward_std=0.25) for group in (2, 3)))
    assert script.of(TrainChunk) == [TrainChunk(1, (2, 3))]
    assert script.send(ChunkTrained(1)) == [TrainChunk(1, (1,), replayed=True)]
    assert script.scheduler.counts["trained"] == 2
    assert script.send(ChunkTrained(1)) == [CloseBatch(1, (2, 3), (1,))]
    script.send(BatchTrained(2))
    assert script.of(Retire) == [Retire((1,))]
    assert script.scheduler.counts["trained"] == 4


def test_without_replay_no_group_is_retired() -> None:
    trace = run(PLAIN)
    assert not trace.of(Retire)
    assert not any(batch.replayed for batch in trace.batches)


def test_the_replay_pool_survives_a_resume() -> None:
    settings = replace(PLAIN, steps=3, checkpoint_every=1, replay=REPLAY)
    first = Simulation(make_scheduler(settings), steady(), reward_rule=lambda _: (0.5, 0.5)).run()
    assert first.batches[1].replayed
    again = Simulation(resume(settings, first.checkpoints[0]), steady(), reward_rule=lambda _: (0.5, 0.5)).run()
    assert again.batches[0].replayed == first.batches[1].replayed != ()
    fill = replace(settings, replay=REPLAY.model_copy(update={"mode": "fill"}))
    filled = Simulation(
        resume(fill, first.checkpoints[0]), steady(), random_outcomes(1, filtered=0.5, failed=0.0)
    ).run()
    assert filled.batches[0].replayed


def test_a_replayed_group_takes_the_place_of_a_filtered_one_and_further_ones_are_replaced_by_tasks() -> None:
    script = started(replace(SMALL, replay=REPLAY.model_copy(update={"mode": "fill"})))
    script.send(GroupClosed(0, "filtered"))
    assert groups(script.of(Admit)) == [4], "nothing can be replayed yet"
    train(script, 1, 2, reward_std=0.5)
    script.send(Published(1), EngineLoaded("e0", 1))
    assert groups(script.of(Admit)) == [5, 6]
    script.send(GroupClosed(3, "filtered"))
    assert not script.of(Admit)
    script.send(GroupClosed(5, "filtered"))
    assert groups(script.of(Admit)) == [7], "half a batch of two is one group"
    script.send(GroupClosed(4, "finished", 0, reward_std=0.25))
    assert script.of(TrainChunk) == [TrainChunk(1, (4,))]
    assert script.send(ChunkTrained(1)) == [TrainChunk(1, (2,), replayed=True)]
    assert script.send(ChunkTrained(1)) == [CloseBatch(1, (4,), (2,))]
    script.send(BatchTrained(2))
    assert script.scheduler.counts["trained"] == script.scheduler.counts["filtered"] == 3


def test_a_run_whose_last_groups_are_all_filtered_ends_although_replayed_groups_could_take_their_places() -> None:
    settings = replace(SMALL, tasks=4, epochs=1, steps=None, replay=REPLAY.model_copy(update={"mode": "fill"}))
    script = started(settings)
    train(script, 0, 1, reward_std=0.5)
    script.send(Published(1), EngineLoaded("e0", 1))
    script.close(2, 3, outcome="filtered")
    assert script.of(Finish) == [Finish("done")]


# ------------------------------------------------------------------------------------------------------------- re-rolls


def test_an_unsolved_task_is_admitted_again_first_with_a_draw_of_its_own() -> None:
    script = started(replace(SMALL, max_lag=0, reroll=REROLLS))
    script.send(GroupClosed(0, "filtered", best=0.0))
    train(script, 1, 2)
    assert script.scheduler.rerolls.waiting == 1
    script.send(Published(1), EngineLoaded("e0", 1))
    again, new = script.of(Admit)
    assert (again.position, again.draw, again.task) == (REROLL, REROLL, script.scheduler.order.task(0)[1])
    assert new.position == 3
    script.send(GroupClosed(again.group, "filtered", best=0.0))
    assert script.of(Finalize) == [Finalize(again.task, 0, "filtered", again.group, reroll=1)]
    assert script.scheduler.rerolls.waiting == 0, "it is visited once more, not twice"


def test_rerolls_survive_a_resume() -> None:
    settings = replace(PLAIN, steps=4, checkpoint_every=1, max_lag=0, reroll=REROLLS)
    reward_rule = lambda admit: (float(admit.task > 2), 0.0)  # noqa: E731
    whole = Simulation(make_scheduler(settings), steady(), reward_rule=reward_rule).run()
    again = Simulation(resume(settings, whole.checkpoints[0]), steady(), reward_rule=reward_rule).run()
    assert sum(admit.position >= REROLL for admit in again.admitted.values()) == 3
    assert again.assignments == [item for item in whole.assignments if item[0] >= 1]
