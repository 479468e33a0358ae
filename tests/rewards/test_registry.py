import re
from pathlib import Path
from typing import Any

import pytest

from outpace.errors import BadInput
from outpace.rewards.builtin import countdown, last_integer, number
from outpace.rewards.registry import check_rewards, isolated_sources, resolve_rewards
from outpace.runtime.by_value import UserCodeSource
from outpace.runtime.references import accepted_parameters


def bad_input_message(call: Any, *arguments: Any) -> str:
    with pytest.raises(BadInput) as caught:
        call(*arguments)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_built_in_rewards_have_names() -> None:
    assert resolve_rewards(["countdown", "number"]) == [("countdown", countdown), ("number", number)]


def test_a_reward_may_be_a_module_a_file_or_a_callable(here: Path) -> None:
    (here / "my_outpace_rewards.py").write_text("def score(completions):\n    return [1.0] * len(completions)\n")
    (here / "folder").mkdir()
    (here / "folder" / "more.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass Judge:\n    x: int = 0\ndef judge(**kwargs): ...\n"
    )

    def mine(completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    names = [name for name, _ in resolve_rewards(["my_outpace_rewards:score", "folder/more.py:judge", mine])]
    assert names == ["score", "judge", "mine"]
    (_, score), *_ = resolve_rewards(["my_outpace_rewards:score"])
    assert score(completions=["a"]) == [1.0]


def test_a_file_is_imported_once(here: Path) -> None:
    (here / "once.py").write_text("def f(**k): ...\ndef g(**k): ...\nf.module = g.module = object()\n")
    (_, f), (_, g) = resolve_rewards(["once.py:f", "./once.py:g"])
    assert vars(f)["module"] is vars(g)["module"]


def test_functions_with_equal_short_names_are_distinguished_by_reference(here: Path) -> None:
    for name in ("one", "two"):
        (here / f"{name}.py").write_text("def score(**k): ...\n")
    assert [name for name, _ in resolve_rewards(["one.py:score", "two.py:score"])] == ["one.py:score", "two.py:score"]
    message = bad_input_message(resolve_rewards, ["one.py:score", "one.py:score"])
    assert message.startswith("rewards.functions: ")
    assert "one.py:score" in message
    assert "weight" in message


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("countdwn", ("'countdwn'", "did you mean countdown")),
        ("zzz", ("'zzz'", "countdown, number")),
        ("no_such_module_at_all:f", ("no_such_module_at_all",)),
        ("outpace.no_such:f", ("outpace.no_such",)),
        ("no_such_file.py:f", ("no_such_file.py",)),
        ("outpace.rewards.builtin:nmber", ("nmber", "did you mean number")),
        ("outpace.rewards.builtin:INTEGER", ("INTEGER", "Pattern")),
        ("raises.py:f", ("raises.py", "ValueError: two lines")),
        ("raises:f", ("raises", "ValueError: two lines")),
        ("exits.py:f", ("exits.py", "SystemExit: 3")),
        ("needs.py:f", ("needs.py", "ModuleNotFoundError: No module named 'not_installed_anywhere'")),
        ("needs:f", ("needs", "ModuleNotFoundError: No module named 'not_installed_anywhere'")),
        ("broken.py:f", ("broken.py", "SyntaxError")),
        (":f", ("':f'", "package.module:name")),
        ("module:", ("'module:'", "package.module:name")),
        (3, ("3", "int")),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_rejected_in_one_line(here: Path, name: Any, keys: tuple[str, ...]) -> None:
    (here / "raises.py").write_text("raise ValueError('two\\nlines')")
    (here / "exits.py").write_text("raise SystemExit(3)")
    (here / "needs.py").write_text("import not_installed_anywhere")
    (here / "broken.py").write_text("def f(:\n")
    message = bad_input_message(resolve_rewards, [name])
    assert message.startswith("rewards.functions: ")
    assert all(key in message for key in keys), message
    assert ("Error" in message) == any("Error" in key for key in keys), message


def test_a_file_that_failed_to_load_can_be_fixed_and_loaded_again(here: Path) -> None:
    (here / "fixed.py").write_text("raise ValueError")
    bad_input_message(resolve_rewards, ["fixed.py:f"])
    (here / "fixed.py").write_text("def f(**k): ...   # of another length than before\n")
    assert len(resolve_rewards(["fixed.py:f"])) == 1


def test_weights_and_columns_are_checked_before_the_run_starts() -> None:
    assert check_rewards(["countdown"], [2.0], ["numbers", "target", "other"])
    message = bad_input_message(check_rewards, ["countdown"], [1.0, 1.0])
    assert message.startswith("rewards.weights: ")
    assert {"1", "2"} <= set(re.findall(r"\d+", message))
    message = bad_input_message(check_rewards, ["countdown"], None, ["answer"])
    assert message.startswith("rewards.functions: ")
    assert all(key in message for key in ("countdown", "numbers, target", "answer")), message


def test_a_function_gets_the_columns_it_names_or_all_with_kwargs() -> None:
    def some(completions: Any, answer: Any, extra: Any = None, *rest: Any) -> None: ...
    def every(prompts: Any, **columns: Any) -> None: ...

    given = ["prompts", "completions", "answer", "unwanted", "rest"]
    assert accepted_parameters(some, given) == {"completions", "answer"}
    assert accepted_parameters(every, given) == set(given)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("41", 41),
        ("13 + 28 = 41.", 41),
        ("It is -7", -7),
        ("It is −7", -7),
        ("5-3", 3),
        ("7.5", None),
        ("about 7.5, so 8", 8),
        ("no idea", None),
        ("", None),
        ("...41", 41),
        ("9" * 5000, None),
    ],
)
def test_the_last_integer_is_found(text: str, expected: int | None) -> None:
    assert last_integer(text) == expected


def test_the_number_reward_reads_text_and_chats() -> None:
    completions: list[Any] = ["41", "14", [{"role": "assistant", "content": "so 41"}], [{"role": "assistant"}], []]
    assert number(completions, answer=[41] * 5) == [1.0, 0.0, 1.0, 0.0, 0.0]


# ----------------------------------------------------------------------------------------------------------- isolation


def mine(completions: list[str]) -> list[float]:
    return [0.0] * len(completions)


async def patient(completions: list[str]) -> list[float]:
    return [0.0] * len(completions)


NAMED = [("countdown", countdown), ("mine", mine), ("patient", patient)]


@pytest.mark.parametrize(("isolation", "apart"), [(None, ["mine"]), ("thread", []), ("process", ["countdown", "mine"])])
def test_sync_user_functions_run_in_processes_and_async_functions_never_do(isolation: Any, apart: list[str]) -> None:
    assert list(isolated_sources(NAMED, isolation)) == apart


def test_a_function_is_sent_by_reference_if_it_has_one_and_by_value_otherwise() -> None:
    by_value = isolated_sources(NAMED, "process")
    assert by_value["countdown"] == UserCodeSource("outpace.rewards.builtin:countdown")
    assert not by_value["mine"].reference
    assert by_value["mine"].code
    named = isolated_sources(NAMED, "process", ["countdown", "my_rewards.py:mine", "my_rewards.py:patient"])
    assert named == {
        "countdown": UserCodeSource("outpace.rewards.builtin:countdown"),
        "mine": UserCodeSource("my_rewards.py:mine"),
    }


def test_a_function_may_require_the_functions_that_report_metrics_and_columns() -> None:
    def logging(completions: Any, log_metric: Any, log_extra: Any, trainer_state: Any) -> list[float]:
        return []

    assert check_rewards([logging], columns=["answer"]) == [("logging", logging)]
