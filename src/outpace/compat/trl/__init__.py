"""TRL's GRPO trainers, with the names and arguments of TRL 1.16. See docs/from_trl.md."""

from outpace.compat.trl.config import AsyncGRPOConfig, GRPOConfig
from outpace.compat.trl.trainer import AsyncGRPOTrainer, GRPOTrainer

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer", "GRPOConfig", "GRPOTrainer"]
