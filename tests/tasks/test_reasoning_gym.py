"""The reasoning-gym tasks and the reward `reasoning_gym`, which uses the graders of the package."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.config.load import make_config
from outpace.errors import BadInput
from outpace.rewards import reasoning_gym as rewards
from outpace.rewards.reasoning_gym import (
    EVALUATED_AS_FORMULA,
    EVALUATED_AS_LIST,
    is_safe_to_evaluate,
    parse_answer,
    reasoning_gym,
)
from outpace.rewards.registry import isolated_sources, resolve_rewards
from outpace.runtime import by_value
from outpace.tasks.reasoning_gym import ReasoningGymTasks
from outpace.tasks.registry import TaskSources, open_tasks
from outpace.types import Task
from support import examples, names, resolved

pytest.importorskip("reasoning_gym")

SMALL = {"min_terms": 2, "max_terms": 2, "max_digits": 1, "size": 300, "seed": 1}
SLOW_TO_MAKE = {"knight_swap", "sokoban", "futoshiki", "zebra_puzzles", "acre", "intermediate_integration", "puzzle24"}


def opened(name: str, options: dict[str, Any] | None = None, **config: Any) -> TaskSources:
    return open_tasks(make_config({"tasks.name": f"reasoning_gym/{name}", "tasks.options": options or {}, **config}))


def bad_input_message(name: str, options: dict[str, Any]) -> str:
    with pytest.raises(BadInput) as caught:
        opened(name, options)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def score(task: Task, completion: Any) -> float:
    [value] = reasoning_gym([task.prompt], [completion], **{name: [given] for name, given in task.columns.items()})
    return value


# ------------------------------------------------------------------------------------------------------------- tasks


def test_a_task_has_the_question_the_answer_and_plain_columns() -> None:
    train, _ = opened("chain_sum", SMALL)
    task = train[0]
    left, sign, right = task.columns["metadata"]["expression"].split()
    assert isinstance(task.prompt, str)
    assert f"{left} {sign} {right}" in task.prompt
    assert task.columns["answer"] == str(int(left) + int(right) if sign == "+" else int(left) - int(right))
    assert task.columns["source"] == "chain_sum"
    assert json.loads(json.dumps(task.columns)) == task.columns


def test_size_and_seed_are_options_in_addition_to_those_of_the_task() -> None:
    train, heldout = opened("chain_sum", SMALL)
    assert heldout is not None
    assert (len(train), len(heldout)) == (300, 500)
    other, same = opened("chain_sum", {**SMALL, "seed": 2})[0], opened("chain_sum", SMALL)[0]
    assert [same[index] for index in range(20)] == [train[index] for index in range(20)]
    assert [other[index] for index in range(20)] != [train[index] for index in range(20)]
    assert len(opened("chain_sum")[0]) == 5000


def test_a_generator_with_duplicates_never_has_a_question_in_both_splits() -> None:
    train, heldout = opened("chain_sum", {**SMALL, "size": 1000})
    assert heldout is not None
    trained = {train[index].prompt for index in range(len(train))}
    held = {heldout[index].prompt for index in range(len(heldout))}
    assert len(trained) < 200, "there are few sums of two digits, so they repeat"
    assert len(held) > 10
    assert trained.isdisjoint(held)


@examples(15)
@given(seeds=st.lists(st.integers(0, 2**40), min_size=2, max_size=2))
def test_no_seed_moves_a_held_out_question_into_training(seeds: list[int]) -> None:
    options = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    train = ReasoningGymTasks("chain_sum", "train", seeds[0], 60, options)
    heldout = ReasoningGymTasks("chain_sum", "heldout", seeds[1], 60, options)
    assert {train[index].prompt for index in range(60)}.isdisjoint(heldout[index].prompt for index in range(60))


def test_a_task_depends_only_on_its_index_and_not_on_access_order() -> None:
    forwards, backwards = opened("chain_sum", SMALL)[0], opened("chain_sum", SMALL)[0]
    ahead = [forwards[index] for index in range(50)]
    assert [backwards[index] for index in reversed(range(50))][::-1] == ahead


def test_a_source_can_be_sent_to_another_process() -> None:
    train, _ = opened("chain_sum", SMALL)
    assert by_value.unpickle_objects(by_value.pickle_objects({"tasks": train}))["tasks"][3] == train[3]


def test_a_reasoning_gym_task_sets_its_reward_function() -> None:
    assert resolved({"tasks.name": "reasoning_gym/chain_sum"}).rewards.functions == ["reasoning_gym"]


@pytest.mark.parametrize(
    ("name", "options", "key", "keys"),
    [
        ("chain_sums", {}, "tasks.name", "'chain_sums' reasoning_gym/chain_sum?"),
        ("", {}, "tasks.name", "'' reasoning_gym/chain_sum"),
        ("chain_sum", {"min_term": 2}, "tasks.options", "chain_sum min_term min_terms?"),
        ("chain_sum", {"min_terms": -2}, "tasks.options", "chain_sum min_terms must be positive"),
        ("chain_sum", {"size": 0}, "tasks.options", "size 1 0"),
        ("chain_sum", {"seed": "x"}, "tasks.options", "seed 0 x"),
    ],
)
def test_invalid_names_and_options_are_rejected_in_one_line(
    name: str, options: dict[str, Any], key: str, keys: str
) -> None:
    message = bad_input_message(name, options)
    assert message.startswith(f"{key}: ")
    assert names(message, keys)


def test_a_generator_with_a_single_question_is_rejected() -> None:
    message = bad_input_message("count_primes", {"min_n": 1, "max_n": 1})
    assert message.startswith("tasks.options: ")
    assert names(message, "count_primes questions")


# ----------------------------------------------------------------------------------------------------------- grading


def every_task() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {"composite"} - SLOW_TO_MAKE)


@pytest.mark.filterwarnings("ignore")  # warnings of the package
@pytest.mark.parametrize("name", every_task())
def test_the_own_answer_of_every_package_task_gets_the_full_score(name: str) -> None:
    source = ReasoningGymTasks(name, "train", 0, 4, {})
    for index in range(2):
        task = source[index]
        right = task.columns["answer"]
        if right is not None:  # some tasks have many right answers and list none
            assert score(task, f"I think.\n<answer>{right}</answer>") == 1.0
        for wrong in ("", "nonsense", "1", "[1, 2]", "{}", "<answer></answer>"):
            assert 0 <= score(task, wrong) <= 1


def test_text_and_messages_are_graded_alike() -> None:
    task = opened("chain_sum", SMALL)[0][0]
    right = task.columns["answer"]
    assert score(task, [{"role": "assistant", "content": f"<answer>{right}</answer>"}]) == score(task, right) == 1.0
    assert score(task, []) == score(task, [{"role": "assistant", "content": None}]) == 0.0


@pytest.mark.parametrize(
    ("text", "right", "answer"),
    [
        ("<answer>1</answer> no, <answer> 2 </answer>", "7", "2"),
        ("first\n 3 \n\n", "7", "3"),
        ("", "7", ""),
        ("1 2\n3 4\n", "1 2\n3 4", "1 2\n3 4"),
        ("any\nform", None, "any\nform"),
    ],
)
def test_the_answer_is_the_tagged_text_or_as_many_lines_as_the_right_answer_has(
    text: str, right: str | None, answer: str
) -> None:
    assert parse_answer(text, right) == answer


def test_the_reward_runs_in_a_process_by_default() -> None:
    functions = resolve_rewards(["reasoning_gym", "number"])
    assert list(isolated_sources(functions)) == ["reasoning_gym"]
    assert isolated_sources(functions, "thread") == {}


# ------------------------------------------------------------------------------------------------ answers as programs

ATTACKS = (
    "__import__('os').system('true')",
    "[open('/dev/null')]",
    "[x for x in (1,)]",
    "exec(chr(49))",
    "exec(chr(49))!",
    "(1).__class__",
    "(lambda: 1)()",
    "9**9**9**9",
    "9**(99999999)",
    "((9**999)**999)**999",
    "(9**999 * 9**999)**999",
    "9**(999*999*999)",
    "9**(1/0.0000001)",
    "sqrt(exec(chr(49)))",
    "'a'*9999999999",
    "f'{open}'",
)


@pytest.mark.parametrize("name", sorted(EVALUATED_AS_LIST | EVALUATED_AS_FORMULA))
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_grader_evaluates_a_program(attack: str, name: str) -> None:
    harmless_text = name in EVALUATED_AS_LIST and attack.endswith("!")  # `eval` rejects it as well
    assert is_safe_to_evaluate(attack, name) == harmless_text


def test_an_endless_formula_scores_0_and_does_not_affect_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    task = ReasoningGymTasks("countdown", "train", 0, 4, {})[0]
    right = task.columns["metadata"]["expression"]
    monkeypatch.setattr(rewards, "is_safe_to_evaluate", lambda answer, source: True)
    monkeypatch.setattr(rewards, "CPU_LIMIT_S", 1.0)
    columns = {name: [given] * 3 for name, given in task.columns.items()}
    assert reasoning_gym([task.prompt] * 3, [right, "((9**999)**999)**999", right], **columns) == [1.0, 0.0, 1.0]


def test_an_unevaluated_integral_is_not_evaluated_as_an_answer() -> None:
    assert not is_safe_to_evaluate("Integral(x*sin(2*x), x) + C", "intermediate_integration")


def test_the_variable_name_of_the_right_answer_scores_0() -> None:
    task = ReasoningGymTasks("string_insertion", "train", 0, 4, {})[0]
    right = task.columns["answer"]
    assert score(task, right) == 1.0
    assert score(task, repr(list(right))) == 0.1, "the package gives partial credit to a list of its letters"
    assert score(task, "oracle_answer") == score(task, "[*oracle_answer]") == score(task, "(oracle_answer)") == 0.0


def test_deeply_nested_or_very_long_answers_are_not_evaluated() -> None:
    assert not is_safe_to_evaluate("-" * 9000 + "1", "n_queens")
    assert not is_safe_to_evaluate("1" * 20_000, "countdown")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("countdown", "(3 + 4) * 25 / 5 - 1"),
        ("simple_integration", "2*x**3/3 - x + C"),
        ("intermediate_integration", "x*exp(2*x)/2 + log(Abs(x)) - sqrt(x)**-1 + C"),
        ("polynomial_multiplication", "12*y**2 - 6*y + 9"),
        ("simple_integration", "(x**2 + 1)**3/6 + (2*x)**(3/2) + x**-2 + C"),
        ("countdown", "1" + " + 1" * 2000),
        ("spiral_matrix", "[1, 2, -3]"),
        ("spiral_matrix", "1 2 3"),
        ("string_insertion", "ABCDE"),
        ("n_queens", "[['_', 'Q'], ['Q', '_']]"),
        ("chain_sum", "anything(at).all"),
    ],
)
def test_arithmetic_lists_and_plain_text_are_safe_to_evaluate(name: str, answer: str) -> None:
    assert is_safe_to_evaluate(answer, name)


def test_all_tasks_whose_graders_evaluate_answers_are_known() -> None:
    """Compared with the source of the package, to detect a new version with another such grader."""
    import inspect

    from reasoning_gym.factory import DATASETS

    evaluated = {
        name
        for name, (dataset, _) in DATASETS.items()
        if any(f"{call}(answer" in inspect.getsource(dataset.score_answer) for call in ("eval", "exec", "parse_expr"))
    }
    assert evaluated == EVALUATED_AS_LIST | EVALUATED_AS_FORMULA
