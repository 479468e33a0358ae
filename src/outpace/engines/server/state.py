"""State of one server engine: the server, its health, its loaded versions and its active requests.

After any change call `react`: it ends requests that cannot continue and admits those that can start.

Invariant: a sampled token is kept from the moment it arrives. An abort, an idle timeout or a crash ends a request but
keeps its tokens. Only tokens sampled by foreign weights are discarded.

Health of one server: a pure state machine without clock or network.

It records observations as facts and derives the state from them. The first matching row wins:

    state      condition                                           new requests   in-flight requests
    dead       it ended, or `patience` probes in a row failed,     no             no
               or it has foreign weights
    draining   `drain` was called                                  no             yes
    starting   it has not answered yet                             no             no
    stale      its weights are unknown                             no             no
    suspect    the last probe failed, or `patience` requests       no             yes
               failed since the last success
    healthy    none of the above                                   yes            yes

Invariants
- Dead is final: a replacement server gets its own HealthMachine.
- After a start or a torn update there are no new requests until the next load, whatever else is observed.
- Probes that fail before the start do not count: the launcher decides how long a start may take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np

from outpace.engines.generation import OpenStreams, TokenStream
from outpace.engines.server.admission import AdmissionQueue, BusyClock, ConcurrencyLimit, LoadedVersions
from outpace.engines.server.protocol import STALE, Piece, Server, ServerRequest, VersionSpan
from outpace.errors import ServerFailed, ServerFaulty, plural
from outpace.types import Generation, Health, StopReason, Version


class ActiveRequest(TokenStream):
    """One `generate` call: the HTTP request, once it is sent, and the tokens received so far.

    `trust_spans`: whether to use the weight versions that the server reports."""

    def __init__(self, request_id: str, trust_spans: bool) -> None:
        super().__init__()
        self.id = request_id
        self.aborted = False
        self.sent: ServerRequest | None = None  # None: not sent yet
        self.version: Version = STALE  # loaded when it was sent, so the oldest that its tokens can have
        self.stop: StopReason | None = None  # reported by the server
        self.end_reason: StopReason | ServerFailed | None = None  # why we ended it
        self.last_token_at = 0.0
        self.closed = asyncio.Event()  # the HTTP stream is closed
        self._trust_spans = trust_spans
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] | None = None
        self._reader: asyncio.Task[None] | None = None

    def send(self, request: ServerRequest, version: Version, reader: asyncio.Task[None]) -> None:
        self.sent, self.version, self._reader = request, version, reader
        self.last_token_at = asyncio.get_running_loop().time()

    def take(self, piece: Piece) -> None:
        assert self.sent is not None
        if len(piece.tokens) != len(piece.logprobs):
            raise ServerFaulty(f"{plural(len(piece.tokens), 'token')} came with {len(piece.logprobs)} logprobs")
        if len(self.tokens) + len(piece.tokens) > self.sent.sampling.max_tokens:
            raise ServerFaulty(f"the server sent more than max_tokens = {self.sent.sampling.max_tokens} tokens")
        self._logprobs += piece.logprobs
        self.stop = piece.stop
        self._spans = piece.spans if self._trust_spans else None
        self.last_token_at = asyncio.get_running_loop().time()
        self.add(piece.tokens)

    def stop_reading(self, why: StopReason | ServerFailed) -> None:
        """End the request if it is sent and not complete. Tokens received so far are kept."""
        if self._reader is not None and self.end_reason is None and self.stop is None:
            self.end_reason = why
            self._reader.cancel()

    def discard(self) -> None:
        """End the request and discard all tokens, even of a complete output: foreign weights sampled them."""
        self.stop = None
        self.stop_reading("lost")
        self.tokens, self._logprobs, self._spans = [], [], None

    def has_foreign_versions(self, newest: Version) -> bool:
        """Whether the server reports a weight version outside the range that we loaded."""
        return any(not self.version <= version <= newest for version, _, _ in self._spans or [])

    def generation(self, stop: StopReason) -> Generation:
        versions = np.full(len(self.tokens), self.version, dtype=np.int32)
        if self._spans is not None and _covers(self._spans, len(self.tokens)):
            for version, start, end in self._spans:
                versions[start:end] = version
        return Generation(
            tokens=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self._logprobs, dtype=np.float32),
            versions=versions,
            stop=stop,
        )


def _covers(spans: Iterable[VersionSpan], count: int) -> bool:
    reached = 0
    for _, start, end in spans:
        if start != reached or end < start:
            return False
        reached = end
    return reached == count


UNKNOWN_WEIGHTS = "no weights of this run are loaded yet"
PATIENCE = 3


class HealthMachine:
    """Pure state machine for the health of one server."""

    def __init__(self, patience: int = PATIENCE) -> None:
        assert patience >= 1
        self._patience = patience
        self._started = False
        self._loaded = False
        self._draining = False
        self._failed_probes = 0
        self._failed_requests = 0
        self._death_reason = ""
        self._last_failure = ""  # its cause
        self._stale_reason = UNKNOWN_WEIGHTS

    @property
    def state(self) -> Health:
        if self._death_reason:
            return "dead"
        if self._draining:
            return "draining"
        if not self._started:
            return "starting"
        if not self._loaded:
            return "stale"
        if self._failed_probes or self._failed_requests >= self._patience:
            return "suspect"
        return "healthy"

    @property
    def serves(self) -> bool:
        """Whether the server may get new requests."""
        return self.state == "healthy"

    @property
    def finishes(self) -> bool:
        """Whether in-flight requests may finish."""
        return self.state in ("healthy", "suspect") or (self.state == "draining" and self._started and self._loaded)

    @property
    def why(self) -> str:
        """Why the server is in its state; empty if healthy."""
        reasons: dict[Health, str] = {
            "starting": "the server has not answered yet",
            "stale": self._stale_reason,
            "healthy": "",
            "suspect": self._last_failure,
            "dead": self._death_reason,
            "draining": "the engine is draining",
        }
        return reasons[self.state]

    def started(self) -> None:
        """The server answered, for the first time or after a restart. Its weights are unknown."""
        self._started = True
        self._loaded = False
        self._stale_reason = UNKNOWN_WEIGHTS

    def loaded(self) -> None:
        """A complete, known version is loaded. Failed probes and requests still count."""
        self._loaded = True

    def torn(self, why: str = "an update failed half-way") -> None:
        """An update failed half-way: the weights are unknown."""
        self._loaded = False
        self._stale_reason = why

    def probe_passed(self) -> None:
        self._failed_probes = 0
        self._failed_requests = 0
        self._last_failure = ""

    def probe_failed(self, why: str) -> None:
        if not self._started:
            return
        self._failed_probes += 1
        self._last_failure = why
        if self._failed_probes >= self._patience:
            self.ended(f"{self._failed_probes} probes in a row failed: {why}")

    def request_passed(self) -> None:
        """A request completed. Resets the count of failed requests, not that of failed probes."""
        self._failed_requests = 0

    def request_failed(self, why: str) -> None:
        self._failed_requests += 1
        if not self._failed_probes:
            self._last_failure = why

    def drain(self) -> None:
        """Finish in-flight requests and accept no new ones."""
        self._draining = True

    def ended(self, why: str) -> None:
        """The server exited or was given up. Keeps the first reason."""
        self._death_reason = self._death_reason or why or "the server ended"


@dataclass(frozen=True)
class ServerEngineSettings:
    name: str  # of the component
    incarnation: str  # of this start of the run; separates its cached prefixes from those of others
    version: Version = 0  # loaded at start; STALE: unknown
    context: int | None = None  # longest sequence; None: the server decides
    idle_s: float = 60.0
    control_s: float = 120.0
    probe_s: float = 5.0
    probe_deadline_s: float = 10.0
    kv: Literal["keep", "recompute"] = "keep"
    pins: bool = False  # versions are adapters: a second one can be loaded for evaluation
    slots: int = 64
    threads: int = 0  # CPU threads of a launched CPU server; 0: report wall-clock time instead of CPU time


@dataclass
class EngineCounters:
    """Running totals. Token counts cover training rollouts only."""

    tokens: int = 0
    prefill_tokens: int = 0
    pieces: int = 0
    turns: int = 0
    retries: int = 0


class ServerState:
    """State shared by RequestRunner, WeightUpdater and HealthMonitor. Call `react` after changing any of it."""

    def __init__(self, server: Server, settings: ServerEngineSettings) -> None:
        self.server = server
        self.settings = settings
        self.health = HealthMachine()
        self.limit = ConcurrencyLimit(settings.slots)
        self.loaded_versions = LoadedVersions(settings.version)
        self.admission = AdmissionQueue(lambda: self.limit.value)
        self.active_requests: OpenStreams[ActiveRequest] = OpenStreams()
        self.counters = EngineCounters()
        self.busy, self.eval_busy = BusyClock(), BusyClock()
        self.died = asyncio.Event()
        self.probe_soon = asyncio.Event()  # requests failed; probe soon to find out why
        self.closed = False
        self.paused = False  # by a weight update of ours
        self.pauses = 0  # incremented when an update begins and when it ends

    @property
    def accepts_requests(self) -> bool:
        """Whether requests may be sent. Not during a pause: they would be labeled with the old version and could hit
        prefixes cached under the old weights."""
        return self.health.serves and not self.paused

    @contextmanager
    def updating(self, paused: bool) -> Iterator[None]:
        """Mark that we are updating, and possibly pausing, the server. Paused time does not count towards the idle
        timeout of any request. `pauses` changes at both ends: a server that pauses by itself does so in between."""
        self.paused = paused
        self.pauses += 1
        try:
            yield
        finally:
            self.paused = False
            self.pauses += 1
            now = asyncio.get_running_loop().time()
            for request in self.active_requests:
                request.last_token_at = now

    def torn(self, why: str) -> None:
        """The server's weights are unknown: end running and waiting requests as lost, so they continue elsewhere."""
        self.loaded_versions.mark_unknown()
        self.health.torn(why)
        self._end_sent()
        self.admission.end("lost")
        self.react()

    def reject_foreign_weights(self, why: str) -> None:
        """The server has foreign weights, for an unknown time: drop the output of in-flight requests and mark it dead.

        Otherwise the controller would assume that this engine still has the version it loaded, and send nothing before
        the next one. The replacement engine gets a fresh load."""
        for request in self.active_requests:
            request.discard()
        self.health.ended(why)
        self.react()

    def react(self) -> None:
        """Apply a state change: end requests that cannot continue, admit those that can start."""
        if self.health.state in ("dead", "draining"):
            self.admission.end("lost")
        if not self.health.finishes:
            self._end_sent()
        if self.health.state == "suspect":
            self.probe_soon.set()
        if self.health.state == "dead":
            self.died.set()
        self.admission.wake()

    def _end_sent(self) -> None:
        for request in self.active_requests:
            request.stop_reading("lost")
