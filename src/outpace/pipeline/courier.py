"""Who reads published snapshots: the courier brings them to the engines, the evaluation measures them.

Invariants
- Publishing waits for nobody: an engine that is slow or stopped only serves older weights.
- An engine whose weights are not the learner's at the start (a resumed run, another incarnation) serves nothing, and
  holds admission, until its first load is done.
- A snapshot that somebody may still read is leased: its buffer must not be reused.

Ways to update
- inflight: an engine that is not loading is sent the newest version at once; intermediate ones may be skipped.
- drain: a newer version holds admission; it is loaded when no group runs.
- lockstep: every version is loaded, one by one in publication order, when no group runs after admission had its chance,
  that is when the stamp in force has all its groups; until all engines have the next one, there is none to admit.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import Literal

from outpace.types import Version

Update = Literal["inflight", "drain", "lockstep"]


@dataclass
class EngineState:
    version: Version
    verified: bool  # it has weights of this start of the run
    loading: Version | None = None


class Courier:
    def __init__(self, update: Update) -> None:
        self.update = update
        self.engines: dict[str, EngineState] = {}
        self._published: list[Version] = []  # ascending; in lockstep from the oldest still to be loaded, else one

    def start(self, engines: dict[str, Version], version: Version) -> None:
        """The engines are up; the learner is at `version`."""
        assert engines, "a run needs at least one engine"
        self.engines = {name: EngineState(has, verified=has == version) for name, has in engines.items()}

    @property
    def newest(self) -> Version | None:
        return self._published[-1] if self._published else None

    @property
    def oldest(self) -> Version:
        """The oldest version that may serve a group now."""
        return min(engine.version for engine in self.engines.values())

    @property
    def loading(self) -> dict[str, Version]:
        return {name: engine.loading for name, engine in self.engines.items() if engine.loading is not None}

    @property
    def holds_admission(self) -> bool:
        if any(not engine.verified for engine in self.engines.values()):
            return True
        return self.update == "drain" and self.newest is not None and self.oldest < self.newest

    def published(self, version: Version) -> None:
        insort(self._published, version)
        self._prune()

    def loaded(self, engine: str, version: Version) -> None:
        state = self.engines[engine]
        assert state.loading == version, f"engine {engine} loaded {version} but was sent {state.loading}"
        self.engines[engine] = EngineState(version, verified=True)
        self._prune()

    def _prune(self) -> None:
        keep_from = self.oldest if self.update == "lockstep" else self._published[-1]
        self._published = [version for version in self._published[:-1] if version > keep_from] + self._published[-1:]

    def deliver(self, running: int) -> list[tuple[str, Version]]:
        """Which engines load which version now. In drain and lockstep, ask after admission had its chance."""
        orders = [(name, version) for name in self.engines if (version := self._wanted(name, running)) is not None]
        for name, version in orders:
            self.engines[name].loading = version
        return orders

    def _wanted(self, name: str, running: int) -> Version | None:
        engine = self.engines[name]
        if engine.loading is not None or self.newest is None:
            return None
        if not engine.verified:
            return self.newest
        if self.update == "lockstep":
            target = next((version for version in self._published if version > self.oldest), None)
            blocked = bool(running or self.loading)
        else:
            target = self.newest
            blocked = self.update == "drain" and running > 0
        return target if target is not None and target > engine.version and not blocked else None

    def leases(self) -> set[Version]:
        """The newest (for whoever asks next), those being loaded, and in lockstep those still to be loaded."""
        return {*self._published, *self.loading.values()}


class Evaluations:
    """At most one evaluation under way and one waiting; a newer one that is due replaces the one that waits."""

    def __init__(self) -> None:
        self.current: Version | None = None
        self._waiting: Version | None = None
        self._unpublished: set[Version] = set()
        self._asked: Version = -1  # the newest version anybody asked for

    @property
    def idle(self) -> bool:
        return self.current is None and self._waiting is None and not self._unpublished

    def ask(self, version: Version, published: bool) -> None:
        """Evaluate this version, as soon as it is published; asking again changes nothing."""
        if version <= self._asked:
            return
        self._asked = version
        self._unpublished.add(version)
        if published:
            self.published(version)

    def published(self, version: Version) -> None:
        if version in self._unpublished:
            self._unpublished.remove(version)
            self._waiting = max(version, version if self._waiting is None else self._waiting)

    def done(self, version: Version) -> None:
        assert self.current == version, f"evaluation of {version} is done, but {self.current} was under way"
        self.current = None

    def next(self) -> Version | None:
        """The evaluation to start now, if any."""
        if self.current is not None or self._waiting is None:
            return None
        self.current, self._waiting = self._waiting, None
        return self.current

    def leases(self) -> set[Version]:
        return {version for version in (self.current, self._waiting) if version is not None}
