"""Loading a whole set of weights into a live model, in one call that leaves the model usable however it ends.

vLLM takes a live model apart for this (`initialize_layerwise_reload`) and puts it together layer by layer as weights
arrive, in the form that its kernels want. A load that fails half-way would leave it in pieces: here they are put back,
some layers with new values and some with old ones. The caller must be told, and the next load makes all of them new.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info


def load_whole(model: nn.Module, model_config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raises, too, when there are parameters that got nothing."""
    wanted = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    try:
        loaded = model.load_weights(weights)  # type: ignore[operator]
    except BaseException:
        _put_together(model, model_config)
        raise
    finalize_layerwise_reload(model, model_config)
    if loaded is not None and model_config.quantization is None and (left := sorted(wanted - set(loaded))):
        raise ValueError(f"no weights came for {left[0]}" + (f" and {len(left) - 1} more" if len(left) > 1 else ""))


def _put_together(model: nn.Module, model_config: Any) -> None:
    """Layers that are still in pieces forget what has arrived, and get back the tensors that they had."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0
    finalize_layerwise_reload(model, model_config)
