"""The reward `python`: correct programs score, and no program can forge its own score."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.config import Config
from outpace.config.sections import SandboxConfig
from outpace.errors import RewardFailed
from outpace.rewards import python_tests
from outpace.rewards.grading import grade
from outpace.rewards.python_tests import ProgramReward, extract_program
from outpace.rewards.python_tests_protocol import NotPlainData, RemoteObject, decode, encode, make_requester
from outpace.rewards.registry import check_rewards, resolve_rewards
from rewards_support import forbid_namespaces
from support import examples, naming

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")

REWARD = ProgramReward(SandboxConfig(timeout_s=20.0, workers=2))
SHORT = ProgramReward(SandboxConfig(timeout_s=1.5, workers=2))
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
        ("```bash\nrun me\n```\nand\n```python\nx = 5\n```", "x = 5\n"),
        ("```python title=a.py\nx = 6\n```\n```bash\nrun me\n```", "x = 6\n"),
        ("```bash\nrun me\n```\n```\nx = 7\n```\n```text\nout\n```", "x = 7\n"),
        ("````python\nx = 9\n```\n````", "x = 9\n```\n"),
        ("1. So:\n   ```py\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ("~~~python\nx = 8\n~~~", "x = 8\n"),
    ],
)
def test_the_program_is_the_last_python_code_block(text: str, program: str) -> None:
    assert extract_program(text) == program


async def test_programs_in_texts_and_chats_are_run() -> None:
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
async def test_the_score_is_the_fraction_of_passed_tests(program: str, expected: float) -> None:
    assert await score(program, DOUBLES) == expected


async def test_a_program_that_hangs_in_one_test_is_not_run_on_later_tests() -> None:
    program = "n = int(input())\nwhile n == 5: pass\nprint(2 * n)"
    assert await score(program, [*DOUBLES, DOUBLES[0]], SHORT) == pytest.approx(1 / 3)


async def test_malformed_tests_fail_and_are_quoted_in_the_error() -> None:
    with pytest.raises(RewardFailed, match=naming("python", "ValueError", "sample 0", "{'question': 1}")):
        await grade([("python", REWARD)], None, ["p"], ["x"], {"tests": [[{"question": 1}]]}, 60.0)


async def test_inputs_and_outputs_may_be_json() -> None:
    assert await score("print(2 * int(input()))", json.dumps(DOUBLES)) == 1.0
    assert await score("I do not know.", json.dumps(DOUBLES)) == 0.0
    assert await score("x = 1", " [] ") is None


@pytest.mark.parametrize("test", [{"input": "", "output": 4}, {"output": None}, "assert f(2) == 4", {"question": 1}])
async def test_a_test_without_input_and_output_texts_is_rejected(test: Any) -> None:
    for tests in ([test], json.dumps([test])):
        with pytest.raises(ValueError, match=naming('"input"', '"output"', repr(test))):
            await score("x = 1", tests)


# -------------------------------------------------------------------------------------------------------------- asserts

VACUOUS_TESTS = {
    "one object of JSON": ('{"inputs": ["2"], "outputs": ["4"]}', "JSON"),
    "a function that is never called": ("def check(candidate):\n  assert candidate(2) == 4", "program"),
    "a class of tests": (
        "import unittest\nclass T(unittest.TestCase):\n  def test(self): self.assertEqual(f(2), 4)",
        "program",
    ),
    "a guard": ("if __name__ == '__main__':\n  assert f(2) == 4", "program"),
    "names of Python": ("assert max([1, 2, 3]) == 3", "program"),
    "an early exit": ("raise SystemExit(0)", "SystemExit: 0"),
    "a module that is not there": ("import no_such\nassert f(2) == 4", "ModuleNotFoundError: No module named"),
    "names of the tests": ("__file__\nassert f(2) == 4", "NameError: name '__file__' is not defined"),
    "no Python": ("assert f(2) == 4)", "unmatched ')' (tests, line 1)"),
    "no text": ("assert f('\0') == 4", "null bytes"),
}


@pytest.mark.parametrize(("tests", "key"), VACUOUS_TESTS.values(), ids=VACUOUS_TESTS.keys())
async def test_tests_that_check_nothing_are_rejected_and_their_column_is_named(tests: str, key: str) -> None:
    with pytest.raises(RewardFailed) as caught:
        await grade([("python", REWARD)], None, ["p"], ["max = f = lambda x: 4"], {"tests": [tests]}, 60.0)
    assert caught.value.function == "python"
    assert "column tests" in str(caught.value)
    assert key in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


async def test_asserts_are_rejected_if_program_and_tests_share_a_user_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_namespaces(monkeypatch, tmp_path, same_user=True)
    with pytest.raises(RewardFailed, match=naming("python", "namespaces")):
        await score("def f(x): return x * x", SQUARES)
    assert await score("print(2 * int(input()))", DOUBLES) == 1.0


async def test_tests_are_not_written_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    forbid_namespaces(monkeypatch, tmp_path)
    seen: list[str] = []
    run = python_tests.run_python

    async def look(code: str, **given: Any) -> Any:
        seen.extend(given.get("files", {}).values())
        return await run(code, **given)

    monkeypatch.setattr(python_tests, "run_python", look)
    assert await score("def f(x): return x * x", SQUARES) == 1.0
    assert seen == ["def f(x): return x * x"]


PROGRAMS = {
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
    "user-defined errors": (
        "class Mine(LookupError): pass\ndef f(): raise Mine('no', 2)",
        "try:\n  f()\nexcept LookupError as error:\n  assert error.args == ('no', 2)\n"
        "  assert type(error).__name__ == 'Mine'\nelse:\n  assert False",
    ),
    "errors with arguments": (
        "def f(d): return d['k']",
        "try:\n  f({})\nexcept KeyError as error:\n  assert error.args == ('k',)\nelse:\n  assert False",
    ),
    "a main program": (
        "def f(x): return x\nif __name__ == '__main__':\n  import sys\n  print(f(int(input())))\n  sys.exit(1)",
        "assert f(2) == 2",
    ),
    "data classes": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass(order=True)\nclass P:\n"
        "  x: int\n  def __add__(self, other): return P(self.x + other.x)",
        "assert P(1) == P(1) != P(2)\nassert (P(1) + P(2)).x == 3\nassert P(1) < P(2) and P(2) in [P(1), P(2)]\n"
        "assert sorted([P(2), P(1)]) == [P(1), P(2)]\nassert isinstance(P(1), P) and not isinstance(1, P)\n"
        "p = P(1)\np.x = 5\nassert p.x == 5 and repr(p) == 'P(x=5)'\nassert P(1) != 1 and not P(1) == (1,)",
    ),
    "containers": (
        "class L:\n  def __init__(self): self.d = {}\n  def __setitem__(self, k, v): self.d[k] = v\n"
        "  def __getitem__(self, k): return self.d[k]\n  def __delitem__(self, k): del self.d[k]\n"
        "  def __iter__(self): return iter(self.d)\n  def __bool__(self): return len(self.d) > 1",
        "c = L()\nc['a'] = 1\nassert not c\nc['b'] = [2]\nassert c and 'a' in c and 'z' not in c\ndel c['a']\n"
        "assert list(c) == ['b']",
    ),
    "user-defined numbers": (
        "class N:\n  def __float__(self): return 1.5\n  def __neg__(self): return 7\n  def __hash__(self): return 3\n"
        "  def __eq__(self, other): return True",
        "assert float(N()) == 1.5 and -N() == 7\nassert len({N(), N()}) == 1",
    ),
    "closures": ("def outer(x): return lambda y: x + y", "assert outer(1)(2) == 3"),
    "modules": ("x = [1, 2]", "import math\nassert math.fsum(x) == 3"),
    "noise": ("def f(x): print('noise'); return x", "assert f(float('inf')) == float('inf')"),
}


@pytest.mark.parametrize(("program", "tests"), PROGRAMS.values(), ids=PROGRAMS.keys())
async def test_asserts_can_use_the_definitions_of_the_program(program: str, tests: str) -> None:
    assert await score(program, tests) == 1.0


FORGERIES = {
    "exits at once": "import os; os._exit(0)",
    "exits with sys.exit": "import sys; sys.exit(0)",
    "exits when called": "import os\ndef f(x): os._exit(0)",
    "raises SystemExit": "def f(x): raise SystemExit(0)",
    "equals everything": "class E:\n  def __eq__(self, other): return True\ndef f(x): return E()",
    "a number that equals everything": "class E(int):\n  def __eq__(self, other): return True\ndef f(x): return E()",
    "is near everything": (
        "class E:\n  def __sub__(self, other): return 0\n  __rsub__ = __add__ = __mul__ = __sub__\n"
        "  def __lt__(self, other): return True\n  __gt__ = __le__ = __ge__ = __contains__ = __eq__ = __lt__\n"
        "def f(x): return E()"
    ),
    "shadows built-in functions": "def abs(x): return 0\nall = any = isinstance = len = abs\ndef f(x): return 0",
    "disables asserts": "import builtins\nbuiltins.AssertionError = BaseException\ndef f(x): return 0",
    "looks for the tests": "import glob\nfor n in glob.glob('*'): print(n, open(n).read())\ndef f(x): return 0",
    "looks for the tests everywhere": (
        "import ast, glob, os, time\nfound = {}\n"
        "for n in 20 * (glob.glob('/tmp/outpace-sandbox-*/*') + glob.glob('/proc/[0-9]*/fd/0')):\n"
        "  try: tree = ast.parse(os.read(os.open(n, os.O_NONBLOCK), 9999))\n"
        "  except Exception: continue\n"
        "  for e in ast.walk(tree):\n"
        "    if isinstance(e, ast.Compare) and isinstance(e.comparators[0], ast.Constant):\n"
        "      found[ast.unparse(e.left)] = e.comparators[0].value\n"
        "def f(x): return found.get(f'f({x})')"
    ),
    "looks through frames": (
        "import sys\ndef f(x):\n  g = sys._getframe()\n  while g: print(g.f_locals); g = g.f_back\n  return 0"
    ),
    "replies before any request": (
        "import os\nfor fd in range(3, 99):\n"
        '  try: os.write(fd, b\'{"value": true, "arguments": null}\\n\' * 9)\n  except OSError: pass\n'
        "def f(x): return 0"
    ),
    "prints verdicts": "print('OK', 'PASSED', 1.0)\ndef f(x): return 0",
    "writes the reward": "open('reward.txt', 'w').write('1.0')\nopen('tests.py', 'w').write('')\ndef f(x): return 0",
    "alters the grader": (
        "try:\n  import outpace.rewards.python_tests as p; p.ProgramReward._score = None\nexcept ImportError: pass\n"
        "def f(x): return 0"
    ),
    "sends invalid replies": (
        "import os\nfor fd in range(3, 99):\n  try: os.write(fd, b'\\xff' * 5000)\n  except OSError: pass\n"
        "def f(x): return 0"
    ),
    "runs out of memory": "x = bytearray(10 << 30)\ndef f(x): return x * x",
    "talks to the network": "import socket\nsocket.create_connection(('127.0.0.1', 80))\ndef f(x): return x * x",
}


NEAR = "assert abs(f(3) - 9) < 1e-6\nassert f(3) < 10\n"
WITHIN = "assert 9 in f(3)\n"


def forgeries() -> Iterator[Any]:
    """Every program with one kind of test and with or without namespaces; slow with both, every combination nightly."""
    for number, (name, program) in enumerate(FORGERIES.items()):
        for namespaces in (True, False):
            halves = [[SQUARES, WITHIN], [NEAR]]
            now, later = halves if (number // 2 + namespaces) % 2 else halves[::-1]
            slow = [pytest.mark.slow] if (number + namespaces) % 2 else []
            yield pytest.param(program, namespaces, now, id=f"{name}-{namespaces}", marks=slow)
            yield pytest.param(program, namespaces, later, id=f"{name}-{namespaces}-more", marks=pytest.mark.nightly)


@pytest.mark.parametrize(("program", "namespaces", "tests"), list(forgeries()))
async def test_no_program_can_forge_its_score(
    program: str, namespaces: bool, tests: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not namespaces:
        forbid_namespaces(monkeypatch, tmp_path)
    scores = await REWARD(completions=[program] * len(tests), tests=tests)
    assert scores == [0.0] * len(tests)


ENDLESS = {
    "a fork bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "endless output": "while True: print('y' * 999)",
    "never answers": "def f(x):\n  while True: pass",
}


@pytest.mark.parametrize("program", ENDLESS.values(), ids=ENDLESS.keys())
async def test_a_program_that_does_not_end_scores_0_and_does_not_affect_later_ones(program: str) -> None:
    assert await score(program, SQUARES, SHORT) == 0.0
    assert await score("def f(x): return x * x", SQUARES) == 1.0


async def test_a_program_cannot_read_environment_secrets_or_the_expected_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_SECRET_KEY", "swordfish")
    program = (
        "import glob, os\nfound = str(os.environ)\n"
        "for name in (*glob.glob('/proc/*/environ'), *glob.glob('/proc/*/cmdline'), *glob.glob('*')):\n"
        "  try: found += open(name, errors='replace').read()\n  except OSError: pass\n"
        "print('sword' + 'fish' in found or 'expect' + 'ation' in found)"
    )
    assert await score(program, [{"input": "", "output": "expectation"}, {"input": "", "output": "False"}]) == 0.5


async def test_a_program_cannot_delete_files_outside_the_sandbox(tmp_path: Path) -> None:
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
@examples(100)
def test_plain_data_round_trips_unchanged(value: Any) -> None:
    arrived = decode(encode(value), None)
    assert arrived == value
    assert repr(arrived) == repr(value)


def test_other_objects_are_sent_by_reference_or_rejected() -> None:
    class Number(int): ...

    assert encode([Number(3)], lambda value: 7) == {"list": [{"kept": 7}]}
    with pytest.raises(NotPlainData):
        encode(Number(3))
    assert encode(RemoteObject(4, None)) == {"kept": 4}


class ScriptedChannel:
    """A channel that always returns the same reply."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def send(self, message: Any) -> None: ...

    def receive(self) -> Any:
        return self.answer


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt", "BaseException", "print", "__import__", "NoSuch"])
def test_every_error_of_the_program_is_raised_as_an_exception_subclass(kind: str) -> None:
    ask: Any = make_requester(ScriptedChannel({"error": [kind], "given": {"list": []}}))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        ask("name", "f")


# ------------------------------------------------------------------------------------------------------------- settings


def test_the_reward_is_built_from_the_config() -> None:
    config = Config.model_validate({"sandbox": {"timeout_s": 3.0, "workers": 5, "memory_mb": 128}})
    ((name, function),) = resolve_rewards(["python"], config)
    assert name == "python"
    assert function == ProgramReward(SandboxConfig(timeout_s=3.0, memory_mb=128, workers=5))
    assert check_rewards(["python"], None, ["tests"], config)
