"""outpace: asynchronous reinforcement learning for language models and agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.algorithms.advantages import BatchAdvantages, GroupReturns
    from outpace.algorithms.losses import Tokens
    from outpace.algorithms.registry import advantage, mask, normalizer, policy_loss
    from outpace.config import Config
    from outpace.config.producer import ProducerConfig
    from outpace.controller.evaluation import Evaluation
    from outpace.monitoring.callbacks import Callback, DataProducerCallback
    from outpace.monitoring.metric_table import log_metric, metric
    from outpace.monitoring.rollout_files import read_rollouts
    from outpace.rewards.functions import evaluator
    from outpace.rollouts.episode import rollout
    from outpace.runtime.registry import environment, register_reward, register_task, tracker, transport
    from outpace.tasks.producers import (
        AsyncDataProducer,
        BaseDataProducer,
        DataProducer,
        GRPODataProducer,
        RolloutDataset,
        make_rollout_collator,
    )
    from outpace.trainer import Trainer
    from outpace.types import Answer, Endpoint, Episode, Task, Trajectory

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "AsyncDataProducer",
    "BaseDataProducer",
    "BatchAdvantages",
    "Callback",
    "Config",
    "DataProducer",
    "DataProducerCallback",
    "Endpoint",
    "Episode",
    "Evaluation",
    "GRPODataProducer",
    "GroupReturns",
    "ProducerConfig",
    "RolloutDataset",
    "Task",
    "Tokens",
    "Trainer",
    "Trajectory",
    "__version__",
    "advantage",
    "environment",
    "evaluator",
    "log_metric",
    "make_rollout_collator",
    "mask",
    "metric",
    "normalizer",
    "policy_loss",
    "read_rollouts",
    "register_reward",
    "register_task",
    "rollout",
    "tracker",
    "transport",
]

_PUBLIC_NAMES = {
    "Answer": "outpace.types",
    "AsyncDataProducer": "outpace.tasks.producers",
    "BaseDataProducer": "outpace.tasks.producers",
    "BatchAdvantages": "outpace.algorithms.advantages",
    "Callback": "outpace.monitoring.callbacks",
    "Config": "outpace.config",
    "DataProducer": "outpace.tasks.producers",
    "DataProducerCallback": "outpace.monitoring.callbacks",
    "Endpoint": "outpace.types",
    "Episode": "outpace.types",
    "Evaluation": "outpace.controller.evaluation",
    "GRPODataProducer": "outpace.tasks.producers",
    "GroupReturns": "outpace.algorithms.advantages",
    "ProducerConfig": "outpace.config.producer",
    "RolloutDataset": "outpace.tasks.producers",
    "Task": "outpace.types",
    "Tokens": "outpace.algorithms.losses",
    "Trainer": "outpace.trainer",
    "Trajectory": "outpace.types",
    "advantage": "outpace.algorithms.registry",
    "environment": "outpace.runtime.registry",
    "evaluator": "outpace.rewards.functions",
    "log_metric": "outpace.monitoring.metric_table",
    "make_rollout_collator": "outpace.tasks.producers",
    "mask": "outpace.algorithms.registry",
    "metric": "outpace.monitoring.metric_table",
    "normalizer": "outpace.algorithms.registry",
    "policy_loss": "outpace.algorithms.registry",
    "read_rollouts": "outpace.monitoring.rollout_files",
    "register_reward": "outpace.runtime.registry",
    "register_task": "outpace.runtime.registry",
    "rollout": "outpace.rollouts.episode",
    "tracker": "outpace.runtime.registry",
    "transport": "outpace.runtime.registry",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import outpace` stays cheap in child processes."""
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module 'outpace' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC_NAMES[name]), name)
