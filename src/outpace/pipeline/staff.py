"""MERGED"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from outpace.pipeline.events import Event
from outpace.pipeline.supervisor import Role
from outpace.protocols import Engine, Learner, Worker
from outpace.runtime.spec import Runtime

LEARNER = "learner"

Tell = Callable[[Event | BaseException], None]
"""Puts an event into the driver's queue, or the error that must end the run."""


@dataclass(frozen=True)
class Parts:
    """The components of a running system."""

    learner: Learner
    engines: dict[str, Engine]
    workers: dict[str, Worker]
    runtime: Runtime
    sockets: dict[str, str] = field(default_factory=dict)  # on which workers call each engine
    urls: dict[str, str] = field(default_factory=dict)  # of the server behind an engine, if it was already running

    @property
    def roles(self) -> dict[str, Role]:
        return {LEARNER: "learner", **dict.fromkeys(self.engines, "engine"), **dict.fromkeys(self.workers, "worker")}
