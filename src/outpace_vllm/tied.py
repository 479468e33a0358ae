"""Layers that share their weights with another, on servers without a GPU.

There vLLM keeps a packed copy of a layer's weights and computes with that. When it reloads weights it packs anew only
the layers that weights came for by name; a head that is tied to the embedding is none of them, and would go on with the
weights that the server was started with, without a word. Here such layers are packed anew as well, after every reload
in this process, outpace's own and vLLM's (`reload_weights`).
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import nn
from vllm.model_executor.model_loader.reload import layerwise

_MARK = "_outpace_packs_tied_layers"


def pack_tied_layers_after_reloads() -> None:
    """Once is enough; a second time does nothing."""
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
    """Those with a parameter that an earlier layer has too."""
    seen: set[int] = set()
    tied: list[nn.Module] = []
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if own & seen:
            tied.append(layer)
        seen |= own
    return tied
