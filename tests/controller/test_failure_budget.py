from __future__ import annotations

import random
import re

import pytest

from outpace.config.sections import PacingConfig
from outpace.controller.failure_budget import FailureBudget, LimitReached
from outpace.errors import ComponentFailed
from outpace.types import EpisodeView, Failure, GroupReport, Outcome

VIEW = EpisodeView("task", "add 2\nand 2", "five", 0.0, "stop", 0)

TRACEBACK = """Traceback (most recent call last):
  File "/outpace/rewards/grading.py", line 40, in call
    return function(**arguments)
  File "/home/me/rewards.py", line 3, in flaky
    return [float(text) for text in completions]
ValueError: boom
"""


def make_budget(failed: int, filtered: int | None, notice_every: int, resumed: bool = False) -> FailureBudget:
    settings = PacingConfig(max_failed=failed, max_filtered=filtered, groups_per_step=notice_every // 4)
    return FailureBudget(settings, resumed)


def report(outcome: Outcome, reason: str = "why") -> GroupReport:
    return GroupReport(0, "task", outcome, reason)


def failed(source: str, reason: str) -> GroupReport:
    failures = [Failure(source, reason, 8)]
    return GroupReport(0, "task", "failed", f"{source} {reason}", failures=failures, traceback=TRACEBACK)


def filtered() -> GroupReport:
    return GroupReport(0, "task", "filtered", "all rewards are 0", rewards=[0.0, 0.0], views=[VIEW])


def test_consecutive_failures_end_the_run_and_name_the_function_the_reason_and_the_line_of_code() -> None:
    budget = make_budget(failed=3, filtered=None, notice_every=100)
    budget.note(failed("reward strict", "took longer than 5 s"))
    budget.note(failed("reward flaky", "raised ValueError: boom"))
    with pytest.raises(LimitReached) as caught:
        budget.note(failed("reward flaky", "raised ValueError: boom"))
    for text in ("3 groups", "reward flaky", "raised ValueError: boom", "2 of 3", "reward strict"):
        assert text in caught.value.message
    assert 'File "/home/me/rewards.py", line 3, in flaky' in caught.value.message
    assert "pacing.max_failed" in caught.value.message
    assert caught.value.remote_traceback == TRACEBACK
    assert "\n" not in caught.value.message


def test_one_finished_group_resets_the_counts_of_failed_and_filtered_groups() -> None:
    budget = make_budget(failed=2, filtered=2, notice_every=100)
    for _ in range(10):
        budget.note(report("failed"))
        budget.note(report("finished"))
        budget.note(report("filtered"))
        budget.note(report("finished"))


def test_consecutive_filtered_groups_end_the_run_with_rewards_an_example_and_the_settings_to_change() -> None:
    budget = make_budget(failed=1, filtered=3, notice_every=10_000)
    for _ in range(2):
        budget.note(filtered())
    with pytest.raises(LimitReached) as caught:
        budget.note(GroupReport(0, "task", "filtered", "all rewards are 0", rewards=[0.0, 0.0]))
    for text in ("3 groups", "all rewards are 0", "6 times", "'add 2 and 2'", "'five'"):
        assert text in caught.value.message
    for setting in ("pacing.max_filtered", "rollout.group_size"):
        assert setting in caught.value.message
    assert "\n" not in caught.value.message


def test_the_filtered_limit_is_lower_until_a_run_has_had_its_first_finished_group() -> None:
    def groups_until_limit(budget: FailureBudget) -> int:
        for count in range(1, 100_000):
            try:
                budget.note(filtered())
            except LimitReached:
                return count
        raise AssertionError

    fresh = make_budget(failed=1, filtered=None, notice_every=10_000)
    finished_once = make_budget(failed=1, filtered=None, notice_every=10_000)
    finished_once.note(report("finished"))
    resumed = make_budget(failed=1, filtered=None, notice_every=10_000, resumed=True)
    chosen = make_budget(failed=1, filtered=7, notice_every=10_000)
    chosen.note(report("finished"))
    assert [groups_until_limit(budget) for budget in (fresh, finished_once, resumed, chosen)] == [512, 1024, 1024, 7]


def test_a_run_in_which_two_groups_in_a_hundred_are_usable_continues() -> None:
    """As many groups as 100 steps of 64 need, with a different seed each time."""
    finished, unusable = report("finished"), report("filtered")
    for seed in range(3):
        draw = random.Random(seed)
        budget = make_budget(failed=1, filtered=None, notice_every=1 << 40)
        for _ in range(320_000):
            budget.note(finished if draw.random() < 0.02 else unusable)


def test_notices_report_the_first_failure_and_then_each_doubling_of_consecutive_failed_or_filtered_groups() -> None:
    budget = make_budget(failed=99, filtered=None, notice_every=4)
    notices = [notice for notice in (budget.note(report("failed", "oops")) for _ in range(31)) if notice is not None]
    assert all("oops" in notice for notice in notices)
    assert [re.findall(r"\d+", notice) for notice in notices[1:]] == [["2"], ["4"], ["8"], ["16"]]
    notified = [count for count in range(1, 40) if budget.note(report("filtered")) is not None]
    assert notified == [4, 8, 16, 32], "at doubling intervals"
    budget.note(report("finished"))
    assert not any(budget.note(report("filtered")) for _ in range(40)), (
        "another series of filtered groups is only reported if it is longer"
    )


def test_the_limit_error_is_a_component_failure() -> None:
    with pytest.raises(ComponentFailed):
        make_budget(failed=1, filtered=None, notice_every=4).note(report("failed"))
