"""Child side of a disposable process that runs user code for its parent.

    parent ── request ──▶ handler, on the main thread ── reply | RaisedReply ──▶ parent

A kind of process is a module that calls `serve_user_code` when it runs as `python -m module FD MEMORY_MB PARENT`. The
parent side is `outpace.runtime.user_code`.

Invariants
- User code runs on the main thread, so it may use SIGALRM.
- Replies are msgpack of typed structs. Pickled bytes are only sent from parent to child, over the inherited socket.
- The process ends with its parent: the kernel kills it, and it exits when the socket closes.
- Only this process replies: a copy forked by user code exits as soon as that code returns in it.
- User code prints to file descriptors 1 and 2, which are separate from the socket.

This is not a sandbox: the code runs with the user's rights, and its side effects on the process persist across
requests.
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

from outpace.errors import one_line
from outpace.runtime import diagnostics, wire
from outpace.runtime.by_value import encodable_text
from outpace.runtime.die_with_parent import die_with_parent

MAX_TRACEBACK = 20_000


class NumberedMessage(Protocol):
    """A request or a reply. A reply has the id of its request."""

    id: int


class DoneReply(msgspec.Struct, tag="done"):
    id: int


class RaisedReply(msgspec.Struct, tag="raised"):
    """User code raised. All strings are encodable."""

    id: int
    kind: str
    message: str
    traceback: str


def serve_user_code(
    kind: str, request_type: Any, handle: Callable[[Any], NumberedMessage], wait: Callable[[int], None] | None = None
) -> None:
    """Handle requests of the type `request_type` with `handle` until the parent is gone.

    An exception from `handle` is sent as `RaisedReply`. `wait`, if given, is called with the socket's file descriptor
    before each request and returns once there is something to read."""
    die_with_parent(int(sys.argv[3]))
    faulthandler.enable()  # a crash in C code writes its stack to the log
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    _limit_memory(int(sys.argv[2]))
    own_pid = os.getpid()
    diagnostics.set_crash_process(kind)
    diagnostics.crash_point("user_code.started")
    while (request := _receive(connection, request_type, wait)) is not None:
        diagnostics.crash_point("user_code.called")
        reply = _reply_to(request, handle)
        if os.getpid() != own_pid:
            os._exit(0)  # a copy forked by user code
        diagnostics.crash_point("user_code.answered")
        try:
            connection.sendall(wire.frame(wire.encode(reply)))
        except ConnectionError:
            return  # the parent is gone


def _reply_to(request: Any, handle: Callable[[Any], NumberedMessage]) -> NumberedMessage:
    try:
        try:
            return handle(request)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # a leftover alarm would fire during the next call
    # User code may raise anything and may even try to exit.
    except BaseException as error:
        return RaisedReply(request.id, type(error).__name__, message_of(error), _trace())


def message_of(error: BaseException) -> str:
    """Return an exception's message as one encodable line."""
    try:
        return encodable_text(one_line(error))
    except Exception:  # `__str__` of an exception is user code, too
        return "(the message cannot be shown)"


def _trace() -> str:
    try:
        return encodable_text(traceback.format_exc()[-MAX_TRACEBACK:])
    except Exception:  # formatting calls the exception's `__str__`
        return ""


def _limit_memory(megabytes: int) -> None:
    """Limit the address space; 0 means no limit."""
    if megabytes:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))


def _receive(connection: socket.socket, request_type: Any, wait: Callable[[int], None] | None) -> Any:
    """Return the next request, or None if the parent is gone."""
    if wait is not None:
        wait(connection.fileno())
    header = _exactly(connection, wire.HEADER.size)
    body = header and _exactly(connection, wire.HEADER.unpack(header)[0])
    return wire.decode(body, request_type) if body else None


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            chunk = connection.recv(size - len(data))
        except ConnectionError:
            return None
        if not chunk:
            return None
        data += chunk
    return bytes(data)
