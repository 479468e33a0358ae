"""The weight sets of one engine: the newest ones, and beside them those that are pinned.

Invariants
- Belongs to the compute thread, as lanes do; counters may be read from anywhere.
- An engine that is stale, since it has taken the place of one that died, serves nothing before its first load. What
  asks for the newest weights waits in the lane, whose version no request accepts; what asks for a pinned set that is
  not there waits too, since whoever has pinned it cannot know yet that it has gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from outpace import crash
from outpace.engines.embedded.decoder import Decoder, Prepared
from outpace.engines.embedded.lane import KvPolicy, Lane
from outpace.engines.embedded.request import Done, Request
from outpace.engines.embedded.stopping import Decode
from outpace.errors import RequestFailed
from outpace.models.device import release_unused
from outpace.types import Generation, Ints, Sampling, Version

STALE: Final[Version] = -1
"""Older than anything that can be asked for."""


class Lanes:
    def __init__(
        self, decoder: Decoder, version: Version, kv: KvPolicy, decode: Decode | None, pinned_slots: int | None = None
    ) -> None:
        """`pinned_slots`: of a pinned set; as many as the newest one's unless given."""
        self._pinned_slots = pinned_slots
        self.main = Lane(decoder, version, kv, decode)
        self.pinned: Lane | None = None
        self.ended: list[Done] = []  # not told to anybody yet
        self._kv: KvPolicy = kv
        self._decode = decode
        self._held: dict[str, Callable[[], None]] = {}  # submissions that wait for a first load

    @property
    def all(self) -> list[Lane]:
        pinned = self.pinned
        return [self.main] if pinned is None else [self.main, pinned]

    @property
    def has_work(self) -> bool:
        return any(lane.has_work for lane in self.all)

    def under_way(self) -> dict[str, Request]:
        return {name: request for lane in self.all for name, request in lane.under_way().items()}

    def submit(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> None:
        crash.reached("engine.request")
        if pinned is not None and self.main.version == STALE and not self._is_resident(pinned):
            self._held[request_id] = lambda: self.submit(request_id, token_ids, sampling, min_version, pinned)
            return
        try:
            self._lane_for(pinned).submit(request_id, token_ids, sampling, min_version if pinned is None else pinned)
        except RequestFailed as error:
            self.ended.append(Done(request_id, error))
        except Exception as error:  # a boundary: what one caller sent may fail that caller, never the engine
            failure = RequestFailed(f"the request cannot be served: {type(error).__name__}: {error}")
            self.ended.append(Done(request_id, failure))

    def abort(self, request_ids: set[str]) -> None:
        for lane in self.all:
            self.ended += lane.abort(request_ids)
        for held in request_ids & self._held.keys():
            del self._held[held]
            self.ended.append(Done(held, _nothing()))

    def swap_main(self, prepared: Prepared, version: Version) -> None:
        self.main.swap(prepared, version)
        crash.reached("engine.swapped")
        self._submit_held()

    def swap_pinned(self, prepared: Prepared, version: Version) -> None:
        """Requests of another pinned version could only go on under weights they did not ask for: they fail."""
        if self.pinned is None:
            self.pinned = Lane(self.main.decoder.sibling(prepared, self._pinned_slots), version, self._kv, self._decode)
        else:
            self.ended += self.pinned.fail_all(f"version {self.pinned.version} is no longer pinned")
            self.pinned.swap(prepared, version)
        crash.reached("engine.pinned")
        self._submit_held()

    def drop_pinned(self) -> None:
        if self.pinned is not None:
            self.ended += self.pinned.fail_all(f"version {self.pinned.version} is no longer pinned")
            self.pinned = None
            release_unused(self.main.decoder.device)
        crash.reached("engine.release_pinned")

    def _submit_held(self) -> None:
        held, self._held = self._held, {}
        for submit in held.values():
            submit()

    def _is_resident(self, version: Version) -> bool:
        return self.pinned is not None and self.pinned.version == version

    def _lane_for(self, pinned: Version | None) -> Lane:
        if pinned is None:
            return self.main
        if self.pinned is None or self.pinned.version != pinned:
            resident = "none" if self.pinned is None else f"version {self.pinned.version}"
            raise RequestFailed(f"version {pinned} is not pinned in this engine ({resident} is)")
        return self.pinned


def _nothing() -> Generation:
    """What an aborted request has that never began."""
    none = np.zeros(0, dtype=np.int32)
    return Generation(tokens=none, logprobs=np.zeros(0, dtype=np.float32), versions=none, stop="aborted")
