"""MERGED"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers: the longest `ModuleList` in the model; empty if it has none."""
    from torch import nn

    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def call_at_every_layer(model: nn.Module, function: Callable[[], None]) -> None:
    """Call `function` on the computing thread before each layer's forward pass and after each layer's backward pass."""
    from torch import Tensor

    def before(layer: nn.Module, args: tuple[Any, ...]) -> None:
        function()
        for value in args:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(after)  # type: ignore[no-untyped-call]

    def after(gradient: Tensor) -> None:
        function()

    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(before)
