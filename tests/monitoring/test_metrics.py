import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import outpace
from outpace.errors import BadInput
from outpace.monitoring import metrics as records
from outpace.monitoring.metric_table import DECLARED, Metric, find
from outpace.monitoring.metrics import MAX_VALUES, UNDECLARED_METRICS, Meter, percentile, result
from outpace.runtime import wire
from outpace.types import Aggregate, ChunkReport, EngineStats, GroupReport, LoadReport, Manifest, StepReport, TensorSpec
from support import naming

finite_floats = st.floats(min_value=-1e6, max_value=1e6)
weights = st.floats(min_value=0.01, max_value=1e3)


@given(st.lists(st.tuples(finite_floats, weights), min_size=1, max_size=30))
def test_means_and_standard_deviations_match_numpy(pairs: list[tuple[float, float]]) -> None:
    meter = Meter()
    for value, weight in pairs:
        meter.add("reward/mean", value, weight)
        meter.add("reward/std", value, weight)
    values, weight_array = np.array(pairs).T
    mean = np.average(values, weights=weight_array)
    std = math.sqrt(np.average((values - mean) ** 2, weights=weight_array))
    metrics = meter.flush()
    assert metrics["reward/mean"] == pytest.approx(mean, rel=1e-9, abs=1e-6)
    assert metrics["reward/std"] == pytest.approx(std, rel=1e-6, abs=1e-4)


@given(st.dictionaries(st.integers(0, 50), st.integers(1, 40), min_size=1))
def test_a_percentile_of_counts_matches_the_expanded_values(counts: dict[int, int]) -> None:
    expanded = np.repeat(list(counts), list(counts.values()))
    assert percentile(counts, 0.95) == np.quantile(expanded, 0.95, method="inverted_cdf")


def test_counts_give_mean_percentile_and_maximum_per_token() -> None:
    meter = Meter()
    meter.add_counts("lag", {0: 90, 1: 8})
    meter.add_counts("lag", {4: 2})
    metrics = meter.flush()
    assert metrics["lag/mean"] == pytest.approx((8 + 8) / 100)
    assert metrics["lag/p95"] == 1
    assert metrics["lag/max"] == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_dropped_and_counted(bad: float) -> None:
    meter = Meter()
    meter.add("reward/mean", 1.0)
    meter.add("reward/mean", bad)
    meter.add("reward/mean", 2.0, weight=bad)
    meter.put("entropy", bad)
    metrics = meter.flush()
    assert metrics["reward/mean"] == 1.0
    assert metrics["faults/nan_metrics"] == 3
    assert "entropy" not in metrics


def test_a_sum_that_overflows_is_dropped_and_counted() -> None:
    meter = Meter()
    for _ in range(2):
        meter.add("time/train_s", 1.5e308)
    metrics = meter.flush()
    assert metrics["faults/nan_metrics"] == 1
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_step_starts_empty_and_only_declared_sums_are_zero() -> None:
    meter = Meter()
    meter.add("reward/mean", 1.0)
    meter.put("efficiency", 0.5)
    meter.flush()
    metrics = meter.flush()
    assert metrics["sync/pause_s"] == 0.0
    assert "reward/mean" not in metrics
    assert "efficiency" not in metrics
    assert set(metrics.values()) == {0.0}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("reward/mean", "mean"),
        ("reward/correct", "mean"),
        ("reward/correct/std", "std"),
        ("reward/graders/math.py:correct", "mean"),
        ("offpolicy/ratio_max", "max"),
        ("offpolicy/ratio_below_0.5", "ratio"),
        ("episode/seconds/p95", "p95"),
        ("episode/score", "mean"),
        ("lag/tokens_3", "sum"),
        ("faults/engine_lost", "sum"),
        ("eval/pass@4/stderr", "last"),
        ("eval/hard/pass@4", "last"),
    ],
)
def test_a_name_has_the_rule_of_its_exact_declaration_or_else_of_its_closest_family(name: str, rule: str) -> None:
    declared = find(name)
    assert declared is not None
    assert declared.rule == rule


RULE_REFERENCES: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda values, weights: np.sum(values * weights),
    "mean": lambda values, weights: np.average(values, weights=weights),
    "std": lambda values, weights: np.sqrt(np.cov(values, aweights=weights, ddof=0)),
    "min": lambda values, weights: values.min(),
    "max": lambda values, weights: values.max(),
    "last": lambda values, weights: values[-1],
    "ratio": lambda values, weights: values.sum() / weights.sum(),
    "p10": lambda values, weights: np.quantile(values, 0.1, weights=weights, method="inverted_cdf"),
    "p99.5": lambda values, weights: np.quantile(values, 0.995, weights=weights, method="inverted_cdf"),
}


@given(
    st.lists(st.tuples(st.integers(-1000, 1000), st.integers(1, 9), st.booleans()), min_size=1, max_size=40),
    st.sampled_from(list(RULE_REFERENCES)),
)
def test_a_rule_gives_the_same_however_the_values_are_divided_among_workers(
    entries: list[tuple[int, int, bool]], rule: str
) -> None:
    DECLARED["env/x"] = Metric("env/x", rule)
    worker, controller = Meter(), Meter()
    for value, weight, reports in entries:
        worker.add("env/x", value, weight)
        if reports:
            controller.merge(wire.decode(wire.encode(worker.take()), dict[str, Aggregate]))
    controller.merge(worker.take())
    DECLARED.clear()
    values, shares = (np.array(column, dtype=float) for column in list(zip(*entries, strict=True))[:2])
    assert controller.flush()["env/x"] == pytest.approx(RULE_REFERENCES[rule](values, shares), rel=1e-9, abs=1e-6)


def test_a_percentile_of_very_many_values_keeps_a_bounded_number_of_them() -> None:
    values = np.random.default_rng(0).permutation(40_000)
    meter = Meter()
    for value in values.tolist():
        meter.add("episode/seconds/p95", value)
    (kept,) = meter.take().values()
    assert len(kept.values) <= MAX_VALUES
    assert sum(weight for _, weight in kept.values) == 40_000
    assert result(kept) == pytest.approx(38_000, abs=20)


@pytest.mark.parametrize("bad", [("env/score", "median"), ("env/score", "p100"), ("step", "mean"), ("kl", "max")])
def test_a_declaration_with_an_unknown_rule_or_a_name_that_is_taken_is_refused(bad: tuple[str, str]) -> None:
    with pytest.raises(BadInput, match=naming(bad[0])):
        outpace.metric(*bad)
    assert not DECLARED


def test_a_declared_family_or_name_takes_precedence_over_the_family_of_episode_values(own_metrics: None) -> None:
    outpace.metric("episode/score", rule="min")
    outpace.metric("env/<room>/score", rule="sum")
    meter = Meter()
    for value in (2.0, 3.0):
        meter.add("episode/score", value)
        meter.add("episode/other", value)
        meter.add("env/hall/score", value)
    metrics = meter.flush()
    assert (metrics["episode/score"], metrics["episode/other"], metrics["env/hall/score"]) == (2, 2.5, 5)
    assert "env/<room>/score" not in metrics


def test_a_declared_family_does_not_change_the_rules_of_built_in_metrics(own_metrics: None) -> None:
    outpace.metric("<room>/<value>", rule="max")
    outpace.metric("episode/<name>", rule="max")
    meter = Meter()
    for _ in range(3):
        meter.add("groups/finished", 1)
        meter.add("episode/score", 1)
    for value in (1.0, 2.0, 9.0):
        meter.add("episode/seconds/p50", value)
    metrics = meter.flush()
    assert (metrics["groups/finished"], metrics["episode/seconds/p50"], metrics["episode/score"]) == (3, 2, 1)


def test_an_undeclared_metric_is_an_error_in_tests_and_an_average_that_is_reported_once_in_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for report in (lambda meter: meter.add("tool/count", 1.0), lambda meter: meter.put("tool/count", 1.0)):
        with pytest.raises(ValueError, match="tool/count"):
            report(Meter())
    monkeypatch.delenv(UNDECLARED_METRICS)
    reported: list[str] = []
    meter = Meter(reported.append)
    for _ in range(2):
        meter.add("tool/count", 1.0)
        meter.add("tool/count", 4.0)
        assert meter.flush()["tool/count"] == 2.5
    assert reported == ["tool/count"]


def test_a_put_value_replaces_added_values() -> None:
    meter = Meter()
    meter.add("offpolicy/kl", 5.0, 100)
    meter.put("offpolicy/kl", 1.0)
    meter.add("offpolicy/kl", 7.0, 100)
    assert meter.flush()["offpolicy/kl"] == 1.0


def group(outcome: str, rewards: list[float], tokens: int) -> GroupReport:
    return GroupReport(
        group=0,
        task_id="t",
        outcome=outcome,  # type: ignore[arg-type]
        rewards=rewards,
        episodes=len(rewards),
        tokens_sampled=tokens,
        truncated=1,
        seconds=2.0,
        measured={"episode/turns": Aggregate("mean", weight=2.0, total=6.0)},
    )


def test_group_reports_become_reward_count_and_waste_metrics() -> None:
    meter = Meter()
    for report in (group("finished", [0.0, 1.0], 20), group("filtered", [1.0, 1.0], 30), group("failed", [], 50)):
        records.record_group(meter, report)
    metrics = meter.flush()
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/std"] == pytest.approx(np.std([0, 1, 1, 1]))
    assert (metrics["groups/finished"], metrics["groups/filtered"], metrics["groups/failed"]) == (1, 1, 1)
    assert metrics["waste/tokens"] == 50
    assert metrics["waste/fraction"] == 0.5
    assert metrics["waste/filtered_tokens"] == 30
    assert metrics["completions/mean_length"] == 12.5
    assert metrics["completions/clipped_ratio"] == 0.5
    assert metrics["episode/turns"] == 3.0


def test_a_discarded_group_counts_as_sampled_and_as_waste() -> None:
    meter = Meter()
    records.record_discarded_group(meter, group("finished", [1.0], 70))
    metrics = meter.flush()
    assert metrics["waste/fraction"] == 1.0
    assert metrics["throughput/sampled_tokens"] == metrics["waste/tokens"] == 70


def test_chunks_of_a_batch_add_up_to_the_metrics_of_one_chunk() -> None:
    halves = Meter()
    records.record_chunk(halves, ChunkReport(3, 1, 0.0, lag_counts={0: 1, 2: 2}))
    records.record_chunk(halves, ChunkReport(7, 1, 0.0, lag_counts={2: 7}))
    whole = Meter()
    records.record_chunk(whole, ChunkReport(10, 2, 0.0, lag_counts={0: 1, 2: 9}))
    expected = whole.flush()
    assert halves.flush() == pytest.approx(expected)
    assert expected["lag/mean"] == pytest.approx(1.8)
    assert expected["throughput/trained_tokens"] == 10


def test_the_lag_of_replayed_groups_is_reported_separately() -> None:
    meter = Meter()
    records.record_chunk(meter, ChunkReport(4, 1, 0.0, lag_counts={1: 4}))
    records.record_chunk(meter, ChunkReport(4, 1, 0.0, replay_lag_counts={5: 1, 9: 3}))
    records.record_scheduling(meter, max_lag=2, resting=6, replayed=3, filled=1)
    metrics = meter.flush()
    assert (metrics["lag/mean"], metrics["lag/max"]) == (1, 1)
    assert metrics["replay/lag_mean"] == 8
    assert metrics["throughput/trained_tokens"] == 8
    assert (metrics["governor/max_lag"], metrics["difficulty/resting"]) == (2, 6)
    assert (metrics["replay/groups"], metrics["replay/filled"]) == (3, 1)


def test_step_publish_load_engine_and_queue_reports_use_the_documented_names() -> None:
    meter = Meter()
    records.record_step(meter, StepReport(3, math.nan, 10, 0.5, 1e-3, skipped=True, metrics={"entropy": 2.0}))
    records.record_publish(meter, Manifest("i", 3, "p", [TensorSpec("w", "float32", [2], 0, 8, 0)], seconds=0.25))
    records.record_load(meter, LoadReport(3, pause_s=0.01, seconds=0.5, bytes=8))
    records.record_load(meter, LoadReport(3, pause_s=0.02, seconds=0.5, bytes=8))
    records.record_engines(meter, [EngineStats(3, 4, 1, 0, 0, 0, 0.0, 0.0, 0.0, 8, 1)] * 2)
    records.record_queue(meter, running=5, finished=2)
    metrics = meter.flush()
    assert "loss/policy" not in metrics
    assert metrics["faults/skipped_steps"] == metrics["faults/nan_metrics"] == 1
    assert metrics["entropy"] == 2.0
    assert metrics["sync/publish_s"] == 0.25
    assert metrics["sync/pause_s"] == pytest.approx(0.03)
    assert metrics["sync/bytes"] == 16
    assert (metrics["queue/running"], metrics["queue/outstanding"], metrics["queue/waiting"]) == (5, 7, 2)
    assert metrics["fleet/engines"] == 2
