"""The countdown tasks: solvable, reproducible, generated on demand, without held-out puzzles in training."""

import time
from fractions import Fraction
from itertools import permutations

import pytest

from outpace.tasks.countdown import Countdown, Puzzle, puzzle_split

EVAL_SIZE = 1024


def is_solvable(values: list[Fraction], target: int) -> bool:
    """Search every pair, order and operator by brute force."""
    if len(values) == 1:
        return values[0] == target
    for a, b, *rest in permutations(values):
        results = [a + b, a - b, a * b] + ([a / b] if b else [])
        if any(is_solvable([result, *rest], target) for result in results):
            return True
    return False


def puzzles(source: Countdown) -> list[Puzzle]:
    return [source.puzzle(index) for index in range(len(source))]


def test_no_seed_moves_a_held_out_puzzle_into_training() -> None:
    heldout = set(puzzles(Countdown("heldout", seed=0)))
    for seed in range(3):
        assert heldout.isdisjoint(puzzles(Countdown("train", seed=seed)))
    assert all(puzzle_split(puzzle) == "heldout" for puzzle in heldout)


def test_every_seed_covers_every_puzzle_of_a_split_once() -> None:
    first, second = puzzles(Countdown("heldout", seed=1)), puzzles(Countdown("heldout", seed=2))
    assert first != second
    assert set(first) == set(second)
    assert len(first) == len(set(first)) >= EVAL_SIZE


def test_a_held_out_size_above_the_number_of_puzzles_is_rejected() -> None:
    with pytest.raises(ValueError, match="held-out"):
        Countdown("heldout", size=100_000)


def test_a_larger_training_set_repeats_puzzles_under_new_ids() -> None:
    source = Countdown("train", size=1_000_000)
    assert len(source) == 1_000_000
    assert source.puzzle(0) == source.puzzle(source.distinct)
    assert source[0].id != source[source.distinct].id


def test_the_same_seed_gives_the_same_tasks_in_any_order_of_access() -> None:
    forward = [Countdown("train", seed=3)[index] for index in range(20)]
    source = Countdown("train", seed=3)
    assert [source[index] for index in reversed(range(20))][::-1] == forward


def test_a_task_is_the_same_on_every_machine() -> None:
    task = Countdown("heldout", seed=0)[0]
    assert task.id == "countdown/heldout/0/0"
    assert task.prompt == "9 8 7 1=9"
    assert task.columns == {"numbers": [9, 8, 7, 1], "target": 9}


def test_indices_outside_the_source_raise() -> None:
    source = Countdown("train", size=5)
    assert source[4].id == "countdown/train/0/4"
    for index in (-1, 5):
        with pytest.raises(IndexError):
            source[index]


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_puzzles_are_solvable_by_brute_force(split: str) -> None:
    source = Countdown("heldout" if split == "heldout" else "train", seed=7)
    for index in range(60):
        puzzle = source.puzzle(index)
        assert is_solvable([Fraction(number) for number in puzzle.numbers], puzzle.target), puzzle


def test_opening_a_huge_source_is_fast() -> None:
    started = time.monotonic()
    Countdown("train", seed=11, size=10**9)[10**9 - 1]
    assert time.monotonic() - started < 1.0


@pytest.mark.parametrize("bad", [{"split": "test"}, {"size": 0}, {"size": -3}])
def test_an_invalid_split_or_size_is_rejected(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="countdown"):
        Countdown(**bad)  # type: ignore[arg-type]
