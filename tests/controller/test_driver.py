"""The driver with fake components: the calls it makes, the records it writes and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from driver_support import SETTINGS, FakeEngine, Rig, until
from outpace.config.algorithm import DifficultyConfig, GovernorConfig, ReplayConfig, RerollConfig
from outpace.controller import engine_registry, policy_versions
from outpace.controller.events import GroupClosed
from outpace.controller.failure_budget import LimitReached
from outpace.controller.recovery import group_closed_event
from outpace.errors import ComponentFailed, ComponentLost, CorruptData, NotSaved, Stalled
from outpace.monitoring import fleet_orders
from outpace.monitoring.line_file import read_lines
from outpace.monitoring.metrics import aggregated
from outpace.tasks.stream import Round, StreamedTasks
from outpace.types import (
    Aggregate,
    EpisodeView,
    Failure,
    FleetMember,
    GroupOrder,
    GroupReport,
    JournalLocation,
    Outcome,
    StepReport,
    Task,
)
from support import naming

BROKEN_REWARD = Failure("reward broken", "raised", 8)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "run")
    yield rig
    rig.log.close()


async def test_a_run_records_its_steps_in_order_and_evaluates_first_and_last(rig: Rig) -> None:
    assert await rig.run() == "done"
    lines = await asyncio.to_thread(lambda: list(read_lines(rig.log.dir / "metrics.jsonl")))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    evals = await asyncio.to_thread(lambda: list(read_lines(rig.log.dir / "evals.jsonl")))
    assert [line["step"] for line in evals] == [0, 6]
    assert rig.saved == [6]
    steps = [call for call in rig.learner.calls if call.startswith("step")]
    assert steps == [f"step {version}" for version in range(6)]


async def test_rollouts_of_each_step_are_recorded_before_a_checkpoint_releases_their_journal_segment(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path / "run", replace(SETTINGS, checkpoint_every=1))
    released_too_early: list[str] = []

    async def record(step: int, places: list[JournalLocation]) -> None:
        await asyncio.sleep(0)
        released_too_early.extend(place.segment for place in places if place.segment in rig.worker.released)
        rig.worker.recorded[step] = places

    rig.worker.record_rollouts = record  # type: ignore[method-assign]
    await rig.run()
    rig.log.close()
    lines = await asyncio.to_thread(lambda: list(read_lines(rig.log.dir / "batches.jsonl")))
    groups = {line["step"]: {group["group"] for group in line["groups"]} for line in lines if line["groups"]}
    assert sorted(rig.worker.recorded) == sorted(groups) == [1, 2, 3, 4, 5, 6]
    for step, places in rig.worker.recorded.items():
        assert {place.offset for place in places} <= groups[step]  # a fake location has its group's number as offset
        assert len(places) == 1
    assert released_too_early == []


async def test_pinned_weights_are_released_after_every_evaluation(rig: Rig) -> None:
    await rig.run()
    assert rig.engine.pinned == [0, -1, 6, -1]


async def test_weights_that_fail_their_checksum_are_read_once_more_and_counted(rig: Rig) -> None:
    rig.engine.corrupt = 1
    assert await rig.run() == "done"
    lines = await asyncio.to_thread(lambda: list(read_lines(rig.log.dir / "metrics.jsonl")))
    assert sum(line.get("faults/corrupt_weights", 0) for line in lines) == 1


@pytest.fixture
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_versions, "FIRST_PAUSE_S", 0.0)


@pytest.mark.usefixtures("no_backoff")
async def test_weights_that_stay_corrupt_end_the_run(rig: Rig) -> None:
    rig.engine.corrupt = 100
    with pytest.raises(CorruptData, match="a flipped bit"):
        await rig.run()


@pytest.mark.usefixtures("no_backoff")
async def test_failed_loads_are_retried_without_holding_up_the_run(rig: Rig) -> None:
    rig.engine.failing = 3
    assert await rig.run() == "done"
    lines = await asyncio.to_thread(lambda: list(read_lines(rig.log.dir / "metrics.jsonl")))
    assert len(lines) == 6
    assert sum(line.get("faults/failed_loads", 0) for line in lines) == 3
    assert rig.runtime.restarted == []


@pytest.mark.usefixtures("no_backoff")
async def test_workers_send_no_requests_to_an_engine_with_a_torn_update_until_the_next_update(rig: Rig) -> None:
    rig.engine.torn = 1
    assert await rig.run() == "done"
    served = [fleet[0].serves for fleet in rig.worker.fleets]
    assert served[-1]
    assert False in served[served.index(True) :], "it served, stopped serving and served again"


@pytest.mark.usefixtures("no_backoff")
async def test_an_engine_that_fails_every_update_is_restarted(rig: Rig) -> None:
    rig.engine.failing = policy_versions.MAX_FAILURES
    assert await rig.run() == "done"
    assert rig.runtime.killed == rig.runtime.restarted == ["e0"]


async def test_a_run_continues_without_an_engine_that_keeps_dying(rig: Rig) -> None:
    rig.engines["e1"] = FakeEngine()
    rig.restarts = 0
    began = asyncio.Event()

    async def begin(order: GroupOrder) -> None:
        began.set()

    rig.worker.behave = begin
    run = asyncio.create_task(rig.run())
    await began.wait()
    rig.runtime.deaths.put_nowait(ComponentLost("e1", "was killed"))
    assert await run == "done"
    assert [member.name for member in rig.worker.fleets[-1]] == ["e0"]


async def test_losing_the_last_engine_ends_the_run(rig: Rig) -> None:
    rig.engines["e1"] = FakeEngine()
    rig.restarts = 0

    async def die(order: GroupOrder) -> None:
        if not order.heldout:
            for name in ("e1", "e0"):
                rig.runtime.deaths.put_nowait(ComponentLost(name, "was killed"))
            await asyncio.Event().wait()

    rig.worker.behave = die
    with pytest.raises(ComponentFailed, match=r"e0: was killed.*supervise\.restarts"):
        await rig.run()


async def test_a_joining_engine_serves_only_after_its_first_load_and_can_leave_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_registry, "ORDER_POLL_S", 0.001)
    rig.start_engine = lambda url: ("e1", "/e1", FakeEngine())
    both_seen = asyncio.Event()

    async def wait_for_both(order: GroupOrder) -> None:
        if order.group >= 8:
            await both_seen.wait()

    rig.worker.behave = wait_for_both
    run = asyncio.create_task(rig.run())
    await until((rig.log.dir / fleet_orders.STATE_FILE).exists)
    fleet_orders.send_order(rig.log.dir, fleet_orders.FleetOrder(add="http://elsewhere:8000"))
    await until(lambda: len(rig.worker.fleets[-1]) == 2 and rig.worker.fleets[-1][1].serves)
    fleet_orders.send_order(rig.log.dir, fleet_orders.FleetOrder(remove="e1"))
    await until(lambda: rig.runtime.retired)
    both_seen.set()
    assert await run == "done"
    first = next(fleet for fleet in rig.worker.fleets if len(fleet) == 2)
    assert not first[1].serves, "it joins before it has loaded anything"
    assert rig.runtime.retired == ["e1"]
    assert [member.name for member in rig.worker.fleets[-1]] == ["e0"]
    assert not (rig.log.dir / fleet_orders.STATE_FILE).exists()


async def test_an_exception_in_a_worker_ends_the_run_with_its_traceback(rig: Rig) -> None:
    async def fail(order: GroupOrder) -> None:
        raise ComponentFailed("worker-0", "boom", "its own traceback")

    rig.worker.behave = fail
    with pytest.raises(ComponentFailed, match="boom") as caught:
        await rig.run()
    assert caught.value.remote_traceback == "its own traceback"


async def test_a_stalled_run_ends_and_names_the_component_that_waits(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", stall_s=0.2)

    async def hang(order: GroupOrder) -> None:
        if not order.heldout:
            await asyncio.Event().wait()

    rig.worker.behave = hang
    with pytest.raises(Stalled, match=naming("0.2 s", "learner", "stall.txt")):
        await rig.run()
    rig.log.close()
    dump = await asyncio.to_thread((rig.log.dir / "logs" / "stall.txt").read_text)
    assert "learner" in dump
    assert "everybody sleeps" in dump


async def test_a_long_evaluation_that_makes_progress_is_not_a_stall(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", stall_s=0.3)

    async def take_long(order: GroupOrder) -> None:
        if order.heldout:
            await asyncio.sleep(0.15)  # five tasks, two at a time: in total longer than the stall limit

    rig.worker.behave = take_long
    assert await rig.run() == "done"
    rig.log.close()


async def test_an_evaluation_in_which_every_group_fails_has_no_score(rig: Rig) -> None:
    async def fail_heldout(order: GroupOrder) -> GroupReport | None:
        if not order.heldout:
            return None
        return GroupReport(order.group, "t", "failed", "no luck", failed_episodes=1)

    rig.worker.behave = fail_heldout
    await rig.run()
    assert rig.recorder.build_summary(0, "done").eval_first is None


async def show_heldout(order: GroupOrder) -> GroupReport | None:
    if not order.heldout:
        return None
    view = EpisodeView(f"t{order.task}", "24?", "4*6", 1.0, "stop", order.min_version)
    return GroupReport(order.group, "t", "finished", rewards=[1.0], episodes=1, views=[view] if order.show else [])


async def test_completions_of_evaluations_are_saved_by_version(rig: Rig) -> None:
    rig.worker.behave = show_heldout
    await rig.run()
    files = {file.name: list(read_lines(file)) for file in (rig.log.dir / "rollouts/evals").iterdir()}
    assert sorted(files) == ["step-000000.jsonl", "step-000006.jsonl"]
    assert [line["task_id"] for line in files["step-000006.jsonl"]] == [f"t{task}" for task in range(5)]


async def test_a_run_continues_if_completions_cannot_be_saved(rig: Rig) -> None:
    (rig.log.dir / "rollouts/evals").write_text("in the way")
    rig.worker.behave = show_heldout
    assert await rig.run() == "done"
    assert rig.recorder.build_summary(0, "done").eval_last == 1.0


async def test_journal_segments_are_released_once_no_checkpoint_needs_them(tmp_path: Path) -> None:
    """Ten groups to a segment, four to a batch, six batches."""
    rig = Rig(tmp_path / "run", replace(SETTINGS, checkpoint_every=3))
    assert await rig.run() == "done"
    rig.log.close()
    assert rig.worker.released == ["w-00000.journal", "w-00001.journal"], "the current segment stays"
    rig = Rig(tmp_path / "other", replace(SETTINGS, checkpoint_every=3))
    rig.refused = [3]
    assert await rig.run() == "done"
    rig.log.close()
    assert rig.saved == [6]


async def test_replayed_groups_are_trained_from_the_journal_marked_and_counted_separately(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", replace(SETTINGS, replay=ReplayConfig(fraction=0.5, max_age=2, times=1)))
    rig.worker.rewards = [0.0, 1.0]
    assert await rig.run() == "done"
    rig.log.close()
    batches = await asyncio.to_thread(lambda: list(read_lines(rig.log.dir / "batches.jsonl")))
    again = [[group["task_id"] for group in line["groups"] if group.get("replay")] for line in batches]
    assert [len(names) for names in again] == [0, 2, 2, 2, 2, 2]
    assert all(line["groups"][4:] == [group for group in line["groups"] if group.get("replay")] for line in batches)
    assert all("replay" not in group for line in batches for group in line["groups"][:4])
    own = [{group["task_id"] for group in line["groups"][:4]} for line in batches]
    assert all(set(again[step]) <= own[step - 1] for step in range(1, 6)), "at equal reward_std, the newest groups"
    assert sorted(rig.learner.replayed) == [1, 2, 3, 4, 5]
    metrics = await asyncio.to_thread(lambda: list(read_lines(rig.log.dir / "metrics.jsonl")))
    assert [line["replay/groups"] for line in metrics] == [0, 2, 2, 2, 2, 2]
    assert {line["lag/max"] for line in metrics} == {0}
    assert {line["replay/lag_mean"] for line in metrics[1:]} == {7}


async def test_groups_replayed_in_place_of_filtered_ones_keep_the_batch_size_and_are_counted(tmp_path: Path) -> None:
    replay = ReplayConfig(fraction=0.5, mode="fill", max_age=2, times=1)
    rig = Rig(tmp_path / "run", replace(SETTINGS, replay=replay))
    rig.worker.rewards = [0.0, 1.0]
    rig.worker.behave = every_third_filtered
    assert await rig.run() == "done"
    rig.log.close()
    batches = await asyncio.to_thread(lambda: list(read_lines(rig.log.dir / "batches.jsonl")))
    steps = [line["groups"] for line in batches if line["groups"]]
    assert [len(groups) for groups in steps] == [4] * 6
    filled = [sum(group.get("replay", False) for group in groups) for groups in steps]
    assert filled[0] == 0
    assert 0 < max(filled) <= 2
    metrics = await asyncio.to_thread(lambda: list(read_lines(rig.log.dir / "metrics.jsonl")))
    assert [line["replay/filled"] for line in metrics] == [line["replay/groups"] for line in metrics] == filled


async def every_third_filtered(order: GroupOrder) -> GroupReport | None:
    return GroupReport(order.group, f"t{order.task}", "filtered", rewards=[0.0]) if order.group % 3 == 2 else None


async def test_rerolls_are_marked_in_the_records_and_counted(tmp_path: Path) -> None:
    reroll = RerollConfig(max_times=1, after_steps=1)
    rig = Rig(tmp_path / "run", replace(SETTINGS, max_lag=0, reroll=reroll))
    rig.worker.rewards = [0.0]
    rig.worker.behave = every_third_filtered
    assert await rig.run() == "done"
    rig.log.close()
    batches = await asyncio.to_thread(lambda: list(read_lines(rig.log.dir / "batches.jsonl")))
    ends = [[*line["groups"], *line.get("settled", [])] for line in batches]
    again = [sum(visit.get("reroll", 0) for visit in visits) for visits in ends]
    assert again[0] == 0
    assert again[1] >= 4, "all attempts of the first batch failed"
    metrics = await asyncio.to_thread(lambda: list(read_lines(rig.log.dir / "metrics.jsonl")))
    assert [line["reroll/visits"] for line in metrics] == again[: len(metrics)]
    assert metrics[0]["reroll/waiting"] >= 4
    assert {line["reroll/dropped"] for line in metrics} == {0}


@pytest.mark.parametrize(
    ("max_age", "released"), [(1, ["w-00000.journal", "w-00001.journal"]), (3, ["w-00000.journal"]), (6, [])]
)
async def test_a_journal_segment_stays_while_one_of_its_groups_may_be_replayed(
    tmp_path: Path, max_age: int, released: list[str]
) -> None:
    """Ten groups to a segment, four to a batch, six batches; the fake learner rejects groups of released segments."""
    rig = Rig(tmp_path / "run", replace(SETTINGS, replay=ReplayConfig(fraction=0.25, max_age=max_age, times=9)))
    rig.worker.rewards = [0.0, 1.0]
    assert await rig.run() == "done"
    rig.log.close()
    assert sorted(rig.learner.replayed) == [1, 2, 3, 4, 5]
    assert rig.worker.released == released


async def test_the_governor_uses_the_metrics_of_the_learner(tmp_path: Path) -> None:
    governor = GovernorConfig(ess_min=0.5, kl_max=0.1, patience=5, min_lag=0)
    rig = Rig(tmp_path / "run", replace(SETTINGS, steps=12, governor=governor))
    rig.learner.metrics = {"offpolicy/ess": 0.2, "offpolicy/kl": 0.0}
    assert await rig.run() == "done"
    rig.log.close()
    metrics = await asyncio.to_thread(lambda: list(read_lines(rig.log.dir / "metrics.jsonl")))
    assert metrics[-1]["governor/max_lag"] == 0
    assert sum(line["governor/lowered"] for line in metrics) == 2
    assert sum(line["governor/raised"] for line in metrics) == 0


async def test_skipped_visits_are_counted_in_metrics_and_summary(tmp_path: Path) -> None:
    difficulty = DifficultyConfig(easy_above=1.0, hard_below=None, rest_epochs=1)
    rig = Rig(tmp_path / "run", replace(SETTINGS, steps=None, epochs=3, max_lag=0, difficulty=difficulty))
    assert await rig.run() == "done"
    rig.log.close()
    summary = rig.recorder.build_summary(0, "done")
    batches = await asyncio.to_thread(lambda: list(read_lines(rig.log.dir / "batches.jsonl")))
    trained = sum(len(line["groups"]) for line in batches)
    assert summary.groups_skipped == 30 - trained > 0


@pytest.mark.parametrize(
    ("outcome", "rewards", "reward", "reward_std", "best"),
    [
        ("finished", [0.0, 1.0], 0.5, 0.5, 1.0),
        ("filtered", [1.0, 1.0], 1.0, 0.0, 1.0),
        ("failed", [1.0], None, 0.0, None),
        ("filtered", [], None, 0.0, None),
    ],
)
def test_the_group_closed_event_carries_mean_std_and_maximum_of_the_rewards_unless_the_group_failed(
    outcome: Outcome, rewards: list[float], reward: float | None, reward_std: float, best: float | None
) -> None:
    event = group_closed_event(GroupReport(3, "t", outcome, rewards=rewards, oldest=2))
    assert event == GroupClosed(3, outcome, oldest=2, reward=reward, reward_std=reward_std, best=best)


async def test_failing_groups_end_the_run_when_the_failure_budget_is_spent(rig: Rig) -> None:
    async def fail(order: GroupOrder) -> GroupReport | None:
        return None if order.heldout else GroupReport(order.group, "t", "failed", "broken", failures=[BROKEN_REWARD])

    rig.worker.behave = fail
    with pytest.raises(LimitReached, match=naming("3 groups", "pacing.max_failed", "reward broken", "raised")):
        await rig.run()
    summary = rig.recorder.build_summary(4, "failed")
    assert [(each.source, each.reason) for each in summary.failures] == [("reward broken", "raised")]
    assert summary.failures[0].count >= 3 * 8, "even though no step was taken"
    assert rig.saved == [], "there is nothing to save before the first step"


async def test_a_run_that_ends_because_groups_fail_saves_the_steps_it_has_trained(rig: Rig) -> None:
    async def fail_later(order: GroupOrder) -> GroupReport | None:
        is_late = rig.learner.version >= 2 and not order.heldout
        return GroupReport(order.group, "t", "failed", "broken", failures=[BROKEN_REWARD]) if is_late else None

    rig.worker.behave = fail_later
    with pytest.raises(LimitReached):
        await rig.run()
    assert rig.saved
    assert rig.saved[-1] == rig.learner.version >= 2


# ------------------------------------------------------------------------------------------------------ a data producer


class FakeProducer:
    """Journals rounds of six tasks and calls `before` ahead of each."""

    def __init__(self, run: Path, before: Callable[[int], Awaitable[None]]) -> None:
        self.tasks = StreamedTasks(run / "journal" / "tasks.jsonl")
        self.before = before
        self.fleets: list[list[FleetMember]] = []

    async def produce(self, number: int, step: int) -> dict[str, Aggregate]:
        await self.before(number)
        self.tasks.append_round(Round(number, 6), [Task(f"{number}.{index}", "?") for index in range(6)])
        return {"producer/rounds": aggregated("sum", [(1.0, 1.0)])}

    async def fleet(self, members: list[FleetMember]) -> None:
        self.fleets.append(members)


def produced(tmp_path: Path, before: Callable[[int], Awaitable[None]], stall_s: float = 20.0) -> Rig:
    rig = Rig(tmp_path, replace(SETTINGS, streamed=True, tasks=1000, eval_enabled=False), stall_s)
    rig.producer = FakeProducer(tmp_path, before)
    return rig


async def test_a_producer_that_hangs_ends_the_run_as_stalled_with_its_round(tmp_path: Path) -> None:
    async def hang(number: int) -> None:
        if number == 1:
            await asyncio.Event().wait()

    with pytest.raises(Stalled, match=naming("producer", "round 1", "stall.txt")):
        await produced(tmp_path, hang, stall_s=0.2).run()


async def test_a_producer_that_fails_ends_the_run_after_a_checkpoint_of_the_steps_so_far(tmp_path: Path) -> None:
    async def fail(number: int) -> None:
        if number == 1:
            raise ValueError("no more questions")

    rig = produced(tmp_path, fail)
    with pytest.raises(ComponentFailed, match=naming("producer", "round 1", "no more questions")) as caught:
        await rig.run()
    assert "in fail" in caught.value.remote_traceback
    assert rig.saved == [1], "round 0 fills one batch and half of the next"


async def test_a_producer_that_dies_is_restarted_and_asked_for_the_same_round(tmp_path: Path) -> None:
    asked: list[int] = []

    async def die_once(number: int) -> None:
        asked.append(number)
        if asked == [0, 1]:
            rig.runtime.deaths.put_nowait(ComponentLost("producer", "was killed by SIGKILL"))
            raise ComponentLost("producer", "closed its connection")

    rig = produced(tmp_path, die_once)
    assert await rig.run() == "done"
    assert asked == [0, 1, 1, 2, 3]
    assert rig.runtime.restarted == ["producer"]
    assert isinstance(rig.producer, FakeProducer)
    assert rig.producer.fleets[-1][0].version > 0, "it knows what the engines serve"


# -------------------------------------------------------------------------------------------------- components that die


async def test_a_dead_worker_is_restarted_and_its_groups_are_repeated_from_recorded_turns(rig: Rig) -> None:
    orders: list[GroupOrder] = []

    async def die_once(order: GroupOrder) -> None:
        orders.append(order)
        if order.group == 5 and not order.recorded:
            rig.runtime.deaths.put_nowait(ComponentLost("worker-0", "was killed by SIGKILL"))
            raise ComponentLost("worker-0", "closed its connection")

    rig.worker.behave = die_once
    assert await rig.run() == "done"
    assert rig.runtime.restarted == ["worker-0"]
    assert [order.recorded for order in orders if order.group == 5 and not order.heldout] == [False, True]
    lines = await asyncio.to_thread(lambda: list(read_lines(rig.log.dir / "batches.jsonl")))
    assert sum(len(line["groups"]) for line in lines) == lines[-1]["accounted"] == 24


async def test_a_dead_engine_is_restarted_and_its_evaluation_is_repeated(rig: Rig) -> None:
    async def die_in_the_evaluation(order: GroupOrder) -> None:
        if order.heldout and order.group == 3 and not rig.runtime.restarted:
            rig.runtime.deaths.put_nowait(ComponentLost("e0", "was killed by SIGKILL"))
            await rig.runtime.restart_done.wait()

    rig.worker.behave = die_in_the_evaluation
    assert await rig.run() == "done"
    assert rig.runtime.restarted == ["e0"]
    assert rig.engine.pinned == [0, -1, 0, -1, 6, -1]


async def test_a_component_that_keeps_dying_ends_the_run_with_its_own_error(rig: Rig) -> None:
    async def die(order: GroupOrder) -> None:
        rig.runtime.deaths.put_nowait(ComponentLost("worker-0", "exited with code 7", "its last words"))
        raise ComponentLost("worker-0", "closed its connection")

    rig.restarts = 0
    rig.worker.behave = die
    with pytest.raises(ComponentFailed, match=r"worker-0: exited with code 7.*supervise\.restarts") as caught:
        await rig.run()
    assert caught.value.remote_traceback == "its last words"


async def test_a_dead_learner_ends_the_run_at_once(rig: Rig) -> None:
    async def die(version: int) -> StepReport:
        rig.runtime.deaths.put_nowait(ComponentLost("learner", "was killed by SIGKILL", "its last words"))
        raise ComponentLost("learner", "closed its connection")

    rig.learner.step = die  # type: ignore[method-assign]
    with pytest.raises(ComponentFailed, match=r"learner: was killed by SIGKILL.*resume") as caught:
        await rig.run()
    assert caught.value.remote_traceback == "its last words"
    assert rig.saved == []


async def test_a_component_that_does_not_answer_pings_is_killed_and_restarted(rig: Rig) -> None:
    async def stop_answering(order: GroupOrder) -> None:
        if order.group == 5 and not order.heldout and not rig.runtime.killed:
            rig.runtime.silent.add("worker-0")
            await rig.runtime.restart_done.wait()
            raise ComponentLost("worker-0", "closed its connection")

    rig.worker.behave = stop_answering
    assert await rig.run() == "done"
    assert rig.runtime.killed == rig.runtime.restarted == ["worker-0"]


async def test_a_component_that_lost_its_connection_but_not_its_process_is_killed_and_restarted(rig: Rig) -> None:
    async def lose_connection(order: GroupOrder) -> None:
        if order.group == 5 and not order.heldout and not rig.runtime.killed:
            rig.runtime.silent.add("worker-0")
            raise ComponentLost("worker-0", "closed its connection")

    rig.worker.behave = lose_connection
    assert await rig.run() == "done"
    assert rig.runtime.killed == rig.runtime.restarted == ["worker-0"]


async def test_a_restart_that_cannot_start_a_process_is_retried(rig: Rig) -> None:
    async def die_once(order: GroupOrder) -> None:
        if order.group == 5 and not order.recorded:
            rig.runtime.refusals = 1
            rig.runtime.deaths.put_nowait(ComponentLost("worker-0", "was killed by SIGKILL"))
            raise ComponentLost("worker-0", "closed its connection")

    rig.worker.behave = die_once
    assert await rig.run() == "done"
    assert (rig.runtime.refusals, rig.runtime.restarted) == (0, ["worker-0"])


async def test_an_engine_in_a_long_evaluation_is_not_taken_for_silent(rig: Rig) -> None:
    async def take_long(order: GroupOrder) -> None:
        if order.heldout:
            for _ in range(10):
                rig.engine.turns += 1
                await asyncio.sleep(0.01)

    rig.worker.behave = take_long
    rig.engine.running = 1
    assert await rig.run() == "done"
    assert rig.runtime.killed == []


async def test_a_checkpoint_that_cannot_be_written_ends_the_run_only_if_it_is_the_last(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", replace(SETTINGS, checkpoint_every=2))
    rig.refused = [2]
    assert await rig.run() == "done"
    rig.log.close()
    assert rig.saved == [4, 6]
    rig = Rig(tmp_path / "other", replace(SETTINGS, checkpoint_every=2))
    rig.refused = [6]
    with pytest.raises(NotSaved, match="no room"):
        await rig.run()
    rig.log.close()
