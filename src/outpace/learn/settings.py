"""What the learner is told. No torch here: whoever builds these settings need not load it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outpace.config import LearnerConfig


@dataclass(frozen=True, kw_only=True)
class CoreSettings:
    """The mathematics. `dtype` is that of matrix products and of published weights; the learner's own parameters,
    gradients and optimizer state are float32 always. `temperature` is the sampler's. `total_steps` is where linear
    and cosine schedules end; None: nowhere, they stay at their peak."""

    learner: LearnerConfig  # with its learning rate resolved
    importance_cap: float = 2.0
    temperature: float = 1.0
    total_steps: int | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True, kw_only=True)
class LearnerSettings(CoreSettings):
    """The mathematics and where things lie: the journal to read from, the directory for snapshots (in memory)."""

    model: str
    journal: Path
    snapshots: Path
    incarnation: str
    device: str = "cpu"
    trust_remote_code: bool = False
    seed: int = 0
    threads: int | None = None  # None: torch's own choice
