"""The reward `python`: right programs are paid, and no program pays itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.config import Config
from outpace.errors import RewardFailed
from outpace.rewards.dialogue import Kept, Refused, ask_over, decode, encode
from outpace.rewards.grading import grade
from outpace.rewards.programs import ProgramReward, program_of
from outpace.rewards.registry import check_rewards, resolve_rewards
from outpace.rewards.sandbox import SandboxLimits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")

REWARD = ProgramReward(SandboxLimits(timeout_s=20.0), 2)
SHORT = ProgramReward(SandboxLimits(timeout_s=1.5), 2)
SQUARES = "assert f(3) == 9\nassert f(-1) == 1\n"
DOUBLES = [{"input": "2\n", "output": "4\n"}, {"input": "5", "output": "10"}]


async def score(program: Any, tests: Any, reward: ProgramReward = REWARD) -> float | None:
    return (await reward(completions=[program], tests=[tests]))[0]


# ------------------------------------------------------------------------------------------------------------ programs


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```python\nx = 1\n```\n```python\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\nprints\n```\n1\n```", "x = 1\n"),
        ("```\nx = 3\n```", "x = 3\n"),
        ("```Python\r\nx = 4\r\n```", "x = 4\r\n"),
        ("```python\nnever closed", "```python\nnever closed"),
    ],
)
def test_the_program_is_the_last_block_of_python(text: str, program: str) -> None:
    assert program_of(text) == program


async def test_texts_and_chats_are_run() -> None:
    program = "```python\ndef f(x):\n    return x * x\n```"
    completions: list[Any] = [program, [{"role": "assistant", "content": program}], [], "no program"]
    assert await REWARD(completions=completions, tests=[SQUARES] * 4) == [1.0, 1.0, 0.0, 0.0]


async def test_without_tests_the_reward_does_not_apply() -> None:
    assert [await score("x = 1", tests) for tests in (None, "", [])] == [None, None, None]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print(2 * int(input()))", 1.0),
        ("n = input()\nprint(4)", 0.5),
        ("print(2 * int(input()), end='')", 1.0),
        ("print('nothing')", 0.0),
        ("print(2 * int(input())); raise SystemExit(1)", 0.0),
        ("this is no program", 0.0),
    ],
)
async def test_the_score_is_the_share_of_passed_tests(program: str, expected: float) -> None:
    assert await score(program, DOUBLES) == expected


async def test_a_program_that_hangs_in_one_test_gets_no_further_ones() -> None:
    program = "n = int(input())\nwhile n == 5: pass\nprint(2 * n)"
    assert await score(program, [*DOUBLES, DOUBLES[0]], SHORT) == pytest.approx(1 / 3)


async def test_tests_of_another_form_fail_with_their_name() -> None:
    with pytest.raises(RewardFailed, match=r"reward python raised ValueError on sample 0: a test is"):
        await grade([("python", REWARD)], None, ["p"], ["x"], {"tests": [[{"question": 1}]]}, 60.0)


# -------------------------------------------------------------------------------------------------------------- asserts


MANNERS = {
    "values": (
        "def f(x): return (x, [x], {x: {1, 2}}, b'b', 1.5, None, 2**70)",
        "assert f(1) == (1, [1], {1: {1, 2}}, b'b', 1.5, None, 2**70)",
    ),
    "changed arguments": (
        "def f(a): a.append({'k': 1}); a[0]['z'] = 2",
        "a = [{}]\nb = a[0]\nf(a)\nassert a == [{'z': 2}, {'k': 1}]\nassert b is a[0]",
    ),
    "classes": (
        "class S:\n  def two(self, x): return [x] * 2",
        "assert S().two(3) == [3, 3]\ndef check(kind):\n  assert kind().two(1) == [1, 1]\ncheck(S)",
    ),
    "generators": ("def f():\n  yield 1\n  yield 2", "assert list(f()) == [1, 2]\nassert next(f()) == 1"),
    "errors": (
        "def f(): raise ValueError('no')",
        "try:\n  f()\nexcept ValueError as error:\n  assert str(error) == 'no'\nelse:\n  assert False",
    ),
    "errors of its own": (
        "class Mine(Exception): pass\ndef f(): raise Mine('no')",
        "try:\n  f()\nexcept RuntimeError as error:\n  assert 'Mine' in str(error)\nelse:\n  assert False",
    ),
    "closures": ("def outer(x): return lambda y: x + y", "assert outer(1)(2) == 3"),
    "modules": ("x = [1, 2]", "import math\nassert math.fsum(x) == 3"),
    "noise": ("def f(x): print('noise'); return x", "assert f(float('inf')) == float('inf')"),
}


@pytest.mark.parametrize(("program", "tests"), MANNERS.values(), ids=MANNERS.keys())
async def test_asserts_speak_of_what_the_program_defines(program: str, tests: str) -> None:
    assert await score(program, tests) == 1.0


FORGERIES = {
    "leaves at once": "import os; os._exit(0)",
    "leaves politely": "import sys; sys.exit(0)",
    "leaves when asked": "import os\ndef f(x): os._exit(0)",
    "raises an exit": "def f(x): raise SystemExit(0)",
    "equals everything": "class E:\n  def __eq__(self, other): return True\ndef f(x): return E()",
    "a number that does": "class E(int):\n  def __eq__(self, other): return True\ndef f(x): return E()",
    "no asserts any more": "import builtins\nbuiltins.AssertionError = BaseException\ndef f(x): return 0",
    "looks for the tests": "import glob\nfor n in glob.glob('*'): print(n, open(n).read())\ndef f(x): return 0",
    "looks through frames": (
        "import sys\ndef f(x):\n  g = sys._getframe()\n  while g: print(g.f_locals); g = g.f_back\n  return 0"
    ),
    "speaks before it is asked": (
        "import os\nfor fd in range(3, 99):\n"
        '  try: os.write(fd, b\'{"value": true, "arguments": null}\\n\' * 9)\n  except OSError: pass\n'
        "def f(x): return 0"
    ),
    "prints verdicts": "print('OK', 'PASSED', 1.0)\ndef f(x): return 0",
    "writes the reward": "open('reward.txt', 'w').write('1.0')\nopen('tests.py', 'w').write('')\ndef f(x): return 0",
    "alters the grader": (
        "try:\n  import outpace.rewards.programs as p; p.ProgramReward._score = None\nexcept ImportError: pass\n"
        "def f(x): return 0"
    ),
    "sends what is none": (
        "import os\nfor fd in range(3, 99):\n  try: os.write(fd, b'\\xff' * 5000)\n  except OSError: pass\n"
        "def f(x): return 0"
    ),
    "runs out of memory": "x = bytearray(10 << 30)\ndef f(x): return x * x",
    "talks to the network": "import socket\nsocket.create_connection(('127.0.0.1', 80))\ndef f(x): return x * x",
}


@pytest.mark.parametrize("program", FORGERIES.values(), ids=FORGERIES.keys())
async def test_no_program_gives_itself_a_reward(program: str) -> None:
    assert await score(program, SQUARES) == 0.0


ENDLESS = {
    "a fork bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "endless output": "while True: print('y' * 999)",
    "never answers": "def f(x):\n  while True: pass",
}


@pytest.mark.parametrize("program", ENDLESS.values(), ids=ENDLESS.keys())
async def test_a_program_that_does_not_end_gets_nothing_and_later_ones_are_unaffected(program: str) -> None:
    assert await score(program, SQUARES, SHORT) == 0.0
    assert await score("def f(x): return x * x", SQUARES) == 1.0


async def test_a_secret_of_ours_and_the_expected_output_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_KEY", "swordfish")
    program = (
        "import glob, os\nfound = str(os.environ)\n"
        "for name in (*glob.glob('/proc/*/environ'), *glob.glob('/proc/*/cmdline'), *glob.glob('*')):\n"
        "  try: found += open(name, errors='replace').read()\n  except OSError: pass\n"
        "print('sword' + 'fish' in found or 'expect' + 'ation' in found)"
    )
    assert await score(program, [{"input": "", "output": "expectation"}, {"input": "", "output": "False"}]) == 0.5


async def test_a_home_directory_survives(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    (tmp_path / "thesis").write_text("years of work")
    program = (
        f"import os, shutil\nfor place in ({str(tmp_path)!r}, '~'): shutil.rmtree(os.path.expanduser(place), True)"
    )
    await score(program, [{"input": "", "output": ""}])
    assert (tmp_path / "thesis").exists()


# ---------------------------------------------------------------------------------------------------------- plain data

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(PLAIN)
@settings(max_examples=100, deadline=None)
def test_plain_data_arrives_as_it_is(value: Any) -> None:
    arrived = decode(encode(value), None)
    assert arrived == value
    assert repr(arrived) == repr(value)


def test_what_is_not_plain_is_kept_or_refused() -> None:
    class Number(int): ...

    assert encode([Number(3)], lambda value: 7) == {"list": [{"kept": 7}]}
    with pytest.raises(Refused):
        encode(Number(3))
    assert encode(Kept(4, None)) == {"kept": 4}


class Deaf:
    """A line whose other end says what it likes."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def send(self, message: Any) -> None: ...

    def receive(self) -> Any:
        return self.answer


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt", "BaseException", "print", "__import__", "NoSuch"])
def test_an_error_of_the_program_can_always_be_caught_as_an_exception(kind: str) -> None:
    ask: Any = ask_over(Deaf({"error": kind, "text": ""}))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        ask("name", "f")


# ------------------------------------------------------------------------------------------------------------- settings


def test_the_reward_is_made_from_the_config() -> None:
    config = Config.model_validate({"sandbox": {"timeout_s": 3.0, "workers": 5, "memory_mb": 128}})
    ((name, function),) = resolve_rewards(["python"], config)
    assert name == "python"
    assert function == ProgramReward(SandboxLimits(timeout_s=3.0, memory_mb=128), 5)
    assert check_rewards(["python"], None, ["tests"], config)
