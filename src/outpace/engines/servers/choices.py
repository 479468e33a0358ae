"""MERGED"""

from __future__ import annotations

import os
import sys
from typing import Literal

from outpace.config import Config
from outpace.config.serving_rules import VLLM_LORA_RANKS

Kind = Literal["vllm", "sglang"]


def kind_of(config: Config) -> Kind:
    assert config.engine.kind != "embedded", "the embedded engine is not a server"
    return config.engine.kind


def needs_plugin(config: Config) -> bool:
    """Whether the server needs outpace's vLLM plugin. It provides the weight-transfer engine. For weights loaded from
    files on a CPU, it updates an output head tied to the embeddings, which vLLM does not. Adapters need neither."""
    return config.engine.kind == "vllm" and not config.lora.rank


def python_of(config: Config) -> str:
    return os.path.expanduser(config.launch.python) if config.launch.python else sys.executable


def server_count(config: Config) -> int:
    return config.engine.count or len(config.engine.urls) or 1


def adapters_at_once(config: Config) -> int:
    """Adapter versions that can be loaded at once: those within pacing.max_lag, the newest, and the next one."""
    return config.pacing.max_lag + 2


def vllm_lora_rank(rank: int) -> int:
    """The smallest `--max-lora-rank` of vLLM that fits this rank. Config validation rejects ranks above the largest."""
    return next(known for known in VLLM_LORA_RANKS if known >= rank)
