import asyncio
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from outpace.errors import RewardFailed
from outpace.monitoring.metric_table import MetricLog, collecting
from outpace.rewards import grading
from outpace.rewards.functions import with_all_arguments
from outpace.rewards.grading import GradedCompletion, grade
from outpace.rewards.registry import isolated_sources
from support import naming

Function = Callable[..., Any]


async def grade_with(
    *functions: Function, count: int = 2, weights: list[float] | None = None, timeout_s: float = 30.0, **columns: Any
) -> list[GradedCompletion]:
    named = [(function.__name__, function) for function in functions]
    repeated = {name: [value] * count for name, value in columns.items()}
    return await grade(named, weights, ["p"] * count, ["c"] * count, repeated, timeout_s)


def returning(value: Any) -> Function:
    def reward(**_: Any) -> Any:
        return value

    return reward


# -------------------------------------------------------------------------------------------------------------- calls


async def test_functions_get_prompts_completions_and_repeated_columns() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, **columns)
        return [1.0] * len(completions)

    await grade_with(reward, count=3, answer=[1, 2], text="x")
    assert seen == {"prompts": ["p"] * 3, "completions": ["c"] * 3, "answer": [[1, 2]] * 3, "text": ["x"] * 3}


async def test_functions_without_kwargs_get_only_the_columns_they_name() -> None:
    def reward(completions: list[str], answer: list[int]) -> list[int]:
        return answer

    assert [each.total for each in await grade_with(reward, answer=7, other=1)] == [7.0, 7.0]


async def test_reported_metrics_and_columns_are_collected_in_a_run_and_ignored_elsewhere() -> None:
    async def on_the_loop(completions: list[str], log_metric: Any) -> list[float]:
        log_metric("env/loop", 1, 2)
        return [0.0] * len(completions)

    def on_a_thread(completions: list[str], log_extra: Any, log_metric: Any = None, **columns: Any) -> list[float]:
        log_metric("env/thread", np.float32(0.5))
        log_extra("seen", [3, np.float32(0.5)])
        log_extra("kind", [str, None])
        return [0.0] * len(completions)

    await grade_with(on_the_loop, on_a_thread)
    with collecting(MetricLog(completions=2)) as log:
        await grade_with(on_the_loop, on_a_thread, log_extra="a column with this name")
    assert sorted(log.take()) == [("env/loop", 1, 2), ("env/thread", 0.5, 1)]
    assert log.extra == {"seen": [3, 0.5], "kind": [str(str), None]}
    with (
        collecting(MetricLog(completions=3)),
        pytest.raises(RewardFailed, match=naming("on_a_thread", "seen", "2", "3")),
    ):
        await grade_with(on_a_thread)


async def test_a_column_cannot_replace_the_completions() -> None:
    def reward(completions: list[str]) -> list[float]:
        return [float(completion == "c") for completion in completions]

    assert [each.total for each in await grade_with(reward, completions="fake")] == [1.0, 1.0]


async def test_a_function_that_clears_its_arguments_does_not_affect_other_functions() -> None:
    def greedy(completions: list[str]) -> list[float]:
        completions.clear()
        return [1.0, 1.0]

    def counting(completions: list[str]) -> list[int]:
        return [len(completions)] * 2

    assert [each.parts for each in await grade_with(greedy, counting)] == [{"greedy": 1.0, "counting": 2.0}] * 2


async def test_sync_functions_run_in_threads_and_async_functions_on_the_event_loop() -> None:
    threads: dict[str, int] = {}

    def plain(**_: Any) -> list[float]:
        threads["plain"] = threading.get_ident()
        return [1.0, 2.0]

    async def coroutine(**_: Any) -> list[float]:
        await asyncio.sleep(0)
        threads["coroutine"] = threading.get_ident()
        return [10.0, 20.0]

    class Judge:
        __name__ = "judge"

        async def __call__(self, **_: Any) -> list[float]:
            return [100.0, 200.0]

    def returning_a_coroutine(**_: Any) -> Any:
        return coroutine()

    graded = await grade_with(plain, coroutine, Judge(), returning_a_coroutine)
    assert [each.total for each in graded] == [121.0, 242.0]
    assert threads["coroutine"] == threading.get_ident() != threads["plain"]


async def test_functions_run_concurrently() -> None:
    barrier = threading.Barrier(2, timeout=20)  # passes only if both functions run at the same time

    def one(**_: Any) -> list[float]:
        barrier.wait()
        return [1.0, 1.0]

    def two(**_: Any) -> list[float]:
        barrier.wait()
        return [2.0, 2.0]

    assert [each.total for each in await grade_with(one, two)] == [3.0, 3.0]


# -------------------------------------------------------------------------------------------------------- combination


async def test_the_total_is_the_weighted_sum_and_rewards_per_function_are_unweighted() -> None:
    def a(**_: Any) -> list[float]:
        return [1.0, 0.0]

    def b(**_: Any) -> list[float]:
        return [0.5, 1.0]

    graded = await grade_with(a, b, weights=[2.0, -1.0])
    assert graded == [GradedCompletion(1.5, {"a": 1.0, "b": 0.5}), GradedCompletion(-1.0, {"a": 0.0, "b": 1.0})]


async def test_none_is_skipped_and_a_completion_with_only_none_has_no_reward() -> None:
    def a(**_: Any) -> list[float | None]:
        return [None, None]

    def b(**_: Any) -> list[float | None]:
        return [0.5, None]

    assert await grade_with(a, b) == [GradedCompletion(0.5, {"b": 0.5}), GradedCompletion(None, {})]


@pytest.mark.parametrize(
    "values", [(1, 0), [True, False], np.array([1.0, 0.0]), [np.float32(1), 0], [Fraction(1), Decimal(0)]]
)
async def test_all_numeric_types_are_accepted(values: Any) -> None:
    graded = await grade_with(returning(values))
    assert [each.total for each in graded] == [1.0, 0.0]
    assert all(type(each.total) is float for each in graded)


# ----------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ([1.0, float("nan")], ("nan", "sample 1")),
        ([float("inf"), 1.0], ("inf", "sample 0")),
        ([1.0, "1.0"], ("'1.0'", "sample 1")),
        ([1.0, [1.0]], ("[1.0]", "sample 1")),
        ([1.0, 10**400], ("sample 1",)),
        ([1.0, np.array([1.0, 2.0])], ("sample 1",)),
        ([1.0], ("1 value", "2 samples")),
        ([1.0] * 3, ("3 values", "2 samples")),
        (1.0, ("1.0", "list", "2")),
        (None, ("None", "list", "2")),
        ("ab", ("str", "list", "2")),
        ({0: 1.0, 1: 1.0}, ("dict", "list", "2")),
    ],
)
async def test_a_result_other_than_one_finite_number_per_completion_fails(value: Any, keys: tuple[str, ...]) -> None:
    with pytest.raises(RewardFailed) as caught:
        await grade_with(returning(value))
    assert caught.value.function == "reward"
    assert all(key in str(caught.value) for key in keys), caught.value
    assert "\n" not in str(caught.value)


async def test_finite_rewards_with_an_infinite_sum_fail() -> None:
    with pytest.raises(RewardFailed, match=naming("sum", "sample 0", "inf")):
        await grade_with(returning([1e308, 0]), weights=[100.0])


class Odd(BaseException):
    """An exception outside the usual hierarchy."""


@pytest.mark.parametrize(
    "error",
    [ValueError("two\nlines"), SystemExit(3), StopIteration(), TimeoutError("mine"), KeyboardInterrupt(), Odd("hm")],
)
@pytest.mark.parametrize("is_async", [True, False])
async def test_an_exception_names_the_function_and_the_samples(error: BaseException, is_async: bool) -> None:
    def plain(**_: Any) -> list[float]:
        raise error

    async def coroutine(**_: Any) -> list[float]:
        raise error

    function = coroutine if is_async else plain
    # Python converts a StopIteration in a coroutine to RuntimeError
    kind = "RuntimeError" if isinstance(error, StopIteration) else type(error).__name__
    with pytest.raises(RewardFailed) as caught:
        await grade_with(function)
    assert caught.value.function == function.__name__
    assert all(key in str(caught.value) for key in (function.__name__, kind, "samples 0 to 1")), caught.value
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None


async def test_a_missing_column_fails_and_is_named() -> None:
    def reward(completions: list[str], answer: list[int]) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(RewardFailed, match="missing 1 required positional argument: 'answer'"):
        await grade_with(reward)


async def test_of_several_failing_functions_the_first_in_the_list_is_reported() -> None:
    async def late(**_: Any) -> list[float]:
        await asyncio.sleep(0.01)
        raise ValueError

    def early(**_: Any) -> list[float]:
        raise ValueError

    with pytest.raises(RewardFailed, match=naming("late", "ValueError")):
        await grade_with(late, early)


async def test_a_coroutine_that_hangs_is_cancelled_at_the_timeout() -> None:
    ended = asyncio.Event()

    async def hangs(**_: Any) -> list[float]:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return []

    with pytest.raises(RewardFailed, match=naming("hangs", "0.01 s", "sample 0")):
        await grade_with(hangs, count=1, timeout_s=0.01)
    assert ended.is_set()


async def test_threads_that_hang_free_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "MAX_THREADS", 1)
    free = threading.Event()

    def hangs(**_: Any) -> list[float]:
        free.wait()
        return [0.0, 0.0]

    try:
        for _ in range(2):
            with pytest.raises(RewardFailed, match=naming("hangs", "0.01 s")):
                await grade_with(hangs, timeout_s=0.01)
        assert [each.total for each in await grade_with(returning([1, 1]))] == [1.0, 1.0]
    finally:
        free.set()


async def test_the_number_of_concurrent_threads_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "MAX_THREADS", 2)
    lock = threading.Lock()
    running = peak = 0

    def counted(**_: Any) -> list[float]:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        time.sleep(0.001)  # long enough for others to start, if there were no limit
        with lock:
            running -= 1
        return [1.0, 1.0]

    await asyncio.gather(*(grade_with(counted) for _ in range(20)))
    assert peak == 2


async def test_waiting_for_a_thread_slot_does_not_count_toward_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "MAX_THREADS", 1)
    free, started = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def holds(**_: Any) -> list[float]:
        loop.call_soon_threadsafe(started.set)
        free.wait()
        return [1.0, 1.0]

    first = asyncio.create_task(grade_with(holds))
    await started.wait()
    second = asyncio.create_task(grade_with(returning([1, 1]), timeout_s=0.01))
    await asyncio.sleep(0.05)
    assert not second.done()
    second.cancel()
    free.set()
    assert [each.total for each in await first] == [1.0, 1.0]


async def test_cancelling_grading_ends_it_at_once() -> None:
    free, started = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hangs(**_: Any) -> list[float]:
        loop.call_soon_threadsafe(started.set)
        free.wait()
        return [0.0, 0.0]

    task = asyncio.create_task(grade_with(hangs))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    free.set()


async def test_changes_to_a_message_by_one_function_are_invisible_to_others() -> None:
    completion = [{"role": "assistant", "content": "4", "tool_calls": [{"id": "a"}]}]

    def vandal(completions: list[Any]) -> list[float]:
        completions[0][0]["content"] = "5"
        completions[0][0]["tool_calls"].clear()
        return [0.0]

    def reader(completions: list[Any]) -> list[float]:
        return [float(completions[0] == [{"role": "assistant", "content": "4", "tool_calls": [{"id": "a"}]}])]

    for functions in ([("vandal", vandal), ("reader", reader)], [("reader", reader), ("vandal", vandal)]):
        (graded,) = await grade(functions, None, ["?"], [completion], {}, 60.0)
        assert graded.parts["reader"] == 1.0
    assert completion[0]["content"] == "4"


# ---------------------------------------------------------------------------------------------------- arguments of TRL

STATE = {"global_step": 4, "max_steps": 8, "epoch": 0.5, "num_train_epochs": 1}


def progress(completions: list[str], trainer_state: Any) -> list[float]:
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)


def everything(completions: list[str], **kwargs: Any) -> list[float]:
    assert {"completion_ids", "trainer_state", "log_metric", "log_extra"} <= set(kwargs)
    return [float(sum(ids)) for ids in kwargs["completion_ids"]]


async def everything_later(completions: list[str], **kwargs: Any) -> list[float]:
    return everything(completions, **kwargs)


@pytest.mark.parametrize("isolated", [False, True])
async def test_functions_get_the_progress_of_the_run_as_one_object(isolated: bool) -> None:
    functions = [("progress", progress)]
    pool = grading.GraderPool(isolated_sources(functions)) if isolated else None
    try:
        on_request = {"trainer_state": [STATE] * 2}
        graded = await grade(functions, None, ["p"] * 2, ["c"] * 2, {}, 60.0, pool, None, on_request)
    finally:
        if pool is not None:
            await pool.close()
    assert [each.total for each in graded] == [0.5, 0.5]


@pytest.mark.parametrize("function", [everything, everything_later])
async def test_a_function_of_a_trl_script_finds_all_arguments_in_its_kwargs(function: Any) -> None:
    functions = [("everything", with_all_arguments(function))]
    on_request = {"trainer_state": [STATE] * 2, "completion_ids": [[1, 2], [3]]}
    graded = await grade(functions, None, ["p"] * 2, ["c"] * 2, {}, 60.0, None, None, on_request)
    assert [each.total for each in graded] == [3.0, 3.0]
