"""The weight sets of one engine: the newest policy and, optionally, a pinned version, each with its decode batch.

Invariants
- Used by the compute thread only; other threads may read counters.
- A stale engine, which replaces one that died, serves nothing before its first load. Requests for the newest weights
  wait in the batch, whose version is too old for any request. Requests for a missing pinned version wait too: the
  caller that pinned it does not know yet that it was lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from outpace.engines.embedded.decode_batch import DecodeBatch, KvPolicy
from outpace.engines.embedded.decoder import Decoder, DecoderWeights
from outpace.engines.embedded.requests import FinishedRequest, GenerationRequest
from outpace.engines.generation import Decode
from outpace.errors import RequestFailed
from outpace.models.loading import release_unused_memory
from outpace.runtime import diagnostics
from outpace.types import Generation, Ints, Sampling, Version

STALE: Final[Version] = -1
"""Version of an engine without usable weights: older than any `min_version`."""


class WeightSets:
    def __init__(
        self, decoder: Decoder, version: Version, kv: KvPolicy, decode: Decode | None, pinned_slots: int | None = None
    ) -> None:
        """`pinned_slots` is the number of slots for a pinned version; by default the same as for the newest."""
        self._pinned_slots = pinned_slots
        self.main = DecodeBatch(decoder, version, kv, decode)
        self.pinned: DecodeBatch | None = None
        self.finished: list[FinishedRequest] = []  # not delivered yet
        self._kv: KvPolicy = kv
        self._decode = decode
        self._deferred: dict[str, Callable[[], None]] = {}  # submissions that wait for the first load

    @property
    def all(self) -> list[DecodeBatch]:
        pinned = self.pinned
        return [self.main] if pinned is None else [self.main, pinned]

    @property
    def has_work(self) -> bool:
        return any(batch.has_work for batch in self.all)

    def active_requests(self) -> dict[str, GenerationRequest]:
        return {name: request for batch in self.all for name, request in batch.active_requests().items()}

    def submit(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> None:
        diagnostics.crash_point("engine.request")
        if pinned is not None and self.main.version == STALE and not self._is_pinned(pinned):
            self._deferred[request_id] = lambda: self.submit(request_id, token_ids, sampling, min_version, pinned)
            return
        try:
            self._batch_for(pinned).submit(request_id, token_ids, sampling, min_version if pinned is None else pinned)
        except RequestFailed as error:
            self.finished.append(FinishedRequest(request_id, error))
        except Exception as error:  # boundary: bad input fails its request, never the engine
            failure = RequestFailed(f"the request cannot be served: {type(error).__name__}: {error}")
            self.finished.append(FinishedRequest(request_id, failure))

    def abort(self, request_ids: set[str]) -> None:
        for batch in self.all:
            self.finished += batch.abort(request_ids)
        for request_id in request_ids & self._deferred.keys():
            del self._deferred[request_id]
            self.finished.append(FinishedRequest(request_id, _empty_generation()))

    def swap_main(self, prepared: DecoderWeights, version: Version) -> None:
        self.main.swap(prepared, version)
        diagnostics.crash_point("engine.swapped")
        self._submit_deferred()

    def swap_pinned(self, prepared: DecoderWeights, version: Version) -> None:
        """Pin `version`. Requests of another pinned version fail: they must not continue under other weights."""
        if self.pinned is None:
            self.pinned = DecodeBatch(
                self.main.decoder.sibling(prepared, self._pinned_slots), version, self._kv, self._decode
            )
        else:
            self.finished += self.pinned.fail_all(f"version {self.pinned.version} is no longer pinned")
            self.pinned.swap(prepared, version)
        diagnostics.crash_point("engine.pinned")
        self._submit_deferred()

    def drop_pinned(self) -> None:
        if self.pinned is not None:
            self.finished += self.pinned.fail_all(f"version {self.pinned.version} is no longer pinned")
            self.pinned = None
            release_unused_memory(self.main.decoder.device)
        diagnostics.crash_point("engine.release_pinned")

    def _submit_deferred(self) -> None:
        deferred, self._deferred = self._deferred, {}
        for submit in deferred.values():
            submit()

    def _is_pinned(self, version: Version) -> bool:
        return self.pinned is not None and self.pinned.version == version

    def _batch_for(self, pinned: Version | None) -> DecodeBatch:
        if pinned is None:
            return self.main
        if self.pinned is None or self.pinned.version != pinned:
            found = "no version" if self.pinned is None else f"version {self.pinned.version}"
            raise RequestFailed(f"version {pinned} is not pinned in this engine ({found} is)")
        return self.pinned


def _empty_generation() -> Generation:
    """Return the result of a request that was aborted before it started."""
    none = np.zeros(0, dtype=np.int32)
    return Generation(tokens=none, logprobs=np.zeros(0, dtype=np.float32), versions=none, stop="aborted")
