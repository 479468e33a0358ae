from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from typing import Protocol

import numpy as np
import pytest

from outpace import errors
from outpace.runtime import wire
from outpace.runtime.rpc import Channel, RpcReply, close_proxy, connect, listen, proxy, serve_calls
from outpace.types import Ints, JournalLocation
from support import naming


class BadInput(Exception):
    """A user's exception that has the name of one of ours."""


HALF_A_PAIR = "a lone surrogate: \ud800"


class Unshowable:
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class Shop(Protocol):
    async def double(self, values: Ints) -> Ints: ...
    async def place(self, segment: str, offset: int) -> JournalLocation: ...
    async def fail(self, kind: str) -> None: ...
    async def wait(self) -> None: ...


class RealShop:
    def __init__(self) -> None:
        self.order: list[int] = []

    async def double(self, values: Ints) -> Ints:
        self.order.append(int(values[0]))
        return values * 2

    async def place(self, segment: str, offset: int) -> JournalLocation:
        return JournalLocation(segment, offset, 0)

    async def fail(self, kind: str) -> None:
        raise {"request": errors.RequestFailed, "value": ValueError, "namesake": BadInput}[kind]("no such thing")

    async def wait(self) -> None:
        await asyncio.Event().wait()

    async def secret(self) -> None:
        raise AssertionError("not part of the protocol")


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    near = Channel(*await asyncio.open_connection(sock=ours))
    far = Channel(*await asyncio.open_connection(sock=theirs))
    yield near, far
    near.close()
    far.close()


@pytest.fixture
async def shop(ends: tuple[Channel, Channel]) -> AsyncIterator[tuple[Shop, RealShop]]:
    near, far = ends
    real = RealShop()
    server = asyncio.create_task(serve_calls(real, Shop, far))
    remote = proxy(Shop, near, "shop")
    yield remote, real
    close_proxy(remote)
    server.cancel()


async def test_a_call_through_a_proxy_has_the_types_of_the_protocol(shop: tuple[Shop, RealShop]) -> None:
    remote, _ = shop
    np.testing.assert_array_equal(await remote.double(np.array([1, 2], dtype=np.int32)), [2, 4])
    assert await remote.place("a", 3) == JournalLocation("a", 3, 0)


async def test_calls_start_in_the_order_in_which_they_were_made(shop: tuple[Shop, RealShop]) -> None:
    remote, real = shop
    await asyncio.gather(*(remote.double(np.array([n], dtype=np.int32)) for n in range(20)))
    assert real.order == list(range(20))


async def test_a_known_failure_keeps_its_type(shop: tuple[Shop, RealShop]) -> None:
    with pytest.raises(errors.RequestFailed, match="no such thing"):
        await shop[0].fail("request")


async def test_any_other_failure_raises_component_failed_with_the_remote_traceback(shop: tuple[Shop, RealShop]) -> None:
    with pytest.raises(errors.ComponentFailed, match="shop: ValueError: no such thing") as caught:
        await shop[0].fail("value")
    assert "in fail" in caught.value.remote_traceback


async def test_an_exception_class_with_the_name_of_a_known_one_does_not_become_it(shop: tuple[Shop, RealShop]) -> None:
    with pytest.raises(errors.ComponentFailed, match="shop: BadInput: no such thing"):
        await shop[0].fail("namesake")


@pytest.mark.parametrize("message", [HALF_A_PAIR, "x" * 10**6, Unshowable()])
async def test_a_failure_whose_message_cannot_be_sent_still_reaches_the_caller(
    message: object, shop: tuple[Shop, RealShop], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, real = shop

    async def fail(kind: str) -> None:
        raise ValueError(message)

    monkeypatch.setattr(real, "fail", fail)
    with pytest.raises(errors.ComponentFailed, match="ValueError") as caught:
        await remote.fail("so")
    assert len(str(caught.value)) < 10**5


async def test_a_reply_to_a_call_that_was_not_made_fails_the_connection(ends: tuple[Channel, Channel]) -> None:
    near, far = ends
    remote = proxy(Shop, near, "shop")
    call = asyncio.create_task(remote.wait())
    await far.receive()
    far.send(RpcReply(10**6, wire.encode(None)))
    with pytest.raises(errors.ComponentFailed, match="1000000"):
        await call
    close_proxy(remote)


async def test_a_call_without_a_reply_in_time_fails(ends: tuple[Channel, Channel]) -> None:
    remote = proxy(Shop, ends[0], "shop", deadline_s=0.05)
    with pytest.raises(errors.ComponentFailed, match=naming("shop", "wait", "0.05 s")):
        await remote.wait()
    close_proxy(remote)


async def test_a_method_outside_the_protocol_is_refused(ends: tuple[Channel, Channel]) -> None:
    class Larger(Shop, Protocol):
        async def secret(self) -> None: ...

    near, far = ends
    server = asyncio.create_task(serve_calls(RealShop(), Shop, far))
    remote = proxy(Larger, near, "shop")
    with pytest.raises(errors.ComponentFailed, match=naming("WireError", "'secret'")):
        await remote.secret()
    close_proxy(remote)
    server.cancel()


async def test_arguments_of_another_type_are_refused_before_the_method_runs(ends: tuple[Channel, Channel]) -> None:
    class Lying(Protocol):
        async def place(self, segment: int, offset: str) -> JournalLocation: ...

    near, far = ends
    server = asyncio.create_task(serve_calls(RealShop(), Shop, far))
    remote = proxy(Lying, near, "shop")
    with pytest.raises(errors.ComponentFailed, match="WireError"):
        await remote.place(1, "x")
    close_proxy(remote)
    server.cancel()


async def test_every_pending_call_fails_when_the_connection_closes(ends: tuple[Channel, Channel]) -> None:
    near, far = ends
    remote = proxy(Shop, near, "shop")
    calls = [asyncio.create_task(remote.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    far.close()
    for call in calls:
        with pytest.raises(errors.ComponentLost):
            await call
    with pytest.raises(errors.ComponentFailed):
        await remote.wait()


async def test_a_huge_frame_is_refused_before_it_is_read(ends: tuple[Channel, Channel]) -> None:
    near, far = ends
    near._writer.write(wire.HEADER.pack(wire.MAX_FRAME + 1))
    with pytest.raises(wire.WireError):
        await far.receive()


async def test_a_connection_needs_the_right_token(tmp_path: object) -> None:
    path = f"{tmp_path}/s.sock"
    server = await listen(path, "right", RealShop(), Shop)
    good = proxy(Shop, await connect(path, "right"), "shop")
    assert await good.place("a", 1) == JournalLocation("a", 1, 0)
    bad = proxy(Shop, await connect(path, "wrong"), "shop")
    with pytest.raises(errors.ComponentFailed):
        await bad.place("a", 1)
    close_proxy(good)
    close_proxy(bad)
    server.close()


@pytest.mark.parametrize("noise", [b"\x00" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\x05\x00\x00\x00\x80\x04]\x94."])
async def test_garbage_on_a_socket_does_not_disturb_other_connections(tmp_path: object, noise: bytes) -> None:
    path = f"{tmp_path}/s.sock"
    server = await listen(path, "right", RealShop(), Shop)
    _, writer = await asyncio.open_unix_connection(path)
    writer.write(noise)
    writer.write_eof()
    good = proxy(Shop, await connect(path, "right"), "shop")
    assert await good.place("a", 1) == JournalLocation("a", 1, 0)
    writer.close()
    close_proxy(good)
    server.close()


async def test_a_peer_that_never_listens_is_given_up(tmp_path: object) -> None:
    with pytest.raises(errors.ComponentFailed, match=naming("missing.sock", "0.01 s")):
        await connect(f"{tmp_path}/missing.sock", "token", deadline_s=0.01)


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [(OSError(errno.EIO, "input/output error"), errors.ComponentLost), (MemoryError(), errors.ComponentFailed)],
)
@pytest.mark.timeout(120)
async def test_calls_fail_if_replies_can_no_longer_be_read(
    trouble: Exception,
    kind: type[errors.ComponentFailed],
    ends: tuple[Channel, Channel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near, _ = ends
    remote = proxy(Shop, near, "shop")
    call = asyncio.create_task(remote.wait())
    await asyncio.sleep(0)
    near._reader.set_exception(trouble)
    for pending in (call, remote.wait()):
        with pytest.raises(errors.ComponentFailed) as caught:
            await pending
        assert type(caught.value) is kind
    close_proxy(remote)


@pytest.mark.timeout(120)
async def test_a_reply_that_is_too_long_fails_the_call(
    shop: tuple[Shop, RealShop], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, real = shop
    monkeypatch.setattr(wire, "MAX_FRAME", 10_000)
    with monkeypatch.context() as patched:
        patched.setattr(real, "double", lambda values: real.place("a" * 10_000, 0))
        with pytest.raises(errors.ComponentFailed, match=naming("WireError", "10000")):
            await remote.double(np.array([1], dtype=np.int32))
    assert await remote.place("a", 3) == JournalLocation("a", 3, 0)
