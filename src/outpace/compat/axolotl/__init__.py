"""Axolotl's async GRPO trainer, its data producers and its config files. See docs/from_axolotl.md."""

from outpace.compat.axolotl.config import AsyncGRPOConfig
from outpace.compat.axolotl.trainer import AsyncGRPOTrainer
from outpace.config.producer import ProducerConfig
from outpace.monitoring.callbacks import DataProducerCallback
from outpace.tasks.producers import (
    AsyncDataProducer,
    BaseDataProducer,
    DataProducer,
    GRPODataProducer,
    RolloutDataset,
    make_rollout_collator,
)

__all__ = [
    "AsyncDataProducer", "AsyncGRPOConfig", "AsyncGRPOTrainer", "BaseDataProducer", "DataProducer",
    "DataProducerCallback", "GRPODataProducer", "ProducerConfig", "RolloutDataset", "make_rollout_collator",
]  # fmt: skip
