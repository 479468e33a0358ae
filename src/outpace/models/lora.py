"""LoRA adapters in a causal language model, through peft, and their files in PEFT format.

Invariants
- The model object stays the same: its layers are wrapped in place, so references to its modules stay valid.
- Adapters are float32. Frozen matrices may be in the dtype of the matrix products: see `frozen_matrices`.
- Initial adapter values depend on torch's seed only, not on the device or on how the model is sharded.
- Only adapters are trained. The base weights never change, not even while merging.
- An adapter starts at zero: before the first step the model's output equals the base model's.
- Importing this module does not import torch: planning and export read adapter files only.

`tensors` uses the names of a PEFT file, `merged` the model's own names.
"""

from __future__ import annotations

import importlib.util
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from outpace.errors import BadInput, CorruptData
from outpace.types import LoraAdapter

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    Tensors = dict[str, Tensor]


ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"

NAME_PREFIX: Final = "base_model.model."
"""Prefix of the model's own tensor names in a PEFT file."""


class _AdapterConfig(msgspec.Struct):
    """The fields of `adapter_config.json` that outpace reads."""

    r: int
    lora_alpha: float
    target_modules: list[str]


SUPPORTED: Final = {"r", "lora_alpha", "target_modules", "task_type", "base_model_name_or_path", "inference_mode"}
"""Arguments of a `peft.LoraConfig` that outpace applies, and arguments that do not affect training."""


def lora_settings(config: Any, model: Callable[[], Path]) -> dict[str, Any]:
    """Return the settings of a `peft.LoraConfig`. `model` returns the directory of the model; it is called only
    if `target_modules` is None, which stands for the default layers of the model's type."""
    found, initial = config.to_dict(), type(config)().to_dict()
    if found.get("peft_type") != "LORA":
        raise BadInput(f"peft_config: {type(config).__name__} is not supported; use LoraConfig")
    if changed := [name for name in found if name not in SUPPORTED and found[name] != initial[name]]:
        raise BadInput(f"peft_config: not supported: {', '.join(changed)}; leave them out")
    targets = found["target_modules"]
    if targets is None:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as BY_TYPE

        targets = BY_TYPE.get(json.loads((model() / "config.json").read_text())["model_type"])
    chosen = {} if targets in (None, "all-linear") else {"lora.targets": sorted(targets)}
    return {"lora.rank": found["r"], "lora.alpha": float(found["lora_alpha"]), **chosen}


def adapter_config_json(adapter: LoraAdapter, model: str | None = None) -> bytes:
    """Return the content of `adapter_config.json`, with every field that a reader might default differently; `model` is
    the base model of the adapter."""
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
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }
    return json.dumps(config, indent=2).encode() + b"\n"


def parse_adapter_config(description: bytes) -> LoraAdapter:
    try:
        found = msgspec.json.decode(description, type=_AdapterConfig)
    except msgspec.DecodeError as error:
        raise CorruptData(f"{ADAPTER_CONFIG}: {error}") from None
    return LoraAdapter(found.r, found.lora_alpha, found.target_modules)


def check_peft() -> None:
    """Raise `BadInput` if peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise BadInput("lora.rank: LoRA needs the package peft: pip install 'outpace[lora]'")


_NAME: Final = "default"  # peft's name for a single adapter
_CHECKSUM_VALUES: Final = 256  # of each parameter
_PARTS: Final = ("lora_A", "lora_B")
_WRAPPED: Final = ".base_layer."


class LoraAdapters:
    """The LoRA adapters of one model. The constructor adds them, unless `add_adapters` already has, and initializes
    them."""

    def __init__(self, model: PreTrainedModel, adapter: LoraAdapter) -> None:
        """`base_checksum` identifies the base model."""
        self.adapter = adapter
        self._model = model
        if not _adapter_layers(model):
            add_adapters(model, adapter)
        self._layers = _adapter_layers(model)
        own = {f"{layer}.{part}.{_NAME}.weight" for layer in self._layers for part in _PARTS}
        self.base_checksum = _checksum([p for name, p in model.named_parameters() if name not in own])
        self._initialize()
        self._merge_buffers: Tensors = {}  # reused: fresh memory costs more than the addition

    def tensors(self) -> Tensors:
        """Return the live adapter tensors under their PEFT names."""
        return {
            f"{NAME_PREFIX}{layer_name}.{part}.weight": getattr(layer, part)[_NAME].weight
            for layer_name, layer in self._layers.items()
            for part in _PARTS
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy these values into the adapters. Raises `CorruptData` when names or shapes differ."""
        import torch

        own = self.tensors()
        if own.keys() != tensors.keys() or any(own[name].shape != tensors[name].shape for name in own):
            raise CorruptData("these adapters do not fit the model; lora.rank and lora.targets must not change")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])

    def merged(self, dtype: torch.dtype) -> Tensors:
        """Return the whole model with merged adapters under its own names, rounded to `dtype`.

        The next call overwrites the result."""
        import torch

        own = {f"{layer}.{part}.{_NAME}.weight" for layer in self._layers for part in _PARTS}
        found = {
            name.replace(_WRAPPED, "."): tensor for name, tensor in self._model.state_dict().items() if name not in own
        }
        with torch.no_grad():
            for layer_name, layer in self._layers.items():
                name, weight = f"{layer_name}.weight", layer.get_base_layer().weight
                if name not in self._merge_buffers:
                    self._merge_buffers[name] = torch.empty_like(weight, dtype=dtype)
                found[name] = torch.add(weight, layer.get_delta_weight(_NAME), out=self._merge_buffers[name])
        return found

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Context in which the adapters are disabled: the model is the base model."""
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)

    @contextmanager
    def with_values(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Context in which the adapters have these values."""
        own = {name: tensor.detach().clone() for name, tensor in self.tensors().items()}
        self.load(tensors)
        try:
            yield
        finally:
            self.load(own)

    def _enable(self, enabled: bool) -> None:
        for layer in self._layers.values():
            layer.enable_adapters(enabled)

    def _initialize(self) -> None:
        """Draw the initial values as peft does."""
        import torch
        from torch import nn

        from outpace.models.slices import copy_own_rows

        for layer in self._layers.values():
            down, up = (getattr(layer, part)[_NAME] for part in _PARTS)
            for linear in (down, up):
                if linear.weight.is_meta:
                    device = layer.get_base_layer().weight.device
                    linear.weight = nn.Parameter(torch.empty(linear.weight.shape, device=device))
            first = torch.empty(down.weight.shape)
            nn.init.kaiming_uniform_(first, a=math.sqrt(5))
            copy_own_rows(down.weight, first)
            nn.init.zeros_(up.weight)


def add_adapters(model: PreTrainedModel, adapter: LoraAdapter) -> None:
    """Wrap the target layers in place. The weights of adapters stay on the meta device, in float32."""
    check_peft()
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    _check_targets(model, adapter.targets)
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]  # peft divides it by the rank; any number works
        target_modules=adapter.targets,
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    inject_adapter_in_model(config, model, _NAME, low_cpu_mem_usage=True)


def _adapter_layers(model: PreTrainedModel) -> dict[str, Any]:
    check_peft()
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _checksum(parameters: list[Tensor]) -> int:
    """Return a checksum of the first values of every parameter: cheap, and enough to tell models apart."""
    from outpace.models.slices import first_values

    checksum = 0
    for values in first_values(parameters, _CHECKSUM_VALUES):
        checksum = zlib.crc32(values.numpy().tobytes(), checksum)
    return checksum


def frozen_matrices(model: PreTrainedModel) -> list[Tensor]:
    """Return the frozen weights of linear layers. A pass casts them to the dtype of the matrix products, so keeping
    them in that dtype changes no result. Other parameters, such as fused experts, may be used in float32."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    embeddings = model.get_input_embeddings().weight
    weights = (module.weight for module in model.modules() if isinstance(module, nn.Linear | Conv1D))
    return [weight for weight in weights if not weight.requires_grad and weight is not embeddings]


def _check_targets(model: PreTrainedModel, targets: list[str]) -> None:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    for target in targets:
        if not any(_matches(name, target) for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise BadInput(f"lora.targets: the model has no linear layer named {target}; it has {', '.join(known)}")
    embeddings = model.get_input_embeddings().weight
    for name, module in linear.items():
        if module.weight is embeddings and any(_matches(name, target) for target in targets):
            raise BadInput(f"lora.targets: {name} is tied to the input embeddings and would change them; remove it")


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
