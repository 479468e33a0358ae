"""Child side of a disposable process that runs user code for its parent.

    parent ── RpcCall ──▶ method, on the main thread ── RpcReply | RpcFailure ──▶ parent

A kind of process is a module that calls `serve_user_code` when it runs as `python -m module FD PARENT MEMORY_MB`. The
parent side is `outpace.runtime.user_code`.

Invariants
- User code runs on the main thread, so it may use SIGALRM and block; the parent can kill the process at any time.
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
from collections.abc import Callable

from outpace.runtime import diagnostics, wire
from outpace.runtime.die_with_parent import die_with_parent
from outpace.runtime.rpc import RpcCall, RpcFailure, RpcReply, method_call


def serve_user_code(name: str, target: object, protocol: type, wait: Callable[[int], None] | None = None) -> None:
    """Serve calls to the blocking methods of `target` until the parent is gone. `protocol` declares them as coroutines,
    as the parent calls them.

    `wait`, if given, is called with the socket's file descriptor before each call and returns once there is something
    to read."""
    die_with_parent(int(sys.argv[2]))
    faulthandler.enable()  # a crash in C code writes its stack to the log
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    _limit_memory(int(sys.argv[3]))
    own_pid = os.getpid()
    diagnostics.set_crash_process(name)
    diagnostics.crash_point("user_code.started")
    while (call := _receive(connection, wait)) is not None:
        diagnostics.crash_point("user_code.called")
        reply = _answer(target, protocol, call)
        if os.getpid() != own_pid:
            os._exit(0)  # a copy forked by user code
        diagnostics.crash_point("user_code.answered")
        try:
            connection.sendall(wire.frame(wire.encode(reply)))
        except ConnectionError:
            return  # the parent is gone


def _answer(target: object, protocol: type, call: RpcCall) -> RpcReply | RpcFailure:
    try:
        try:
            return RpcReply(call.id, wire.encode(method_call(target, protocol, call)))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # a leftover alarm would fire during the next call
    # User code may raise anything and may even try to exit.
    except BaseException as error:
        return RpcFailure.of(call.id, error)


def _limit_memory(megabytes: int) -> None:
    """Limit the address space; 0 means no limit."""
    if megabytes:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))


def _receive(connection: socket.socket, wait: Callable[[int], None] | None) -> RpcCall | None:
    """Return the next call, or None if the parent is gone."""
    if wait is not None:
        wait(connection.fileno())
    header = _exactly(connection, wire.HEADER.size)
    body = header and _exactly(connection, wire.HEADER.unpack(header)[0])
    return wire.decode(body, RpcCall) if body else None


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
