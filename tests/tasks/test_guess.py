"""The guessing game: the prompt does not reveal the number, the tool answers correctly, bisection always wins."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.tasks.generated import GUESSES, Guess, GuessProblem, guess_problems, guess_tasks

GAMES = st.sampled_from([*guess_problems("train"), *guess_problems("heldout")])


def started(game: GuessProblem) -> Guess:
    environment = Guess()
    environment.reset(low=game.low, high=game.high, secret=game.secret)
    return environment


@given(game=GAMES)
def test_bisection_always_finds_the_number(game: GuessProblem) -> None:
    environment, low, high = started(game), game.low, game.high
    for _ in range(GUESSES):
        middle = (low + high) // 2
        reply = environment.guess(middle)
        if reply == "correct":
            break
        low, high = (middle + 1, high) if reply == "higher" else (low, middle - 1)
    assert environment.get_reward() == 1.0


@given(game=GAMES, numbers=st.lists(st.integers(), min_size=1, max_size=GUESSES))
def test_the_tool_compares_correctly_and_the_reward_is_for_finding_the_number(
    game: GuessProblem, numbers: list[int]
) -> None:
    environment = started(game)
    for number in numbers:
        reply = environment.guess(number)
        assert (reply == "higher", reply == "lower") == (number < game.secret, number > game.secret)
        if reply == "correct":
            break
    assert environment.get_reward() == float(game.secret in numbers)


def test_a_finished_game_rejects_further_guesses() -> None:
    game = guess_problems("heldout")[0]
    lost, won = started(game), started(game)
    for _ in range(GUESSES):
        lost.guess(0)
    with pytest.raises(ValueError, match="guesses"):
        lost.guess(game.secret)
    assert lost.get_reward() == 0.0
    won.guess(game.secret)
    with pytest.raises(ValueError, match="found"):
        won.guess(game.secret)
    assert won.get_reward() == 1.0


def test_reset_clears_the_previous_game() -> None:
    game = guess_problems("heldout")[0]
    environment = started(game)
    environment.guess(game.secret)
    environment.reset(secret=game.secret)
    assert environment.get_reward() == 0.0


def test_each_number_in_the_range_of_a_prompt_is_the_secret_equally_often() -> None:
    hidden = defaultdict(list)
    for game in [*guess_problems("train"), *guess_problems("heldout")]:
        hidden[game.text()].append(game)
    for same in hidden.values():
        assert [game.secret for game in same] == list(range(same[0].low, same[0].high + 1))


def test_no_range_is_in_both_splits() -> None:
    train, heldout = ({(game.low, game.high) for game in guess_problems(split)} for split in ("train", "heldout"))
    assert train.isdisjoint(heldout)
    assert len(heldout) > 50
    prompts = {task.prompt for task in map(guess_tasks("train", 5).__getitem__, range(len(guess_problems("train"))))}
    assert prompts.isdisjoint(
        guess_tasks("heldout", 6)[index].prompt for index in range(len(guess_problems("heldout")))
    )


def test_a_task_is_the_same_on_every_machine() -> None:
    task = guess_tasks("heldout", 0)[0]
    assert task.id == "guess/72-85/85"
    assert task.prompt == "I think of a number from 72 to 85. Find it in 4 guesses."
    assert task.columns == {"low": 72, "high": 85, "secret": 85}
