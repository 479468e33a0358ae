"""The policy that a KL term pulls to: the first one for ever, or a later one that is renewed now and then."""

from __future__ import annotations

import copy
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace.errors import CorruptData
from outpace.learn.forward import Forward, Wanted, same_way
from outpace.learn.packing import Packed
from outpace.models.adapters import Adapters
from outpace.weights.layout import distinct_tensors

Tensors = dict[str, Tensor]


class Reference(Protocol):
    def logp(self, packed: Packed) -> Tensor: ...

    def renew(self) -> None:
        """Become the policy as it is now."""
        ...

    def tensors(self) -> Tensors:
        """What of it cannot be had from the model that the run began with; nobody changes them but `renew`."""
        ...

    def load(self, tensors: Tensors) -> None:
        """Be again what gave these tensors."""
        ...


def make_reference(model: PreTrainedModel, adapters: Adapters | None, chosen: Forward, wanted: Wanted) -> Reference:
    """The policy as it is before anything is trained. `chosen` is the way that it goes forward."""
    if adapters is not None:
        return AdapterReference(adapters, same_way(chosen, model, wanted))
    copied = copy.deepcopy(model).requires_grad_(False)
    return CopiedReference(model, copied, same_way(chosen, copied, wanted))


class CopiedReference:
    """A second set of weights, none of which is trained."""

    def __init__(self, policy: PreTrainedModel, copied: PreTrainedModel, forward: Forward) -> None:
        self.model = copied
        self._policy = policy
        self._forward = forward

    @torch.no_grad()
    def logp(self, packed: Packed) -> Tensor:
        return self._forward(packed).logp_N

    def renew(self) -> None:
        self.sync(self._policy)

    @torch.no_grad()
    def sync(self, model: PreTrainedModel) -> None:
        for own, new in zip(self.model.parameters(), model.parameters(), strict=True):
            own.copy_(new)

    def tensors(self) -> Tensors:
        return distinct_tensors(self.model.state_dict())

    @torch.no_grad()
    def load(self, tensors: Tensors) -> None:
        own = self.tensors()
        if not tensors:
            raise CorruptData("it was saved without a reference; kl.coefficient must stay 0")
        if own.keys() != tensors.keys() or any(own[name].shape != tensors[name].shape for name in own):
            raise CorruptData("its reference is of another model; model.path must stay")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


class AdapterReference:
    """The policy's own model with its adapters off or, once it was renewed, with the adapters of that time. The model
    is lent for one pass and given back as it was."""

    def __init__(self, adapters: Adapters, forward: Forward) -> None:
        self._adapters = adapters
        self._forward = forward
        self._kept: Tensors = {}  # empty: it is the model without adapters

    @torch.no_grad()
    def logp(self, packed: Packed) -> Tensor:
        with self._adapters.replaced(self._kept) if self._kept else self._adapters.off():
            return self._forward(packed).logp_N

    def renew(self) -> None:
        self._kept = {name: tensor.detach().clone() for name, tensor in self._adapters.tensors().items()}

    def tensors(self) -> Tensors:
        return self._kept

    def load(self, tensors: Tensors) -> None:
        device = next(iter(self._adapters.tensors().values())).device
        self._kept = {name: tensor.to(device) for name, tensor in tensors.items()}
