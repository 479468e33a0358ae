"""Low-rank adapters inside a causal language model, through peft.

Invariants
- The model stays the object that it was: its layers are wrapped in place, so what reaches into it finds what it did.
- Only adapters are trained. The weights they stand beside never change, not even while both are merged.
- An adapter begins at zero: until something is learned the model is the one that was given.

Tensors leave under one of two kinds of names: those of a PEFT file (`tensors`), or the model's own (`merged`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outpace.errors import BadInput, CorruptData
from outpace.models.adapter_files import NAME_PREFIX, check_peft
from outpace.types import Adapter

_NAME: Final = "default"  # peft's own name for an only adapter
_BEGINNING: Final = 256
_PARTS: Final = ("lora_A", "lora_B")
_WRAPPED: Final = ".base_layer."

Tensors = dict[str, Tensor]


class Adapters:
    """The adapters of one model. Making them puts them in."""

    def __init__(self, model: PreTrainedModel, adapter: Adapter) -> None:
        """`frozen_sum` tells the model beside them from another."""
        self.adapter = adapter
        self._model = model
        _check_targets(model, adapter.targets)
        self.frozen_sum = _sum_of_beginnings(model)
        self._layers = _inject(model, adapter)
        self._room: Tensors = {}  # of merged weights: taken once, fresh memory costs more than the sum itself

    def tensors(self) -> Tensors:
        """The adapters themselves, live, by the names of a PEFT file."""
        return {
            f"{NAME_PREFIX}{layer_name}.{part}.weight": getattr(layer, part)[_NAME].weight
            for layer_name, layer in self._layers.items()
            for part in _PARTS
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take these values. Raises `CorruptData` when they are of other adapters."""
        own = self.tensors()
        if own.keys() != tensors.keys() or any(own[name].shape != tensors[name].shape for name in own):
            raise CorruptData("these are not the adapters of this model; lora.rank and lora.targets must stay")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    @torch.no_grad()
    def merged(self, dtype: torch.dtype) -> Tensors:
        """The whole model with its adapters worked in, by its own names; sums are rounded to `dtype`. They are good
        until they are asked for again."""
        own = {f"{layer}.{part}.{_NAME}.weight" for layer in self._layers for part in _PARTS}
        found = {
            name.replace(_WRAPPED, "."): tensor for name, tensor in self._model.state_dict().items() if name not in own
        }
        for layer_name, layer in self._layers.items():
            name, weight = f"{layer_name}.weight", layer.get_base_layer().weight
            if name not in self._room:
                self._room[name] = torch.empty_like(weight, dtype=dtype)
            found[name] = torch.add(weight, layer.get_delta_weight(_NAME), out=self._room[name])
        return found

    @contextmanager
    def off(self) -> Iterator[None]:
        """In here the model is the one that it was before it got adapters."""
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)

    @contextmanager
    def replaced(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """In here the adapters have these values."""
        own = {name: tensor.detach().clone() for name, tensor in self.tensors().items()}
        self.load(tensors)
        try:
            yield
        finally:
            self.load(own)

    def _enable(self, enabled: bool) -> None:
        for layer in self._layers.values():
            layer.enable_adapters(enabled)


def _sum_of_beginnings(model: PreTrainedModel) -> int:
    """A checksum of the first values of every parameter: it tells one model from another, and costs nothing."""
    checksum = 0
    for parameter in model.parameters():
        beginning = parameter.detach().flatten()[:_BEGINNING].float().cpu().contiguous()
        checksum = zlib.crc32(beginning.numpy().tobytes(), checksum)
    return checksum


def _inject(model: PreTrainedModel, adapter: Adapter) -> dict[str, Any]:
    """Wraps the model's layers in place; the wrapped ones by their names."""
    check_peft()
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]  # it is divided by the rank, and may be any number
        target_modules=adapter.targets,
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    inject_adapter_in_model(config, model, _NAME)
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _check_targets(model: PreTrainedModel, targets: list[str]) -> None:
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    for target in targets:
        if not any(_is_called(name, target) for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise BadInput(f"lora.targets: the model has no linear layer called {target}; it has {', '.join(known)}")
    embeddings = model.get_input_embeddings().weight
    for name, module in linear.items():
        if module.weight is embeddings and any(_is_called(name, target) for target in targets):
            raise BadInput(f"lora.targets: {name} is tied to the embeddings, which would change with it; leave it out")


def _is_called(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
