"""outpace: asynchronous reinforcement learning for language models and agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.algorithms.advantages import BatchAdvantages, GroupReturns
    from outpace.algorithms.losses import Tokens
    from outpace.algorithms.registry import advantage, normalizer, policy_loss
    from outpace.config import Config
    from outpace.controller.evaluation import Evaluation
    from outpace.monitoring.callbacks import Callback
    from outpace.monitoring.metric_table import log_metric, metric
    from outpace.monitoring.rollout_files import read_rollouts
    from outpace.rewards.functions import evaluator
    from outpace.rewards.registry import register as register_reward
    from outpace.rollouts.episode import rollout
    from outpace.tasks.registry import register as register_task
    from outpace.trainer import Trainer
    from outpace.types import Answer, Endpoint, Episode, Task, Trajectory

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "BatchAdvantages",
    "Callback",
    "Config",
    "Endpoint",
    "Episode",
    "Evaluation",
    "GroupReturns",
    "Task",
    "Tokens",
    "Trainer",
    "Trajectory",
    "__version__",
    "advantage",
    "evaluator",
    "log_metric",
    "metric",
    "normalizer",
    "policy_loss",
    "read_rollouts",
    "register_reward",
    "register_task",
    "rollout",
]

_PUBLIC_NAMES = {
    "Answer": "outpace.types",
    "BatchAdvantages": "outpace.algorithms.advantages",
    "Callback": "outpace.monitoring.callbacks",
    "Config": "outpace.config",
    "Endpoint": "outpace.types",
    "Episode": "outpace.types",
    "Evaluation": "outpace.controller.evaluation",
    "GroupReturns": "outpace.algorithms.advantages",
    "Task": "outpace.types",
    "Tokens": "outpace.algorithms.losses",
    "Trainer": "outpace.trainer",
    "Trajectory": "outpace.types",
    "advantage": "outpace.algorithms.registry",
    "evaluator": "outpace.rewards.functions",
    "log_metric": "outpace.monitoring.metric_table",
    "metric": "outpace.monitoring.metric_table",
    "normalizer": "outpace.algorithms.registry",
    "read_rollouts": "outpace.monitoring.rollout_files",
    "register_reward": "outpace.rewards.registry:register",
    "register_task": "outpace.tasks.registry:register",
    "rollout": "outpace.rollouts.episode",
    "policy_loss": "outpace.algorithms.registry",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import outpace` stays cheap in child processes."""
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module 'outpace' has no attribute {name!r}")
    import importlib

    module, _, attribute = _PUBLIC_NAMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute or name)
