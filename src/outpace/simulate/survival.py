"""MERGED"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

from outpace.pipeline.core import Core, CoreSettings
from outpace.pipeline.events import Action, BatchTrained, Checkpoint, CloseBatch, Event, GroupClosed
from outpace.pipeline.state import CoreState, state_of
from outpace.pipeline.survivors import Rules, Survivors, choose, recorded
from outpace.simulate.conductor import Observer
from outpace.simulate.rollouts import Group
from outpace.tasks.order import Order
from outpace.types import GroupOrder, GroupReport, Kept, Version


@dataclass
class Entry:
    """One finished group in the simulated journal."""

    group: Group
    kept: Kept
    trained: Version | None = None  # the version it was trained into, if any


@dataclass(frozen=True)
class Inheritance:
    """The state that a start of the run begins with."""

    core: Core
    finished: dict[int, Group] = field(default_factory=dict)  # including those that may be replayed
    begun: dict[int, Group] = field(default_factory=dict)  # unfinished groups with recorded turns, by prompt visit


class Journal(Observer):
    """State that survives a learner failure: the latest checkpoint, and finished groups not yet covered by one."""

    def __init__(self) -> None:
        self.checkpoint: Checkpoint | None = None
        self.groups: dict[int, Group] = {}  # groups of the current start
        self._entries: dict[int, Entry] = {}
        self._batch: tuple[int, ...] = ()
        self._compacted: Version = 0  # version of the checkpoint at the last compaction

    def heard(self, event: Event) -> None:
        match event:
            case GroupClosed(number, "finished") if number in self.groups:
                group = self.groups[number]
                self._entries[number] = Entry(group, _kept(group))
            case BatchTrained(version):
                for number in self._batch:
                    self._entries[number].trained = version

    def ordered(self, action: Action) -> None:
        match action:
            case CloseBatch():
                self._batch = action.groups
            case Checkpoint():
                self.checkpoint = action
                self._compact(state_of(_as_on_disk(action)))

    def _compact(self, state: CoreState) -> None:
        """Drop groups whose training a checkpoint covers, unless they may be replayed. As in the real, segmented
        journal, they stay until the next checkpoint."""
        for number, entry in list(self._entries.items()):
            if entry.trained is not None and entry.trained <= self._compacted and number not in state.replay:
                del self._entries[number]
        self._compacted = state.version

    def go_on(self, settings: CoreSettings, order: Order, turns: bool) -> Inheritance:
        """Return the state to resume from: the latest checkpoint, or a fresh start if there is none. With `turns`, it
        includes the recorded turns of unfinished groups."""
        state = None if self.checkpoint is None else state_of(_as_on_disk(self.checkpoint))
        rules = Rules.of(state, settings)
        survivors = choose((entry.kept for entry in self._entries.values()), rules)
        begun = self._unfinished(rules.version) if turns else {}
        min_versions = {position: group.admit.min_version for position, group in begun.items()}
        survivors = replace(survivors, recorded=recorded(min_versions, survivors.finished, rules))
        self._retain(survivors)
        finished = {number: entry.group for number, entry in self._entries.items()}
        return Inheritance(Core(settings, order, state, survivors), finished, begun)

    def _unfinished(self, version: Version) -> dict[int, Group]:
        """Return unfinished groups with recorded turns, by prompt visit, without those sampled from versions newer than
        the checkpoint, which no longer exist."""
        return {
            group.admit.position: group
            for group in self.groups.values()
            if not group.over and 0 <= group.newest <= version
        }

    def _retain(self, survivors: Survivors) -> None:
        retained = {kept.order.group for kept in (*survivors.finished, *survivors.pooled)}
        self._entries = {number: entry for number, entry in self._entries.items() if number in retained}
        for kept in survivors.finished:
            self._entries[kept.order.group].trained = None


def _as_on_disk(checkpoint: Checkpoint) -> dict[str, object]:
    stored: dict[str, object] = json.loads(json.dumps(checkpoint.state))
    return stored


def _kept(group: Group) -> Kept:
    admit = group.admit
    order = GroupOrder(
        admit.group, admit.task, admit.epoch, admit.min_version, size=group.size, position=admit.position
    )
    report = GroupReport(admit.group, "", "finished", oldest=group.oldest, newest=group.newest, rewards=[0.0, 1.0])
    return Kept(order, report)
