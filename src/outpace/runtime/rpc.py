"""Typed calls over a byte stream.

    proxy(Engine, channel)  ── Call(id, method, args) ──▶  serve(engine, Engine, channel)
                            ◀── Reply | Failure ─────────

Both ends read the argument and result types off the same protocol class, so a call through a proxy has the types of
the protocol and a frame of any other shape is refused. Calls are multiplexed: each runs in its own task, started in
the order in which the frames arrived. The serving loop itself answers a ping.

Invariants
- Every call has a deadline. Every pending call ends when the channel closes, and every later one at once, with
  `PartLost`, until the proxy is attached to a channel to the part's successor.
- Nothing is unpickled. An exception travels as its kind, its message and its traceback as text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import traceback
from typing import Any, TypeVar, cast

import msgspec

from outpace import errors, wire
from outpace.runtime.signatures import Signatures
from outpace.runtime.waits import waiting

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


class Call(msgspec.Struct, tag="call"):
    id: int
    method: str
    args: bytes


class Reply(msgspec.Struct, tag="reply"):
    id: int
    value: bytes


class Failure(msgspec.Struct, tag="failure"):
    id: int
    kind: str
    message: str
    traceback: str


class Ping(msgspec.Struct, tag="ping"):
    id: int


class Pong(msgspec.Struct, tag="pong"):
    id: int


Frame = Call | Reply | Failure | Ping | Pong


class Channel:
    """Whole frames over an asyncio stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._unsent: list[bytes] = []

    async def receive(self, kind: Any = Frame, limit: int = wire.MAX_FRAME) -> Any:
        """The next frame, or None when the other side is gone. One longer than `limit` bytes is a `WireError`."""
        try:
            header = await self._reader.readexactly(wire.HEADER.size)
            (size,) = wire.HEADER.unpack(header)
            if size > limit:
                raise wire.WireError(f"a frame of {size} bytes")
            body = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            return None
        return wire.decode(body, kind)

    async def send(self, message: Any) -> None:
        """Frames sent in one turn of the event loop leave in one write: a system call each would cost more than
        the frames."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(wire.frame(wire.encode(message)))
        await self._writer.drain()

    def _flush(self) -> None:
        frames, self._unsent = b"".join(self._unsent), []
        if not self._writer.is_closing():
            self._writer.write(frames)

    async def finish(self) -> None:
        """Close once everything sent has left; the other side may be gone already."""
        self.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def close(self) -> None:
        self._flush()
        self._writer.close()


class Remote:
    """The calling side. Attribute access gives a coroutine function that performs the call."""

    def __init__(self, protocol: type, channel: Channel, part: str, deadlines: dict[str, float]) -> None:
        self._signatures = Signatures(protocol)
        self._part = part
        self._deadlines = deadlines
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self._attach(channel)

    def _attach(self, channel: Channel) -> None:
        """Go on over this channel; what was asked over the last one is lost."""
        self._channel = channel
        self._down: errors.PartFailed | None = None
        self._reader = asyncio.create_task(self._read(channel), name=f"replies of {self._part}")

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any) -> Any:
            return await self._call(method, args)

        return call

    async def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        signature = self._signatures[method]
        call = Call(next(self._ids), method, wire.encode(args))
        deadline = self._deadlines.get(method, DEFAULT_DEADLINE_S)
        with waiting(f"{self._part}: {method}"):
            value = await self._exchange(call, deadline, method)
        return wire.decode(value, signature.result)

    async def _ping(self, deadline_s: float) -> bool:
        try:
            await self._exchange(Ping(next(self._ids)), deadline_s, "ping")
        except errors.PartFailed:
            return False
        return True

    async def _exchange(self, asked: Call | Ping, deadline_s: float, what: str) -> bytes:
        if self._down is not None:
            raise _copy(self._down)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending[asked.id] = answer
        try:
            async with asyncio.timeout(deadline_s):
                await self._channel.send(asked)
                return await answer
        except TimeoutError:
            raise errors.PartFailed(self._part, f"{what} gave no answer within {deadline_s:g} s") from None
        except OSError as error:
            raise errors.PartLost(self._part, f"connection lost during {what}") from error
        finally:
            self._pending.pop(asked.id, None)

    async def _read(self, channel: Channel) -> None:
        try:
            while (frame := await channel.receive()) is not None:
                self._settle(frame)
            self._fail(errors.PartLost(self._part, "closed its connection"))
        except wire.WireError as error:
            self._fail(errors.PartFailed(self._part, f"sent something that is not a frame: {error}"))
        except Exception as error:  # the boundary of the task: whoever waits for an answer is to hear that none comes
            text = "".join(traceback.format_exception(error))
            self._fail(errors.PartFailed(self._part, f"cannot be read: {type(error).__name__}: {error}", text))

    def _settle(self, frame: Frame) -> None:
        answer = self._pending.get(frame.id)
        if answer is None or answer.done():
            return  # the caller has given up on it
        if isinstance(frame, Reply):
            answer.set_result(frame.value)
        elif isinstance(frame, Pong):
            answer.set_result(b"")
        elif isinstance(frame, Failure):
            answer.set_exception(self._error(frame))

    def _error(self, failure: Failure) -> errors.OutpaceError:
        typed = _TYPED_FAILURES.get(failure.kind)
        if typed is not None:
            return typed(failure.message)
        return errors.PartFailed(self._part, f"{failure.kind}: {failure.message}", failure.traceback)

    def _fail(self, error: errors.PartFailed) -> None:
        self._down = error
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(_copy(error))

    def _detach(self, error: errors.PartFailed) -> None:
        self._fail(error)
        self._reader.cancel()
        self._channel.close()


def proxy(protocol: type[P], channel: Channel, part: str, deadlines: dict[str, float] | None = None) -> P:
    """A remote object that satisfies `protocol`."""
    return cast(P, Remote(protocol, channel, part, deadlines or {}))


def close_proxy(remote: object) -> None:
    """End a proxy's reader and channel; any other object is left alone."""
    if isinstance(remote, Remote):
        remote._detach(errors.PartFailed(remote._part, "was stopped"))


def detach(remote: object, error: errors.PartFailed) -> None:
    """The part behind this proxy is gone: every call raises `error` until `attach`."""
    assert isinstance(remote, Remote)
    remote._detach(error)


def attach(remote: object, channel: Channel) -> None:
    """Let a proxy that has lost its part go on with the part at the other end of `channel`."""
    assert isinstance(remote, Remote)
    remote._attach(channel)


async def ping(remote: object, deadline_s: float) -> bool:
    """Whether the process behind a proxy answers in time. Any other object lives in this process."""
    return await remote._ping(deadline_s) if isinstance(remote, Remote) else True


def _copy(error: errors.PartFailed) -> errors.PartFailed:
    """To be raised: one exception raised again and again would grow with every traceback."""
    return type(error)(error.part, error.message, error.remote_traceback)


async def serve(target: object, protocol: type, channel: Channel) -> None:
    """Answer calls to `target` until the other side is gone."""
    signatures = Signatures(protocol)
    running: set[asyncio.Task[None]] = set()
    try:
        while (frame := await channel.receive()) is not None:
            if isinstance(frame, Call):
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


async def _answer(target: object, signatures: Signatures, channel: Channel, call: Call) -> None:
    try:
        signature = signatures[call.method]
        args: tuple[Any, ...] = wire.decode(call.args, signature.args)
        result = await getattr(target, call.method)(*args)
        message: Reply | Failure = Reply(call.id, wire.encode(result))
    except Exception as error:  # a boundary: whatever went wrong is the caller's to know
        message = _failure(call.id, error)
    await _reply(channel, message)


async def _reply(channel: Channel, message: Reply | Failure | Pong) -> None:
    try:
        await channel.send(message)
    except wire.WireError as error:  # too long to be sent; the caller still waits for something
        await _reply(channel, _failure(message.id, error))
    except OSError:
        return  # the caller is gone, and with it whoever wanted to know


def _failure(call_id: int, error: Exception) -> Failure:
    kind = "PartFailed" if isinstance(error, errors.PartFailed) else type(error).__name__
    text = getattr(error, "remote_traceback", "") or "".join(traceback.format_exception(error))
    return Failure(call_id, kind, str(error), text)
