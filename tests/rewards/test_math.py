"""The reward `math`, in real grader processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from outpace.config import Config
from outpace.errors import BadInput
from outpace.rewards import builtin
from outpace.rewards.builtin import score_in_forks
from outpace.rewards.grading import GraderPool, grade
from outpace.rewards.registry import check_rewards, isolated_sources, resolve_rewards
from support import naming

pytest.importorskip("math_verify")

NAMED = resolve_rewards(["math"])


@pytest.fixture
async def pool() -> AsyncIterator[GraderPool]:
    pool = GraderPool(isolated_sources(NAMED), workers=1)
    yield pool
    await pool.close()


async def scores(pool: GraderPool, completions: list[Any], answers: list[Any]) -> list[float | None]:
    prompts = ["p"] * len(answers)
    graded = await grade(NAMED, None, prompts, completions, {"answer": answers}, 60.0, pool)
    return [each.total for each in graded]


async def test_answers_are_compared_mathematically(pool: GraderPool) -> None:
    cases: list[tuple[Any, Any, float | None]] = [
        ("so it is \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("The answer is 42.", 42, 1.0),
        ("$x^2 + 2x + 1$", "(x+1)^2", 1.0),
        ("\\boxed{\\{1, 2\\}}", "$\\{2, 1\\}$", 1.0),
        ([{"role": "assistant", "content": "\\boxed{7}"}], 7, 1.0),
        ("\\boxed{8}", 7, 0.0),
        ("no idea", "7", 0.0),
        ("", "7", 0.0),
        ([], "7", 0.0),
        ("\\boxed{7}", "", None),
        ("\\boxed{7}", None, None),
    ]
    assert await scores(pool, [case[0] for case in cases], [case[1] for case in cases]) == [case[2] for case in cases]


async def test_an_answer_that_takes_too_long_scores_0_and_the_others_are_graded(pool: GraderPool) -> None:
    texts = ["\\boxed{2}", "\\boxed{\\binom{10^9}{5 \\cdot 10^8}}", "\\boxed{2}"]
    assert await scores(pool, texts, ["2"] * 3) == [1.0, 0.0, 1.0]
    assert await scores(pool, ["2"], ["2"]) == [1.0]


def misbehaving_score(pair: tuple[str, Any]) -> float | None:
    text, gold = pair
    while text == "busy":
        pass
    while text == "asleep":
        time.sleep(60)
    if text == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    return None if gold is None else 1.0


def test_a_fork_that_ignores_signals_or_crashes_scores_0_and_the_others_are_graded() -> None:
    texts = ["a", "busy", "b", "crash", "busy", "c"]
    pairs = [*((text, 1) for text in texts), ("d", None)]
    assert score_in_forks(misbehaving_score, pairs, cpu_s=0.3) == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, None]


def test_a_fork_that_sleeps_forever_is_abandoned_at_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "FORK_TIMEOUT_S", 0.2)
    assert score_in_forks(misbehaving_score, [("asleep", 1)], cpu_s=60.0) == [0.0]


def test_the_math_reward_runs_in_a_process_and_rejects_thread_isolation() -> None:
    assert isolated_sources(NAMED)["math"].reference == "outpace.rewards.builtin:math"
    threads = Config.model_validate({"rewards": {"isolation": "thread"}})
    with pytest.raises(BadInput) as caught:
        check_rewards(["math"], None, ["answer"], threads)
    assert str(caught.value).startswith("rewards.isolation: math ")
    assert "\n" not in str(caught.value)
    assert check_rewards(["number"], None, ["answer"], threads)


def test_a_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=naming("rewards.functions", "math_verify", 'pip install "outpace[math]"')):
        resolve_rewards(["math"])
