"""Typed RPC over a byte stream, and the Unix sockets that components of one machine connect through.

    proxy(Engine, channel)  ── RpcCall(id, method, args) ──▶  serve_calls(engine, Engine, channel)
                            ◀── RpcReply | RpcFailure ─────

Both ends take the argument and result types from the same protocol class, so a call through a proxy has the protocol's
types and a frame of any other shape is rejected. Calls are multiplexed: each runs in its own task, and tasks start in
the order in which the frames arrive. The serving loop answers pings itself.

Invariants
- Every call has a timeout. When the channel closes, every pending call fails with `ComponentLost`, and so does every
  later call until the proxy is attached to a channel to the component's successor.
- Nothing is unpickled. An exception is sent as its class name, message and traceback text.
- A Unix socket is private to the user. A peer must send the token as its first frame; anything else closes the
  connection before any call is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import itertools
import logging
import os
import traceback
import typing
from typing import Any, TypeVar, cast

import msgspec

from outpace import errors
from outpace.errors import ComponentFailed
from outpace.runtime import wire
from outpace.runtime.components import START_DEADLINE_S
from outpace.runtime.diagnostics import waiting
from outpace.runtime.wire import WireError


class MethodSignature:
    """The argument and result types of one protocol method, from its type hints."""

    def __init__(self, protocol: type, method: str) -> None:
        function = getattr(protocol, method, None)
        if function is None or method.startswith("_"):
            raise wire.WireError(f"{protocol.__name__} has no method {method!r}")
        hints = typing.get_type_hints(function)
        self.result = hints.pop("return")
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        self.args = tuple[tuple(hints[name] for name in names)] if names else tuple[()]  # type: ignore[misc]


class MethodSignatures:
    def __init__(self, protocol: type) -> None:
        self._protocol = protocol
        self._known: dict[str, MethodSignature] = {}

    def __getitem__(self, method: str) -> MethodSignature:
        if method not in self._known:
            self._known[method] = MethodSignature(self._protocol, method)
        return self._known[method]


P = TypeVar("P")

DEFAULT_DEADLINE_S = 3600.0

_TYPED_FAILURES: dict[str, type[errors.OutpaceError]] = {
    kind.__name__: kind
    for kind in (
        errors.BadInput,
        errors.RequestFailed,
        errors.ContextFull,
        errors.RewardFailed,
        errors.CorruptData,
        errors.NotSaved,
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
    id: int
    kind: str
    message: str
    traceback: str


class Ping(msgspec.Struct, tag="ping"):
    id: int


class Pong(msgspec.Struct, tag="pong"):
    id: int


RpcFrame = RpcCall | RpcReply | RpcFailure | Ping | Pong


class Channel:
    """Sends and receives whole frames over an asyncio stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._unsent: list[bytes] = []

    async def receive(self, kind: Any = RpcFrame, limit: int = wire.MAX_FRAME) -> Any:
        """Return the next frame, or None if the other side is gone. Raises `WireError` if it exceeds `limit` bytes."""
        try:
            header = await self._reader.readexactly(wire.HEADER.size)
            (size,) = wire.HEADER.unpack(header)
            if size > limit:
                raise wire.WireError(f"a frame of {size} bytes exceeds the limit of {limit}")
            body = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            return None
        return wire.decode(body, kind)

    async def send(self, message: Any) -> None:
        """Send a frame. Frames sent in the same event loop iteration are written together, to save system calls."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(wire.frame(wire.encode(message)))
        await self._writer.drain()

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


class RpcProxy:
    """The calling side. Attribute access returns a coroutine function that performs the call."""

    def __init__(self, protocol: type, channel: Channel, component: str, deadlines: dict[str, float]) -> None:
        self._signatures = MethodSignatures(protocol)
        self._component = component
        self._deadlines = deadlines
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self._attach(channel)

    def _attach(self, channel: Channel) -> None:
        """Use this channel from now on. Calls pending on the previous channel are lost."""
        self._channel = channel
        self._down: errors.ComponentFailed | None = None
        self._reader = asyncio.create_task(self._read(channel), name=f"replies of {self._component}")

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any) -> Any:
            return await self._call(method, args)

        return call

    async def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        signature = self._signatures[method]
        call = RpcCall(next(self._ids), method, wire.encode(args))
        deadline = self._deadlines.get(method, DEFAULT_DEADLINE_S)
        with waiting(f"{self._component}: {method}"):
            value = await self._exchange(call, deadline, method)
        return wire.decode(value, signature.result)

    async def _ping(self, deadline_s: float) -> bool:
        try:
            await self._exchange(Ping(next(self._ids)), deadline_s, "ping")
        except errors.ComponentFailed:
            return False
        return True

    async def _exchange(self, request: RpcCall | Ping, deadline_s: float, what: str) -> bytes:
        if self._down is not None:
            raise _copy(self._down)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending[request.id] = reply
        try:
            async with asyncio.timeout(deadline_s):
                await self._channel.send(request)
                return await reply
        except TimeoutError:
            raise errors.ComponentFailed(self._component, f"{what} timed out after {deadline_s:g} s") from None
        except OSError as error:
            raise errors.ComponentLost(self._component, f"connection lost during {what}") from error
        finally:
            self._pending.pop(request.id, None)

    async def _read(self, channel: Channel) -> None:
        try:
            while (frame := await channel.receive()) is not None:
                self._complete(frame)
            self._fail(errors.ComponentLost(self._component, "closed its connection"))
        except wire.WireError as error:
            self._fail(errors.ComponentFailed(self._component, f"sent an invalid frame: {error}"))
        except Exception as error:  # task boundary: pending calls must fail, not wait forever
            text = "".join(traceback.format_exception(error))
            message = f"reading its replies failed: {type(error).__name__}: {error}"
            self._fail(errors.ComponentFailed(self._component, message, text))

    def _complete(self, frame: RpcFrame) -> None:
        reply = self._pending.get(frame.id)
        if reply is None or reply.done():
            return  # the call timed out or was cancelled
        if isinstance(frame, RpcReply):
            reply.set_result(frame.value)
        elif isinstance(frame, Pong):
            reply.set_result(b"")
        elif isinstance(frame, RpcFailure):
            reply.set_exception(self._error(frame))

    def _error(self, failure: RpcFailure) -> errors.OutpaceError:
        typed = _TYPED_FAILURES.get(failure.kind)
        if typed is not None:
            return typed(failure.message)
        return errors.ComponentFailed(self._component, f"{failure.kind}: {failure.message}", failure.traceback)

    def _fail(self, error: errors.ComponentFailed) -> None:
        self._down = error
        for reply in self._pending.values():
            if not reply.done():
                reply.set_exception(_copy(error))

    def _detach(self, error: errors.ComponentFailed) -> None:
        self._fail(error)
        self._reader.cancel()
        self._channel.close()


def proxy(protocol: type[P], channel: Channel, component: str, deadlines: dict[str, float] | None = None) -> P:
    """Return a remote object that implements `protocol`. `deadlines` are timeouts by method, in seconds."""
    return cast(P, RpcProxy(protocol, channel, component, deadlines or {}))


def close_proxy(remote: object) -> None:
    """Close a proxy's reader and channel. Does nothing for other objects."""
    if isinstance(remote, RpcProxy):
        remote._detach(errors.ComponentFailed(remote._component, "was stopped"))


def detach_proxy(remote: object, error: errors.ComponentFailed) -> None:
    """Disconnect a proxy whose component is gone. Every call raises `error` until `attach_proxy`."""
    assert isinstance(remote, RpcProxy)
    remote._detach(error)


def attach_proxy(remote: object, channel: Channel) -> None:
    """Connect a detached proxy to the component at the other end of `channel`."""
    assert isinstance(remote, RpcProxy)
    remote._attach(channel)


async def ping_proxy(remote: object, deadline_s: float) -> bool:
    """Return whether the process behind a proxy replies in time. True for objects in this process."""
    return await remote._ping(deadline_s) if isinstance(remote, RpcProxy) else True


def _copy(error: errors.ComponentFailed) -> errors.ComponentFailed:
    """Copy an error before raising it: raising one instance repeatedly would grow its traceback."""
    return type(error)(error.component, error.message, error.remote_traceback)


async def serve_calls(target: object, protocol: type, channel: Channel) -> None:
    """Serve calls to `target` until the other side is gone."""
    signatures = MethodSignatures(protocol)
    running: set[asyncio.Task[None]] = set()
    try:
        while (frame := await channel.receive()) is not None:
            if isinstance(frame, RpcCall):
                work = _answer(target, signatures, channel, frame)
            elif isinstance(frame, Ping):
                work = _reply(channel, Pong(frame.id))
            else:
                continue
            task = asyncio.create_task(work)
            running.add(task)
            task.add_done_callback(running.discard)
    finally:
        for task in running:
            task.cancel()


async def _answer(target: object, signatures: MethodSignatures, channel: Channel, call: RpcCall) -> None:
    try:
        signature = signatures[call.method]
        args: tuple[Any, ...] = wire.decode(call.args, signature.args)
        result = await getattr(target, call.method)(*args)
        message: RpcReply | RpcFailure = RpcReply(call.id, wire.encode(result))
    except Exception as error:  # process boundary: every error goes to the caller
        message = _failure(call.id, error)
    await _reply(channel, message)


async def _reply(channel: Channel, message: RpcReply | RpcFailure | Pong) -> None:
    try:
        await channel.send(message)
    except wire.WireError as error:  # the reply is too long; send the error instead
        await _reply(channel, _failure(message.id, error))
    except OSError:
        return  # the caller is gone


def _failure(call_id: int, error: Exception) -> RpcFailure:
    kind = errors.ComponentFailed.__name__ if isinstance(error, errors.ComponentFailed) else type(error).__name__
    text = getattr(error, "remote_traceback", "") or "".join(traceback.format_exception(error))
    return RpcFailure(call_id, kind, str(error), text)


log = logging.getLogger(__name__)


async def listen(path: str, token: str, target: object, protocol: type) -> asyncio.Server:
    """Serve calls to `target` on a Unix socket, for peers that send the token first."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        try:
            async with asyncio.timeout(10):
                offered = await channel.receive(str)
            if not isinstance(offered, str) or not hmac.compare_digest(offered, token):
                log.warning("rejected a connection with a missing or wrong token")
                return
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
    await channel.send(token)
    return channel
