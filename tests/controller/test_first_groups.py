"""The early warning: the first groups, and none of them can be trained on."""

from __future__ import annotations

import re

from outpace.controller.failure_budget import FirstGroupsCheck
from outpace.types import EpisodeView, GroupReport, Outcome


def report(outcome: Outcome, reason: str = "", group: int = 0, answer: str = "4+6") -> GroupReport:
    view = EpisodeView("t7", "reach 24", answer, 0.0, "stop", 0)
    return GroupReport(group, "t7", outcome, reason, views=[] if outcome == "finished" else [view])


def test_nothing_is_said_before_enough_groups_have_closed() -> None:
    first = FirstGroupsCheck(3, "runs/a")
    assert [first.note(report("filtered", "all rewards are 0")) for _ in range(2)] == [None, None]


def test_the_warning_names_reason_example_and_where_to_look_and_comes_once() -> None:
    first = FirstGroupsCheck(3, "runs/a")
    said = [first.note(report("filtered", "all rewards are 0")) for _ in range(6)]
    assert [each is not None for each in said] == [False, False, True, False, False, False]
    for part in ("3 filtered", "all rewards are 0", "t7", "reach 24", "4+6", "outpace show runs/a"):
        assert part in str(said[2])


def test_a_single_group_that_can_be_trained_on_ends_the_watch() -> None:
    first = FirstGroupsCheck(2, "runs/a")
    first.note(report("filtered", "x"))
    first.note(report("finished"))
    assert [first.note(report("filtered", "x")) for _ in range(4)] == [None] * 4


def test_different_causes_are_counted_apart() -> None:
    first = FirstGroupsCheck(4, "runs/a")
    for cause in ("reward a: boom", "reward a: boom", "reward b: bang"):
        first.note(report("failed", cause))
    said = str(first.note(report("filtered", "all rewards are 0")))
    assert re.search(r"\b2 failed\b[^,;]*reward a: boom", said)
    assert re.search(r"\b1\b[^,;]*\bother\b", said)


def test_a_cancelled_group_says_nothing_about_the_task() -> None:
    first = FirstGroupsCheck(1, "runs/a")
    assert first.note(GroupReport(0, "", "failed", "cancelled", cancelled=True)) is None


def test_what_the_model_wrote_cannot_reach_the_terminal_as_control_characters() -> None:
    said = str(FirstGroupsCheck(1, "runs/a").note(report("failed", "bad \x1b[2J", answer="\x1b]0;x\x07\nline")))
    assert said.isprintable()
