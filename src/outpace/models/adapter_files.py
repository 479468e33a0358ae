"""MERGED"""

from __future__ import annotations

import importlib.util
import json
from typing import Final

import msgspec

from outpace.errors import BadInput, CorruptData
from outpace.types import Adapter

ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"

NAME_PREFIX: Final = "base_model.model."
"""Prefix of the model's own tensor names in a PEFT file."""


class _AdapterConfig(msgspec.Struct):
    """The fields of `adapter_config.json` that outpace reads."""

    r: int
    lora_alpha: float
    target_modules: list[str]


def describe_adapter(adapter: Adapter, model: str | None = None) -> bytes:
    """Return the content of `adapter_config.json`; `model` is the base model of the adapter."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": adapter.targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    return json.dumps(config, indent=2).encode() + b"\n"


def read_adapter(description: bytes) -> Adapter:
    try:
        found = msgspec.json.decode(description, type=_AdapterConfig)
    except msgspec.DecodeError as error:
        raise CorruptData(f"{ADAPTER_CONFIG}: {error}") from None
    return Adapter(found.r, found.lora_alpha, found.target_modules)


def check_peft() -> None:
    """Raise `BadInput` if peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise BadInput("lora.rank: LoRA needs the package peft: pip install 'outpace[lora]'")
