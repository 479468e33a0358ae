"""rLLM's names on outpace: change `rllm` to `outpace.compat.rllm` in the import lines. See docs/from_rllm.md."""

from __future__ import annotations

import os
from pathlib import Path

from outpace.compat.rllm.rollouts import BaseAgent, RolloutEngine, Workflow, evaluator, rollout
from outpace.compat.rllm.trainer import AgentTrainer, BackendProtocol, TrainerState
from outpace.compat.rllm.types import *  # noqa: F403
from outpace.compat.rllm.types import __all__ as _types
from outpace.tasks.dataset_store import DatasetStore
from outpace.tasks.dataset_store import StoredDataset as Dataset

DatasetRegistry = DatasetStore(lambda: Path(os.environ.get("RLLM_HOME", "~/.rllm")).expanduser() / "datasets")
"""Finds datasets that rLLM itself registered: directory and format are the same."""

__all__ = [
    "AgentTrainer", "BackendProtocol", "BaseAgent", "Dataset", "DatasetRegistry", "RolloutEngine", "TrainerState",
    "Workflow", "evaluator", "rollout", *_types,
]  # fmt: skip
