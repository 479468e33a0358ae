"""Short scripts of events: tell a core what happened, look at what it orders."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from controller.simulated import PLAIN, core_of
from outpace.controller.events import (
    Action,
    Admit,
    BatchTrained,
    ChunkTrained,
    CloseBatch,
    Event,
    GroupClosed,
    Published,
    RunStarted,
    TrainChunk,
)
from outpace.controller.scheduler import Scheduler, SchedulerSettings
from outpace.types import Outcome

SMALL = replace(PLAIN, groups_per_step=2, chunk_groups=2)
Kind = TypeVar("Kind", bound=Action)


class Script:
    """Tells a core events and keeps what it ordered."""

    def __init__(self, settings: SchedulerSettings, core: Scheduler | None = None) -> None:
        self.core = core or core_of(settings)
        self.said: list[Action] = []

    def tell(self, *events: Event) -> list[Action]:
        """The actions that these events call for."""
        self.said = [action for event in events for action in self.core.handle(event)]
        return self.said

    def close(self, *groups: int, outcome: Outcome = "finished") -> list[Action]:
        return self.tell(*(GroupClosed(group, outcome, oldest=self.core.version) for group in groups))

    def train(self, *groups: int) -> list[Action]:
        """Finish these groups, which must complete a batch of one chunk, and train it."""
        self.close(*groups)
        version = self.core.version
        assert self.of(TrainChunk) == [TrainChunk(version, groups)]
        assert self.tell(ChunkTrained(version)) == [CloseBatch(version, groups)]
        return self.tell(BatchTrained(version + 1))

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [action for action in self.said if isinstance(action, kind)]


def started(settings: SchedulerSettings) -> Script:
    script = Script(settings)
    script.tell(RunStarted({"e0": 0}), Published(0))
    return script


def groups(actions: list[Admit]) -> list[int]:
    return [action.group for action in actions]
