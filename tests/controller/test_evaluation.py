from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.config.sections import EvalConfig
from outpace.controller.evaluation import Evaluation, Evaluator, pass_at_k, score_set
from outpace.errors import ComponentFailed
from outpace.types import EpisodeView, GroupOrder, GroupReport

LIMITED = EvalConfig(max_running=4)


def graded(order: GroupOrder, *rewards: float, **changes: Any) -> GroupReport:
    values = {"rewards": list(rewards), "episodes": len(rewards), "failed_episodes": 1 - len(rewards)} | changes
    return GroupReport(order.group, f"t{order.task}", "finished" if rewards else "failed", **values)


async def evaluate(rewards: dict[str, Sequence[Sequence[float]]], **settings: Any) -> Evaluation:
    """Evaluate with these rewards by set, task and attempt. An attempt without a reward fails."""

    async def run_attempt(order: GroupOrder) -> GroupReport:
        task = rewards[order.heldout_set][order.task]
        return graded(order, *task[order.first_attempt : order.first_attempt + 1])

    counts = {name: len(tasks) for name, tasks in rewards.items()}
    return await Evaluator(counts, EvalConfig(**settings)).run(7, run_attempt)


# ------------------------------------------------------------------------------------------------------- concurrency


async def test_ten_thousand_tasks_in_three_sets_never_need_more_coroutines_than_max_running() -> None:
    running = most = most_coroutines = 0
    taken: Counter[tuple[str, int, int]] = Counter()
    before = len(asyncio.all_tasks())

    async def run_attempt(order: GroupOrder) -> GroupReport:
        nonlocal running, most, most_coroutines
        taken[order.heldout_set, order.task, order.first_attempt] += order.size
        running += order.size
        assert running <= 8
        most, most_coroutines = max(most, running), max(most_coroutines, len(asyncio.all_tasks()) - before)
        for _ in range(order.task % 3):  # so that attempts end in another order than they start
            await asyncio.sleep(0)
        running -= order.size
        return graded(order, 1.0)

    counts = {"": 6000, "a": 3000, "b": 1000}
    evaluation = await Evaluator(counts, EvalConfig(max_running=8, attempts=2)).run(3, run_attempt)
    assert (most, most_coroutines) == (8, 8)
    assert set(taken) == {
        (name, task, attempt) for name, count in counts.items() for task in range(count) for attempt in range(2)
    }
    assert set(taken.values()) == {1}, "each attempt once"
    assert {"": evaluation.count, **{name: scores.count for name, scores in evaluation.sets.items()}} == counts


async def test_fewer_attempts_than_max_running_need_fewer_coroutines() -> None:
    before = len(asyncio.all_tasks())
    coroutines = []

    async def run_attempt(order: GroupOrder) -> GroupReport:
        coroutines.append(len(asyncio.all_tasks()) - before)
        return graded(order, 1.0)

    await Evaluator({"": 1, "a": 1}, EvalConfig(max_running=100)).run(0, run_attempt)
    assert max(coroutines) == 2


async def test_a_component_failure_ends_the_evaluation_and_leaves_nothing_running() -> None:
    tasks_before = asyncio.all_tasks()

    async def run_attempt(order: GroupOrder) -> GroupReport:
        if order.task == 2:
            raise ComponentFailed("worker-0", "died")
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(ComponentFailed):
        await Evaluator({"": 20}, LIMITED).run(0, run_attempt)
    assert asyncio.all_tasks() == tasks_before


async def test_the_seed_of_an_attempt_does_not_depend_on_other_sets_or_on_the_number_of_attempts() -> None:
    async def draws_of(counts: dict[str, int], attempts: int) -> dict[tuple[str, int, int], int]:
        drawn: dict[tuple[str, int, int], int] = {}

        async def run_attempt(order: GroupOrder) -> GroupReport:
            seeded_by = order.group if order.draw is None else order.draw
            drawn[order.heldout_set, order.task, order.first_attempt] = seeded_by
            return graded(order, 1.0)

        await Evaluator(counts, EvalConfig(attempts=attempts)).run(0, run_attempt)
        return drawn

    few, many = await draws_of({"b": 3}, 1), await draws_of({"": 4, "a": 5, "b": 3}, 4)
    assert few.items() <= many.items()


# ------------------------------------------------------------------------------------------------------------ scores


@given(st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_attempts_with_a_solved_one(data: st.DataObject) -> None:
    attempts = data.draw(st.lists(st.booleans(), min_size=1, max_size=9))
    k = data.draw(st.integers(1, len(attempts)))
    choices = [any(chosen) for chosen in combinations(attempts, k)]
    assert pass_at_k(len(attempts), sum(attempts), k) == pytest.approx(sum(choices) / len(choices))


@pytest.mark.parametrize(("n", "c", "k"), [(10, 3, 5), (200, 1, 100), (256, 20, 64), (64, 64, 1), (64, 0, 64)])
def test_pass_at_k_equals_the_closed_formula(n: int, c: int, k: int) -> None:
    """In the product form of the paper that introduced it: 1 - Π (1 - k / i) for i from n - c + 1 to n."""
    failing = math.prod(1 - k / i for i in range(n - c + 1, n + 1)) if n - c >= k else 0.0
    assert pass_at_k(n, c, k) == pytest.approx(1 - failing, abs=1e-12)


async def test_an_evaluation_reports_pass_at_k_with_its_standard_error_over_tasks() -> None:
    solved = [0, 1, 2, 4]
    rewards = [[1.0] * c + [0.0] * (4 - c) for c in solved]
    metrics = (await evaluate({"": rewards}, attempts=4, k=[1, 2, 4])).metrics()
    for k in (1, 2, 4):
        values = [1 - math.comb(4 - c, k) / math.comb(4, k) for c in solved]
        mean = sum(values) / 4
        assert metrics[f"eval/pass@{k}"] == pytest.approx(mean)
        stderr = math.sqrt(sum((value - mean) ** 2 for value in values) / 3 / 4)
        assert metrics[f"eval/pass@{k}/stderr"] == pytest.approx(stderr)


async def test_a_task_counts_with_the_mean_of_its_attempts_and_the_standard_error_is_over_tasks() -> None:
    evaluation = await evaluate({"": [[0.0, 1.0], [1.0, 1.0], [0.5, 0.0]]}, attempts=2)
    means = [0.5, 1.0, 0.25]
    mean = sum(means) / 3
    assert evaluation.reward == pytest.approx(mean)
    assert evaluation.stderr == pytest.approx(math.sqrt(sum((each - mean) ** 2 for each in means) / 2 / 3))
    assert (evaluation.count, evaluation.failed) == (3, 0)


async def test_failed_attempts_have_no_score_and_pass_at_k_needs_k_scored_attempts() -> None:
    evaluation = await evaluate({"": [[1.0], [], [0.0, 1.0]]}, attempts=2, k=[1, 2])
    assert (evaluation.count, evaluation.failed, evaluation.reward) == (2, 3, 0.75)
    assert evaluation.pass_at[1].mean == 0.75
    assert (evaluation.pass_at[2].mean, evaluation.pass_at[2].stderr) == (1.0, None), "one task has two attempts"
    nothing = await evaluate({"": [[], []]}, attempts=2, k=[1, 2])
    assert (nothing.reward, nothing.pass_at, nothing.percentiles, nothing.result) == (None, {}, {}, None)


async def test_an_attempt_solves_its_task_from_solved_at_on() -> None:
    rewards = [[0.3], [0.5], [0.7 + 0.2 + 0.1]]
    assert (await evaluate({"": rewards}, solved_at=0.5)).pass_at[1].mean == pytest.approx(2 / 3)
    assert rewards[2][0] < 1
    assert (await evaluate({"": rewards})).pass_at[1].mean == pytest.approx(1 / 3), (
        "the error of the sum does not count"
    )


async def test_percentiles_are_those_of_the_rewards_of_all_attempts() -> None:
    metrics = (await evaluate({"": [[number / 100, number / 100 + 0.5] for number in range(50)]}, attempts=2)).metrics()
    assert [metrics[f"eval/p{share}"] for share in (10, 50, 90)] == pytest.approx([0.09, 0.49, 0.89])


def test_means_and_percentiles_of_single_functions_are_over_the_attempts_that_have_them() -> None:
    reports = [
        [GroupReport(0, "t", "finished", rewards=[3.0], parts=[{"form": 1.0, "sum": 2.0}])],
        [GroupReport(1, "t", "finished", rewards=[0.5], parts=[{"form": 0.5}])],
    ]
    scores = score_set(reports, LIMITED)
    assert scores.rewards == {"form": 0.75, "sum": 2.0}
    assert scores.reward_percentiles == {"form": {10: 0.5, 50: 0.5, 90: 1.0}, "sum": {10: 2.0, 50: 2.0, 90: 2.0}}


async def test_rewards_of_zero_and_one_are_an_accuracy() -> None:
    accuracy = await evaluate({"": [[1.0], [1.0], [1.0], [0.0]]})
    assert (accuracy.reward, accuracy.count, accuracy.binary) == (0.75, 4, True)
    assert accuracy.stderr == pytest.approx(math.sqrt(0.75 * 0.25 * 4 / 3) / 2)
    assert accuracy.metrics()["eval/stderr"] == accuracy.stderr
    single = await evaluate({"": [[0.5]]})
    assert (single.stderr, single.binary) == (None, False)
    assert "eval/stderr" not in single.metrics()


# -------------------------------------------------------------------------------------------------------------- sets


async def test_metrics_of_named_sets_have_the_name_and_the_others_belong_to_the_unnamed_set() -> None:
    metrics = (await evaluate({"": [[1.0], [0.0]], "hard": [[0.0], [0.0]]})).metrics()
    assert (metrics["eval/reward"], metrics["eval/hard/reward"]) == (0.5, 0.0)
    unnamed = {name.removeprefix("eval/") for name in metrics if not name.startswith("eval/hard/")}
    named = {name.removeprefix("eval/hard/") for name in metrics if name.startswith("eval/hard/")}
    assert unnamed == named | {"version", "version_newest"}


async def test_without_an_unnamed_set_the_first_named_one_is_the_result() -> None:
    evaluation = await evaluate({"first": [[1.0]], "second": [[0.0]]})
    assert (evaluation.reward, evaluation.sets["first"].reward, evaluation.sets["second"].reward) == (1.0, 1.0, 0.0)


async def test_completions_are_kept_evenly_over_the_sets_up_to_the_limit() -> None:
    async def run_attempt(order: GroupOrder) -> GroupReport:
        view = EpisodeView("t", "", "", 1.0, "stop", 0, heldout_set=order.heldout_set, attempt=order.first_attempt)
        return graded(order, 1.0, views=[view] if order.show else [])

    settings = EvalConfig(attempts=2, save_completions=6)
    evaluation = await Evaluator({"": 20, "a": 20}, settings).run(0, run_attempt)
    assert [(view.heldout_set, view.attempt) for view in evaluation.views] == [
        ("", 0), ("", 1), ("", 0), ("a", 0), ("a", 1), ("a", 0),
    ]  # fmt: skip
