"""Router: chooses the engine for a request, by prefix cache and load. Pure: no I/O, the caller passes the time.

An engine is eligible if it serves, is not leaving, is reachable, and has the weights the request needs: `min_version`
or newer, or exactly the pinned version. If no engine is eligible, the request waits. Among eligible engines, in order:

    the engine of the episode's last turn      unless its load exceeds the least load by more than TURN_MARGIN
    the engine of the group's last prompt      unless its load exceeds the least load by more than PROMPT_MARGIN
    the least loaded engine                    by in-flight requests; a hash of the group breaks ties evenly

Invariants
- Reported weight versions may be stale: an engine may have newer weights, and checks every request itself. A single
  engine gets every request, whatever version it reports.
- After a choice no engine's load exceeds the least load by more than the larger margin plus one request.
- An engine that failed a request is avoided for FAILURE_COOLDOWN_S if there is another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from outpace.types import FleetMember, Version

FAILURE_COOLDOWN_S = 10.0
"""How long other engines are preferred after an engine fails a request: about the time until its health is known."""

MAX_REMEMBERED = 20_000
"""Number of episodes and groups whose last engine is remembered. The least recently served are dropped."""


@dataclass(frozen=True)
class LoadMargin:
    """How far an engine's load may exceed the least load for its prefix cache to be preferred."""

    requests: int
    share: float  # of the in-flight requests of the least loaded engine

    def allows(self, load: int, least: int) -> bool:
        return load - least <= self.requests + self.share * least


TURN_MARGIN = LoadMargin(requests=4, share=0.5)
"""Any other engine has to prefill the whole conversation again."""

PROMPT_MARGIN = LoadMargin(requests=2, share=0.125)
"""Any other engine has to prefill the prompt of the group again."""


class RequestNeeds(msgspec.Struct, frozen=True):
    """The request id and the weights it needs. The id is `group.episode.number`, optionally with a prefix."""

    request_id: str
    min_version: Version
    pinned: Version | None = None

    @property
    def episode(self) -> str:
        return self.request_id.rpartition(".")[0]

    @property
    def group(self) -> str:
        return self.episode.rpartition(".")[0]


def eligible(members: Sequence[FleetMember], needs: RequestNeeds, unreachable: Collection[str] = ()) -> list[str]:
    """Return the names of the eligible engines."""
    serving = _serving(members, unreachable)
    if len(members) == 1:
        return [member.name for member in serving]
    if needs.pinned is None:
        return [member.name for member in serving if member.version >= needs.min_version]
    return [member.name for member in serving if member.pinned == needs.pinned]


def _serving(members: Sequence[FleetMember], unreachable: Collection[str]) -> list[FleetMember]:
    return [m for m in members if m.serves and not m.leaving and m.name not in unreachable]


def choose(names: Sequence[str], load: Mapping[str, int], needs: RequestNeeds, last_engine: Mapping[str, str]) -> str:
    """Return one of `names`. `last_engine` maps an episode or a group to the engine that served it last."""
    if len(names) == 1:
        return names[0]
    least = min(load.get(name, 0) for name in names)
    for cached, margin in (
        (last_engine.get(needs.episode), TURN_MARGIN),
        (last_engine.get(needs.group), PROMPT_MARGIN),
    ):
        if cached is not None and cached in names and margin.allows(load.get(cached, 0), least):
            return cached
    return min(names, key=lambda name: (load.get(name, 0), _tie_break(needs.group, name)))


def _tie_break(group: str, name: str) -> bytes:
    """Return a hash of group and engine, the same in every worker, so that idle engines fill up evenly."""
    return blake2b(f"{group} {name}".encode(), digest_size=8).digest()


@dataclass
class Router:
    """Routing state: members, load, last engine per episode and group, recent failures."""

    members: list[FleetMember] = field(default_factory=list)
    load: dict[str, int] = field(default_factory=dict)
    _last_engine: OrderedDict[str, str] = field(default_factory=OrderedDict)
    _failures: dict[str, float] = field(default_factory=dict)  # name -> time of its last failed request

    @property
    def names(self) -> set[str]:
        return {member.name for member in self.members}

    def update(self, members: Sequence[FleetMember]) -> None:
        self.members = list(members)
        self._failures = {name: when for name, when in self._failures.items() if name in self.names}

    def choose(self, needs: RequestNeeds, now: float, unreachable: Collection[str] = ()) -> str | None:
        """Return the engine for a request, or None if the request has to wait."""
        names = eligible(self.members, needs, unreachable)
        if not names:
            return None
        trusted = [name for name in names if self.is_trusted(name, now)]
        return choose(trusted or names, self.load, needs, self._last_engine)

    def accepts(self, name: str, unreachable: Collection[str] = ()) -> bool:
        """Whether the engine serves requests, whatever its version."""
        return any(member.name == name for member in _serving(self.members, unreachable))

    def can_never_serve(self, needs: RequestNeeds) -> bool:
        """Whether the request is pinned to a version that no member has, serving or not. False for a single member."""
        several = len(self.members) > 1
        return several and needs.pinned is not None and all(member.pinned != needs.pinned for member in self.members)

    def is_trusted(self, name: str, now: float) -> bool:
        """Whether the engine has failed no request within FAILURE_COOLDOWN_S."""
        return now - self._failures.get(name, float("-inf")) >= FAILURE_COOLDOWN_S

    def sent(self, name: str, needs: RequestNeeds) -> None:
        self.load[name] = self.load.get(name, 0) + 1
        if len(self.members) < 2:
            return  # there is no choice to remember
        for key in (needs.group, needs.episode):
            self._last_engine[key] = name
            self._last_engine.move_to_end(key)
        while len(self._last_engine) > MAX_REMEMBERED:
            self._last_engine.popitem(last=False)

    def ended(self, name: str) -> None:
        self.load[name] -= 1
        if not self.load[name]:
            del self.load[name]

    def failed(self, name: str, now: float) -> None:
        self._failures[name] = now
