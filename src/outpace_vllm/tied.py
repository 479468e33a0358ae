"""Fixes reloads of tied layers on CPU servers.

On a CPU, vLLM computes with a packed copy of a layer's weights. A reload packs only the layers that receive weights by
name. An output head tied to the embedding is not among them, and would silently keep using the weights from the
server's start. Here such layers are packed too, after every reload in this process: outpace's own and vLLM's
(`reload_weights`).
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import nn
from vllm.model_executor.model_loader.reload import layerwise

_MARK = "_outpace_packs_tied_layers"


def pack_tied_layers_after_reloads() -> None:
    """Patch vLLM to pack tied layers after every reload. Idempotent."""
    finalize = layerwise.finalize_layerwise_processing
    if hasattr(finalize, _MARK):
        return

    @wraps(finalize)
    def finalize_and_pack(model: nn.Module, *arguments: Any, **options: Any) -> None:
        finalize(model, *arguments, **options)
        for layer in tied_layers(model):
            if hasattr(layer, "cpu_linear"):  # the packed copy
                method: Any = layer.quant_method
                method.process_weights_after_loading(layer)

    setattr(finalize_and_pack, _MARK, True)
    layerwise.finalize_layerwise_processing = finalize_and_pack


def tied_layers(model: nn.Module) -> list[nn.Module]:
    """Layers that share a parameter with an earlier layer."""
    seen: set[int] = set()
    tied: list[nn.Module] = []
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if own & seen:
            tied.append(layer)
        seen |= own
    return tied
