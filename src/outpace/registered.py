"""MERGED"""

from __future__ import annotations

from dataclasses import dataclass, field

from outpace.algorithms.registry import ADVANTAGES, NORMALISERS, SURROGATES, Facts, Registry
from outpace.config import Config
from outpace.protocols import Reward
from outpace.rewards import registry as rewards
from outpace.tasks import registry as tasks

ALGORITHMS: dict[str, Registry] = {"surrogate": SURROGATES, "advantage": ADVANTAGES, "normalise": NORMALISERS}
"""Registries by their keys in `[algorithm]`."""


@dataclass(frozen=True)
class Registered:
    """Functions that a script registered by name, for the child processes that look them up. Contains only what the
    config uses. Importable functions are sent by reference; those of `__main__` or a notebook by value."""

    tasks: dict[str, tasks.TaskFactory] = field(default_factory=dict)
    rewards: dict[str, Reward] = field(default_factory=dict)
    algorithms: dict[str, Facts] = field(default_factory=dict)

    def install(self) -> None:
        """Register the functions in this process."""
        for name, factory in self.tasks.items():
            tasks.register(name)(factory)
        for name, function in self.rewards.items():
            rewards.register(name)(function)
        for key, facts in self.algorithms.items():
            ALGORITHMS[key].own[facts.name] = facts


def for_worker(config: Config) -> Registered | None:
    """Return the registered functions that a rollout worker needs, or None if there are none."""
    name, own = config.tasks.name, tasks.own_tasks()
    return _unless_empty(
        Registered(
            tasks={name: own[name]} if name in own else {},
            rewards={name: rewards.OWN[name] for name in config.rewards.functions if name in rewards.OWN},
            algorithms=_algorithms(config, ("advantage",)),
        )
    )


def for_learner(config: Config) -> Registered | None:
    """Return the registered functions that the learner needs, or None if there are none."""
    return _unless_empty(Registered(algorithms=_algorithms(config, tuple(ALGORITHMS))))


def _algorithms(config: Config, keys: tuple[str, ...]) -> dict[str, Facts]:
    chosen = {key: getattr(config.algorithm, key) for key in keys}
    return {key: ALGORITHMS[key].own[name] for key, name in chosen.items() if name in ALGORITHMS[key].own}


def _unless_empty(registered: Registered) -> Registered | None:
    return registered if registered.tasks or registered.rewards or registered.algorithms else None
