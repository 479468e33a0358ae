"""Short scripts of events: send events to a scheduler and inspect the actions it returns."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from controller.simulated import PLAIN, make_scheduler
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
from outpace.controller.pacing import SchedulerSettings
from outpace.controller.scheduler import Scheduler
from outpace.types import Outcome

SMALL = replace(PLAIN, groups_per_step=2, chunk_groups=2)
ActionKind = TypeVar("ActionKind", bound=Action)


class Script:
    """Sends events to a scheduler and keeps the actions of the latest call."""

    def __init__(self, settings: SchedulerSettings, scheduler: Scheduler | None = None) -> None:
        self.scheduler = scheduler or make_scheduler(settings)
        self.actions: list[Action] = []

    def send(self, *events: Event) -> list[Action]:
        """Return the actions that these events call for."""
        self.actions = [action for event in events for action in self.scheduler.handle(event)]
        return self.actions

    def close(self, *groups: int, outcome: Outcome = "finished") -> list[Action]:
        return self.send(*(GroupClosed(group, outcome, oldest=self.scheduler.version) for group in groups))

    def train(self, *groups: int) -> list[Action]:
        """Finish these groups, which must complete a batch of one chunk, and train it."""
        self.close(*groups)
        version = self.scheduler.version
        assert self.of(TrainChunk) == [TrainChunk(version, groups)]
        assert self.send(ChunkTrained(version)) == [CloseBatch(version, groups)]
        return self.send(BatchTrained(version + 1))

    def of(self, kind: type[ActionKind]) -> list[ActionKind]:
        return [action for action in self.actions if isinstance(action, kind)]


def started(settings: SchedulerSettings) -> Script:
    script = Script(settings)
    script.send(RunStarted({"e0": 0}), Published(0))
    return script


def groups(actions: list[Admit]) -> list[int]:
    return [action.group for action in actions]
