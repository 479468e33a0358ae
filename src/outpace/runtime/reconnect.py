"""Proxies that reconnect: a restarted peer listens at the same socket path.

    connected ── connection lost ──▶ reconnecting, in the background ── peer listens ──▶ connected

Invariants
- A call in flight when the connection is lost raises `ComponentLost` immediately; it may be retried.
- A call made while disconnected waits for as long as a component may take to start, then raises `ComponentFailed`.
- Reconnecting continues through temporary errors such as a lack of file descriptors. If it fails for good, calls raise.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

from outpace import errors
from outpace.runtime.components import START_DEADLINE_S
from outpace.runtime.diagnostics import waiting
from outpace.runtime.rpc import DEFAULT_DEADLINE_S, Channel, RpcProxy, connect

P = TypeVar("P")

PAUSE_S = 0.05
"""Pause between two connection attempts, so that a peer that closes every connection does not cause a busy loop."""

TROUBLE_PAUSE_S = 1.0
"""Pause after a local error, such as a lack of file descriptors."""

log = logging.getLogger(__name__)


class ReconnectingProxy(RpcProxy):
    """A proxy that reconnects after its connection is lost."""

    def __init__(
        self, protocol: type, channel: Channel, component: str, path: str, token: str, patience_s: float
    ) -> None:
        self._path = path
        self._token = token
        self._patience_s = patience_s
        self._connected = asyncio.Event()
        self._changed: Callable[[], object] = lambda: None
        super().__init__(protocol, channel, component, DEFAULT_DEADLINE_S)

    def attach(self, channel: Channel) -> None:
        super().attach(channel)
        self._connected.set()
        self._changed()

    async def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        if not self._connected.is_set():
            await self._until_connected()
        return await super()._call(method, args)

    async def _until_connected(self) -> None:
        try:
            with waiting(f"{self._component}: reconnect"):
                async with asyncio.timeout(self._patience_s):
                    await self._connected.wait()
        except TimeoutError:
            raise errors.ComponentFailed(self._component, f"did not reconnect within {self._patience_s:g} s") from None

    async def _read(self, channel: Channel) -> None:
        await super()._read(channel)
        self._connected.clear()
        channel.close()
        log.warning("lost the connection to %s; reconnecting", self._component)
        self._changed()
        try:
            new_channel = await self._reconnect()
        except Exception as error:  # task boundary
            self._fail(errors.ComponentFailed(self._component, f"cannot reconnect: {type(error).__name__}: {error}"))
            self._connected.set()
            self._changed()
            return
        log.info("reconnected to %s", self._component)
        self.attach(new_channel)

    async def _reconnect(self) -> Channel:
        while True:
            await asyncio.sleep(PAUSE_S)
            try:
                return await connect(self._path, self._token, deadline_s=None)
            except OSError as error:
                log.warning("cannot connect to %s, retrying: %s", self._component, error)
                await asyncio.sleep(TROUBLE_PAUSE_S)

    def detach(self, error: errors.ComponentFailed) -> None:
        super().detach(error)
        self._connected.set()  # waiting calls must raise, because it never reconnects
        self._changed()


def is_connected(remote: object) -> bool:
    """Return whether a call is sent or fails immediately, instead of waiting for a reconnect. True for objects in this
    process."""
    return remote._connected.is_set() if isinstance(remote, ReconnectingProxy) else True


def on_connection_change(remote: object, changed: Callable[[], object]) -> None:
    """Call `changed` on the event loop whenever the connection to a peer is lost or restored."""
    if isinstance(remote, ReconnectingProxy):
        remote._changed = changed


async def reconnecting_proxy(
    protocol: type[P], path: str, token: str, component: str, patience_s: float = START_DEADLINE_S
) -> P:
    """Return a proxy for the component listening at `path` that reconnects after a restart.

    While disconnected, calls wait up to `patience_s`."""
    return cast(P, ReconnectingProxy(protocol, await connect(path, token), component, path, token, patience_s))
