"""The early warning if none of the first groups can be trained on."""

from __future__ import annotations

import re

from outpace.controller.failure_budget import FirstGroupsCheck
from outpace.types import EpisodeView, GroupReport, Outcome


def report(outcome: Outcome, reason: str = "", group: int = 0, answer: str = "4+6") -> GroupReport:
    view = EpisodeView("t7", "reach 24", answer, 0.0, "stop", 0)
    return GroupReport(group, "t7", outcome, reason, views=[] if outcome == "finished" else [view])


def test_no_warning_is_given_before_enough_groups_have_closed() -> None:
    first = FirstGroupsCheck(3, "runs/a")
    assert [first.note(report("filtered", "all rewards are 0")) for _ in range(2)] == [None, None]


def test_the_warning_comes_once_with_a_reason_an_example_and_the_command_to_run() -> None:
    first = FirstGroupsCheck(3, "runs/a")
    warnings = [first.note(report("filtered", "all rewards are 0")) for _ in range(6)]
    assert [each is not None for each in warnings] == [False, False, True, False, False, False]
    for text in ("3 filtered", "all rewards are 0", "t7", "reach 24", "4+6", "outpace show runs/a"):
        assert text in str(warnings[2])


def test_a_single_trainable_group_ends_the_check() -> None:
    first = FirstGroupsCheck(2, "runs/a")
    first.note(report("filtered", "x"))
    first.note(report("finished"))
    assert [first.note(report("filtered", "x")) for _ in range(4)] == [None] * 4


def test_different_causes_are_counted_separately() -> None:
    first = FirstGroupsCheck(4, "runs/a")
    for cause in ("reward a: boom", "reward a: boom", "reward b: bang"):
        first.note(report("failed", cause))
    warning = str(first.note(report("filtered", "all rewards are 0")))
    assert re.search(r"\b2 failed\b[^,;]*reward a: boom", warning)
    assert re.search(r"\b1\b[^,;]*\bother\b", warning)


def test_a_cancelled_group_is_not_counted() -> None:
    first = FirstGroupsCheck(1, "runs/a")
    assert first.note(GroupReport(0, "", "failed", "cancelled", cancelled=True)) is None


def test_control_characters_in_completions_do_not_reach_the_terminal() -> None:
    warning = str(FirstGroupsCheck(1, "runs/a").note(report("failed", "bad \x1b[2J", answer="\x1b]0;x\x07\nline")))
    assert warning.isprintable()
