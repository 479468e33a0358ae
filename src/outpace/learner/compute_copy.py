"""ComputeCopy: a copy of the model with bfloat16 matrices for forward and backward, beside the trained float32 model.

Casting the weights in every pass, as autocast does, reads and writes all of them for each pass. The copy is cast once
per update. Gradients of each pass are added to those of the float32 model, so they are summed in float32.

Vectors, embeddings and the output head are not copied: the copy uses the parameters of the float32 model themselves.
Activations between layers therefore stay float32.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class ComputeCopy:
    """Holds `model`, a copy of the original with matrices in `dtype` and the same modules."""

    def __init__(self, original: PreTrainedModel, dtype: torch.dtype) -> None:
        kept = {id(parameter) for parameter in _kept(original)}
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # float32, copy
        same: dict[int, object] = {}
        for parameter in original.parameters():
            if id(parameter) in kept:
                same[id(parameter)] = parameter
            else:
                copied = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                same[id(parameter)] = copied
                self._pairs.append((parameter, copied))
        self.model: PreTrainedModel = copy.deepcopy(original, same)

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Add the gradients of a pass to those of the float32 model."""
        totals: list[Tensor] = []
        added: list[Tensor] = []
        for parameter, copied in self._pairs:
            if copied.grad is None:
                continue
            if parameter.grad is None:
                parameter.grad = copied.grad.to(parameter.dtype)
            else:
                totals.append(parameter.grad)
                added.append(copied.grad)
            copied.grad = None
        if totals:
            torch._foreach_add_(totals, added)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights of the float32 model, after an update or a restore."""
        if self._pairs:
            originals, copies = zip(*self._pairs, strict=True)
            torch._foreach_copy_(copies, originals)


def _kept(model: PreTrainedModel) -> list[nn.Parameter]:
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[no-untyped-call]
    return vectors + [parameter for module in ends if module is not None for parameter in module.parameters()]
