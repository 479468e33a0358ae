"""Engines behind sockets: a connection that is lost moves requests, and one that is back wakes them."""

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


class Door:
    """An engine's socket, which can be torn out and put back."""

    def __init__(self, path: Path, engine: FakeEngine) -> None:
        self.path = str(path)
        self.engine = engine
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self.greeted = asyncio.Event()

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._greet, self.path)

    async def tear(self) -> None:
        assert self._server is not None
        self._server.close()
        os.unlink(self.path)
        for writer in self._writers:
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        channel = Channel(reader, writer)
        await channel.receive(str)
        self.greeted.set()
        await serve_calls(self.engine, Engine, channel)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - sockets tell nobody
        await asyncio.sleep(0.001)


async def connect(member: FleetMember) -> Engine:
    return await reconnecting_proxy(Engine, member.socket, "token", member.name)


def asked(fleet: EngineFleet, request_id: str) -> asyncio.Task[Generation]:
    return asyncio.create_task(fleet.generate(request_id, PROMPT, Sampling(6, 1), 0, None))


async def test_requests_leave_an_engine_that_is_cut_off_and_come_back_when_it_is(tmp_path: Path) -> None:
    doors = [Door(tmp_path / name, FakeEngine()) for name in "ab"]
    members = [FleetMember(Path(door.path).name, door.path, True) for door in doors]
    fleet = EngineFleet({}, [], connect)
    for door in doors:
        door.engine.prompt_answers = False
        await door.open()
    await fleet.update(members)
    answers = [asked(fleet, f"{group}.0.0") for group in range(8)]
    torn, left = doors
    await until(lambda: len(torn.engine._ends) + len(left.engine._ends) == 8)
    assert torn.engine._ends
    left.engine.prompt_answers = True
    for request_id in list(left.engine._ends):
        left.engine.end(request_id, 6, "length")
    await torn.tear()
    for made in await asyncio.gather(*answers):
        assert made.tokens.tolist() == answer_to(PROMPT, 6)

    await fleet.update([members[0]])  # only the one that is cut off is left: whoever asks has to wait for it
    late = asked(fleet, "9.0.0")
    await asyncio.sleep(0)
    torn.engine.prompt_answers = True
    await torn.open()
    assert (await late).tokens.tolist() == answer_to(PROMPT, 6)
    await fleet.close()
    await torn.tear()
    await left.tear()


async def test_an_idle_engine_that_is_cut_off_is_not_waited_for_where_there_is_another(tmp_path: Path) -> None:
    door, near = Door(tmp_path / "a", FakeEngine()), FakeEngine()
    await door.open()
    far = await reconnecting_proxy(Engine, door.path, "token", "a")
    fleet = EngineFleet({"a": far, "b": near})
    await door.greeted.wait()
    await door.tear()
    await until(lambda: not fleet._connections.is_reachable("a"))
    await asyncio.gather(*(asked(fleet, f"{group}.0.0") for group in range(8)))
    assert len(near.asked) == 8
    await fleet.close()
