"""The inside of a servant, a disposable process that runs code of the user for its parent.

    parent ── order ──▶ obey, on the main thread ── answer | Raised ──▶ parent

A kind of servant is a module that calls `serve` when it is run as `python -m module FD MEMORY_MB PARENT`. The parent's
side is `outpace.runtime.servant`.

Invariants
- User code runs on the main thread, so that it may use SIGALRM.
- What goes up is msgpack of typed structs. Pickled bytes only come down, over the socket that was inherited.
- The process ends with its parent: the kernel kills it, and a closed socket ends it.
- Only this process answers: a copy that user code forked ends as soon as that code returns in it.
- What user code prints goes to file descriptors 1 and 2, which have nothing to do with the socket.

This is no sandbox: the code has the rights of the user, and the process, with all that it changes there, serves later
orders too.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from outpace import crash, wire
from outpace.errors import one_line
from outpace.runtime.lifeline import die_with_parent
from outpace.runtime.values import sendable

MAX_TRACEBACK = 20_000


class Numbered(Protocol):
    """What orders and answers have in common: an answer has the number of its order."""

    id: int


class Done(msgspec.Struct, tag="done"):
    id: int


class Raised(msgspec.Struct, tag="raised"):
    """User code raised; the texts are fit to be sent."""

    id: int
    kind: str
    message: str
    traceback: str


def serve(kind: str, orders: Any, obey: Callable[[Any], Numbered], wait: Callable[[int], None] | None = None) -> None:
    """Answer orders of the type `orders` until the parent is gone.

    What `obey` raises is answered with `Raised`. `wait` is called with the socket's descriptor between two orders, and
    returns once there is something to read."""
    die_with_parent(int(sys.argv[3]))
    faulthandler.enable()  # a crash in C says where it was, in the log
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    _limit_memory(int(sys.argv[2]))
    home = os.getpid()
    crash.be(kind)
    crash.reached("servant.started")
    while (order := _receive(connection, orders, wait)) is not None:
        crash.reached("servant.called")
        answer = _answer(order, obey)
        if os.getpid() != home:
            os._exit(0)
        crash.reached("servant.answered")
        try:
            connection.sendall(wire.frame(wire.encode(answer)))
        except ConnectionError:
            return  # the parent has gone while this was done


def _answer(order: Any, obey: Callable[[Any], Numbered]) -> Numbered:
    try:
        try:
            return obey(order)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left behind would go off in the next call
    # The boundary to the user's code, which may raise anything and may even try to exit.
    except BaseException as error:
        return Raised(order.id, type(error).__name__, message_of(error), _trace())


def message_of(error: BaseException) -> str:
    """What an exception says, on one line that can be sent."""
    try:
        return sendable(one_line(error))
    except Exception:  # the text of an exception is code of the user too
        return "(its message cannot be shown)"


def _trace() -> str:
    try:
        return sendable(traceback.format_exc()[-MAX_TRACEBACK:])
    except Exception:  # formatting asks the exception for its text
        return ""


def _limit_memory(megabytes: int) -> None:
    """Of address space; 0 is no limit."""
    if megabytes:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))


def _receive(connection: socket.socket, orders: Any, wait: Callable[[int], None] | None) -> Any:
    """The next order, or None when the parent is gone."""
    if wait is not None:
        wait(connection.fileno())
    header = _exactly(connection, wire.HEADER.size)
    body = header and _exactly(connection, wire.HEADER.unpack(header)[0])
    return wire.decode(body, orders) if body else None


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
