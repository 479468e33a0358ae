from __future__ import annotations

import pytest

from outpace.errors import PartFailed
from outpace.pipeline.budget import Budget, Limits
from outpace.types import GroupReport, Outcome


def report(outcome: Outcome, reason: str = "why") -> GroupReport:
    return GroupReport(0, "task", outcome, reason)


def test_failures_in_a_row_end_the_run_and_name_the_last_reason() -> None:
    budget = Budget(Limits(failed=3, filtered=None, notice_every=100))
    budget.note(report("failed"))
    budget.note(report("failed"))
    with pytest.raises(PartFailed, match="3 groups in a row failed, the last one: boom"):
        budget.note(report("failed", "boom"))


def test_one_success_forgives_what_came_before() -> None:
    budget = Budget(Limits(failed=2, filtered=2, notice_every=100))
    for _ in range(10):
        budget.note(report("failed"))
        budget.note(report("finished"))
        budget.note(report("filtered"))
        budget.note(report("finished"))


def test_filtered_groups_end_the_run_only_when_told_to() -> None:
    patient = Budget(Limits(failed=1, filtered=None, notice_every=10_000))
    for _ in range(1000):
        patient.note(report("filtered"))
    strict = Budget(Limits(failed=1, filtered=2, notice_every=10_000))
    strict.note(report("filtered"))
    with pytest.raises(PartFailed, match="2 groups in a row were filtered"):
        strict.note(report("filtered"))


def test_people_are_told_of_the_first_failure_and_of_long_dry_spells() -> None:
    budget = Budget(Limits(failed=99, filtered=None, notice_every=4))
    assert budget.note(report("failed", "oops")) == "a group failed: oops"
    notices = [budget.note(report("failed", "oops")) for _ in range(30)]
    assert list(filter(None, notices)) == [f"{count} groups so far have failed: oops" for count in (2, 4, 8, 16)]
    told = [count for count in range(1, 40) if budget.note(report("filtered")) is not None]
    assert told == [4, 8, 16, 32], "ever more rarely"
    budget.note(report("finished"))
    assert not any(budget.note(report("filtered")) for _ in range(40)), "another spell is no news unless it is longer"


def test_the_traceback_of_user_code_comes_along() -> None:
    budget = Budget(Limits(failed=1, filtered=None, notice_every=4))
    with pytest.raises(PartFailed) as caught:
        budget.note(GroupReport(0, "task", "failed", "boom", traceback="line 3 of my_rewards.py"))
    assert caught.value.remote_traceback == "line 3 of my_rewards.py"
