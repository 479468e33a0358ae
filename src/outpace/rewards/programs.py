"""The reward `python`: does the program in the completion do what its tests say?

    completion ─▶ last fenced block, or all of it ─▶ sandbox ─▶ judged out here

The column `tests` is a list of `{"input": …, "output": …}`, what the program reads and must print, or a text of Python
asserts about the names that the program defines. A program cannot give itself a reward:

- With inputs and outputs the expected output never enters the sandbox; what was printed is compared out here.
- With asserts, program and tests run in two sandboxes and exchange plain data (`outpace.rewards.dialogue`). What is
  judged is the end of the tests' process, in which no code of the program runs.

What stays possible: a program may recognise the inputs that it is asked about and answer only those; and asserts that
fetch their own judge from the program, such as a module that only the program imports, believe what it says.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from outpace.config import Config
from outpace.rewards.sandbox import SandboxLimits, check_available, run_python
from outpace.rewards.text import Completion, last_text
from outpace.runtime.per_loop import PerLoop
from outpace.runtime.together import together

FENCED = re.compile(r"^[ \t]*```(python3?|py)?[ \t]*\r?\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL | re.IGNORECASE)
DIALOGUE = Path(__file__).with_name("dialogue.py")

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
        if not tests:
            return None
        if isinstance(tests, str):
            async with self._place():
                return 1.0 if await self._holds(program, tests) else 0.0
        return await self._share(program, tests)

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

    async def _holds(self, program: str, tests: str) -> bool:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            answering = asyncio.create_task(self._side("serve", "answer.py", program, ours))
            asking = asyncio.create_task(self._side("ask", "tests.py", tests, theirs))
            try:
                await asyncio.wait({answering, asking}, return_when=asyncio.FIRST_COMPLETED)
                for end in (ours, theirs):  # now only the sandboxes hold them: one side hears when the other ends
                    end.close()
                passed = await asking
                if answering.done():
                    answering.result()  # a sandbox that could not be had is no fault of the program
                return passed
            finally:
                for task in (answering, asking):
                    task.cancel()
                await asyncio.gather(answering, asking, return_exceptions=True)

    async def _side(self, role: str, name: str, text: str, channel: socket.socket) -> bool:
        code = await asyncio.to_thread(DIALOGUE.read_text)
        arguments = [role, str(channel.fileno())]
        result = await run_python(code, limits=self.limits, arguments=arguments, files={name: text}, channel=channel)
        return result.exit_code == 0


def program_of(text: str) -> str:
    """The last fenced block that says it is Python, else the last that says nothing, else the whole text."""
    found = FENCED.findall(text)
    marked = [str(body) for language, body in found if language]
    return (marked or [str(body) for _, body in found] or [text])[-1]


def _texts(test: Mapping[str, Any]) -> tuple[str, str]:
    with suppress(KeyError, TypeError):
        given, wanted = test.get("input", ""), test["output"]
        if isinstance(given, str) and isinstance(wanted, str):
            return given, wanted
    raise ValueError(f'a test is {{"input": text, "output": text}}, not {test!r}')


def _lines(text: str) -> list[str]:
    """White space at the end of a line or of the whole is no difference."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
