"""What the agent starter learns from: right without bad habits, and never a held-out problem."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from outpace.models.loading import load_tokenizer
from outpace.rewards.builtin import last_integer
from outpace.tasks.generated import calculator_problems, guess_problems

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        import agent_dialogues  # type: ignore[import-not-found]

        yield agent_dialogues


def some(script: ModuleType, count: int, **habits: Any) -> list[list[Any]]:
    openings = script.Openings(load_tokenizer("starter-agent"))
    return list(islice(script.dialogues(openings, script.Habits(**habits), random.Random(0)), count))


def asked(pieces: list[Any]) -> str:
    """The user's message."""
    return str(pieces[0].text.partition("<|user|>")[2].partition("<|end|>")[0])


def test_without_bad_habits_every_dialogue_ends_well(script: ModuleType) -> None:
    answers = {problem.text(): problem.answer for problem in calculator_problems("train")}
    for pieces in some(script, 200):
        if asked(pieces) in answers:
            assert last_integer(pieces[-1].text) == answers[asked(pieces)]
        else:
            assert pieces[-1].text == "Found it.<|end|>"


def test_no_held_out_problem_is_ever_shown(script: ModuleType) -> None:
    heldout = {problem.text() for problem in calculator_problems("heldout")} | {
        game.text() for game in guess_problems("heldout")
    }
    shown = {asked(pieces) for pieces in some(script, 2000)}
    assert len(shown) > 1000
    assert shown.isdisjoint(heldout)


def test_only_answers_are_learned_and_stray_guesses_only_where_they_are_meant_to_be(script: ModuleType) -> None:
    for meant in (True, False):
        guesses = [
            pieces for pieces in some(script, 40, wild=1.0, learn_stray_guesses=meant) if "guess(" in pieces[0].text
        ]
        for opening, *said in guesses:
            assert not opening.learned
            assert not any(piece.learned for piece in said if piece.text.startswith("<|tool|>"))
            assert all(piece.learned == meant for piece in said if piece.text.startswith("<tool_call>"))


def test_bad_habits_make_wrong_dialogues(script: ModuleType) -> None:
    by_head = some(script, 40, by_head=1.0)[::2]
    assert all(len(pieces) == 2 for pieces in by_head), "an opening and an answer, no call"
    misread = some(script, 40, misread=1.0)[::2]
    for pieces in misread:
        expression = asked(pieces).removeprefix("What is ").removesuffix("?")
        assert f'"{expression}"' not in pieces[1].text
