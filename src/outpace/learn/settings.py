"""What the learner is told. No torch here: whoever builds these settings need not load it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outpace.algorithms.registry import Aggregation, Anchor
from outpace.config import Config, LearnerConfig
from outpace.config.algorithm import AlgorithmConfig, CorrectionConfig, CriticConfig, KlConfig
from outpace.config.serving import LoraConfig
from outpace.types import Adapter


@dataclass(frozen=True, kw_only=True)
class CoreSettings:
    """The mathematics, from a resolved config. `dtype` is that of matrix products and of published weights; the
    learner's own parameters, gradients and optimizer state are float32 always (float64 is for proofs). `temperature` is
    the sampler's. `total_steps` is where linear and cosine schedules end; None: nowhere, they stay at their peak.
    `longest` is the most tokens of one completion: what dr_grpo divides by. With an `adapter` only that is trained;
    `bare` says that engines hold the model already, and are given the adapter alone."""

    learner: LearnerConfig
    algorithm: AlgorithmConfig
    correction: CorrectionConfig
    kl: KlConfig
    critic: CriticConfig
    longest: int = 1
    temperature: float = 1.0
    total_steps: int | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    adapter: Adapter | None = None
    bare: bool = False

    @classmethod
    def of(cls, config: Config) -> CoreSettings:
        assert config.rollout.max_tokens is not None, "the config was resolved"
        return cls(
            learner=config.learner,
            algorithm=config.algorithm,
            correction=config.correction,
            kl=config.kl,
            critic=config.critic,
            longest=config.rollout.max_tokens,
            temperature=config.rollout.temperature,
            total_steps=config.run.steps,
            dtype=config.model.dtype,
            adapter=_adapter_of(config.lora),
            bare=config.engine.kind != "embedded",
        )

    @property
    def anchor(self) -> Anchor:
        assert self.algorithm.anchor is not None, "the config was resolved"
        return self.algorithm.anchor

    @property
    def aggregation(self) -> Aggregation:
        assert self.algorithm.aggregation is not None, "the config was resolved"
        return self.algorithm.aggregation

    @property
    def has_critic(self) -> bool:
        return self.critic.coefficient is not None

    @property
    def pulls_in_loss(self) -> bool:
        return self.kl.coefficient > 0 and self.kl.place == "loss"


def _adapter_of(lora: LoraConfig) -> Adapter | None:
    if lora.rank == 0:
        return None
    assert lora.alpha is not None, "the config was resolved"
    return Adapter(lora.rank, lora.alpha, list(lora.targets))


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """The mathematics and where things lie: the journal to read from, the directory for snapshots (in memory).
    `config` is resolved."""

    config: Config
    journal: Path
    snapshots: Path
    incarnation: str
    device: str = "cpu"
    gpu_memory: float = 1.0  # of the GPU's memory, what the learner may take
    threads: int | None = None  # None: torch's own choice
    share_cores: Path | None = None  # the run's board of compute threads, where their number follows the load
