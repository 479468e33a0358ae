from __future__ import annotations

import pytest

from outpace.errors import BadInput, RewardFailed, plural, with_article
from outpace.rewards.functions import check_scores
from outpace.tasks.dataset import Dataset


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "step", "1 step"),
        (0, "step", "0 steps"),
        (2048, "finished group", "2,048 finished groups"),
        (2, "try", "2 tries"),
        (3, "batch", "3 batches"),
        (2, "day", "2 days"),
    ],
)
def test_a_count_agrees_with_its_noun(count: int, noun: str, text: str) -> None:
    assert plural(count, noun) == text


@pytest.mark.parametrize(("noun", "text"), [("int", "an int"), ("Episode", "an Episode"), ("str", "a str")])
def test_the_article_depends_on_the_first_letter(noun: str, text: str) -> None:
    assert with_article(noun) == text


def test_two_rewards_for_one_sample_are_refused_with_correct_plurals() -> None:
    with pytest.raises(RewardFailed, match=r"\b2 values\b.*\b1 sample\b"):
        check_scores("short", [1.0, 2.0], 1)


def test_a_row_that_is_an_integer_is_called_an_int() -> None:
    with pytest.raises(BadInput, match=r"\b0\b.*\ban int\b"):
        Dataset([7])
