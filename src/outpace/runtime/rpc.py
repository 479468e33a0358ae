"""Typed RPC over a byte stream, and the Unix sockets that components of one machine connect through.

    proxy(Engine, channel)  ── RpcCall(id, method, args) ──▶  serve_calls(engine, Engine, channel)
                            ◀── RpcReply | RpcFailure ─────

A process that runs user code serves the same frames on its main thread, one call at a time
(`outpace.runtime.user_code_child`).

Both ends take the argument and result types from the same protocol class, so a call through a proxy has the protocol's
types and a frame of any other shape is rejected. Calls are multiplexed: each runs in its own task, and tasks start in
the order in which the frames arrive. The serving loop answers pings itself.

Invariants
- Every call has a timeout. When the channel closes, every pending call fails with `ComponentLost`, and so does every
  later call until the proxy is attached to a channel to the component's successor.
- Nothing is unpickled. An exception is sent as its qualified class name, message and traceback text, all bounded. Only
  the exact classes in `_TYPED_FAILURES` keep their type; a user's class with the same name does not.
- A reply to a call that was never made is an invalid frame and fails the connection.
- A Unix socket is private to the user. A peer must send the token as its first frame; anything else closes the
  connection before any call is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import logging
import math
import os
import traceback
import typing
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from outpace import errors
from outpace.errors import ComponentFailed
from outpace.runtime import wire
from outpace.runtime.components import START_DEADLINE_S
from outpace.runtime.diagnostics import waiting
from outpace.runtime.wire import WireError, encodable_text


@cache
def signature(protocol: type, method: str) -> tuple[Any, Any]:
    """Return the argument types, as one tuple type, and the result type of a protocol method."""
    function = getattr(protocol, method, None)
    if function is None or method.startswith("_"):
        raise WireError(f"{protocol.__name__} has no method {method!r}")
    hints = typing.get_type_hints(function)
    result = hints.pop("return")
    return tuple[tuple(hints[name] for name in inspect.signature(function).parameters if name != "self")], result  # type: ignore[misc]


P = TypeVar("P")

DEFAULT_DEADLINE_S = 3600.0
MAX_FAILURE_TEXT = 20_000
"""Maximum characters of a failure's message, and of its traceback."""


def qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_TYPED_FAILURES: dict[str, type[errors.OutpaceError]] = {
    qualified_name(kind): kind
    for kind in (
        errors.BadInput,
        errors.RequestFailed,
        errors.ContextFull,
        errors.EngineClosed,
        errors.RewardFailed,
        errors.CorruptData,
        errors.NotSaved,
        errors.CollectiveFailed,
        errors.UpdateFailed,
        errors.UpdateTorn,
    )
}


class RpcCall(msgspec.Struct, tag="call"):
    id: int
    method: str
    args: bytes


class RpcReply(msgspec.Struct, tag="reply"):
    id: int
    value: bytes


class RpcFailure(msgspec.Struct, tag="failure"):
    """The call raised. `kind` is the qualified name of the exception class."""

    id: int
    kind: str
    message: str
    traceback: str

    @classmethod
    def of(cls, call_id: int, error: BaseException) -> RpcFailure:
        """Describe an exception. Its `__str__` may be user code, may raise, and may return text that UTF-8 cannot
        encode."""
        kind = errors.ComponentFailed if isinstance(error, errors.ComponentFailed) else type(error)
        try:
            message = encodable_text(errors.clip(str(error), MAX_FAILURE_TEXT))
            trace = getattr(error, "remote_traceback", "") or "".join(traceback.format_exception(error))
            trace = encodable_text(trace[-MAX_FAILURE_TEXT:])
        except Exception:  # boundary to user code
            message, trace = "(the message cannot be shown)", ""
        return cls(call_id, encodable_text(qualified_name(kind)), message, trace)

    @property
    def name(self) -> str:
        """The class name of the exception, without its module."""
        return self.kind.rpartition(".")[2]

    def error(self, component: str) -> errors.OutpaceError:
        """Return the exception to raise in the caller."""
        typed = _TYPED_FAILURES.get(self.kind)
        if typed is not None:
            return typed(self.message)
        return errors.ComponentFailed(component, f"{self.name}: {self.message}", self.traceback)


RpcFrame = RpcCall | RpcReply | RpcFailure

PING = "ping"
"""A call that every serving loop answers itself."""

END = "end"
"""A call that ends the serving loop. If the channel closes without it, the caller or its connection has failed."""


READ_BYTES = 1 << 20


class Channel:
    """Sends and receives whole frames over an asyncio stream. Received frames have at most `limit` bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int = wire.MAX_FRAME) -> None:
        self._reader = reader
        self._writer = writer
        self._received = wire.FrameBuffer(limit)
        self._unsent: list[bytes] = []

    async def receive(self, kind: Any = RpcFrame) -> Any:
        """Return the next frame, or None if the other side is gone. Raises `WireError` if it is too long or invalid."""
        while (body := self._received.next_body()) is None:
            try:
                data = await self._reader.read(READ_BYTES)
            except OSError:
                return None
            if not data:
                return None
            self._received.add(data)
        return wire.decode(body, kind)

    def send(self, message: Any) -> None:
        """Send a frame. Frames sent in the same event loop iteration are written together, to save system calls.

        Does not wait for a slow peer: a caller waits for the reply to its call anyway."""
        frame = wire.frame(wire.encode(message))
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame)

    def _flush(self) -> None:
        frames, self._unsent = b"".join(self._unsent), []
        if not self._writer.is_closing():
            self._writer.write(frames)

    async def finish(self) -> None:
        """Close after everything sent has been written. The other side may already be gone."""
        self.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def close(self) -> None:
        self._flush()
        self._writer.close()


class _PendingCall(NamedTuple):
    reply: asyncio.Future[bytes]
    method: str
    deadline_s: float
    expires: float  # loop time


ErrorOf = Callable[[RpcFailure], Exception]
"""Returns the exception that a call raises for a failure on the other side."""


class RpcProxy:
    """The calling side. Attribute access returns a coroutine function that performs the call, except for the methods
    `attach`, `detach` and `ping`, whose names no protocol may use."""

    def __init__(
        self, protocol: type, channel: Channel, component: str, deadline_s: float, error_of: ErrorOf | None = None
    ) -> None:
        assert not {"attach", "detach", "ping"} & set(dir(protocol)), f"{protocol.__name__} uses a name of RpcProxy"
        self._protocol = protocol
        self._component = component
        self._deadline_s = deadline_s
        self._error_of = error_of or (lambda failure: failure.error(component))
        self._calls = 0
        self._pending: dict[int, _PendingCall] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next_check = math.inf  # when the timer runs
        self.attach(channel)

    def attach(self, channel: Channel) -> None:
        """Use this channel from now on."""
        self._channel = channel
        self._down: errors.ComponentFailed | None = None
        self._reader = asyncio.create_task(self._read(channel), name=f"replies of {self._component}")

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*args: Any) -> Coroutine[Any, Any, Any]:
            return self._call(method, args)

        self.__dict__[method] = call  # found directly from now on
        return call

    async def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        _, result = signature(self._protocol, method)
        with waiting(f"{self._component}: {method}"):
            value = await self._exchange(method, wire.encode(args), self._deadline_s)
        return wire.decode(value, result)

    async def ping(self, deadline_s: float) -> bool:
        """Return whether the process at the other end replies in time."""
        try:
            await self._exchange(PING, b"", deadline_s)
        except errors.ComponentFailed:
            return False
        return True

    async def _exchange(self, method: str, args: bytes, deadline_s: float) -> bytes:
        if self._down is not None:
            raise _copy(self._down)
        loop = asyncio.get_running_loop()
        self._calls += 1
        number, reply, expires = self._calls, loop.create_future(), loop.time() + deadline_s
        self._channel.send(RpcCall(number, method, args))
        self._pending[number] = _PendingCall(reply, method, deadline_s, expires)
        if expires < self._next_check:
            self._check_at(expires)
        try:
            return await reply  # type: ignore[no-any-return]
        finally:
            del self._pending[number]

    def _check_at(self, when: float) -> None:
        """Check at the time `when` which calls have timed out. One timer serves all calls, because few time out."""
        self._stop_timer()
        self._next_check, self._timer = when, asyncio.get_running_loop().call_at(when, self._expire_calls)

    def _expire_calls(self) -> None:
        now = asyncio.get_running_loop().time()
        for call in self._pending.values():
            if call.expires <= now and not call.reply.done():
                message = f"{call.method} timed out after {call.deadline_s:g} s"
                call.reply.set_exception(errors.ComponentFailed(self._component, message))
        self._stop_timer()
        later = [call.expires for call in self._pending.values() if now < call.expires < math.inf]
        if later:
            self._check_at(min(later))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next_check, self._timer = math.inf, None

    async def _read(self, channel: Channel) -> None:
        try:
            while (frame := await channel.receive()) is not None:
                self._complete(frame)
            self._fail(errors.ComponentLost(self._component, "closed its connection"))
        except WireError as error:
            self._fail(errors.ComponentFailed(self._component, f"sent an invalid frame: {error}"))
        except Exception as error:  # task boundary: pending calls must fail, not wait forever
            text = "".join(traceback.format_exception(error))
            message = f"reading its replies failed: {type(error).__name__}: {error}"
            self._fail(errors.ComponentFailed(self._component, message, text))

    def _complete(self, frame: RpcFrame) -> None:
        if frame.id > self._calls:
            raise WireError(f"a reply to call {frame.id}, which was not made")
        call = self._pending.get(frame.id)
        if call is None or call.reply.done():
            return  # the call timed out or was cancelled
        if isinstance(frame, RpcReply):
            call.reply.set_result(frame.value)
        elif isinstance(frame, RpcFailure):
            call.reply.set_exception(self._error_of(frame))

    def _fail(self, error: errors.ComponentFailed) -> None:
        self._down = error
        for call in self._pending.values():
            if not call.reply.done():
                call.reply.set_exception(_copy(error))

    def detach(self, error: errors.ComponentFailed) -> None:
        """Close the channel. Every call raises `error` until `attach`."""
        self._fail(error)
        self._stop_timer()
        self._reader.cancel()
        self._channel.close()


def proxy(protocol: type[P], channel: Channel, component: str, deadline_s: float = DEFAULT_DEADLINE_S) -> P:
    """Return a remote object that implements `protocol`. `deadline_s` is the timeout of each call."""
    return cast(P, RpcProxy(protocol, channel, component, deadline_s))


def close_proxy(remote: object) -> None:
    """Close a proxy's reader and channel. Does nothing for other objects."""
    if isinstance(remote, RpcProxy):
        remote.detach(errors.ComponentFailed(remote._component, "was stopped"))


def _copy(error: errors.ComponentFailed) -> errors.ComponentFailed:
    """Copy an error before raising it: raising one instance repeatedly would grow its traceback."""
    return type(error)(error.component, error.message, error.remote_traceback)


async def serve_calls(target: object, protocol: type, channel: Channel) -> bool:
    """Serve calls to `target` until the other side is gone. Returns whether it sent `END` first."""
    running: set[asyncio.Task[None]] = set()
    try:
        while (frame := await channel.receive()) is not None:
            if not isinstance(frame, RpcCall):
                continue
            if frame.method == END:
                return True
            task = asyncio.create_task(_answer(target, protocol, channel, frame))
            running.add(task)
            task.add_done_callback(running.discard)
        return False
    finally:
        for task in running:
            task.cancel()


async def _answer(target: object, protocol: type, channel: Channel, call: RpcCall) -> None:
    try:
        value = b"" if call.method == PING else wire.encode(await method_call(target, protocol, call))
        message: RpcReply | RpcFailure = RpcReply(call.id, value)
    except Exception as error:  # process boundary: every error goes to the caller
        message = RpcFailure.of(call.id, error)
    _reply(channel, message)


def method_call(target: object, protocol: type, call: RpcCall) -> Any:
    """Call the method of `target` that a frame names, with its arguments checked against the protocol."""
    args: tuple[Any, ...] = wire.decode(call.args, signature(protocol, call.method)[0])
    return getattr(target, call.method)(*args)


def _reply(channel: Channel, message: RpcReply | RpcFailure) -> None:
    try:
        channel.send(message)
    except WireError as error:  # the reply is too long; send the error instead
        channel.send(RpcFailure.of(message.id, error))


log = logging.getLogger(__name__)


TOKEN_S = 10.0
"""How long a peer may take to send its token."""


async def check_token(channel: Channel, token: str) -> None:
    """Receive the first frame of a peer. Raises `WireError` unless it is the token, `TimeoutError` if it is late."""
    async with asyncio.timeout(TOKEN_S):
        offered = await channel.receive(str)
    if not isinstance(offered, str) or not hmac.compare_digest(offered.encode(), token.encode()):
        raise WireError("a missing or wrong token")


async def listen(path: str, token: str, target: object, protocol: type) -> asyncio.Server:
    """Serve calls to `target` on a Unix socket, for peers that send the token first."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        try:
            await check_token(channel, token)
            await serve_calls(target, protocol, channel)
        except asyncio.CancelledError:
            return  # the process is ending; re-raised, asyncio would log it as an error
        except (WireError, TimeoutError) as error:
            log.warning("rejected a connection: %s", error)
        finally:
            channel.close()

    server = await asyncio.start_unix_server(accept, path)
    os.chmod(path, 0o600)
    return server


async def connect(path: str, token: str, deadline_s: float | None = START_DEADLINE_S) -> Channel:
    """Connect to a peer that may still be starting. Retries until `deadline_s`; None retries forever."""
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                try:
                    reader, writer = await asyncio.open_unix_connection(path)
                    break
                except (FileNotFoundError, ConnectionError):
                    await asyncio.sleep(0.05)
    except TimeoutError:
        raise ComponentFailed(os.path.basename(path), f"did not accept connections within {deadline_s:g} s") from None
    channel = Channel(reader, writer)
    channel.send(token)
    return channel
