"""outpace: asynchronous reinforcement learning for language models and agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.algorithms.advantages import Peers
    from outpace.algorithms.normalisers import BatchSignal
    from outpace.algorithms.registry import advantage, normaliser, surrogate
    from outpace.algorithms.tokens import Tokens
    from outpace.config import Config
    from outpace.observe.callbacks import Callback
    from outpace.observe.read_rollouts import read_rollouts
    from outpace.pipeline.evaluation import Evaluation
    from outpace.rewards.evaluator import evaluator
    from outpace.rewards.registry import register as register_reward
    from outpace.rollouts.custom import rollout
    from outpace.tasks.registry import register as register_task
    from outpace.trainer import Trainer
    from outpace.types import Answer, Endpoint, Episode, Task, Trajectory

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "BatchSignal",
    "Callback",
    "Config",
    "Endpoint",
    "Episode",
    "Evaluation",
    "Peers",
    "Task",
    "Tokens",
    "Trainer",
    "Trajectory",
    "__version__",
    "advantage",
    "evaluator",
    "normaliser",
    "read_rollouts",
    "register_reward",
    "register_task",
    "rollout",
    "surrogate",
]

_PUBLIC_NAMES = {
    "Answer": "outpace.types",
    "BatchSignal": "outpace.algorithms.normalisers",
    "Callback": "outpace.observe.callbacks",
    "Config": "outpace.config",
    "Endpoint": "outpace.types",
    "Episode": "outpace.types",
    "Evaluation": "outpace.pipeline.evaluation",
    "Peers": "outpace.algorithms.advantages",
    "Task": "outpace.types",
    "Tokens": "outpace.algorithms.tokens",
    "Trainer": "outpace.trainer",
    "Trajectory": "outpace.types",
    "advantage": "outpace.algorithms.registry",
    "evaluator": "outpace.rewards.evaluator",
    "normaliser": "outpace.algorithms.registry",
    "read_rollouts": "outpace.observe.read_rollouts",
    "register_reward": "outpace.rewards.registry:register",
    "register_task": "outpace.tasks.registry:register",
    "rollout": "outpace.rollouts.custom",
    "surrogate": "outpace.algorithms.registry",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import outpace` stays cheap in child processes."""
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module 'outpace' has no attribute {name!r}")
    import importlib

    module, _, attribute = _PUBLIC_NAMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute or name)
