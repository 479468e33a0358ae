"""Settings of the learner and of its backends. No torch, so that building them does not load it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outpace.algorithms.registry import Aggregation, OldPolicy
from outpace.config import Config, LearnerConfig
from outpace.config.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    KlConfig,
    PolicyLossConfig,
    configured_advantage,
)
from outpace.config.engines import LoraConfig
from outpace.hardware.cores import CoreSharing
from outpace.types import GroupRecord, JournalLocation, LoraAdapter


@dataclass(frozen=True, kw_only=True)
class LearnerCoreSettings:
    """Settings of `LearnerCore`, from a resolved config.

    - `dtype`: of matrix products and published weights. The learner's parameters, gradients and optimizer state are
      always float32 (float64 is for tests)
    - `temperature`: of the sampler
    - `total_steps`: where linear and cosine schedules end; None: they stay at their peak
    - `max_completion_tokens`: token limit of one completion, which dr_grpo divides by
    - `adapter`: if set, only the adapter is trained
    - `adapter_only`: publish the adapter alone; the engines already have the model"""

    learner: LearnerConfig
    algorithm: AlgorithmConfig
    policy_loss: PolicyLossConfig
    correction: CorrectionConfig
    kl: KlConfig
    critic: CriticConfig | None
    max_completion_tokens: int = 1
    temperature: float = 1.0
    total_steps: int | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    adapter: LoraAdapter | None = None
    adapter_only: bool = False

    @classmethod
    def of(cls, config: Config) -> LearnerCoreSettings:
        assert config.rollout.max_tokens is not None, "the config must be resolved"
        return cls(
            learner=config.learner,
            algorithm=config.algorithm,
            policy_loss=config.policy_loss,
            correction=config.correction,
            kl=config.kl,
            critic=config.critic if configured_advantage(config.advantage).registration.critic else None,
            max_completion_tokens=config.rollout.max_tokens,
            temperature=config.rollout.temperature,
            total_steps=config.run.steps,
            dtype=config.model.dtype,
            adapter=_adapter_of(config.lora),
            adapter_only=config.engine.kind != "embedded",
        )

    @property
    def old_policy(self) -> OldPolicy:
        assert self.policy_loss.old_policy is not None, "the config must be resolved"
        return self.policy_loss.old_policy

    @property
    def aggregation(self) -> Aggregation:
        assert self.policy_loss.aggregation is not None, "the config must be resolved"
        return self.policy_loss.aggregation

    @property
    def kl_in_loss(self) -> bool:
        return self.kl.coefficient > 0 and self.kl.place == "loss"


def _adapter_of(lora: LoraConfig) -> LoraAdapter | None:
    if lora.rank == 0:
        return None
    assert lora.alpha is not None, "the config must be resolved"
    return LoraAdapter(lora.rank, lora.alpha, list(lora.targets))


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """What `LearnerHost` and its backend are built from.

    - `config`: resolved
    - `read_group`: fetches a finished group, from wherever the workers put it
    - `snapshots`: directory in memory for published weights
    - `bad_steps`: directory for the groups of bad steps; None: they are not kept"""

    config: Config
    read_group: Callable[[JournalLocation], GroupRecord]
    snapshots: Path
    incarnation: str
    bad_steps: Path | None = None
    device: str = "cpu"
    gpu_memory: float = 1.0  # fraction of the GPU memory that the learner may use
    threads: int | None = None  # None: torch's default
    sharing: CoreSharing | None = None  # adjusts the thread count during the run; None: it is fixed
