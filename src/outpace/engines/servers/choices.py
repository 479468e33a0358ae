"""What follows from the config for the servers of a run."""

from __future__ import annotations

import os
import sys
from typing import Literal

from outpace.config import Config
from outpace.config.serving_rules import VLLM_LORA_RANKS

Kind = Literal["vllm", "sglang"]


def kind_of(config: Config) -> Kind:
    assert config.engine.kind != "embedded", "an embedded engine is no server"
    return config.engine.kind


def needs_plugin(config: Config) -> bool:
    """Whether outpace's plugin is to be in the server: weights come through its transfer engine and, where they come as
    files, vLLM would leave an output head that is tied to the embeddings as it was on a CPU. Adapters need nothing."""
    return config.engine.kind == "vllm" and not config.lora.rank


def python_of(config: Config) -> str:
    return os.path.expanduser(config.launch.python) if config.launch.python else sys.executable


def server_count(config: Config) -> int:
    return config.engine.count or len(config.engine.urls) or 1


def adapters_at_once(config: Config) -> int:
    """Versions of an adapter that requests may be under way with: those within the lag, the newest, and one to come."""
    return config.pacing.max_lag + 2


def vllm_lora_rank(rank: int) -> int:
    """The smallest `--max-lora-rank` of vLLM that takes adapters of this rank; a config has none above the largest."""
    return next(known for known in VLLM_LORA_RANKS if known >= rank)
