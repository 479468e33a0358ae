"""The countdown reward: exact arithmetic, and a defined score for any text a model may write."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.rewards.builtin import countdown
from outpace.tasks.generated import MAX_EXPRESSION_DEPTH, MAX_EXPRESSION_LENGTH, MAX_NUMBER_DIGITS, evaluate_expression

Tree = int | tuple[str, Any, Any]

trees = st.recursive(
    st.integers(0, 99),
    lambda inner: st.tuples(st.sampled_from("+-*/"), inner, inner),
    max_leaves=12,
)


def tree_value(tree: Tree) -> Fraction:
    if isinstance(tree, int):
        return Fraction(tree)
    operator, left, right = tree[0], tree_value(tree[1]), tree_value(tree[2])
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    return left * right if operator == "*" else left / right


def tree_numbers(tree: Tree) -> list[int]:
    return [tree] if isinstance(tree, int) else tree_numbers(tree[1]) + tree_numbers(tree[2])


def fully_bracketed(tree: Tree) -> str:
    if isinstance(tree, int):
        return str(tree)
    return f"({fully_bracketed(tree[1])} {tree[0]} {fully_bracketed(tree[2])})"


def sparsely_bracketed(tree: Tree, needs: int = 0) -> str:
    """Parenthesize only where precedence and left associativity require it; `needs` is the minimum precedence."""
    if isinstance(tree, int):
        return str(tree)
    binding = 1 if tree[0] in "+-" else 2
    text = sparsely_bracketed(tree[1], binding) + tree[0] + sparsely_bracketed(tree[2], binding + 1)
    return f"({text})" if binding < needs else text


@given(trees, st.sampled_from([fully_bracketed, sparsely_bracketed]))
def test_a_rendered_tree_evaluates_to_the_value_and_numbers_of_the_tree(tree: Tree, render: Any) -> None:
    text = render(tree)
    if len(text) > MAX_EXPRESSION_LENGTH:
        return
    try:
        expected = tree_value(tree)
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="division by zero"):
            evaluate_expression(text)
        return
    assert evaluate_expression(text) == (expected, tree_numbers(tree))


@given(st.text() | st.text("0123456789+-*/() ", max_size=40))
def test_no_text_makes_the_reward_raise(text: str) -> None:
    assert countdown(["p"], [text], numbers=[[1, 2, 3]], target=[6])[0] in (0.0, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "01-5",
        "00",
        "-1+2",
        "1--2",
        "1+",
        "*2",
        "()",
        "(1",
        "1)",
        "1 2",
        "2(3)",
        "1.5",
        "2**3",
        "7//2",
        "1/0",
        "1/(2-2)",
        "1+2\n3",
        "1+2=3",
        "٣+1",
        "²+1",
        "1\uff0b2",
        "\x00",
        "9" * (MAX_NUMBER_DIGITS + 1),
        "9" * 100_000,
        "(" * 100_000,
        "(" * (MAX_EXPRESSION_DEPTH + 1) + "1" + ")" * (MAX_EXPRESSION_DEPTH + 1),
        "1+" * MAX_EXPRESSION_LENGTH + "1",
        "__import__('os')",
    ],
)
def test_text_outside_the_grammar_raises_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        evaluate_expression(text)


def test_nesting_up_to_the_limit_is_accepted() -> None:
    assert evaluate_expression("(" * MAX_EXPRESSION_DEPTH + "7" + ")" * MAX_EXPRESSION_DEPTH) == (Fraction(7), [7])


def test_intermediate_fractions_are_exact() -> None:
    assert evaluate_expression("8/(3-8/3)") == (Fraction(24), [8, 3, 8, 3])


def test_each_completion_is_scored_against_its_own_puzzle() -> None:
    scores = countdown(
        ["a", "b", "c"],
        ["8*3", "8*3", " 3 * 8\n"],
        numbers=[[3, 8], [3, 9], [8, 3]],
        target=[24, 24, 24],
        difficulty=[1, 1, 1],
    )
    assert scores == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("text", ["8*3+0", "8*3*1", "8+8+8", "24", "3+8", "8*3/3*3"])
def test_every_number_must_be_used_exactly_once(text: str) -> None:
    assert countdown(["p"], [text], numbers=[[3, 8]], target=[24]) == [0.0]


def test_a_chat_is_scored_by_its_last_message() -> None:
    chat: list[dict[str, Any]] = [
        {"role": "assistant", "content": "8-3"},
        {"role": "assistant", "content": "8*3"},
    ]
    silent: list[dict[str, Any]] = [{"role": "assistant", "content": None}]
    scores = countdown(["p"] * 3, [chat, silent, []], numbers=[[3, 8]] * 3, target=[24] * 3)
    assert scores == [1.0, 0.0, 0.0]


def test_columns_of_a_different_length_raise_value_error() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        countdown(["p"], ["8*3"], numbers=[[3, 8], [3, 8]], target=[24])
