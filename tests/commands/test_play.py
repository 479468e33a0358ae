"""`outpace play`: a person answers in place of the model, driven by scripted lines."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from outpace.commands.play import index_of, play
from outpace.errors import BadInput
from outpace.rollouts.human import read_answer, tool_signature
from outpace.rollouts.tools.functions import load_tools
from outpace.tasks.generated import guess_tasks
from outpace.types import Task
from support import names

MODULE = '''
from outpace import Task


def shelves(config):
    return [Task("shelf/0", "Where is the pump?", {"stock": ["valve", "pump"], "wanted": "pump"})], None


class Warehouse:
    def reset(self, stock, wanted, **columns):
        self.stock, self.wanted, self.found = stock, wanted, None
        return f" There are {len(stock)} shelves."

    def look(self, shelf: int) -> str:
        """Look at one shelf."""
        self.found = self.stock[shelf]
        return self.found

    def get_reward(self):
        return 1.0 if self.found == self.wanted else 0.0


async def debate(task, client):
    first = await client.chat([{"role": "user", "content": "Open the debate."}], role="speaker")
    second = await client.chat([{"role": "user", "content": first.text}], role="critic")
    client.reward(0.25, role="critic")
    return float(len(second.text))


async def two_steps(task, client):
    await client.sample(task.prompt)
    client.observe("think again")
    await client.sample("And now?")
    return 0.5


async def steps(task, client):
    first = await client.chat([{"role": "user", "content": "One."}], role="a")
    second = await client.chat([{"role": "user", "content": "Two."}], role="b")
    client.turn_reward(0.5, first)
    client.turn_reward(0.25, second)
    client.reward(1.0, request=first)
    client.reward(3.0, role="b")


def curious(completions, completion_ids, environments):
    assert completion_ids == [[]]
    return [float(len(environment.found)) for environment in environments]


def silent(completions, **columns):
    return [None for _ in completions]


async def broken(task, client):
    raise RuntimeError("no luck")


def plain(task, endpoint):
    return 1.0
'''


@pytest.fixture
def module(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MODULE)
    return str(path)


@pytest.fixture
def warehouse(module: str) -> list[str]:
    return [f"--tasks.name={module}:shelves", f"--rollout.environment={module}:Warehouse"]


def played(lines: list[str], settings: list[str], **options: Any) -> str:
    """Everything shown to a player who types these lines and then closes the input."""
    typed: Iterator[str] = iter(lines)
    shown = io.StringIO()
    play(None, settings, read=lambda: next(typed, None), console=Console(file=shown, highlight=False), **options)
    return shown.getvalue()


# ----------------------------------------------------------------------------------------------------------- one answer


@pytest.mark.parametrize(("answer", "total"), [("8-6+5-2", "total: 1"), ("8-5+2", "total: 0")])
def test_a_puzzle_is_shown_answered_and_graded(answer: str, total: str) -> None:
    out = played([answer, "", "n"], [], task="0")
    assert "user: 8 6 5 2=5" in out
    assert total in out
    assert names(out.rstrip().splitlines()[-1], "Enter n")


def test_the_input_may_end_with_the_answer() -> None:
    assert "total: 0" in played(["1+1"], [], task="0")


def test_leaving_gives_no_reward_and_no_further_task() -> None:
    out = played([], [], task="0")
    assert names(out, "left")
    assert "total" not in out


def test_an_attempt_can_be_abandoned_for_another_task() -> None:
    out = played(["/give-up", "", "1+1"], [], task="0")
    assert "given up" in out
    assert out.count("your turn") == 2
    assert out.count("total: 0") == 1


def test_tasks_are_drawn_by_the_seed_of_the_run() -> None:
    first, again, other = (played([], [f"--run.seed={seed}"]).splitlines()[0] for seed in (3, 3, 4))
    assert first == again != other


def test_raw_shows_the_prompt_text_of_the_model() -> None:
    out = played(["1+1"], [], task="0", raw=True)
    assert "<|user|>8 6 5 2=5<|end|><|assistant|>" in out


# ---------------------------------------------------------------------------------------------------------------- tools


def test_tools_are_listed_and_called_and_the_environment_gives_the_reward(warehouse: list[str]) -> None:
    out = played(["/call look shelf=1", "", "on shelf 1"], warehouse)
    assert "user: Where is the pump? There are 2 shelves." in out
    assert "/call look(shelf: integer)  Look at one shelf." in out
    assert "look: pump" in out
    assert "2 turns, 1 tool_calls, 0 tool_errors" in out
    assert "reward environment: 1" in out
    assert out.rstrip().endswith("total: 1")


def test_several_lines_are_several_calls_of_one_answer(warehouse: list[str]) -> None:
    out = played(["let me see", "/call look shelf=1", '/call look {"shelf": 0}', "", "done"], warehouse)
    assert out.index("look: pump") < out.index("look: valve")
    assert "2 turns, 2 tool_calls" in out
    assert "total: 0" in out  # the last shelf that was looked at counts


def test_a_wrong_tool_call_gets_the_error_that_a_model_would_get(warehouse: list[str]) -> None:
    out = played(["/call lok shelf=1", "", "/call look shelf=one", "", "done"], warehouse)
    assert any(line.startswith("lok: error: ") and names(line, "'lok' look") for line in out.splitlines())
    assert "look: error: look: shelf: Input should be a valid integer" in out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/call", "/call: tool"),
        ("/call look shelf", "/call look: 'shelf' key=value"),
        ("/call look {shelf}", "/call look: JSON"),
        ("/call look shelf='1", "/call look: No closing quotation"),
        ("/dance now", "/dance: /help"),
    ],
)
def test_a_line_that_cannot_be_parsed_is_refused_in_one_line_and_never_sent(
    line: str, expected: str, warehouse: list[str]
) -> None:
    out = played([line, "", "done"], warehouse)
    assert [shown for shown in out.splitlines() if names(shown, expected)]
    assert "1 turns, 0 tool_calls" in out


def test_commands_show_the_tools_and_the_whole_conversation_again(warehouse: list[str]) -> None:
    out = played(["/call look shelf=0", "", "/prompt", "/tools", "/help", "done"], warehouse)
    assert out.count("Where is the pump?") == 2
    assert 'assistant: /call look {"shelf": 0}' in out
    assert out.count("/call look(shelf: integer)") == 2
    assert "Ctrl-D" in out


def test_turn_and_call_limits_apply_as_in_a_run(warehouse: list[str]) -> None:
    calls = ["/call look shelf=1", ""]
    assert ": turns" in played(calls * 3, [*warehouse, "--rollout.max_turns=2"])
    spent = played(["/call look shelf=0", "/call look shelf=1", ""], [*warehouse, "--rollout.max_calls=1"])
    assert ": calls" in spent
    assert "total: 0" in spent  # the second call was not run


@pytest.mark.parametrize(("shift", "total"), [(0, "total: 1"), (1, "total: 0")])
def test_the_built_in_game_can_be_won_and_lost(shift: int, total: str) -> None:
    secret = guess_tasks("train", 0)[0].columns["secret"]
    assert total in played([f"/call guess number={secret + shift}", "", "that is it"], ["--tasks.name=guess"], task="0")


# ----------------------------------------------------------------------------------------------------- custom rollouts


def test_roles_of_a_custom_rollout_are_shown_and_rewarded(module: str) -> None:
    out = played(["go", "", "no"], [f"--rollout.function={module}:debate"], task="0")
    assert "speaker ---\n" in out
    assert "critic ---\nuser: go" in out
    assert "reward critic: 0.25" in out
    assert "total: 2.25" in out, "as a run counts it"


def test_rewards_of_single_answers_count_as_in_a_run(module: str) -> None:
    out = played(["one", "", "two"], [f"--rollout.function={module}:steps"], task="0")
    assert "reward answer-0: 0.5" in out
    assert "reward answer-1: 0.25" in out
    assert "total: 2.75" in out, "both turn rewards, and the mean of the rewards of the conversations"


def test_a_reward_function_gets_the_arguments_that_it_declares(module: str, warehouse: list[str]) -> None:
    out = played(["/call look shelf=0", "", "there"], [*warehouse, f"--rewards.functions={module}:curious"])
    assert "reward curious: 5" in out, "the environment has what was found; there are no tokens"


def test_a_reward_function_that_returns_none_does_not_count_as_zero(module: str) -> None:
    out = played(["1+1"], [f"--rewards.functions={module}:silent"], task="0")
    assert "no reward" in out
    assert "total" not in out


def test_a_growing_conversation_shows_only_new_messages(module: str) -> None:
    out = played(["one", "", "two"], [f"--rollout.function={module}:two_steps"], task="0")
    assert out.count("8 6 5 2=5") == 1
    assert "text: think again" in out
    assert "user: And now?" in out
    assert "total: 0.5" in out


@pytest.mark.parametrize(("name", "why"), [("broken", "RuntimeError: no luck"), ("plain", "URL")])
def test_a_failed_rollout_shows_the_reason(name: str, why: str, module: str) -> None:
    out = played([], [f"--rollout.function={module}:{name}"], task="0")
    assert any(names(line, "failed") and why in line for line in out.splitlines())


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("settings", "options", "expected"),
    [
        ([], {"task": "countdown/nowhere"}, r"--task: .*countdown/nowhere\b"),
        ([], {"task": "99999999"}, r"--task: .*\b99999999\b"),
        (['--rollout.agent=["my-agent"]'], {}, r"rollout\.agent: "),
        (["--rewards.functions=number"], {}, r"rewards\.functions: .*\bnumber\b.*\banswer\b"),
    ],
)
def test_a_task_or_setting_that_cannot_be_played_is_refused_in_one_line(
    settings: list[str], options: dict[str, str], expected: str
) -> None:
    with pytest.raises(BadInput, match=f"^{expected}"):
        played([], settings, **options)


def test_a_task_is_chosen_by_number_or_by_id() -> None:
    tasks = [Task("a", "x"), Task("7", "y")]
    assert (index_of("0", tasks), index_of("a", tasks), index_of("7", tasks)) == (0, 0, 1)


def test_a_pipe_plays_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from outpace.cli import main; code = main(['play', '--task', '0']); "
        "sys.exit(9 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input="1+1\n\nn\n", capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "total: 0" in done.stdout


# -------------------------------------------------------------------------------------------------------- typed answers


def search(query: str, limit: int = 3) -> str:
    """Search the notes.

    Args:
        query: words.
    """
    return query * limit


SEARCH = [tool.schema for tool in load_tools([search])]


@given(st.text(), st.integers())
def test_arguments_survive_being_typed_as_json(query: str, limit: int) -> None:
    line = f"/call search {json.dumps({'query': query, 'limit': limit})}"
    assert read_answer([line], SEARCH).calls == (("search", {"query": query, "limit": limit}),)


def test_an_argument_stays_text_if_the_tool_declares_text() -> None:
    typed = read_answer(["/call search query=12 limit=12", "//call me"], SEARCH)
    assert typed.calls == (("search", {"query": "12", "limit": 12}),)
    assert typed.text == "/call me"


def test_a_tool_signature_marks_optional_arguments() -> None:
    assert tool_signature(SEARCH[0]) == "search(query: string, limit?: integer)  Search the notes."
