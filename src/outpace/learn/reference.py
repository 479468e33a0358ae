"""The policy that a KL term pulls to: a second set of weights, the first ones for ever or synced now and then."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace.learn.forward import Wanted, choose_forward
from outpace.learn.packing import Packed


class Reference:
    """Holds a copy of the model as it is now; nothing of it is trained."""

    def __init__(self, model: PreTrainedModel, wanted: Wanted) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self._forward = choose_forward(self.model, wanted)

    @torch.no_grad()
    def logp(self, packed: Packed) -> Tensor:
        return self._forward(packed).logp_N

    @torch.no_grad()
    def sync(self, model: PreTrainedModel) -> None:
        for own, new in zip(self.model.parameters(), model.parameters(), strict=True):
            own.copy_(new)
