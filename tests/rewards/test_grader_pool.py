"""Grader pool with real processes that hang, crash and leave children behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from outpace.errors import RewardFailed
from outpace.rewards.grading import GradedCompletion, GraderPool, grade
from outpace.rewards.registry import isolated_sources
from outpace.runtime.by_value import UserCodeSource
from outpace.runtime.child_process import MAX_OUTPUT
from outpace.runtime.process_table import MARK_VARIABLE
from outpace.runtime.references import load_function
from runtime_support import is_gone, noted_pids, until
from support import naming

FILE = Path(__file__).parent / "misbehaving.py"

MakePool = Callable[..., GraderPool]


def reference(name: str) -> str:
    return f"{FILE}:{name}"


async def grade_with(
    pool: GraderPool | None, *names: str, count: int = 2, timeout_s: float = 60.0, **columns: Any
) -> Any:
    named = [(name, load_function(reference(name), "test")) for name in names]
    repeated = {name: [value] * count for name, value in columns.items()}
    return await grade(named, None, ["p"] * count, ["abc"] * count, repeated, timeout_s, pool)


async def totals(pool: GraderPool, name: str, **more: Any) -> list[float | None]:
    return [each.total for each in await grade_with(pool, name, **more)]


async def failure(pool: GraderPool | None, name: str, **more: Any) -> RewardFailed:
    with pytest.raises(RewardFailed) as caught:
        await grade_with(pool, name, **more)
    assert "\n" not in str(caught.value)
    return caught.value


def has(message: str, *keys: str) -> bool:
    return all(key in message for key in keys)


OWNER = "OUTPACE_TESTED_BY"
"""Environment variable that distinguishes the graders of this test process from others on the machine."""


def grader_processes() -> list[int]:
    """Return the pids of all living graders of this test process and their descendants."""
    owner, mark = f"{OWNER}={os.getpid()}\0".encode(), f"{MARK_VARIABLE}=".encode()
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            content = environment.read_bytes()  # empty of a zombie
            if owner in content and mark in content:
                found.append(int(environment.parent.name))
    return found


@pytest.fixture
async def make_pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MakePool]:
    monkeypatch.setenv(OWNER, str(os.getpid()))
    pools = []

    def make(*names: str, **settings: Any) -> GraderPool:
        pools.append(GraderPool({name: UserCodeSource(reference(name)) for name in names}, **settings))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()
    assert grader_processes() == [], "processes were left behind"


# ------------------------------------------------------------------------------------------------------------- results


async def test_functions_run_in_reused_processes_and_never_in_the_worker(make_pool: MakePool) -> None:
    pool = make_pool("pid", "good", "silent", "returns_a_coroutine")
    assert await totals(pool, "good") == [3.0, 3.0]
    assert await totals(pool, "returns_a_coroutine") == [7.0, 7.0], "a returned coroutine is awaited"
    assert await grade_with(pool, "silent", "good") == [GradedCompletion(3.0, {"good": 3.0})] * 2, "None does not apply"
    seen = {(await totals(pool, "pid"))[0] for _ in range(3)}
    assert len(seen) == 1
    assert seen != {float(os.getpid())}


async def test_a_function_fails_with_the_same_message_in_a_process_as_in_a_thread(make_pool: MakePool) -> None:
    names = ["not_a_number", "infinite", "too_few", "no_list", "text", "raises", "exits"]
    pool = make_pool(*names, "good")
    for name in names:
        assert str(await failure(pool, name)) == str(await failure(None, name))
        assert await totals(pool, "good") == [3.0, 3.0]


async def test_an_exception_of_the_function_is_reported_with_its_traceback_as_the_cause(make_pool: MakePool) -> None:
    pool = make_pool("raises", "raises_unencodable_message", "interrupts")
    error = await failure(pool, "raises")
    assert error.function == "raises"
    assert has(str(error), "ValueError", "samples 0 to 1", "two lines"), error
    assert f'{FILE}", line ' in str(error.__cause__)
    assert "in raises" in str(error.__cause__)
    assert str(await failure(pool, "raises_unencodable_message")).endswith("half a pair: ?")
    assert "KeyboardInterrupt" in str(await failure(pool, "interrupts"))


async def test_functions_may_use_alarms_and_one_left_behind_is_cleared_before_the_next_call(
    make_pool: MakePool,
) -> None:
    pool = make_pool("uses_an_alarm", "leaves_an_alarm_behind")
    assert await totals(pool, "uses_an_alarm") == [0.5, 0.5]
    assert [await totals(pool, "leaves_an_alarm_behind") for _ in range(2)] == [[0.0, 0.0]] * 2


# --------------------------------------------------------------------------------------------------- process failures


async def test_a_process_that_exits_or_sends_invalid_replies_fails_only_its_own_call(make_pool: MakePool) -> None:
    causes = {
        "leaves": "code 3",
        "crashes": "SIGSEGV",
        "closes_everything": "code 1",
        "forges_an_answer": "call 1000000",
        "sends_rubbish": "bytes",
    }
    pool = make_pool(*causes, "good", workers=1)
    for name, key in causes.items():
        error = await failure(pool, name)
        assert error.function == name
        assert has(str(error).replace(name, ""), "process", key, "samples 0 to 1"), error
        assert await totals(pool, "good") == [3.0, 3.0]


async def test_a_process_that_hangs_is_killed_at_the_timeout_and_replaced(make_pool: MakePool, tmp_path: Path) -> None:
    note = tmp_path / "note"
    pool = make_pool("hangs", "good", workers=1)
    error = await failure(pool, "hangs", timeout_s=1.0, note=str(note))
    assert has(str(error), "hangs", "1 s", "samples 0 to 1"), error
    assert await totals(pool, "good") == [3.0, 3.0]
    await pool.close()
    assert [is_gone(pid) for pid in await noted_pids(note)] == [True]


async def test_a_hanging_call_does_not_affect_concurrent_calls(make_pool: MakePool, tmp_path: Path) -> None:
    note = tmp_path / "note"
    pool = make_pool("hangs", "pid")
    hanging = asyncio.create_task(failure(pool, "hangs", timeout_s=1.0, note=str(note)))
    await noted_pids(note)
    first = await totals(pool, "pid")
    await hanging
    assert await totals(pool, "pid") == first


async def test_an_idle_process_that_was_killed_is_replaced(make_pool: MakePool) -> None:
    pool = make_pool("pid")
    (before, _) = await totals(pool, "pid")
    assert before is not None
    os.kill(int(before), signal.SIGKILL)
    await asyncio.to_thread(until, lambda: not psutil.pid_exists(int(before)))
    await asyncio.sleep(0.05)  # the event loop is notified a moment later
    (after, _) = await totals(pool, "pid")
    assert after != before


async def test_the_memory_limit_is_enforced_if_set(make_pool: MakePool) -> None:
    pool = make_pool("devours_memory", "good", memory_mb=1024)
    assert "MemoryError" in str(await failure(pool, "devours_memory"))
    assert await totals(pool, "good") == [3.0, 3.0]


async def test_a_function_that_fails_to_load_in_the_process_fails_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(
        f"import os\nif '{MARK_VARIABLE}' in os.environ:\n    raise OSError('not here')\ndef score(completions): ...\n"
    )
    named = [("score", load_function(f"{tmp_path}/picky.py:score", "test"))]
    pool = GraderPool({"score": UserCodeSource(f"{tmp_path}/picky.py:score")})
    with pytest.raises(RewardFailed, match=naming("score", "BadInput", "OSError: not here")):
        await grade(named, None, ["p"], ["c"], {}, 60.0, pool)
    await pool.close()


# -------------------------------------------------------------------------------------------------------------- output


async def test_printed_output_goes_to_the_stderr_of_the_worker(make_pool: MakePool, capsys: Any) -> None:
    pool = make_pool("prints")
    assert await totals(pool, "prints") == [1.0, 1.0]
    await pool.close()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.split("\n") == ["to people", "to engineers", "from a child", ""]


async def test_excess_output_is_truncated_per_call(make_pool: MakePool, capsys: Any) -> None:
    pool = make_pool("floods")
    for _ in range(2):
        assert await totals(pool, "floods") == [1.0, 1.0]
    await pool.close()
    printed = capsys.readouterr().err
    assert printed.count("start") >= 1
    assert printed.count(f"{MAX_OUTPUT} bytes") == 2
    assert len(printed) < 2 * (MAX_OUTPUT + 200)


# --------------------------------------------------------------------------------------------------------- descendants


@pytest.mark.parametrize("end", ["hang", "crash", "return"])
async def test_no_descendant_survives_a_call(make_pool: MakePool, tmp_path: Path, end: str) -> None:
    note = tmp_path / "note"
    pool = make_pool("has_children")
    if end == "return":
        assert await totals(pool, "has_children", note=str(note), end=end) == [1.0, 1.0]
    else:
        await failure(pool, "has_children", timeout_s=2.0, note=str(note), end=end)
    descendants = await noted_pids(note, 3)
    await pool.close()
    assert [is_gone(pid) for pid in descendants] == [True] * 3


async def test_continuously_forking_processes_are_killed(make_pool: MakePool, tmp_path: Path) -> None:
    note = tmp_path / "note"
    pool = make_pool("reproduces")
    await failure(pool, "reproduces", timeout_s=1.0, note=str(note))
    await pool.close()
    generations = await noted_pids(note)
    assert len(generations) > 10
    await asyncio.sleep(0.2)  # time for many more generations
    assert await noted_pids(note) == generations


async def test_the_reply_of_a_forked_copy_is_ignored(make_pool: MakePool) -> None:
    pool = make_pool("returns_twice", workers=1)
    assert [await totals(pool, "returns_twice") for _ in range(3)] == [[1.0, 1.0]] * 3


PARENT = """
import asyncio, sys
from outpace.runtime.by_value import UserCodeSource
from outpace.rewards.grading import GraderPool

async def main():
    pool = GraderPool({"hangs": UserCodeSource(sys.argv[1])})
    await pool.call("hangs", {"note": [sys.argv[2]]}, 1, 600.0)

asyncio.run(main())
"""


async def test_a_grader_ends_with_its_parent(tmp_path: Path) -> None:
    note = tmp_path / "note"
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, reference("hangs"), str(note))
    (grader,) = await noted_pids(note)
    process = psutil.Process(grader)
    parent.kill()
    await parent.wait()
    gone, _ = psutil.wait_procs([process], timeout=20)
    assert gone == [process]


# ---------------------------------------------------------------------------------------------------------- concurrency


async def test_calls_run_concurrently_up_to_the_number_of_workers(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool("waits_for", workers=2)
    gate, note = tmp_path / "gate", tmp_path / "note"
    calls = [asyncio.create_task(totals(pool, "waits_for", gate=str(gate), note=str(note))) for _ in range(5)]
    await noted_pids(note, 2)
    await asyncio.sleep(0.1)  # time for a third call to start, if there were no limit
    assert len(await noted_pids(note, 2)) == 2
    gate.touch()
    assert len({answer[0] for answer in await asyncio.gather(*calls)}) == 2


async def test_queued_calls_run_in_fifo_order_and_queue_time_does_not_count_toward_the_timeout(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool("waits_for", "good", workers=1)
    gate, note = tmp_path / "gate", tmp_path / "note"
    first = asyncio.create_task(totals(pool, "waits_for", gate=str(gate), note=str(note)))
    await noted_pids(note)
    order: list[int] = []

    async def waiting(number: int) -> None:
        assert await totals(pool, "good", timeout_s=1.0) == [3.0, 3.0]
        order.append(number)

    others = [asyncio.create_task(waiting(number)) for number in range(4)]
    await asyncio.sleep(1.2)  # longer than the timeout of each
    gate.touch()
    await asyncio.gather(first, *others)
    assert order == [0, 1, 2, 3]


async def test_cancelling_a_call_ends_it_and_its_process_at_once(make_pool: MakePool, tmp_path: Path) -> None:
    note = tmp_path / "note"
    pool = make_pool("hangs", "good", workers=1)
    running = asyncio.create_task(grade_with(pool, "hangs", note=str(note)))
    (grader,) = await noted_pids(note)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
    assert await totals(pool, "good") == [3.0, 3.0]
    await pool.close()
    assert is_gone(grader)


async def test_a_call_cancelled_while_its_process_starts_leaves_no_process(make_pool: MakePool) -> None:
    pool = make_pool("good")
    for turns in range(6):
        starting = asyncio.create_task(grade_with(pool, "good"))
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait({starting})
    assert await totals(pool, "good") == [3.0, 3.0]  # the fixture checks for leftover processes


async def test_closing_ends_running_calls_and_rejects_new_ones(make_pool: MakePool, tmp_path: Path) -> None:
    note = tmp_path / "note"
    pool = make_pool("hangs")
    running = asyncio.create_task(failure(pool, "hangs", note=str(note)))
    await noted_pids(note)
    await pool.close()
    assert has(str(await running), "hangs", "SIGKILL")
    assert "closed" in str(await failure(pool, "hangs", note=str(note)))


THREADS = 4


async def test_kills_and_crashes_leak_neither_threads_nor_descriptors(make_pool: MakePool, tmp_path: Path) -> None:
    async def round_of_failures() -> None:
        pool = make_pool("crashes", "hangs", "good")
        await asyncio.gather(
            failure(pool, "crashes"),
            failure(pool, "hangs", timeout_s=0.1, note=str(tmp_path / "n")),
            grade_with(pool, "good"),
        )
        await pool.close()

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
    everyone = threading.Barrier(THREADS)
    await asyncio.gather(*(asyncio.to_thread(everyone.wait) for _ in range(THREADS)))  # start all its threads
    await round_of_failures()
    me = psutil.Process()
    fds, threads, tasks = me.num_fds(), me.num_threads(), len(asyncio.all_tasks())
    for _ in range(2):
        await round_of_failures()
    assert me.num_fds() <= fds  # fewer: something of an earlier test has ended meanwhile
    assert me.num_threads() <= threads
    assert len(asyncio.all_tasks()) <= tasks


# -------------------------------------------------------------------------------------------------------- serialization


async def test_functions_and_columns_of_a_python_caller_keep_their_types() -> None:
    bonus = 0.5

    def typed(completions: list[str], pair: Any, exact: Any, array: Any, big: Any) -> list[float]:
        right = pair[0] == (1, 2) and type(exact[0]).__name__ == "Decimal" and array[0].sum() == 6 and big[0] == 2**70
        return [bonus + right] * len(completions)

    functions = [("typed", typed)]
    pool = GraderPool(isolated_sources(functions))
    columns = {"pair": [(1, 2)], "exact": [Decimal("0.1")], "array": [np.arange(4)], "big": [2**70]}
    assert await grade(functions, None, ["p"], ["c"], columns, 60.0, pool) == [GradedCompletion(1.5, {"typed": 1.5})]
    await pool.close()


async def test_a_function_from_a_file_can_be_sent_by_value() -> None:
    functions = [
        ("raises", load_function(reference("raises"), "test")),
        ("good", load_function(reference("good"), "test")),
    ]
    pool = GraderPool(isolated_sources(functions))
    assert await totals(pool, "good") == [3.0, 3.0]
    assert "ValueError" in str(await failure(pool, "raises"))
    await pool.close()


async def test_a_column_that_cannot_be_serialized_fails_the_group_with_the_setting_to_change() -> None:
    def any_reward(lock: Any) -> list[float]:
        return [1.0]

    functions = [("any_reward", any_reward)]
    pool = GraderPool(isolated_sources(functions))
    with pytest.raises(RewardFailed, match=naming("any_reward", "rewards.isolation = thread", "lock: ")):
        await grade(functions, None, ["p"], ["c"], {"lock": [threading.Lock()]}, 60.0, pool)
    await pool.close()


async def test_a_call_whose_process_is_killed_externally_is_retried_once(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool("is_killed")
    assert await totals(pool, "is_killed", note=str(tmp_path / "once"), times=1) == [1.0, 1.0]
    error = await failure(pool, "is_killed", note=str(tmp_path / "always"), times=9)
    assert has(str(error), "is_killed", "SIGKILL"), error
    assert len((tmp_path / "always").read_text().splitlines()) == 2


@pytest.mark.parametrize(("visible", "score"), [("GPU-ab", 1.0), ("", 0.0)])
async def test_a_function_in_a_process_sees_the_gpus_of_its_worker(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, visible: str, score: float
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert await totals(make_pool("sees_a_gpu"), "sees_a_gpu") == [score, score]
