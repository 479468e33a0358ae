"""Health of one server: a pure state machine without clock or network.

It records observations as facts and derives the state from them. The first matching row wins:

    state      condition                                           new requests   in-flight requests
    dead       it ended, or `patience` probes in a row failed,     no             no
               or it has foreign weights
    draining   `drain` was called                                  no             yes
    starting   it has not answered yet                             no             no
    stale      its weights are unknown                             no             no
    suspect    the last probe failed, or `patience` requests       no             yes
               failed since one passed
    healthy    none of the above                                   yes            yes

Invariants
- Dead is final: a replacement server gets its own HealthMachine.
- After a start or a torn update there are no new requests until the next load, whatever else is observed.
- Probes that fail before the start do not count: the launcher decides how long a start may take.
"""

from __future__ import annotations

from outpace.types import Health

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
        self._last_failure = ""  # the last failure
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
        """The server exited or is given up. Keeps the first reason."""
        self._death_reason = self._death_reason or why or "the server ended"
