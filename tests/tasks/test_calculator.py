"""The calculator task: fixed problems, a split that does not depend on the seed, and a tool that parses expressions."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.rewards.builtin import number
from outpace.tasks.generated import Calculator, calculator_problems, calculator_tasks

SYMBOLS = st.text(alphabet="0123456789+-*/() ", max_size=30)


def test_every_answer_equals_the_result_of_the_tool() -> None:
    tool = Calculator()
    tool.reset(expression="ignored", answer=0)
    for problem in calculator_problems("heldout")[:200]:
        assert tool.calculate(problem.expression) == str(problem.answer)


def test_problems_are_small() -> None:
    every = [*calculator_problems("train"), *calculator_problems("heldout")]
    assert all(0 < problem.answer < 1_000_000 for problem in every)
    assert max(len(problem.expression) for problem in every) <= 11


def test_no_seed_moves_a_held_out_problem_into_training() -> None:
    heldout = {
        task.id for task in map(calculator_tasks("heldout", 0).__getitem__, range(len(calculator_problems("heldout"))))
    }
    for seed in (0, 1):
        train = calculator_tasks("train", seed)
        assert heldout.isdisjoint(train[index].id for index in range(len(train)))
    assert len(heldout) == len(calculator_problems("heldout")) > 2000


def test_the_seed_changes_only_the_order() -> None:
    first, second = calculator_tasks("heldout", 1), calculator_tasks("heldout", 2)
    assert first[0] != second[0]
    assert {first[index].id for index in range(len(first))} == {second[index].id for index in range(len(second))}


def test_a_task_is_the_same_on_every_machine() -> None:
    task = calculator_tasks("heldout", 0)[0]
    assert task.id == "calculator/(752-45)*56"
    assert task.prompt == "What is (752-45)*56?"
    assert task.columns == {"expression": "(752-45)*56", "answer": 39592}


def test_indices_outside_the_source_raise() -> None:
    source = calculator_tasks("heldout")
    for index in (-1, len(source)):
        with pytest.raises(IndexError, match=r"calculator/heldout/0\b"):
            source[index]


@pytest.mark.parametrize("invalid", ["", "2**9", "abs(1)", "__import__('os')", "1/0", "(" * 50, "9" * 10, "1+" * 200])
def test_the_tool_rejects_anything_but_a_small_expression(invalid: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Calculator().calculate(invalid)


@given(text=SYMBOLS)
def test_any_text_gives_a_number_or_a_value_error(text: str) -> None:
    try:
        result = Calculator().calculate(text)
    except ValueError:
        return
    assert isinstance(Fraction(result), Fraction)


def test_the_last_assistant_message_is_scored_and_not_the_tool_result() -> None:
    problem = calculator_problems("heldout")[0]
    call = {"role": "assistant", "content": "<tool_call>…</tool_call>"}
    tool_result = {"role": "tool", "content": str(problem.answer)}
    right = {"role": "assistant", "content": f"The answer is {problem.answer}."}
    wrong = {"role": "assistant", "content": f"The answer is {problem.answer + 1}."}
    completions = [[call, tool_result, right], [call, tool_result, wrong], [call, tool_result]]
    assert number(completions, answer=[problem.answer] * 3) == [1.0, 0.0, 0.0]
