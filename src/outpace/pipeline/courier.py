"""Who reads published snapshots: the courier brings them to the engines, the evaluation measures them.

Invariants
- Publishing waits for nobody: an engine that is slow, stopped or dead only serves older weights, or none.
- An engine whose weights are not the learner's (a resumed run, a restart, an engine that has just joined, a load that
  was torn) is stale: it serves nothing until its next load is done. The others serve meanwhile; where none does,
  admission waits.
- An engine whose load has failed or takes too long is behind: once what it serves is too old to be trained in time,
  groups are admitted for the others alone. Others that are about to load are waited for, lest the first to have the
  newest weights get all the work.
- A snapshot that somebody may still read is leased: its buffer must not be reused.
- In flight, what an event costs does not depend on how many engines there are, except when a version is published.

Ways to update
- inflight: an engine that is not loading is sent the newest version at once; intermediate ones may be skipped.
- drain: a newer version holds admission; it is loaded when no group runs.
- lockstep: every version is loaded, one by one in publication order, when no group runs after admission had its chance,
  that is when the stamp in force has all its groups; until all engines have the next one, there is none to admit. An
  engine that died is given the very version back that it had, so that what it was at comes out the same.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from outpace.types import Version

Update = Literal["inflight", "drain", "lockstep"]


@dataclass
class EngineState:
    version: Version | None  # the newest it was given in this start of the run; None: none yet
    up: bool = True
    stale: bool = False  # what it holds is not `version`
    behind: bool = False  # a newer version has not reached it when it should have

    @property
    def serves(self) -> bool:
        return self.up and not self.stale and self.version is not None


class Courier:
    def __init__(self, update: Update) -> None:
        self.update = update
        self.engines: dict[str, EngineState] = {}
        self.loading: dict[str, Version] = {}
        self._published: list[Version] = []  # ascending; in lockstep from the version in force, else one
        self._versions: Counter[Version] = Counter()  # of the engines that serve; in lockstep of all that were loaded
        self._behind: Counter[Version] = Counter()  # those of them that are behind
        self._waiting: dict[str, None] = {}  # engines that may want a load
        self._stale = 0  # engines that do not serve, whether up or not

    def start(self, engines: dict[str, Version], version: Version) -> None:
        """The engines are up; the learner is at `version`."""
        assert engines, "a run needs at least one engine"
        for name, has in engines.items():
            self._enter(name, EngineState(version if has == version else None))

    @property
    def newest(self) -> Version | None:
        return self._published[-1] if self._published else None

    @property
    def oldest(self) -> Version:
        """The oldest version that may serve a group now; where no engine serves, what the first to do so will get."""
        if self._versions:
            return min(self._versions)
        return self.newest or 0

    @property
    def served_by_all(self) -> Version | None:
        """The newest version that every serving engine has reached; None if no engine serves."""
        return min(self._versions, default=None)

    def oldest_from(self, floor: Version) -> Version:
        """The oldest version that serves, without those older than `floor` that are behind, if there is any other."""
        counted = [v for v, count in self._versions.items() if v >= floor or count > self._behind[v]]
        return min(counted, default=self.oldest)

    @property
    def stale(self) -> bool:
        """Whether there is an engine that does not serve."""
        return self._stale > 0

    @property
    def holds_admission(self) -> bool:
        if not self._versions or (self.update == "lockstep" and self._stale):
            return True
        # One that is behind holds up nobody, as long as there is another.
        fit = [version for version, count in self._versions.items() if count > self._behind[version]]
        return self.update == "drain" and self.newest is not None and (min(fit, default=self.oldest) < self.newest)

    # --------------------------------------------------------------------------------------------------------- news

    def published(self, version: Version) -> None:
        insort(self._published, version)
        self._waiting |= dict.fromkeys(name for name, engine in self.engines.items() if engine.up)
        self._prune()

    def loaded(self, engine: str, version: Version) -> None:
        expected = self.loading.pop(engine, None)
        assert expected == version, f"engine {engine} loaded {version} but was sent {expected}"
        self._enter(engine, EngineState(version))
        self._prune()

    def failed(self, engine: str, torn: bool) -> None:
        """A load has come to nothing; the next one is ordered at once."""
        if self.loading.pop(engine, None) is None:
            return  # it was lost over it, and that is known already
        known = self.engines[engine]
        kept = known.version if self.update == "lockstep" or not torn else None
        self._enter(engine, EngineState(kept, stale=known.stale or torn, behind=True))

    def late(self, engine: str, version: Version) -> None:
        """A load takes long; it is not waited for any more, but may still come to its end."""
        if self.loading.get(engine) == version:
            self._enter(engine, replace(self.engines[engine], behind=True))

    def joined(self, engine: str) -> None:
        """It is up, and stale."""
        known = self.engines.get(engine)
        assert known is None or not known.up, f"engine {engine} joined twice"
        self._enter(engine, EngineState(known.version if known else None, stale=True))

    def lost(self, engine: str) -> None:
        """It is gone, and what it was loading with it."""
        self.loading.pop(engine, None)
        kept = self.engines[engine].version if self.update == "lockstep" else None
        self._enter(engine, EngineState(kept, up=False, stale=True))

    def left(self, engine: str) -> None:
        """It will not come back."""
        self.lost(engine)
        self._stale -= 1
        del self.engines[engine]

    def _enter(self, name: str, state: EngineState) -> None:
        """Replace what is known of an engine, and what is counted."""
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

    def _count(self, state: EngineState, by: int) -> None:
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

    # ------------------------------------------------------------------------------------------------------- orders

    def deliver(self, busy: bool) -> list[tuple[str, Version]]:
        """Which engines load which version now. In drain and lockstep, `busy` engines (groups run) keep what they have;
        ask after admission had its chance."""
        if self.newest is None or not self._waiting:
            return []
        if self.update != "inflight" and busy and not self._stale:
            return []
        orders = [(name, version) for name in self._waiting if (version := self._wanted(name, busy)) is not None]
        if self.update == "inflight":
            self._waiting.clear()  # whoever got no order has the newest, or is loading
        for name, version in orders:
            self.loading[name] = version
        return orders

    def _wanted(self, name: str, busy: bool) -> Version | None:
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
        """The newest (for whoever asks next), those being loaded, and in lockstep those in force or still to come."""
        return {*self._published, *self.loading.values()}


class Evaluations:
    """At most one evaluation under way and one waiting; a newer one that is due replaces the one that waits. With
    `keep_all` all wait their turn: which versions are evaluated is then no question of speed."""

    def __init__(self, keep_all: bool, evaluated: Version) -> None:
        """`evaluated`: the newest version of which the result is known already, -1 if none."""
        self.current: Version | None = None
        self._keep_all = keep_all
        self._waiting: list[Version] = []  # ascending
        self._unpublished: set[Version] = set()
        self._asked = evaluated  # the newest version anybody asked for

    @property
    def idle(self) -> bool:
        return self.current is None and not self._waiting and not self._unpublished

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def is_open(self, version: Version) -> bool:
        """Whether an evaluation of this version or an older one is still to come or under way."""
        under_way = {*self._unpublished, *self._waiting} | ({self.current} if self.current is not None else set())
        return min(under_way, default=version + 1) <= version

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
            insort(self._waiting, version)
            if not self._keep_all:
                del self._waiting[:-1]

    def done(self, version: Version) -> None:
        assert self.current == version, f"evaluation of {version} is done, but {self.current} was under way"
        self.current = None

    def next(self) -> Version | None:
        """The evaluation to start now, if any."""
        if self.current is not None or not self._waiting:
            return None
        self.current = self._waiting.pop(0)
        return self.current

    def leases(self) -> set[Version]:
        return {*self._waiting} | ({self.current} if self.current is not None else set())
