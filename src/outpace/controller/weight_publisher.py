"""Weight publication: which engine loads which published version, and which versions are evaluated. Pure.

Invariants
- Publishing never waits: a slow, stopped or dead engine only serves older weights, or none.
- An engine whose weights are not the learner's (resumed run, restart, new engine, torn load) is stale: it serves
  nothing until its next load completes. The others serve meanwhile; if none does, admission waits.
- An engine whose load failed or takes too long is behind: once its version is too old to be trained in time, groups
  are admitted for the other engines only. Admission waits for engines that are about to load, so that the first
  engine with the newest weights does not get all the work.
- A snapshot that may still be read is leased: its buffer must not be reused.
- In `inflight` mode the cost of an event does not depend on the number of engines, except when a version is published.

Update modes
- inflight: an engine that is not loading gets the newest version at once. Intermediate versions may be skipped.
- drain: a newer version blocks admission and is loaded when no group is running.
- lockstep (deterministic mode): every version is loaded, one by one in publication order, when no group is running
  after admission, that is, when all groups of the current version are done. Nothing is admitted until all engines
  have the next version. A restarted engine reloads exactly the version it had, so its work is reproduced.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from outpace.controller import events as ev
from outpace.types import Version

UpdateMode = Literal["inflight", "drain", "lockstep"]


@dataclass
class EngineWeights:
    version: Version | None  # newest version loaded in this start of the run; None: none yet
    up: bool = True
    stale: bool = False  # its weights are not `version`
    behind: bool = False  # it failed to load a newer version in time

    @property
    def serves(self) -> bool:
        return self.up and not self.stale and self.version is not None


class WeightPublisher:
    """Tracks the version of each engine and decides which engine loads which version."""

    def __init__(self, update: UpdateMode) -> None:
        self.update = update
        self.engines: dict[str, EngineWeights] = {}
        self.loading: dict[str, Version] = {}
        self._published: list[Version] = []  # ascending; lockstep: from the version in use on; else only the newest
        self._versions: Counter[Version] = Counter()  # counts of serving engines; lockstep: of all loaded engines
        self._behind: Counter[Version] = Counter()  # counts of those engines that are behind
        self._waiting: dict[str, None] = {}  # engines that may need a load
        self._stale = 0  # number of engines that do not serve, up or not

    def start(self, engines: dict[str, Version], version: Version) -> None:
        """Register the engines that are up; the learner is at `version`."""
        assert engines, "a run needs at least one engine"
        for name, has in engines.items():
            self._set_state(name, EngineWeights(version if has == version else None))

    @property
    def newest(self) -> Version | None:
        return self._published[-1] if self._published else None

    @property
    def oldest(self) -> Version:
        """Oldest version that may serve a group now. If no engine serves, the version the first engine will load."""
        if self._versions:
            return min(self._versions)
        return self.newest or 0

    @property
    def served_by_all(self) -> Version | None:
        """Newest version that every serving engine has reached; None if no engine serves."""
        return min(self._versions, default=None)

    @property
    def all_newest(self) -> bool:
        """Whether an engine serves, none is loading, and all serving engines have the newest published version."""
        return not self.loading and self.newest is not None and self.served_by_all == self.newest

    def oldest_from(self, floor: Version) -> Version:
        """Return the oldest serving version, ignoring engines that are behind and older than `floor` if there are
        others."""
        counted = [v for v, count in self._versions.items() if v >= floor or count > self._behind[v]]
        return min(counted, default=self.oldest)

    @property
    def stale(self) -> bool:
        """Whether any engine does not serve."""
        return self._stale > 0

    @property
    def blocks_admission(self) -> bool:
        if not self._versions or (self.update == "lockstep" and self._stale):
            return True
        # An engine that is behind does not block admission while another one serves.
        fit = [version for version, count in self._versions.items() if count > self._behind[version]]
        return self.update == "drain" and self.newest is not None and (min(fit, default=self.oldest) < self.newest)

    # ------------------------------------------------------------------------------------------------------- events

    def handle(self, event: ev.Event) -> None:
        """Apply an event about an engine; ignore all others."""
        match event:
            case ev.EngineLoaded(engine, version):
                self.loaded(engine, version)
            case ev.LoadLate(engine, version):
                self.late(engine, version)
            case ev.LoadFailed(engine, _, torn):
                self.failed(engine, torn)
            case ev.EngineLost(engine):
                self.lost(engine)
            case ev.EngineJoined(engine):
                self.joined(engine)
            case ev.EngineLeft(engine):
                self.left(engine)

    def published(self, version: Version) -> None:
        insort(self._published, version)
        self._waiting |= dict.fromkeys(name for name, engine in self.engines.items() if engine.up)
        self._prune()

    def loaded(self, engine: str, version: Version) -> None:
        expected = self.loading.pop(engine, None)
        assert expected == version, f"engine {engine} loaded version {version}, expected {expected}"
        self._set_state(engine, EngineWeights(version))
        self._prune()

    def failed(self, engine: str, torn: bool) -> None:
        """Record a failed load. The next load is ordered at once."""
        if self.loading.pop(engine, None) is None:
            return  # the engine died during the load and EngineLost came first
        known = self.engines[engine]
        kept = known.version if self.update == "lockstep" or not torn else None
        self._set_state(engine, EngineWeights(kept, stale=known.stale or torn, behind=True))

    def late(self, engine: str, version: Version) -> None:
        """Record a slow load: it is no longer waited for, but may still complete."""
        if self.loading.get(engine) == version:
            self._set_state(engine, replace(self.engines[engine], behind=True))

    def joined(self, engine: str) -> None:
        """Record that an engine is up, and stale."""
        known = self.engines.get(engine)
        assert known is None or not known.up, f"engine {engine} joined twice"
        self._set_state(engine, EngineWeights(known.version if known else None, stale=True))

    def lost(self, engine: str) -> None:
        """Record that an engine is gone, along with the load in progress."""
        self.loading.pop(engine, None)
        kept = self.engines[engine].version if self.update == "lockstep" else None
        self._set_state(engine, EngineWeights(kept, up=False, stale=True))

    def left(self, engine: str) -> None:
        """Record that an engine will not come back."""
        self.lost(engine)
        self._stale -= 1
        del self.engines[engine]

    def _set_state(self, name: str, state: EngineWeights) -> None:
        """Replace an engine's state and update the counters."""
        before = self.engines.get(name)
        if before is not None:
            self._stale -= not before.serves
            self._count(before, -1)
        self.engines[name] = state
        self._stale += not state.serves
        self._count(state, 1)
        if state.up:
            self._waiting[name] = None
        else:
            self._waiting.pop(name, None)

    def _count(self, state: EngineWeights, by: int) -> None:
        serves = state.version is not None if self.update == "lockstep" else state.serves
        if not serves or state.version is None:
            return
        for counter, counts in ((self._versions, True), (self._behind, state.behind)):
            if counts:
                counter[state.version] += by
                if not counter[state.version]:
                    del counter[state.version]

    def _prune(self) -> None:
        keep_from = self.oldest if self.update == "lockstep" else self._published[-1]
        self._published = [version for version in self._published[:-1] if version >= keep_from] + self._published[-1:]

    # -------------------------------------------------------------------------------------------------------- loads

    def next_loads(self, busy: bool) -> list[tuple[str, Version]]:
        """Return which engines load which version now. In drain and lockstep modes, serving engines keep their weights
        while `busy` (groups are running). Call this after admission."""
        if self.newest is None or not self._waiting:
            return []
        if self.update != "inflight" and busy and not self._stale:
            return []
        wanted = ((name, self._version_to_load(name, busy)) for name in self._waiting)
        orders = [(name, version) for name, version in wanted if version is not None]
        if self.update == "inflight":
            self._waiting.clear()  # engines without an order have the newest version or are loading it
        for name, version in orders:
            self.loading[name] = version
        return orders

    def _version_to_load(self, name: str, busy: bool) -> Version | None:
        engine = self.engines[name]
        if name in self.loading or self.newest is None:
            return None
        if not engine.serves:
            return self.newest if engine.version is None else engine.version
        if self.update == "lockstep":
            target = next((version for version in self._published if version > self.oldest), None)
            blocked = busy or bool(self.loading or self._stale)
        else:
            target = self.newest
            blocked = self.update == "drain" and busy
        assert engine.version is not None
        return target if target is not None and target > engine.version and not blocked else None

    def leases(self) -> set[Version]:
        """Return the versions to keep: the newest, those being loaded and, in lockstep, those in use or still to
        come."""
        return {*self._published, *self.loading.values()}


class EvaluationQueue:
    """Queue of evaluations: at most one running and one waiting; a newer request replaces the waiting one.

    With `keep_all` no request is replaced, so which versions are evaluated does not depend on speed."""

    def __init__(self, keep_all: bool, evaluated: Version) -> None:
        """`evaluated` is the newest version whose result is already known, -1 if none."""
        self.current: Version | None = None
        self._keep_all = keep_all
        self._waiting: list[Version] = []  # ascending
        self._unpublished: set[Version] = set()
        self._requested = evaluated  # newest version requested

    @property
    def idle(self) -> bool:
        return self.current is None and not self._waiting and not self._unpublished

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def is_pending(self, version: Version) -> bool:
        """Return whether an evaluation of this or an older version is pending or running."""
        pending = {*self._unpublished, *self._waiting} | ({self.current} if self.current is not None else set())
        return min(pending, default=version + 1) <= version

    def request(self, version: Version, published: bool) -> None:
        """Request an evaluation of this version once it is published. Repeated requests have no effect."""
        if version <= self._requested:
            return
        self._requested = version
        self._unpublished.add(version)
        if published:
            self.published(version)

    def published(self, version: Version) -> None:
        if version in self._unpublished:
            self._unpublished.remove(version)
            insort(self._waiting, version)
            if not self._keep_all:
                del self._waiting[:-1]

    def done(self, version: Version) -> None:
        assert self.current == version, f"evaluation of {version} is done, but {self.current} was running"
        self.current = None

    def next(self) -> Version | None:
        """Return the evaluation to start now, if any."""
        if self.current is not None or not self._waiting:
            return None
        self.current = self._waiting.pop(0)
        return self.current

    def leases(self) -> set[Version]:
        return {*self._waiting} | ({self.current} if self.current is not None else set())
