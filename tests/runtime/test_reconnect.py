"""Proxies to a component that dies and is restarted."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from outpace.errors import ComponentFailed, ComponentLost
from outpace.runtime.local import LocalRuntime
from outpace.runtime.reconnect import reconnecting_proxy
from outpace.runtime.rpc import Channel, close_proxy, connect
from runtime_support import Toy, start_toy

pytestmark = pytest.mark.timeout(120)


async def lost(runtime: LocalRuntime, name: str, remote: Toy) -> None:
    """Kill the component; return once the proxy has noticed."""
    waiting = asyncio.create_task(remote.wait())
    assert await remote.pid()  # the earlier call has arrived by now
    await runtime.kill(name)
    await runtime.deaths.get()
    with pytest.raises(ComponentLost):
        await waiting


async def test_in_flight_calls_are_lost_and_later_calls_wait_for_the_restarted_peer(
    runtime: LocalRuntime, tmp_path: Path
) -> None:
    path = f"{tmp_path}/s"
    await start_toy(runtime, listen=path, token="t")
    remote = await reconnecting_proxy(Toy, path, "t", "toy")
    for attempt in (1, 2):
        await lost(runtime, "toy", remote)
        meanwhile = asyncio.create_task(remote.attempt())
        await runtime.restart("toy")
        assert await meanwhile == attempt
    close_proxy(remote)


async def test_a_peer_that_does_not_come_back_is_given_up(runtime: LocalRuntime, tmp_path: Path) -> None:
    path = f"{tmp_path}/s"
    await start_toy(runtime, listen=path, token="t")
    remote = await reconnecting_proxy(Toy, path, "t", "toy", patience_s=0.1)
    await lost(runtime, "toy", remote)
    with pytest.raises(ComponentFailed, match=r"\b0\.1 s\b") as caught:
        await remote.pid()
    assert not isinstance(caught.value, ComponentLost), "a lost component would be retried again and again"
    close_proxy(remote)


async def test_a_call_waiting_for_a_peer_fails_when_the_proxy_is_closed(runtime: LocalRuntime, tmp_path: Path) -> None:
    path = f"{tmp_path}/s"
    await start_toy(runtime, listen=path, token="t")
    remote = await reconnecting_proxy(Toy, path, "t", "toy")
    await lost(runtime, "toy", remote)
    waiting = asyncio.create_task(remote.pid())
    await asyncio.sleep(0)
    close_proxy(remote)
    with pytest.raises(ComponentFailed) as caught:
        await waiting
    assert not isinstance(caught.value, ComponentLost)


async def test_a_component_reaches_its_restarted_peer_and_a_restarted_component_its_peers(
    runtime: LocalRuntime, tmp_path: Path
) -> None:
    path = f"{tmp_path}/s"
    engine = await start_toy(runtime, "engine", listen=path, token="t")
    worker = await start_toy(runtime, "worker", peers={"engine": path}, token="t")
    for name in ("engine", "worker"):
        await runtime.kill(name)
        await runtime.deaths.get()
        await runtime.restart(name)
        assert await worker.call_peer() == await engine.pid()


async def test_a_temporary_lack_of_file_descriptors_is_retried(
    runtime: LocalRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{tmp_path}/s"
    await start_toy(runtime, listen=path, token="t")
    remote = await reconnecting_proxy(Toy, path, "t", "toy")
    troubles = [OSError(errno.EMFILE, "too many open files")] * 2

    async def troubled(*args: Any, **options: Any) -> Channel:
        if troubles:
            raise troubles.pop()
        return await connect(*args, **options)

    monkeypatch.setattr("outpace.runtime.reconnect.TROUBLE_PAUSE_S", 0)
    monkeypatch.setattr("outpace.runtime.reconnect.connect", troubled)
    await lost(runtime, "toy", remote)
    await runtime.restart("toy")
    assert await remote.attempt() == 1
    assert not troubles
    close_proxy(remote)


async def test_a_call_waiting_for_a_peer_fails_if_connecting_raises(
    runtime: LocalRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any, **__: Any) -> Channel:
        raise ValueError("no way to it")

    path = f"{tmp_path}/s"
    await start_toy(runtime, listen=path, token="t")
    remote = await reconnecting_proxy(Toy, path, "t", "toy")
    monkeypatch.setattr("outpace.runtime.reconnect.connect", broken)
    await lost(runtime, "toy", remote)
    with pytest.raises(ComponentFailed, match="ValueError: no way to it"):
        await remote.pid()
    close_proxy(remote)
