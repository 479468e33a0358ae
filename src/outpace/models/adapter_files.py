"""The files of a low-rank adapter, as peft, transformers and vLLM read them. No torch here."""

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
"""What stands before the model's own names in such a file."""


class _Described(msgspec.Struct):
    """The part of the description that is ours to read."""

    r: int
    lora_alpha: float
    target_modules: list[str]


def describe_adapter(adapter: Adapter, model: str | None = None) -> bytes:
    """The content of `adapter_config.json`; `model` says what the adapter was trained on."""
    described = {
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
    return json.dumps(described, indent=2).encode() + b"\n"


def read_adapter(description: bytes) -> Adapter:
    try:
        found = msgspec.json.decode(description, type=_Described)
    except msgspec.DecodeError as error:
        raise CorruptData(f"{ADAPTER_CONFIG}: {error}") from None
    return Adapter(found.r, found.lora_alpha, found.target_modules)


def check_peft() -> None:
    """Raise `BadInput` where adapters cannot be trained for want of a package."""
    if importlib.util.find_spec("peft") is None:
        raise BadInput("lora.rank: adapters need the package peft: pip install 'outpace[lora]'")
