"""Engines behind sockets: a lost connection moves requests, and a restored one wakes waiting requests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fleet_support import FakeEngine, answer_to
from outpace.engines.fleet import EngineFleet
from outpace.protocols import Engine
from outpace.runtime.reconnect import reconnecting_proxy
from outpace.runtime.rpc import Channel, serve_calls
from outpace.types import FleetMember, Generation, Sampling

pytestmark = pytest.mark.timeout(120)

PROMPT = np.array([5, 6, 7], dtype=np.int32)


class EngineSocket:
    """An engine's socket, which a test can disconnect and reopen."""

    def __init__(self, path: Path, engine: FakeEngine) -> None:
        self.path = str(path)
        self.engine = engine
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self.connected = asyncio.Event()

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def disconnect(self) -> None:
        assert self._server is not None
        self._server.close()
        os.unlink(self.path)
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        channel = Channel(reader, writer)
        await channel.receive(str)
        self.connected.set()
        await serve_calls(self.engine, Engine, channel)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.001)


async def connect(member: FleetMember) -> Engine:
    return await reconnecting_proxy(Engine, member.socket, "token", member.name)


def submit(fleet: EngineFleet, request_id: str) -> asyncio.Task[Generation]:
    return asyncio.create_task(fleet.generate(request_id, PROMPT, Sampling(6, 1), 0, None))


async def test_requests_move_from_a_disconnected_engine_and_return_after_it_reconnects(tmp_path: Path) -> None:
    sockets = [EngineSocket(tmp_path / name, FakeEngine()) for name in "ab"]
    members = [FleetMember(Path(engine_socket.path).name, engine_socket.path, True) for engine_socket in sockets]
    fleet = EngineFleet({}, [], connect)
    for engine_socket in sockets:
        engine_socket.engine.answers_immediately = False
        await engine_socket.open()
    await fleet.update(members)
    answers = [submit(fleet, f"{group}.0.0") for group in range(8)]
    lost, left = sockets
    await until(lambda: len(lost.engine._ends) + len(left.engine._ends) == 8)
    assert lost.engine._ends
    left.engine.answers_immediately = True
    for request_id in list(left.engine._ends):
        left.engine.end(request_id, 6, "length")
    await lost.disconnect()
    for made in await asyncio.gather(*answers):
        assert made.tokens.tolist() == answer_to(PROMPT, 6)

    await fleet.update([members[0]])  # only the disconnected engine is left: new requests wait for it
    late = submit(fleet, "9.0.0")
    await asyncio.sleep(0)
    lost.engine.answers_immediately = True
    await lost.open()
    assert (await late).tokens.tolist() == answer_to(PROMPT, 6)
    await fleet.close()
    await lost.disconnect()
    await left.disconnect()


async def test_requests_do_not_wait_for_a_disconnected_idle_engine_while_another_is_reachable(tmp_path: Path) -> None:
    engine_socket, near = EngineSocket(tmp_path / "a", FakeEngine()), FakeEngine()
    await engine_socket.open()
    far = await reconnecting_proxy(Engine, engine_socket.path, "token", "a")
    fleet = EngineFleet({"a": far, "b": near})
    await engine_socket.connected.wait()
    await engine_socket.disconnect()
    await until(lambda: not fleet._connections.is_reachable("a"))
    await asyncio.gather(*(submit(fleet, f"{group}.0.0") for group in range(8)))
    assert len(near.received) == 8
    await fleet.close()
