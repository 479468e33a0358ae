"""The reward `python`: run the program in the completion against its tests.

    completion ─▶ last fenced block, or the whole text ─▶ sandbox ─▶ score computed outside the sandbox

The column `tests` is a list of `{"input": …, "output": …}` (stdin and expected stdout), the same as JSON, or Python
asserts about the names that the program defines. A program cannot reward itself:

- With inputs and outputs, the expected output never enters the sandbox; stdout is compared outside.
- With asserts, program and tests run in two sandboxes and exchange plain data (`python_tests_protocol`). The
  score is the exit code of the tests' process, in which no code of the program runs. Asserts are refused if the two
  sandboxes would share user and files, because the program could then read the tests.
- Tests that do not parse, or that never use a name of the program, raise `RewardFailed`.

Remaining hazards: a program may hard-code answers to inputs it recognizes. Asserts that rely on the program for the
check itself (a module that only the program imports, equality of the program's own objects) trust the program. As an
ordinary user without namespaces, a program may search processes of that user, if the system allows tracing them, for
expected outputs.
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
from outpace.config.sections import SandboxConfig
from outpace.errors import RewardFailed, one_line
from outpace.rewards.builtin import Completion, last_text
from outpace.rewards.python_tests_protocol import EXIT_PROGRAM_UNUSED
from outpace.rewards.sandbox import SandboxResult, check_available, run_python
from outpace.runtime.async_tools import PerLoop, gather_or_cancel

FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([^\s`{,:]*)([^`]*)")
PYTHON = frozenset({"python", "python3", "py"})
PROTOCOL_SCRIPT = Path(__file__).with_name("python_tests_protocol.py")
"""The script that runs in both sandboxes when the tests are asserts."""

COLUMN = "reward python: the column tests"

Tests = str | Sequence[Mapping[str, Any]]

_slots_by_loop: PerLoop[asyncio.Semaphore] = PerLoop()


def make_python(config: Config) -> ProgramReward:
    check_available()
    return ProgramReward(config.sandbox)


@dataclass(frozen=True)
class ProgramReward:
    """Async: the event loop only waits. At most `limits.workers` programs run at once per event loop."""

    limits: SandboxConfig
    own_timeout: ClassVar[bool] = True
    """Every program has its own timeout from the moment it starts; the time for a whole group depends on the queue."""

    async def __call__(
        self, completions: Sequence[Completion], tests: Sequence[Tests | None], **columns: Any
    ) -> list[float | None]:
        pairs = zip(completions, tests, strict=True)
        return await gather_or_cancel(*(self._score(extract_program(last_text(text)), given) for text, given in pairs))

    async def _score(self, program: str, tests: Tests | None) -> float | None:
        tests = _parse_tests(tests) if isinstance(tests, str) else tests
        if tests is None or len(tests) == 0:
            return None
        if not isinstance(tests, str):
            return await self._pass_rate(program, tests)
        if error := await asyncio.to_thread(_compile_error, tests):
            raise RewardFailed(f"{COLUMN} has asserts that Python cannot compile: {error}")
        async with self._slot():
            return _assert_score(await self._run_asserts(program, tests))

    def _slot(self) -> asyncio.Semaphore:
        return _slots_by_loop.get(lambda: asyncio.Semaphore(self.limits.workers))

    async def _pass_rate(self, program: str, tests: Sequence[Mapping[str, Any]]) -> float:
        """Return the fraction of tests passed. Stops at the first timeout: the other tests would take as long."""
        passed = 0
        for test in tests:
            given, expected = _input_and_output(test)
            async with self._slot():
                result = await run_python(program, stdin=given, limits=self.limits)
            if result.status == "timeout":
                break
            printed = _stripped_lines(result.stdout)
            passed += result.status == "ok" and not result.truncated and printed == _stripped_lines(expected)
        return passed / len(tests)

    async def _run_asserts(self, program: str, tests: str) -> SandboxResult:
        """Run program and asserts in two sandboxes; return the result of the asserts."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            program_side = asyncio.create_task(self._run_side("serve", ours, files={"answer.py": program}))
            test_side = asyncio.create_task(self._run_side("ask", theirs, stdin=tests))
            try:
                await asyncio.wait({program_side, test_side}, return_when=asyncio.FIRST_COMPLETED)
                for end in (ours, theirs):  # now only the sandboxes hold them, so each sees when the other exits
                    end.close()
                result = await test_side
                if program_side.done():
                    program_side.result()  # raises if the sandbox failed to start: not the program's fault
                return result
            finally:
                for task in (program_side, test_side):
                    task.cancel()
                await asyncio.gather(program_side, test_side, return_exceptions=True)

    async def _run_side(self, role: str, channel: socket.socket, **given: Any) -> SandboxResult:
        code = await asyncio.to_thread(PROTOCOL_SCRIPT.read_text)
        arguments = [role, str(channel.fileno())]
        return await run_python(code, limits=self.limits, arguments=arguments, channel=channel, **given)


def _assert_score(result: SandboxResult) -> float:
    if not (result.isolation.files or result.isolation.user):
        raise RewardFailed(
            "reward python: asserts require namespaces or root, because without them the program could read the tests; "
            "give inputs and outputs in the column tests, or permit user namespaces"
        )
    if result.exit_code == EXIT_PROGRAM_UNUSED:
        error = one_line(result.stderr.rstrip().rpartition("\n")[2], 120)
        raise RewardFailed(
            f"{COLUMN} has asserts that never use a name of the program{error and f' ({error})'}; call test functions "
            "and classes in the tests, and note that names of Python builtins refer to the builtins"
        )
    return 1.0 if result.exit_code == 0 else 0.0


def _parse_tests(tests: str) -> Tests:
    """Parse inputs and outputs written as JSON; return any other text unchanged."""
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
def _compile_error(tests: str) -> str:
    """Return the compile error of the asserts; empty if there is none."""
    try:
        compile(tests, "tests", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return one_line(error) or type(error).__name__
    return ""


def extract_program(text: str) -> str:
    """Return the last fenced Python block, else the last block without a language, else the whole text."""
    found = list(_fenced_blocks(text))
    chosen = [body for language, body in found if language in PYTHON] or [
        body for language, body in found if not language
    ]
    return (chosen or [text])[-1]


def _fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and content of every fenced block, in order."""
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


def _input_and_output(test: Mapping[str, Any]) -> tuple[str, str]:
    if isinstance(test, Mapping):
        given, expected = test.get("input", ""), test.get("output")
        if isinstance(given, str) and isinstance(expected, str):
            return given, expected
    raise ValueError(f'a test must be {{"input": text, "output": text}}, got {test!r}')


def _stripped_lines(text: str) -> list[str]:
    """Split into lines, ignoring trailing white space of lines and of the text."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
