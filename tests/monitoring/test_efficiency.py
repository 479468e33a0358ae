import pytest

from outpace.hardware.cores import ComputeUnits
from outpace.monitoring.efficiency import EfficiencyTracker
from outpace.types import EngineStats, LearnerStats


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def engine(busy_s: float, tokens: int, eval_busy_s: float = 0.0) -> EngineStats:
    return EngineStats(0, 0, 0, tokens, 0, 0, busy_s, busy_s, eval_busy_s, 8, 1)


def learner(busy_s: float, tokens: int, core_s: float | None = None) -> LearnerStats:
    return LearnerStats(0, busy_s, busy_s if core_s is None else core_s, tokens, 2, 10)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tracker(clock: Clock) -> EfficiencyTracker:
    return EfficiencyTracker(ComputeUnits(2), clock)


def test_an_engine_and_a_learner_that_are_always_busy_reach_full_efficiency(
    tracker: EfficiencyTracker, clock: Clock
) -> None:
    clock.now += 10
    tracker.engines({"e": engine(10.0, 1000)})
    tracker.learner(learner(10.0, 900))
    result = tracker.run_total()
    assert result.efficiency == pytest.approx(1.0)
    assert result.ideal_s == pytest.approx(10.0)
    assert result.engine_wait_s == result.trainer_wait_s == 0.0


def test_an_engine_and_a_learner_that_take_turns_reach_half_efficiency(
    tracker: EfficiencyTracker, clock: Clock
) -> None:
    clock.now += 10
    tracker.engines({"e": engine(6.0, 1000)})
    tracker.learner(learner(4.0, 900))
    result = tracker.run_total()
    assert result.efficiency == pytest.approx(0.5)
    assert (result.engine_wait_s, result.trainer_wait_s) == pytest.approx((4.0, 6.0))
    assert (result.engine_share, result.learner_share) == pytest.approx((0.6, 0.4))


def test_wasted_tokens_are_not_useful_work(tracker: EfficiencyTracker, clock: Clock) -> None:
    clock.now += 10
    tracker.engines({"e": engine(10.0, 1000)})
    tracker.wasted(250)
    assert tracker.run_total().ideal_s == pytest.approx(7.5 / 2)


def test_evaluation_is_neither_useful_work_nor_waiting(tracker: EfficiencyTracker, clock: Clock) -> None:
    clock.now += 10
    tracker.engines({"e": engine(4.0, 1000, eval_busy_s=5.0)})
    result = tracker.run_total()
    assert result.ideal_s == pytest.approx(2.0)
    assert result.eval_share == pytest.approx(0.5)
    assert result.engine_wait_s == pytest.approx(1.0)


def test_threads_that_wait_for_each_other_do_not_count_as_work(tracker: EfficiencyTracker, clock: Clock) -> None:
    clock.now += 10
    tracker.learner(learner(10.0, 5, core_s=13.0))
    assert tracker.run_total().efficiency == pytest.approx(0.65)
    assert tracker.run_total().trainer_wait_s == 0.0


def test_time_in_which_engine_and_learner_are_both_busy_on_one_gpu_counts_once(clock: Clock) -> None:
    tracker = EfficiencyTracker(ComputeUnits(1, are_gpus=True), clock)
    clock.now += 10
    tracker.engines({"e": engine(5.0, 1000)})
    tracker.learner(learner(2.0, 900))
    assert tracker.run_total().efficiency == pytest.approx(0.7)
    tracker.learner(learner(8.0, 900))
    assert tracker.run_total().efficiency == pytest.approx(1.0)


def test_an_engine_of_two_gpus_counts_twice(clock: Clock) -> None:
    tracker = EfficiencyTracker(ComputeUnits(3, are_gpus=True, per_engine=2), clock)
    clock.now += 10
    tracker.engines({"e": engine(6.0, 1000)})
    tracker.learner(learner(9.0, 900))
    assert tracker.run_total().efficiency == pytest.approx(0.7)


def test_a_learner_of_two_processes_counts_twice(clock: Clock) -> None:
    tracker = EfficiencyTracker(ComputeUnits(3, are_gpus=True, per_learner=2), clock)
    clock.now += 10
    tracker.engines({"e": engine(9.0, 1000)})
    tracker.learner(learner(6.0, 900))
    assert tracker.run_total().efficiency == pytest.approx(0.7)


def test_on_unknown_gpus_no_efficiency_is_reported(clock: Clock) -> None:
    tracker = EfficiencyTracker(None, clock)
    clock.now += 10
    tracker.engines({"e": engine(10.0, 1000)})
    tracker.learner(learner(10.0, 900))
    assert tracker.run_total().efficiency is None
    assert "efficiency" not in tracker.run_total().metrics()


def test_a_lap_counts_only_its_own_time(tracker: EfficiencyTracker, clock: Clock) -> None:
    clock.now += 10
    tracker.engines({"e": engine(8.0, 1000)})
    tracker.learner(learner(2.0, 100))
    tracker.lap()
    clock.now += 5
    tracker.engines({"e": engine(9.0, 1500)})
    tracker.learner(learner(6.0, 350))
    lap = tracker.lap()
    assert (lap.seconds, lap.engine_share, lap.learner_share) == pytest.approx((5.0, 0.2, 0.8))
    assert lap.metrics()["throughput/sampled_tok_s"] == pytest.approx(100.0)
    assert lap.metrics()["throughput/trained_tok_s"] == pytest.approx(50.0)
    assert tracker.run_total().seconds == pytest.approx(15.0)


def test_work_of_an_engine_before_its_restart_still_counts(tracker: EfficiencyTracker, clock: Clock) -> None:
    clock.now += 10
    tracker.engines({"e": engine(6.0, 1000)})
    tracker.engines({"e": engine(1.0, 200)})
    result = tracker.run_total()
    assert result.sampled_tokens == 1200
    assert result.engine_share == pytest.approx(0.7)


def test_zero_elapsed_time_does_not_divide_by_zero(tracker: EfficiencyTracker) -> None:
    assert tracker.lap().efficiency == 0.0
