"""The inside of a grader process: `python -m outpace.rewards.grader FD MEMORY_MB`.

    Load(reference or code) ─▶ import ─▶ Done          Ask(arguments) ─▶ call, check ─▶ Scores | Refused | Raised

Invariants
- User code runs on the main thread, so that a function may use SIGALRM.
- What goes up is msgpack of the structs below. Pickled bytes only come down, over the socket that was inherited.
- The process ends with its parent: the kernel kills it, and a closed socket ends it.
- Only this process answers: a copy that the function forked ends as soon as the function returns in it.
- What the function prints goes to file descriptors 1 and 2, which have nothing to do with the socket.

This is no sandbox: the function has the rights of the user, and its process, with all that it changes there, serves
later calls too.
"""

from __future__ import annotations

import faulthandler
import inspect
import os
import signal
import socket
import sys
import traceback
from typing import Any

import msgspec

from outpace import wire
from outpace.errors import RewardFailed, one_line
from outpace.references import load_function
from outpace.rewards.arguments import unpacked
from outpace.rewards.outcomes import checked
from outpace.runtime import code
from outpace.runtime.lifeline import die_with_parent

SETTING = "rewards.functions"
MAX_TRACEBACK = 20_000


class Load(msgspec.Struct, tag="load"):
    """Make a function known: by `reference`, or where that is empty by `code` (see `outpace.runtime.code`)."""

    id: int
    function: str
    reference: str
    code: bytes


class Ask(msgspec.Struct, tag="ask"):
    """Call a function for `count` completions. `arguments` and `by_value` are those of `outpace.rewards.arguments`."""

    id: int
    function: str
    count: int
    arguments: bytes
    by_value: bool


class Done(msgspec.Struct, tag="done"):
    id: int


class Scores(msgspec.Struct, tag="scores"):
    id: int
    values: list[float | None]


class Refused(msgspec.Struct, tag="refused"):
    """The function returned something unusable; the message names it and the sample."""

    id: int
    message: str


class Raised(msgspec.Struct, tag="raised"):
    id: int
    kind: str
    message: str
    traceback: str


Order = Load | Ask
Answer = Done | Scores | Refused | Raised


def main() -> None:
    die_with_parent()
    faulthandler.enable()  # a crash in C says where it was, in the log
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    _limit_memory(int(sys.argv[2]))
    functions: dict[str, Any] = {}
    home = os.getpid()
    while (order := _receive(connection)) is not None:
        answer = _obey(order, functions)
        if os.getpid() != home:
            os._exit(0)
        connection.sendall(wire.frame(wire.encode(answer)))


def _limit_memory(megabytes: int) -> None:
    """Of address space; 0 is no limit."""
    if megabytes:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))


def _receive(connection: socket.socket) -> Order | None:
    """The next order, or None when the parent is gone."""
    header = _exactly(connection, wire.HEADER.size)
    body = header and _exactly(connection, wire.HEADER.unpack(header)[0])
    return wire.decode(body, Order) if body else None


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = connection.recv(size - len(parts))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


def _obey(order: Order, functions: dict[str, Any]) -> Answer:
    try:
        try:
            if isinstance(order, Load):
                functions[order.function] = _load(order)
                return Done(order.id)
            return _judged(order, _call(order, functions[order.function]))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left behind would go off in the next call
    # The boundary to the user's code, which may raise anything and may even try to exit.
    except BaseException as error:
        return Raised(order.id, type(error).__name__, _message(error), _trace())


def _judged(order: Ask, returned: Any) -> Answer:
    try:
        return Scores(order.id, checked(order.function, returned, order.count))
    except RewardFailed as error:
        return Refused(order.id, _sendable(str(error)))


def _load(order: Load) -> Any:
    if order.reference:
        return load_function(order.reference, SETTING)
    return code.unpack(order.code)[order.function]


def _call(order: Ask, function: Any) -> Any:
    returned = function(**unpacked(order.arguments, order.by_value, order.count))
    return _awaited(returned) if inspect.isawaitable(returned) else returned


def _awaited(returned: Any) -> Any:
    """What a plain function that hands out a coroutine meant to return."""
    import asyncio  # here, because few need it and it is slow to load

    async def wait() -> Any:
        return await returned

    return asyncio.run(wait())


def _message(error: BaseException) -> str:
    try:
        return _sendable(one_line(error))
    except Exception:  # the text of an exception is code of the user too
        return "(its message cannot be shown)"


def _trace() -> str:
    try:
        return _sendable(traceback.format_exc()[-MAX_TRACEBACK:])
    except Exception:  # formatting asks the exception for its text
        return ""


def _sendable(text: str) -> str:
    """Half of a surrogate pair is no character and does not travel."""
    return text.encode("utf-8", "replace").decode()


if __name__ == "__main__":
    main()
