"""Environments with the mistakes and faults of user code. Loaded by file, in this process and in others."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import outpace
from outpace.rollouts.tools.functions import ToolError


class Guessing:
    """A number to guess."""

    def __init__(self) -> None:
        self.guesses: list[int] = []
        self.resets = 0

    def reset(self, secret: int, prompt: Any = None) -> str:
        self.secret, self.prompt = secret, prompt
        self.resets += 1
        return f" It is below ten, says {prompt!r}."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.
        """
        self.guesses.append(number)
        outpace.log_metric("guess/number", number)
        if number < 0:
            raise ValueError("numbers are\nnot negative")
        return "right" if number == self.secret else "wrong"

    def state(self) -> dict[str, Any]:
        """What the instance has seen."""
        return {"pid": os.getpid(), "guesses": self.guesses, "resets": self.resets}

    def get_reward(self) -> float:
        return 1.0 if self.secret in self.guesses else 0.0


class Waiting:
    """All methods but one are async, a task lives as long as the instance, and there is no `get_reward`."""

    async def reset(self, **columns: Any) -> None:
        self.columns = columns
        self.loop = asyncio.get_running_loop()
        self.beats = 0
        self.enough = asyncio.Event()
        self.heart = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            self.beats += 1
            if self.beats >= 20:
                self.enough.set()

    async def look(self) -> list[str]:
        """See which columns there are."""
        await asyncio.sleep(0)
        assert asyncio.get_running_loop() is self.loop
        return sorted(self.columns)

    async def listen(self) -> bool:
        """Wait for the heart."""
        await self.enough.wait()
        return True

    def pulse(self) -> int:
        """Count the beats, without waiting."""
        return self.beats

    async def exit(self) -> None:
        """Try to leave."""
        sys.exit(3)


class AsyncJudge:
    async def reset(self, note: str) -> str:
        note += "!"
        return note

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        outpace.log_metric("judge/notes", 1)
        return 0.5


class Columns:
    """Reads its columns and modifies one of them."""

    def reset(self, board: list[int], pair: Any = None, nothing: Any = 0, **columns: Any) -> str:
        seen = f"{board} {type(pair).__name__} {nothing!r} {sorted(columns)}"
        board.append(9)
        return seen


class Talking:
    """Returns values of many types."""

    def reset(self, **columns: Any) -> None: ...

    def give(self, what: str) -> Any:
        """Give something back."""
        circle: list[Any] = []
        circle.append(circle)
        deep: list[Any] = []
        for _ in range(5000):
            deep = [deep]
        return {
            "text": "half a pair: \ud800",
            "none": None,
            "json": {"a": [1, 2.5, True, None]},
            "tuple": (1, 2),
            "object": Path("/a/b"),
            "mixed": {"where": Path("/a/b"), 3: {4}},
            "circle": circle,
            "deep": deep,
            "bytes": b"\x00\x01",
            "large": 2**70,
            "long": "x" * 10_000_000,
        }[what]

    def give_too_much(self) -> str:
        """Give forty million characters."""
        return "x" * 40_000_000

    def swallow(self, anything: list[Any] | str | int) -> str:
        """Take something."""
        return type(anything).__name__


class Unfit:
    """Fails outside of its tools, in the way that the column `how` selects."""

    def reset(self, how: str) -> Any:
        self.how = how
        if how == "reset raises":
            raise ValueError("two\nlines")
        if how == "reset exits":
            sys.exit(3)
        if how == "reset returns a dict":
            return {}
        return None

    def get_reward(self) -> Any:
        if self.how == "reward raises":
            raise KeyError("gone")
        return {"text": "1.0", "nan": float("nan"), "none": None, "large": 10**400}[self.how]


class NeverMade:
    def __init__(self) -> None:
        raise OSError("no display")

    def reset(self) -> None: ...


class SaysNothing(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


class Faulty:
    """Fails in the selected way, in a tool or in `reset`."""

    def reset(self, fault: str = "", note: str = "") -> None:
        self.note = note
        if fault:
            getattr(self, fault)()

    def fine(self) -> int:
        """Nothing wrong."""
        return os.getpid()

    def raise_oddly(self) -> None:
        """Raise something that cannot be shown."""
        raise SaysNothing

    def raise_as_a_tool(self) -> None:
        """Raise what outpace itself raises."""
        raise ToolError("of mine")

    async def be_cancelled(self) -> None:
        """Await a future that was cancelled."""
        waiting = asyncio.get_running_loop().create_future()
        waiting.cancel("of mine")
        await waiting

    def interrupt(self) -> None:
        """Be interrupted."""
        raise KeyboardInterrupt

    def hang(self) -> None:
        """Never return."""
        self._note_pid(os.getpid())
        while True:
            time.sleep(60)

    def hang_in_c(self) -> None:
        """Never return, and hold the interpreter lock."""
        ctypes.PyDLL(None).sleep(600)

    async def hang_on_the_loop(self) -> None:
        """Never return, without blocking the loop."""
        await asyncio.Event().wait()

    def leave(self) -> None:
        """Leave at once."""
        os._exit(3)

    def crash(self) -> None:
        """Read from a null pointer."""
        ctypes.string_at(0)

    def kill(self) -> None:
        """Be killed, as by the system when memory runs out."""
        os.kill(os.getpid(), signal.SIGKILL)

    def fork(self) -> str:
        """Return twice."""
        return "copy" if os.fork() == 0 else "original"

    def breed(self) -> None:
        """Start a child process that stays, and hang."""
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self._note_pid(child.pid)
        self.hang()

    def flood(self) -> str:
        """Print a lot."""
        for _ in range(256):
            os.write(1, b"y" * 4096)
        return "done"

    def devour(self) -> int:
        """Allocate too much memory."""
        return len(bytearray(4 << 30))

    def babble(self) -> str:
        """Write into the socket."""
        os.write(int(sys.argv[1]), b"\xff" * 64)
        return "done"

    def forge(self) -> str:
        """Reply with a malformed message that is 5,000 lists deep."""
        body = b"\x83\xa4type\xa5reply\xa2id\x00\xa5value" + b"\x91" * 5000 + b"\xc0"
        os.write(int(sys.argv[1]), len(body).to_bytes(4, "little") + body)
        return "done"

    def thread(self) -> bool:
        """Whether this is the main thread."""
        return threading.current_thread() is threading.main_thread()

    def _note_pid(self, pid: int) -> None:
        if self.note:
            with open(self.note, "a") as file:
                file.write(f"{pid}\n")
