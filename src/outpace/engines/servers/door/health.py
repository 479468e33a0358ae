"""How a server is, from what was seen of it: a pure machine, which knows neither clock nor network.

What is seen is kept as facts, and the state is read off them, the first row that holds:

    state      holds when                                          gets work   finishes what it has
    dead       it has ended, or `patience` probes in a row failed,     no          no
               or it holds what is not ours
    draining   it was told to leave                                    no          yes
    starting   it has not answered yet                                 no          no
    stale      nobody knows which weights it has                       no          no
    suspect    the last probe failed, or `patience` requests           no          yes
               have failed since one passed
    healthy    none of these                                           yes         yes

Invariants
- Dead is for good: whoever takes the server's place gets a machine of its own.
- Between a start, or a torn update, and the next load no work is given, whatever else is seen.
- Probes that fail before it has started do not count: how long a start may take is for whoever starts it to say.
"""

from __future__ import annotations

from outpace.types import Health

UNKNOWN_WEIGHTS = "it has no weights of this run yet"
PATIENCE = 3


class HealthMachine:
    def __init__(self, patience: int = PATIENCE) -> None:
        assert patience >= 1
        self._patience = patience
        self._started = False
        self._loaded = False
        self._draining = False
        self._failed_probes = 0
        self._failed_requests = 0
        self._death = ""
        self._doubt = ""  # what failed last
        self._staleness = UNKNOWN_WEIGHTS

    @property
    def state(self) -> Health:
        if self._death:
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
        """Whether it may be given work."""
        return self.state == "healthy"

    @property
    def finishes(self) -> bool:
        """Whether what it has under way may come to its end there."""
        return self.state in ("healthy", "suspect") or (self.state == "draining" and self._started and self._loaded)

    @property
    def why(self) -> str:
        """What made it so; empty for a healthy one."""
        reasons: dict[Health, str] = {
            "starting": "it has not answered yet",
            "stale": self._staleness,
            "healthy": "",
            "suspect": self._doubt,
            "dead": self._death,
            "draining": "it was told to leave",
        }
        return reasons[self.state]

    def started(self) -> None:
        """It has answered, for the first time or after a restart. What it holds is anybody's guess."""
        self._started = True
        self._loaded = False
        self._staleness = UNKNOWN_WEIGHTS

    def loaded(self) -> None:
        """It has a whole set of weights, and we know which. Says nothing of how it samples: doubts remain."""
        self._loaded = True

    def torn(self, why: str = "an update has failed half-way") -> None:
        """An update has failed half-way."""
        self._loaded = False
        self._staleness = why

    def probe_passed(self) -> None:
        self._failed_probes = 0
        self._failed_requests = 0
        self._doubt = ""

    def probe_failed(self, why: str) -> None:
        if not self._started:
            return
        self._failed_probes += 1
        self._doubt = why
        if self._failed_probes >= self._patience:
            self.ended(f"{self._failed_probes} probes in a row have failed: {why}")

    def request_passed(self) -> None:
        """A whole answer has come. It takes away the doubts that requests have raised, not those of a probe."""
        self._failed_requests = 0

    def request_failed(self, why: str) -> None:
        self._failed_requests += 1
        if not self._failed_probes:
            self._doubt = why

    def drain(self) -> None:
        """It is to finish what it has and gets nothing more."""
        self._draining = True

    def ended(self, why: str) -> None:
        """It is gone, or given up. The first reason stays."""
        self._death = self._death or why or "it has ended"
