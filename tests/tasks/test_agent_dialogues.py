"""Training dialogues of the starter-agent model: correct without bad habits, and never a held-out problem."""

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


def sample_dialogues(script: ModuleType, count: int, **habits: Any) -> list[list[Any]]:
    openings = script.Openings(load_tokenizer("starter-agent"))
    return list(islice(script.dialogues(openings, script.Habits(**habits), random.Random(0)), count))


def user_message(pieces: list[Any]) -> str:
    """Return the user's message."""
    return str(pieces[0].text.partition("<|user|>")[2].partition("<|end|>")[0])


def test_without_bad_habits_every_dialogue_ends_with_the_right_answer(script: ModuleType) -> None:
    answers = {problem.text(): problem.answer for problem in calculator_problems("train")}
    for pieces in sample_dialogues(script, 200):
        if user_message(pieces) in answers:
            assert last_integer(pieces[-1].text) == answers[user_message(pieces)]
        else:
            assert pieces[-1].text == "Found it.<|end|>"


def test_no_dialogue_contains_a_held_out_problem(script: ModuleType) -> None:
    heldout = {problem.text() for problem in calculator_problems("heldout")} | {
        game.text() for game in guess_problems("heldout")
    }
    shown = {user_message(pieces) for pieces in sample_dialogues(script, 2000)}
    assert len(shown) > 1000
    assert shown.isdisjoint(heldout)


def test_only_assistant_turns_are_trained_and_stray_guesses_only_if_enabled(script: ModuleType) -> None:
    for enabled in (True, False):
        guesses = [
            pieces
            for pieces in sample_dialogues(script, 40, wild=1.0, learn_stray_guesses=enabled)
            if "guess(" in pieces[0].text
        ]
        for opening, *turns in guesses:
            assert not opening.learned
            assert not any(piece.learned for piece in turns if piece.text.startswith("<|tool|>"))
            assert all(piece.learned == enabled for piece in turns if piece.text.startswith("<tool_call>"))


def test_bad_habits_make_wrong_dialogues(script: ModuleType) -> None:
    by_head = sample_dialogues(script, 40, by_head=1.0)[::2]
    assert all(len(pieces) == 2 for pieces in by_head), "an opening and an answer, without a tool call"
    misread = sample_dialogues(script, 40, misread=1.0)[::2]
    for pieces in misread:
        expression = user_message(pieces).removeprefix("What is ").removesuffix("?")
        assert f'"{expression}"' not in pieces[1].text
