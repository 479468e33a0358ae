"""MERGED"""

from __future__ import annotations

import random
from collections.abc import Callable

from outpace.pipeline.events import Admit, CloseBatch, TrainChunk
from outpace.pipeline.pacing import CoreSettings
from outpace.pipeline.supervisor import Supervisor
from outpace.simulate.clock import Clock
from outpace.simulate.conductor import LearnerWork, Tell
from outpace.simulate.fleet import Fleet, GiveUpRun
from outpace.simulate.rollouts import Group, Rollouts
from outpace.simulate.settings import SimulationSettings
from outpace.types import Version


class ModelledParts:
    """The simulated cluster: a fleet of engines, workers with their episodes, and a learner.

    `cancelled` is called with every group that the scheduler cancels, `give_up` with the reason when a component
    exceeds its restart limit, which ends the run."""

    def __init__(
        self,
        settings: SimulationSettings,
        core: CoreSettings,
        clock: Clock,
        supervisor: Supervisor,
        rng: random.Random,
        served: Version,
        give_up: GiveUpRun,
        cancelled: Callable[[Group], None],
    ) -> None:
        assert settings.cluster.training is not None
        self._settings = settings
        self._core = core
        self._training = settings.cluster.training
        self._served = served
        self._give_up = give_up
        self._cancelled = cancelled
        self.learner_busy_s = 0.0
        self.rollouts = Rollouts(settings, clock, supervisor, rng)
        self.fleet = Fleet(settings, clock, supervisor, rng, self.rollouts, give_up)

    def connect(self, tell: Tell) -> None:
        self.fleet.connect(tell)
        self.rollouts.connect(tell, self.fleet, self._give_up)
        self.fleet.start(engines_of(self._settings), self._served)

    def engines(self) -> dict[str, Version]:
        return {name: engine.version for name, engine in self.fleet.engines.items()}

    def start(self, admit: Admit) -> None:
        self.rollouts.start(admit)

    def cancel(self, group: int) -> None:
        self._cancelled(self.rollouts.cancel(group))

    def load(self, engine: str, version: Version) -> None:
        self.fleet.load(engine, version)

    def learner_seconds(self, work: LearnerWork) -> float:
        seconds = self._learner_seconds(work)
        self.learner_busy_s += seconds
        return seconds

    def _learner_seconds(self, work: LearnerWork) -> float:
        learner = self._settings.learner
        match work:
            case TrainChunk():
                tokens = sum(self.rollouts.groups[group].trained_tokens for group in work.groups)
                return tokens * learner.token_s / self._training
            case CloseBatch(version):
                saved = self._core.is_checkpointed(version + 1)
                return learner.step_s + (learner.checkpoint_s if saved else 0.0)
            case _:
                return learner.publish_s

    def fit(self, version: Version) -> tuple[float, float]:
        return 1.0, 0.0

    def evaluation_seconds(self, version: Version) -> float:
        raise NotImplementedError("the simulated cluster does not support evaluation")


def engines_of(settings: SimulationSettings) -> int:
    """Return the number of engines that fit on the generation devices."""
    assert settings.cluster.training is not None
    return (settings.cluster.devices - settings.cluster.training) // settings.cluster.per_engine
