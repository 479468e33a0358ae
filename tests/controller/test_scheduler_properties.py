"""Properties of every run, for arbitrary settings, durations and outcomes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.simulated import (
    PLAIN,
    Simulation,
    Trace,
    all_finish,
    erratic,
    fit_of,
    make_scheduler,
    random_outcomes,
    random_rewards,
    resume,
    steady,
)
from outpace.config.algorithm import DifficultyConfig, GovernorConfig, ReplayConfig, RerollConfig
from outpace.controller.events import (
    Admit,
    Checkpoint,
    CloseBatch,
    EpochEnded,
    EpochStarted,
    Evaluate,
    Finalize,
    LoadWeights,
    Publish,
    Retire,
    StopRequested,
    WriteRecord,
)
from outpace.controller.pacing import SchedulerSettings
from outpace.controller.recovery import decode_state
from outpace.simulator.driver import Deadlock
from outpace.tasks.order import REROLL, reroll_number
from support import examples

seeds = st.integers(0, 2**31)
governors = st.builds(
    GovernorConfig, ess_min=st.just(0.5), kl_max=st.just(0.1), patience=st.integers(1, 3), min_lag=st.integers(0, 2)
)
difficulties = st.builds(
    DifficultyConfig,
    easy_above=st.sampled_from([None, 0.0, 0.5, 1.0]),  # 0: every task is too easy
    hard_below=st.sampled_from([None, 0.0]),
    rest_epochs=st.sampled_from([1, 2, 10**9]),
)
replays = st.builds(
    ReplayConfig,
    fraction=st.sampled_from([0.1, 0.5, 0.9]),
    mode=st.sampled_from(["add", "fill"]),
    max_age=st.integers(1, 4),
    times=st.integers(1, 3),
)
rerolls = st.builds(
    RerollConfig, max_times=st.integers(1, 2), after_steps=st.integers(1, 4), max_waiting=st.sampled_from([1, 3, 100])
)


@st.composite
def any_settings(draw: st.DrawFn, /, **fixed: object) -> SchedulerSettings:
    max_lag = draw(st.sampled_from([0, 1, 2, 3, 5]))
    epochs = draw(st.none() | st.integers(1, 4))
    drawn: dict[str, object] = {
        "groups_per_step": draw(st.integers(1, 5)),
        "group_size": draw(st.integers(1, 3)),
        "max_lag": max_lag,
        "depth": draw(st.sampled_from([1.0, 0.0, 0.5, 2.3, 5.0])),
        "chunk_groups": draw(st.integers(1, 6)),
        "max_running": draw(st.sampled_from([1000, 1, 7, 20])),
        "on_stale": "wait",
        "warmup_steps": draw(st.sampled_from([0, 0, 1, 3])),
        "publish_every": draw(st.sampled_from([1, 1, max_lag + 1])),
        "update": draw(st.sampled_from(["inflight", "drain"])),
        "deterministic": draw(st.booleans()),
        "steps": draw(st.integers(1, 15)) if epochs is None else draw(st.none() | st.integers(1, 15)),
        "epochs": epochs,
        "tasks": draw(st.integers(1, 25)),
        "eval_every": draw(st.integers(0, 3)),
        "eval_enabled": draw(st.booleans()),
        "checkpoint_every": draw(st.sampled_from([0, 1, 4])),
        "governor": draw(st.none() | governors),
        "difficulty": draw(st.none() | difficulties),
        "replay": draw(st.none() | replays),
        "reroll": draw(st.none() | rerolls),
    }
    merged = {**drawn, **fixed}
    if merged["deterministic"]:
        merged["governor"] = None
    return SchedulerSettings(**merged)  # type: ignore[arg-type]


def simulate(settings: SchedulerSettings, seed: int) -> Trace:
    outcome_rule = random_outcomes(seed, filtered=0.25, failed=0.1)
    return Simulation(
        make_scheduler(settings),
        erratic(seed),
        outcome_rule,
        engines=1 + seed % 3,
        seed=seed,
        reward_rule=random_rewards(seed),
        fit=fit_of(seed),
    ).run()


def trained(trace: Trace) -> list[int]:
    return [group for batch in trace.batches for group in batch.groups]


@given(any_settings(), seeds)
@examples(150)
def test_no_token_is_older_than_max_lag_and_warm_up_batches_are_on_policy(
    settings: SchedulerSettings, seed: int
) -> None:
    for version, lag in simulate(settings, seed).lags:
        assert lag <= (0 if version < settings.warmup_steps else settings.max_lag)


@given(any_settings(deterministic=False), governors, seeds)
@examples(150)
def test_every_group_is_trained_within_the_lag_that_applied_when_it_was_admitted(
    settings: SchedulerSettings, governor: GovernorConfig, seed: int
) -> None:
    trace = simulate(replace(settings, governor=governor), seed)
    for batch in trace.batches:
        for group in batch.groups:
            assert batch.version - trace.oldest[group] <= trace.max_lags[group]


@given(any_settings(), seeds)
@examples(150)
def test_a_run_ends_with_every_group_accounted_for_once_and_full_batches(
    settings: SchedulerSettings, seed: int
) -> None:
    trace = simulate(settings, seed)
    assert trace.finish == "done"
    finished = sorted(group for group in trace.admitted if trace.outcomes[group] == "finished")
    assert sorted(trained(trace)) == finished
    assert [batch.version for batch in trace.batches] == list(range(len(trace.batches)))
    fills = settings.replay is not None and settings.replay.mode == "fill"
    assert all(batch.groups for batch in trace.batches)
    sizes = [len(batch.groups) + (len(batch.replayed) if fills else 0) for batch in trace.batches]
    assert all(size == settings.groups_per_step for size in sizes[:-1])
    if settings.epochs is None:
        assert sizes == [settings.groups_per_step] * (settings.steps or 0)
    else:
        visits = len(trace.admitted) + len(trace.skipped) - len(rerolled(trace))
        assert len(sizes) == settings.steps or visits == settings.epochs * settings.tasks
        assert all(size <= settings.groups_per_step for size in sizes)


@given(any_settings(), seeds)
@examples(50)
def test_the_chunks_of_a_batch_add_up_to_the_batch(settings: SchedulerSettings, seed: int) -> None:
    trace = simulate(settings, seed)
    for batch in trace.batches:
        chunks = [chunk for chunk in trace.chunks if chunk.version == batch.version]
        own = [chunk.groups for chunk in chunks if not chunk.replayed]
        assert sum(own, ()) == batch.groups
        assert all(len(chunk) >= settings.chunk_groups for chunk in own[:-1])
        assert [chunk.groups for chunk in chunks if chunk.replayed] == ([batch.replayed] if batch.replayed else [])
        assert not any(chunk.replayed for chunk in chunks[:-1])


@given(any_settings(), replays, seeds)
@examples(100)
def test_groups_are_replayed_within_their_limits_of_count_and_age_and_retired_once(
    settings: SchedulerSettings, replay: ReplayConfig, seed: int
) -> None:
    trace = simulate(replace(settings, replay=replay), seed)
    if replay.mode == "fill":
        filtered = Counter(trace.outcomes.values())["filtered"]
        assert sum(len(batch.replayed) for batch in trace.batches) <= filtered
    first = {group: batch.version for batch in trace.batches for group in batch.groups}
    again = Counter(group for batch in trace.batches for group in batch.replayed)
    assert all(times <= replay.times for times in again.values())
    for batch in trace.batches:
        assert len(batch.replayed) <= replay.fraction * settings.groups_per_step
        assert len(set(batch.replayed)) == len(batch.replayed)
        assert all(1 <= batch.version - first[group] <= replay.max_age for group in batch.replayed)
    retired = [group for action in trace.of(Retire) for group in action.groups]
    assert len(set(retired)) == len(retired)
    if retired:
        old = {group for group, version in first.items() if version + replay.max_age < len(trace.batches)}
        assert old <= set(retired), "groups that are too old to be replayed do not stay in the journal"


@given(any_settings(steps=None, epochs=4, reroll=None), difficulties, seeds)
@examples(100)
def test_visits_are_skipped_only_after_an_extreme_reward_and_at_most_one_epoch_of_them_in_a_row(
    settings: SchedulerSettings, difficulty: DifficultyConfig, seed: int
) -> None:
    trace = simulate(replace(settings, difficulty=difficulty), seed)
    visited = {(admit.task, admit.epoch) for admit in trace.admitted.values()}
    skipped = {(skip.task, skip.epoch) for skip in trace.skipped}
    assert len(skipped) == len(trace.skipped)
    assert visited | skipped == {(task, epoch) for task in range(settings.tasks) for epoch in range(4)}
    assert not visited & skipped
    reward_rule = random_rewards(seed)
    extreme = {
        (admit.task, admit.epoch) for admit in trace.admitted.values() if is_extreme(reward_rule(admit)[0], difficulty)
    }
    for task, epoch in skipped:
        earlier = range(max(0, epoch - difficulty.rest_epochs), epoch)
        assert any((task, before) in extreme for before in earlier)
    in_a_row = longest = 0
    for action in trace.actions:
        in_a_row = (
            in_a_row + 1
            if isinstance(action, Finalize) and action.outcome == "skipped"
            else 0
            if isinstance(action, Admit)
            else in_a_row
        )
        longest = max(longest, in_a_row)
    assert longest <= settings.tasks or settings.deterministic, (
        "in deterministic mode skips are recorded with their step"
    )


def is_extreme(reward: float, difficulty: DifficultyConfig) -> bool:
    easy, hard = difficulty.easy_above, difficulty.hard_below
    return (easy is not None and reward >= easy) or (hard is not None and reward <= hard)


def rerolled(trace: Trace) -> set[tuple[int, int, int]]:
    """Return epoch, task and number of the re-rolls that were started or skipped."""
    visits = [(admit.epoch, admit.task, reroll_number(admit.position)) for admit in trace.admitted.values()]
    visits += [(skip.epoch, skip.task, skip.reroll) for skip in trace.skipped]
    return {visit for visit in visits if visit[2]}


def unsolved(trace: Trace, admit: Admit, reroll: RerollConfig, seed: int) -> bool:
    """Return whether a re-roll of this visit is planned when it ends."""
    if reroll_number(admit.position) == reroll.max_times:
        return False
    return trace.outcomes[admit.group] == "failed" or sum(random_rewards(seed)(admit)) <= reroll.solved_above


@given(any_settings(), rerolls, seeds)
@examples(100)
def test_unsolved_tasks_are_visited_again_later_within_the_limit_and_no_reroll_is_lost(
    settings: SchedulerSettings, reroll: RerollConfig, seed: int
) -> None:
    trace = simulate(replace(settings, reroll=reroll), seed)
    by_position = {admit.position: admit for admit in trace.admitted.values()}
    assert len(by_position) == len(trace.admitted), "no visit happens twice"
    for position, admit in by_position.items():
        if reroll_number(position):
            before = by_position[position - REROLL]
            assert unsolved(trace, before, reroll, seed)
            assert (admit.task, admit.epoch) == (before.task, before.epoch)
            assert admit.min_version >= before.min_version + reroll.after_steps
    ledger = decode_state(trace.checkpoints[-1].state).ledger
    planned = sum(unsolved(trace, admit, reroll, seed) for admit in by_position.values())
    assert planned == len(rerolled(trace)) + len(ledger.rerolls.waiting) + ledger.rerolls.dropped
    assert ledger.rerolled.finalized == len(rerolled(trace))


@given(any_settings(), rerolls, st.integers(1, 150), seeds)
@examples(100)
def test_a_run_stopped_anywhere_and_resumed_loses_no_reroll_and_doubles_none(
    settings: SchedulerSettings, reroll: RerollConfig, action_count: int, seed: int
) -> None:
    settings = replace(settings, reroll=reroll)
    outcome_rule, reward_rule = random_outcomes(seed, 0.25, 0.1), random_rewards(seed)
    stopped = Simulation(make_scheduler(settings), erratic(seed), outcome_rule, seed=seed, reward_rule=reward_rule)
    stopped.run(until=lambda trace: len(trace.actions) >= action_count)
    stopped.send_event(StopRequested())
    first = stopped.run()
    checkpoint = first.checkpoints[-1] if first.checkpoints else None
    scheduler = resume(settings, checkpoint) if checkpoint else make_scheduler(settings)
    rest = Simulation(scheduler, erratic(seed + 1), outcome_rule, seed=seed, reward_rule=reward_rule).run()
    planned: dict[int, bool] = {}  # by the position of each visit: the last time that it ran
    if checkpoint:
        state = decode_state(checkpoint.state)
        for admit in first.admitted.values():
            if admit.group < state.next_group and admit.position not in state.ledger.open:
                planned[admit.position] = unsolved(first, admit, reroll, seed)
    assert not planned.keys() & {admit.position for admit in rest.admitted.values()}, "an ended visit is not repeated"
    planned |= {admit.position: unsolved(rest, admit, reroll, seed) for admit in rest.admitted.values()}
    ledger = decode_state((rest.checkpoints or first.checkpoints)[-1].state).ledger
    assert sum(planned.values()) == ledger.rerolled.finalized + len(ledger.rerolls.waiting) + ledger.rerolls.dropped
    assert sum(scheduler.counts[outcome] for outcome in ("trained", "filtered", "failed")) == len(planned)


@given(any_settings(max_lag=0, publish_every=1), seeds)
@examples(50)
def test_with_zero_lag_every_batch_consists_of_groups_admitted_at_its_own_version(
    settings: SchedulerSettings, seed: int
) -> None:
    trace = simulate(settings, seed)
    for batch in trace.batches:
        assert {trace.admitted[group].min_version for group in batch.groups} == {batch.version}


@given(any_settings(steps=None, epochs=2, difficulty=None, reroll=None), seeds)
@examples(50)
def test_slow_tasks_are_trained_as_often_as_fast_ones(settings: SchedulerSettings, seed: int) -> None:
    rng = random.Random(seed)
    slow = {task for task in range(settings.tasks) if rng.random() < 0.3}
    pace = erratic(seed)
    scheduler = make_scheduler(settings)
    trace = Simulation(
        scheduler, lambda kind, a: pace(kind, a) * (100 if getattr(a, "task", None) in slow else 1)
    ).run()
    counts = Counter(trace.admitted[group].task for group in trained(trace))
    assert counts == dict.fromkeys(range(settings.tasks), 2)
    assert scheduler.counts["trained"] == 2 * settings.tasks


@given(any_settings(deterministic=False), seeds, st.sampled_from(["drop", "requeue", "train"]))
@examples(100)
def test_under_every_straggler_policy_the_run_ends_and_all_groups_are_accounted_for(
    settings: SchedulerSettings, seed: int, on_stale: str
) -> None:
    settings = replace(settings, on_stale=on_stale)  # type: ignore[arg-type]
    scheduler = make_scheduler(settings)
    trace = Simulation(
        scheduler, erratic(seed), random_outcomes(seed, 0.2, 0.1), engines=1 + seed % 2, seed=seed, fit=fit_of(seed)
    ).run()
    assert trace.finish == "done"
    assert len(set(trained(trace))) == len(trained(trace)) == scheduler.counts["trained"]
    assert not set(trained(trace)) & set(trace.cancelled)
    assert scheduler.counts["requeued" if on_stale == "requeue" else "dropped"] == len(trace.cancelled)
    finalized = sum(scheduler.counts[outcome] for outcome in ("trained", "filtered", "failed", "dropped"))
    assert finalized + scheduler.counts["requeued"] == len(trace.admitted)
    assert scheduler.counts["skipped"] == len(trace.skipped)
    if on_stale != "train":
        assert all(lag <= settings.max_lag for _, lag in trace.lags)
    if settings.epochs and settings.steps is None:
        first = finalized + scheduler.counts["skipped"] - len(rerolled(trace))
        assert first == settings.epochs * settings.tasks


@given(any_settings(deterministic=True), seeds, seeds)
@examples(150)
def test_in_deterministic_mode_component_speeds_do_not_change_what_is_trained(
    settings: SchedulerSettings, content: int, timing: int
) -> None:
    outcome_rule = random_outcomes(content, filtered=0.3, failed=0.1)
    reference = Simulation(make_scheduler(settings), steady(), outcome_rule).run()
    other = Simulation(
        make_scheduler(settings), erratic(timing), outcome_rule, engines=1 + timing % 3, seed=timing
    ).run()
    assert other.assignments == reference.assignments
    assert other.admitted == reference.admitted
    assert other.skipped == reference.skipped
    assert other.batches == reference.batches
    assert all(len(chunk.groups) <= settings.chunk_groups for chunk in reference.chunks if not chunk.replayed)


@given(any_settings(deterministic=True, checkpoint_every=2), seeds, seeds)
@examples(100)
def test_in_deterministic_mode_a_killed_and_resumed_run_trains_what_an_uninterrupted_run_trains(
    settings: SchedulerSettings, content: int, timing: int
) -> None:
    outcome_rule = random_outcomes(content, filtered=0.3, failed=0.1)
    uninterrupted = Simulation(make_scheduler(settings), steady(), outcome_rule).run()
    for checkpoint in uninterrupted.checkpoints:
        rest = Simulation(resume(settings, checkpoint), erratic(timing), outcome_rule, engines=2, seed=timing).run()
        assert rest.finish == "done"
        assert rest.assignments == [item for item in uninterrupted.assignments if item[0] >= checkpoint.version]


@given(any_settings(steps=None, epochs=3, reroll=None), st.integers(1, 4), seeds)
@examples(100)
def test_a_resume_from_any_checkpoint_visits_every_task_once_per_epoch(
    settings: SchedulerSettings, every: int, seed: int
) -> None:
    settings = replace(settings, checkpoint_every=every)
    first = simulate(settings, seed)
    for checkpoint in first.checkpoints:
        at = first.actions.index(checkpoint)
        kept = visits_trained(first, before=checkpoint)
        scheduler = resume(settings, checkpoint)
        # Visits filtered or failed before the checkpoint are finalized; all others are trained before or after it.
        finalized_before = sum(scheduler.counts[outcome] for outcome in ("filtered", "failed"))
        rest = Simulation(scheduler, erratic(seed + at), all_finish, seed=seed, fit=fit_of(seed)).run()
        visits = kept + visits_trained(rest)
        assert len(visits) == len(set(visits)) == 3 * settings.tasks - finalized_before - scheduler.counts["skipped"]
        assert all(lag <= settings.max_lag for _, lag in rest.lags)
        assert min(rest.admitted, default=10**9) > max(groups_before(first, checkpoint), default=-1)


@given(any_settings(steps=None, epochs=3, reroll=None), st.integers(1, 150), seeds)
@examples(100)
def test_a_run_stopped_anywhere_and_resumed_visits_every_task_once_per_epoch(
    settings: SchedulerSettings, action_count: int, seed: int
) -> None:
    stopped = Simulation(make_scheduler(settings), erratic(seed), random_outcomes(seed, 0.25, 0.1), seed=seed)
    stopped.run(until=lambda trace: len(trace.actions) >= action_count)
    stopped.send_event(StopRequested())
    first = stopped.run()
    assert first.finish in ("stopped", "done")
    # Deterministic mode may have no exact state to save.
    checkpoint = first.checkpoints[-1] if first.checkpoints else None
    scheduler = resume(settings, checkpoint) if checkpoint else make_scheduler(settings)
    rest = Simulation(scheduler, erratic(seed + 1), all_finish, engines=2, seed=seed).run()
    visits = (visits_trained(first, before=checkpoint) if checkpoint else []) + visits_trained(rest)
    assert len(visits) == len(set(visits)) == scheduler.counts["trained"]
    outcomes = ("trained", "filtered", "failed", "skipped")
    assert sum(scheduler.counts[outcome] for outcome in outcomes) == 3 * settings.tasks


@given(any_settings(deterministic=True), st.integers(1, 100), seeds, seeds)
@examples(100)
def test_in_deterministic_mode_a_stopped_and_resumed_run_trains_what_an_uninterrupted_run_trains(
    settings: SchedulerSettings, action_count: int, content: int, timing: int
) -> None:
    outcome_rule = random_outcomes(content, filtered=0.3, failed=0.1)
    uninterrupted = Simulation(make_scheduler(settings), steady(), outcome_rule).run()
    stopped = Simulation(make_scheduler(settings), erratic(timing), outcome_rule, seed=timing)
    stopped.run(until=lambda trace: len(trace.actions) >= action_count)
    stopped.send_event(StopRequested())
    first = stopped.run()
    checkpoint = first.checkpoints[-1] if first.checkpoints else None
    scheduler = resume(settings, checkpoint) if checkpoint else make_scheduler(settings)
    begun = checkpoint.version if checkpoint else 0
    rest = Simulation(scheduler, erratic(timing + 1), outcome_rule, seed=timing).run()
    again = [item for item in first.assignments if item[0] < begun] + rest.assignments
    assert again == uninterrupted.assignments


@given(any_settings(), st.integers(1, 150), seeds)
@examples(100)
def test_visits_counted_as_finalized_by_a_checkpoint_are_recorded_before_it(
    settings: SchedulerSettings, action_count: int, seed: int
) -> None:
    settings = replace(settings, checkpoint_every=2)
    simulation = Simulation(make_scheduler(settings), erratic(seed), random_outcomes(seed, 0.25, 0.1), seed=seed)
    simulation.run(until=lambda trace: len(trace.actions) >= action_count)
    simulation.send_event(StopRequested())
    recorded = announced = 0
    for action in simulation.run().actions:
        match action:
            case Finalize():
                announced += 1
            case WriteRecord(finalized=finalized):
                recorded = finalized
            case CloseBatch(groups=groups):
                announced += len(groups)
            case Checkpoint():
                ledger = decode_state(action.state).ledger
                counted = [*ledger.epochs, ledger.earlier, ledger.rerolled]
                assert sum(tally.finalized for tally in counted) == recorded
            case _:
                pass
    assert recorded <= announced, "every counted visit was finalized or trained"


def visits_trained(trace: Trace, before: Checkpoint | None = None) -> list[tuple[int, int]]:
    batches = [batch for batch in trace.batches if before is None or batch.version < before.version]
    admits = [trace.admitted[group] for batch in batches for group in batch.groups]
    return [(admit.epoch, admit.task) for admit in admits]


def groups_before(trace: Trace, checkpoint: Checkpoint) -> list[int]:
    before = trace.actions[: trace.actions.index(checkpoint)]
    return [action.group for action in before if isinstance(action, Admit)]


@given(any_settings(), seeds)
@examples(100)
def test_the_first_every_kth_and_the_last_version_are_published_and_the_last_is_evaluated(
    settings: SchedulerSettings, seed: int
) -> None:
    trace = simulate(settings, seed)
    last = len(trace.batches)
    published = [action.version for action in trace.of(Publish)]
    assert published == sorted(set(published))
    assert {0, last} | set(range(0, last, settings.publish_every)) <= set(published)
    evaluated = [action.version for action in trace.of(Evaluate)]
    assert evaluated == sorted(set(evaluated))
    assert set(evaluated) <= set(published)
    if settings.eval_enabled:
        assert evaluated[-1] == last
    else:
        assert not evaluated
    assert trace.checkpoints[-1].version == last
    if settings.checkpoint_every:
        periodic = range(settings.checkpoint_every, last + 1, settings.checkpoint_every)
        assert {checkpoint.version for checkpoint in trace.checkpoints} == {*periodic, last}


@given(any_settings(steps=None, epochs=3), seeds)
@examples(50)
def test_every_epoch_starts_once_and_ends_once(settings: SchedulerSettings, seed: int) -> None:
    trace = simulate(settings, seed)
    assert trace.of(EpochStarted) == [EpochStarted(epoch) for epoch in range(3)]
    assert sorted(action.epoch for action in trace.of(EpochEnded)) == [0, 1, 2]


@given(any_settings(), seeds)
@examples(50)
def test_engines_only_load_newer_versions(settings: SchedulerSettings, seed: int) -> None:
    served: dict[str, int] = {}
    for load in simulate(settings, seed).of(LoadWeights):
        assert load.version > served.get(load.engine, 0)
        served[load.engine] = load.version


@given(any_settings(steps=None, epochs=3, replay=None, reroll=None), seeds)
@examples(200)
def test_engines_that_die_hang_in_a_load_and_rejoin_lose_no_visit_and_keep_the_lag_bound(
    settings: SchedulerSettings, seed: int
) -> None:
    rng = random.Random(seed)
    trace = Simulation(
        make_scheduler(settings),
        erratic(seed, tail=3.0),
        random_outcomes(seed, filtered=0.25, failed=0.1),
        engines=1 + seed % 4,
        seed=seed,
        fit=fit_of(seed),
        faults=lambda: 10 ** rng.uniform(1, 4),
    ).run()
    assert trace.finish == "done"
    visits = [(admit.epoch, admit.task) for admit in trace.admitted.values()]
    visits += [(finalize.epoch, finalize.task) for finalize in trace.skipped]
    assert sorted(visits) == [(epoch, task) for epoch in range(3) for task in range(settings.tasks)]
    finished = sorted(group for group in trace.admitted if trace.outcomes[group] == "finished")
    assert sorted(trained(trace)) == finished
    assert all(lag <= (0 if version < settings.warmup_steps else settings.max_lag) for version, lag in trace.lags)


@given(any_settings(deterministic=True), seeds, seeds)
@examples(100)
def test_in_deterministic_mode_engine_deaths_do_not_change_what_is_trained(
    settings: SchedulerSettings, content: int, timing: int
) -> None:
    outcome_rule, rng = random_outcomes(content, filtered=0.3, failed=0.1), random.Random(timing)
    reference = Simulation(make_scheduler(settings), steady(), outcome_rule).run()
    faults = lambda: 10 ** rng.uniform(1, 4)  # noqa: E731
    other = Simulation(
        make_scheduler(settings),
        erratic(timing, tail=3.0),
        outcome_rule,
        engines=1 + timing % 3,
        seed=timing,
        faults=faults,
    ).run()
    assert other.assignments == reference.assignments
    assert other.batches == reference.batches


def test_the_simulator_detects_a_deadlock() -> None:
    simulation = Simulation(make_scheduler(PLAIN), steady())
    simulation.clock.at = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(Deadlock, match="learner"):
        simulation.run()
