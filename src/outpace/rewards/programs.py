"""The reward `python`: does the program in the completion do what its tests say?

    completion ─▶ last fenced block, or all of it ─▶ sandbox ─▶ judged out here

The column `tests` is a list of `{"input": …, "output": …}`, what the program reads and must print, or the same as
JSON, or a text of Python asserts about the names that the program defines. A program cannot give itself a reward:

- With inputs and outputs the expected output never enters the sandbox; what was printed is compared out here.
- With asserts, program and tests run in two sandboxes and exchange plain data (`outpace.rewards.dialogue`). What is
  judged is the end of the tests' process, in which no code of the program runs. Where the two would share user and
  files, so that one could look into the other, asserts are refused.
- Tests that cannot be read, or that never use a name of the program, judge nobody: they are a `RewardFailed`.

What stays possible: a program may recognise the inputs that it is asked about and answer only those; asserts that fetch
their own judge from the program, such as a module that only the program imports or the equality of its own objects,
believe what it says; and as an ordinary user without namespaces, a program may look for expected outputs in processes
of yours that the system lets it trace.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from outpace.config import Config
from outpace.errors import RewardFailed, one_line
from outpace.rewards.dialogue import UNASKED
from outpace.rewards.sandbox import SandboxLimits, SandboxResult, check_available, run_python
from outpace.rewards.text import Completion, last_text
from outpace.runtime.per_loop import PerLoop
from outpace.runtime.together import together

FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([^\s`{,:]*)([^`]*)")
PYTHON = frozenset({"python", "python3", "py"})
DIALOGUE = Path(__file__).with_name("dialogue.py")

COLUMN = "reward python: the column tests"

Tests = str | Sequence[Mapping[str, Any]]

_places: PerLoop[asyncio.Semaphore] = PerLoop()


def make_python(config: Config) -> ProgramReward:
    check_available()
    return ProgramReward(SandboxLimits.of(config.sandbox), config.sandbox.workers)


@dataclass(frozen=True)
class ProgramReward:
    """Asynchronous: the event loop only waits. `workers` programs run at once in this process, whoever asks."""

    limits: SandboxLimits
    workers: int
    own_time: ClassVar[bool] = True
    """Every program has its time limit, counted from when it starts; the time of a whole group depends on the queue."""

    async def __call__(
        self, completions: Sequence[Completion], tests: Sequence[Tests | None], **columns: Any
    ) -> list[float | None]:
        pairs = zip(completions, tests, strict=True)
        return await together(*(self._score(program_of(last_text(text)), given) for text, given in pairs))

    async def _score(self, program: str, tests: Tests | None) -> float | None:
        tests = _as_list(tests) if isinstance(tests, str) else tests
        if tests is None or len(tests) == 0:
            return None
        if not isinstance(tests, str):
            return await self._share(program, tests)
        if fault := await asyncio.to_thread(_fault, tests):
            raise RewardFailed(f"{COLUMN} has asserts that Python cannot read: {fault}")
        async with self._place():
            return _judged(await self._asked(program, tests))

    def _place(self) -> asyncio.Semaphore:
        return _places.get(lambda: asyncio.Semaphore(self.workers))

    async def _share(self, program: str, tests: Sequence[Mapping[str, Any]]) -> float:
        """The share of tests that are passed. One that runs out of time is the last: the others would take as long."""
        passed = 0
        for test in tests:
            given, wanted = _texts(test)
            async with self._place():
                result = await run_python(program, stdin=given, limits=self.limits)
            if result.status == "timeout":
                break
            passed += result.status == "ok" and not result.truncated and _lines(result.stdout) == _lines(wanted)
        return passed / len(tests)

    async def _asked(self, program: str, tests: str) -> SandboxResult:
        """How the tests ended."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            answering = asyncio.create_task(self._side("serve", ours, files={"answer.py": program}))
            asking = asyncio.create_task(self._side("ask", theirs, stdin=tests))
            try:
                await asyncio.wait({answering, asking}, return_when=asyncio.FIRST_COMPLETED)
                for end in (ours, theirs):  # now only the sandboxes hold them: one side hears when the other ends
                    end.close()
                asked = await asking
                if answering.done():
                    answering.result()  # a sandbox that could not be had is no fault of the program
                return asked
            finally:
                for task in (answering, asking):
                    task.cancel()
                await asyncio.gather(answering, asking, return_exceptions=True)

    async def _side(self, role: str, channel: socket.socket, **given: Any) -> SandboxResult:
        code = await asyncio.to_thread(DIALOGUE.read_text)
        arguments = [role, str(channel.fileno())]
        return await run_python(code, limits=self.limits, arguments=arguments, channel=channel, **given)


def _judged(asked: SandboxResult) -> float:
    if not (asked.isolation.files or asked.isolation.user):
        raise RewardFailed(
            "reward python: asserts need namespaces or root, for here a program could read them; "
            "give inputs and outputs in the column tests, or permit user namespaces"
        )
    if asked.exit_code == UNASKED:
        said = one_line(asked.stderr.rstrip().rpartition("\n")[2], 120)
        raise RewardFailed(
            f"{COLUMN} has asserts that never use a name of the program{said and f' ({said})'}; functions and "
            "classes of tests must be called there, and a name that Python has itself is Python's"
        )
    return 1.0 if asked.exit_code == 0 else 0.0


def _as_list(tests: str) -> Tests:
    """Inputs and outputs that were written as JSON; any other text as it is."""
    if not tests.lstrip().startswith(("[", "{")):
        return tests
    try:
        found = json.loads(tests)
    except ValueError:
        return tests
    if not isinstance(found, list):
        raise RewardFailed(f'{COLUMN} is a JSON object; write a list of {{"input": text, "output": text}}')
    return found


@lru_cache(maxsize=1024)
def _fault(tests: str) -> str:
    """What is wrong with asserts before anything is run; empty if nothing is."""
    try:
        compile(tests, "tests", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return one_line(error) or type(error).__name__
    return ""


def program_of(text: str) -> str:
    """The last fenced block that says it is Python, else the last that says nothing, else the whole text."""
    found = list(_blocks(text))
    chosen = [body for language, body in found if language in PYTHON] or [
        body for language, body in found if not language
    ]
    return (chosen or [text])[-1]


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and content of every fenced block, whatever its language: fences come in pairs, in their order."""
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        fence = FENCE.fullmatch(line)
        if opening is None:
            opening, lines = fence, []
        elif fence and fence[2].startswith(opening[2]) and not (fence[3] + fence[4]).strip():
            yield opening[3].lower(), "".join(each.removeprefix(opening[1]) + "\n" for each in lines)
            opening = None
        else:
            lines.append(line)


def _texts(test: Mapping[str, Any]) -> tuple[str, str]:
    if isinstance(test, Mapping):
        given, wanted = test.get("input", ""), test.get("output")
        if isinstance(given, str) and isinstance(wanted, str):
            return given, wanted
    raise ValueError(f'a test is {{"input": text, "output": text}}, not {test!r}')


def _lines(text: str) -> list[str]:
    """White space at the end of a line or of the whole is no difference."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
