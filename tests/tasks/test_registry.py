import json
from pathlib import Path

import pytest

from outpace.config import Config
from outpace.config.load import make_config
from outpace.errors import BadInput
from outpace.protocols import TaskSource
from outpace.rewards.builtin import solves
from outpace.runtime import by_value
from outpace.runtime.registry import TASKS, register_task
from outpace.tasks.dataset import Dataset
from outpace.tasks.registry import (
    ReopenedSource,
    TaskSources,
    is_task_name,
    open_heldout,
    open_sets,
    open_tasks,
    open_train,
)
from support import names


def ids(source: TaskSource | None) -> list[str]:
    assert source is not None
    return [source[index].id for index in range(len(source))]


def bad_input_message(config: Config) -> str:
    with pytest.raises(BadInput) as caught:
        open_tasks(config)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def test_countdown_is_the_default_task() -> None:
    train, heldout = open_tasks(Config())
    assert train[0].id.startswith("countdown/train")
    assert heldout is not None
    assert heldout[0].id.startswith("countdown/heldout")
    assert not solves("nonsense", train[0].columns["numbers"], train[0].columns["target"])


def test_arithmetic_prompts_are_sentences_and_the_answer_is_a_column() -> None:
    train, heldout = open_tasks(make_config({"tasks.name": "arithmetic"}))
    assert heldout is not None
    for task in (train[0], heldout[0]):
        left, sign, right = str(task.prompt).removeprefix("What is ").split("?")[0].split()
        assert task.columns["answer"] == (int(left) + int(right) if sign == "+" else int(left) - int(right))
        assert str(task.prompt).endswith("? Answer with the number only.")


def test_no_seed_moves_held_out_arithmetic_into_training() -> None:
    first, second = (open_tasks(make_config({"tasks.name": "arithmetic", "run.seed": seed})) for seed in (0, 1))
    assert sorted(ids(first[0])) == sorted(ids(second[0]))
    assert ids(first[0]) != ids(second[0])
    assert set(ids(first[0])).isdisjoint(ids(first[1]))
    assert len(ids(first[0])) + len(ids(first[1])) == 20_000


def test_a_limit_uses_only_the_first_tasks() -> None:
    whole, _ = open_tasks(make_config({"tasks.name": "arithmetic"}))
    train, _ = open_tasks(make_config({"tasks.name": "arithmetic", "tasks.limit": 3}))
    assert ids(train) == [whole[index].id for index in range(3)]


def test_a_registered_function_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TASKS, "registered", {})

    @register_task("mine")
    def mine(config: Config) -> TaskSources:
        return Dataset([{"prompt": config.model.path}]), None

    train, heldout = open_tasks(make_config({"tasks.name": "mine", "model.path": "m"}))
    assert train[0].prompt == "m"
    assert heldout is None


def test_a_function_in_the_current_directory_needs_no_registration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_outpace_tasks.py").write_text(
        "from outpace.tasks.dataset import Dataset\n"
        "def make(config):\n    return Dataset([{'prompt': 'a'}]), None\n"
        "def wrong(config):\n    return Dataset([{'prompt': 'a'}])\n"
        "def none(config):\n    return [], None\n"
    )
    assert open_tasks(make_config({"tasks.name": "my_outpace_tasks:make"}))[0][0].prompt == "a"
    assert open_tasks(make_config({"tasks.name": "my_outpace_tasks.py:make"}))[0][0].prompt == "a"
    wrong = bad_input_message(make_config({"tasks.name": "my_outpace_tasks:wrong"}))
    assert names(wrong, "tasks.name my_outpace_tasks:wrong None")
    none = bad_input_message(make_config({"tasks.name": "my_outpace_tasks:none"}))
    assert names(none, "tasks.name my_outpace_tasks:none")


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("countdwn", "'countdwn' countdown?"),
        ("zzz", "'zzz' arithmetic calculator countdown guess"),
        ("no_such_module:make", "no_such_module module"),
        ("outpace.tasks.registry:open_task", "open_tasks?"),
    ],
)
def test_an_unknown_task_is_rejected_with_a_suggestion(name: str, keys: str) -> None:
    message = bad_input_message(make_config({"tasks.name": name}))
    assert message.startswith("tasks.name: ")
    assert names(message, keys)


def test_a_path_is_split_by_the_holdout_share(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"prompt": "p", "id": str(number)}) + "\n" for number in range(100)))
    train, heldout = open_tasks(make_config({"tasks.path": str(file), "eval.holdout": 0.2}))
    assert sorted(ids(train) + ids(heldout)) == sorted(map(str, range(100)))
    assert open_tasks(make_config({"tasks.path": str(file), "eval.holdout": 0}))[1] is None


def test_the_held_out_rows_do_not_depend_on_the_run_seed(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "p"}\n' * 100)
    first, second = (open_tasks(make_config({"tasks.path": str(file), "run.seed": seed})) for seed in (0, 1))
    assert ids(first[1]) == ids(second[1])


def test_with_an_evaluation_file_the_training_file_is_not_split(tmp_path: Path) -> None:
    for name, rows in (("a", 10), ("b", 3)):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "p"}\n' * rows)
    values = {"tasks.path": str(tmp_path / "a.jsonl"), "tasks.eval_path": str(tmp_path / "b.jsonl")}
    train, heldout = open_tasks(make_config(values))
    assert len(train) == 10
    assert ids(heldout) == ["b/0", "b/1", "b/2"]
    assert bad_input_message(make_config({**values, "tasks.eval_path": "none.jsonl"})).startswith("tasks.eval_path: ")


def test_a_split_name_for_a_file_is_rejected(tmp_path: Path) -> None:
    message = bad_input_message(make_config({"tasks.path": str(tmp_path / "a.jsonl"), "tasks.split": "test"}))
    assert message.startswith("tasks.split: ")


def test_a_reopened_source_is_pickled_as_its_config(tmp_path: Path) -> None:
    for name in ("a", "b"):
        lines = (json.dumps({"id": f"{name}{number}", "prompt": "hi"}) + "\n" for number in range(20))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    config = make_config({"tasks.path": str(tmp_path / "a.jsonl"), "tasks.eval_path": str(tmp_path / "b.jsonl")})
    for opener, first in ((open_train, "a0"), (open_heldout, "b0")):
        carried = by_value.pickle_objects({"tasks": ReopenedSource(opener, config)})
        arrived = by_value.unpickle_objects(carried)["tasks"]
        assert (len(arrived), arrived[0].id) == (20, first)
        assert b"a5" not in carried, "the rows are not pickled"


@pytest.mark.parametrize("text", ["countdown", "mine", "package.module:make", "a/b.py:make", "reasoning_gym/spell"])
def test_names_of_tasks_are_told_from_paths(text: str) -> None:
    assert is_task_name(text)


@pytest.mark.parametrize("text", ["a.jsonl", "b.parquet", "dir/file", "owner/name", "owner/name:configuration"])
def test_paths_are_told_from_names_of_tasks(text: str) -> None:
    assert not is_task_name(text)


def test_a_held_out_set_is_a_file_or_the_held_out_tasks_of_a_task(tmp_path: Path) -> None:
    (tmp_path / "hard.jsonl").write_text('{"prompt": "p", "id": "h0"}\n')
    sets = {"hard": str(tmp_path / "hard.jsonl"), "sums": "arithmetic"}
    opened = open_sets(make_config({"eval.sets": sets, "tasks.path": "unused.jsonl"}))
    assert list(opened) == ["hard", "sums"]
    assert ids(opened["hard"]) == ["h0"]
    assert ids(opened["sums"]) == ids(open_tasks(make_config({"tasks.name": "arithmetic"}))[1])


def test_a_held_out_set_that_cannot_be_used_is_rejected_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TASKS, "registered", {})
    register_task("trained")(lambda config: (Dataset([{"prompt": "a"}]), None))
    for place in ("nowhere.jsonl", "countdwn", "trained"):
        with pytest.raises(BadInput, match=r"^eval\.sets\.mine: ") as caught:
            open_sets(make_config({"eval.sets": {"mine": place}}))
        assert names(str(caught.value), place if place != "countdwn" else "countdown?")
