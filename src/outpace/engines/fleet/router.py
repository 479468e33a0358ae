"""Which engine a request goes to: a pure rule, and the little that it remembers.

An engine may be asked if it serves, is not leaving, can be reached and has what the request needs: weights of
`min_version` or newer, or exactly the pinned ones. Nobody such, and the request waits. Of those who may be asked:

    the engine with the episode's last turn    unless it is busier than the least busy one by more than TURN
    the engine with the group's last prompt    unless it is busier than the least busy one by more than PROMPT
    the least busy one                         by requests in flight; ties are spread evenly over groups

Invariants
- What an engine holds is known by hearsay, so it may be newer than we think; it checks every request itself. Where it
  is the only one there is, it is asked whatever is said of its weights.
- Nobody is busier after a choice than the least busy one by more than the larger margin and one request.
- An engine that has failed a request is avoided for AVOIDED_S where there is another. There is no clock here: whoever
  asks says what time it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from outpace.types import Member, Version

AVOIDED_S = 10.0
"""How long an engine that has failed a request gets none: about as long as it takes to learn how it is."""

MAX_HOMES = 20_000
"""So many episodes and groups are remembered, those that were served last."""


@dataclass(frozen=True)
class Margin:
    """How much busier than the least busy engine one may be, to be asked for what it has in its cache."""

    requests: int
    share: float  # of what the least busy one has in flight

    def allows(self, load: int, least: int) -> bool:
        return load - least <= self.requests + self.share * least


TURN = Margin(requests=4, share=0.5)
"""Another engine would have to compute the whole conversation again."""

PROMPT = Margin(requests=2, share=0.125)
"""Another engine would have to compute the prompt of the group again."""


@dataclass(frozen=True)
class Wish:
    """What a request needs. Its id is `group.episode.number`, perhaps with something before the group."""

    request_id: str
    min_version: Version
    pinned: Version | None = None

    @property
    def episode(self) -> str:
        return self.request_id.rpartition(".")[0]

    @property
    def group(self) -> str:
        return self.episode.rpartition(".")[0]


def able(members: Sequence[Member], wish: Wish, unreachable: Collection[str] = ()) -> list[str]:
    """Whoever may be asked."""
    serving = [m for m in members if m.serves and not m.leaving and m.name not in unreachable]
    if len(members) == 1:
        return [member.name for member in serving]
    if wish.pinned is None:
        return [member.name for member in serving if member.version >= wish.min_version]
    return [member.name for member in serving if member.pinned == wish.pinned]


def choose(names: Sequence[str], load: Mapping[str, int], wish: Wish, homes: Mapping[str, str]) -> str:
    """One of `names`. `homes` has the engine that served an episode, or a group, last."""
    least = min(load.get(name, 0) for name in names)
    for home, margin in ((homes.get(wish.episode), TURN), (homes.get(wish.group), PROMPT)):
        if home is not None and home in names and margin.allows(load.get(home, 0), least):
            return home
    return min(names, key=lambda name: (load.get(name, 0), _lot(wish.group, name)))


def _lot(group: str, name: str) -> bytes:
    """Drawn for an engine by a group: the same in every worker, so that idle engines fill up evenly."""
    return blake2b(f"{group} {name}".encode(), digest_size=8).digest()


@dataclass
class Router:
    """What the rule needs to know of a fleet."""

    members: list[Member] = field(default_factory=list)
    load: dict[str, int] = field(default_factory=dict)
    _homes: OrderedDict[str, str] = field(default_factory=OrderedDict)
    _failures: dict[str, float] = field(default_factory=dict)  # name -> when it failed a request last

    def update(self, members: Sequence[Member]) -> None:
        self.members = list(members)
        names = {member.name for member in members}
        self._failures = {name: when for name, when in self._failures.items() if name in names}

    def choose(self, wish: Wish, now: float, unreachable: Collection[str] = ()) -> str | None:
        """The engine to ask; None: wait."""
        names = able(self.members, wish, unreachable)
        if not names:
            return None
        trusted = [name for name in names if self.trusts(name, now)]
        return choose(trusted or names, self.load, wish, self._homes)

    def waits_in_vain(self, wish: Wish) -> bool:
        """Whether no engine of several, be it up or down, has what the request is pinned to: none will get it."""
        several = len(self.members) > 1
        return several and wish.pinned is not None and all(one.pinned != wish.pinned for one in self.members)

    def trusts(self, name: str, now: float) -> bool:
        """Whether it has failed no request of late."""
        return now - self._failures.get(name, float("-inf")) >= AVOIDED_S

    def sent(self, name: str, wish: Wish) -> None:
        self.load[name] = self.load.get(name, 0) + 1
        for key in (wish.group, wish.episode):
            self._homes[key] = name
            self._homes.move_to_end(key)
        while len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)

    def ended(self, name: str) -> None:
        self.load[name] -= 1
        if not self.load[name]:
            del self.load[name]

    def failed(self, name: str, now: float) -> None:
        self._failures[name] = now
