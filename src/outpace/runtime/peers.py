"""A peer that may be started again: its proxy finds it where it was.

    connected ── connection lost ──▶ calling again, in the background ── it listens ──▶ connected

Invariants
- A call that was under way when the connection was lost raises `PartLost` at once: it may be repeated.
- A call that is made meanwhile waits, as long as any part may take to start, and then raises `PartFailed`.
- Calling again does not end while there is hope: a lack of descriptors passes. If it ends, calls hear of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

from outpace import errors
from outpace.runtime.rpc import Channel, Remote
from outpace.runtime.sockets import connect
from outpace.runtime.spec import START_DEADLINE_S
from outpace.runtime.waits import waiting

P = TypeVar("P")

PAUSE_S = 0.05
"""Between two connections: one that is closed as soon as it is made must not keep this process busy."""

TROUBLE_PAUSE_S = 1.0
"""After a failure that is this process's own, such as a lack of descriptors."""

log = logging.getLogger(__name__)


class Peer(Remote):
    def __init__(self, protocol: type, channel: Channel, part: str, path: str, token: str, patience_s: float) -> None:
        self._path = path
        self._token = token
        self._patience_s = patience_s
        self._connected = asyncio.Event()
        self._changed: Callable[[], None] = _nobody_asks
        super().__init__(protocol, channel, part, {})

    def _attach(self, channel: Channel) -> None:
        super()._attach(channel)
        self._connected.set()
        self._changed()

    async def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        if not self._connected.is_set():
            await self._until_connected()
        return await super()._call(method, args)

    async def _until_connected(self) -> None:
        try:
            with waiting(f"{self._part}: until it is back"):
                async with asyncio.timeout(self._patience_s):
                    await self._connected.wait()
        except TimeoutError:
            raise errors.PartFailed(self._part, f"was not back within {self._patience_s:g} s") from None

    async def _read(self, channel: Channel) -> None:
        await super()._read(channel)
        self._connected.clear()
        channel.close()
        log.warning("%s is gone; calling it again", self._part)
        self._changed()
        try:
            again = await self._called_again()
        except Exception as error:  # the boundary of the task
            self._fail(errors.PartFailed(self._part, f"cannot be called again: {type(error).__name__}: {error}"))
            self._connected.set()
            self._changed()
            return
        log.info("%s is back", self._part)
        self._attach(again)

    async def _called_again(self) -> Channel:
        while True:
            await asyncio.sleep(PAUSE_S)
            try:
                return await connect(self._path, self._token, deadline_s=None)
            except OSError as error:
                log.warning("%s cannot be called: %s", self._part, error)
                await asyncio.sleep(TROUBLE_PAUSE_S)

    def _detach(self, error: errors.PartFailed) -> None:
        super()._detach(error)
        self._connected.set()  # whoever waits is to hear that it never comes back
        self._changed()


def _nobody_asks() -> None:
    return


def reachable(remote: object) -> bool:
    """Whether a call would be sent at once, or fail at once. Any other object lives in this process."""
    return remote._connected.is_set() if isinstance(remote, Peer) else True


def watch(remote: object, changed: Callable[[], None]) -> None:
    """Have `changed` called, on the event loop, whenever a peer is lost or found again."""
    if isinstance(remote, Peer):
        remote._changed = changed


async def peer(protocol: type[P], path: str, token: str, part: str, patience_s: float = START_DEADLINE_S) -> P:
    """A proxy of whoever listens at `path`, now and after it was started again."""
    return cast(P, Peer(protocol, await connect(path, token), part, path, token, patience_s))
