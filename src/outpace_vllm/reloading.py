"""Loads a complete set of weights into a live model; the model stays usable even if the load fails.

vLLM takes a live model apart (`initialize_layerwise_reload`) and rebuilds it layer by layer as weights arrive, in the
layout that its kernels need. A load that fails half-way would leave it in pieces. Here the incomplete layers are
restored: some layers then have new values and some old ones. The failure must be reported; the next load replaces all
of them.

On a CPU, vLLM computes with a packed copy of a layer's weights. A reload packs only the layers that receive weights by
name. An output head tied to the embedding is not among them, and would silently keep using the weights from the
server's start. `pack_tied_layers_after_reloads` packs such layers too, after every reload in this process: outpace's
own and vLLM's (`reload_weights`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    layerwise,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info


def load_whole(model: nn.Module, model_config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load all weights. Also raises if a parameter received no weights."""
    wanted = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    try:
        loaded = model.load_weights(weights)  # type: ignore[operator]
    except BaseException:
        _restore_layers(model, model_config)
        raise
    finalize_layerwise_reload(model, model_config)
    if loaded is not None and model_config.quantization is None and (missing := sorted(wanted - set(loaded))):
        raise ValueError(f"no weights for {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""))


def _restore_layers(model: nn.Module, model_config: Any) -> None:
    """Restore the old tensors of layers that are not complete, dropping the weights received for them."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0
    finalize_layerwise_reload(model, model_config)


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
