"""The reference policy of the KL term: the initial policy, or the policy copied every `kl.sync_every` steps."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace.errors import CorruptData
from outpace.learner.forward import Forward
from outpace.learner.packing import PackedBatch
from outpace.models.lora import LoraAdapters
from outpace.weights.shared_memory import distinct_tensors

Tensors = dict[str, Tensor]


class CopiedReference:
    """A frozen second copy of the weights."""

    def __init__(self, policy: PreTrainedModel, copied: PreTrainedModel, forward: Forward) -> None:
        self.model = copied.requires_grad_(False)
        self._policy = policy
        self._forward = forward

    @torch.no_grad()
    def logp(self, packed: PackedBatch) -> Tensor:
        return self._forward(packed).logp_N

    @torch.no_grad()
    def refresh(self) -> None:
        """Set the reference to the current policy."""
        for own, new in zip(self.model.parameters(), self._policy.parameters(), strict=True):
            own.copy_(new)

    def tensors(self) -> Tensors:
        """Return the tensors that the initial model does not provide. Only `refresh` changes them."""
        return distinct_tensors(self.model.state_dict())

    @torch.no_grad()
    def load(self, tensors: Tensors) -> None:
        own = self.tensors()
        if not tensors:
            raise CorruptData("the checkpoint has no reference policy; set kl.coefficient = 0")
        if own.keys() != tensors.keys() or any(own[name].shape != tensors[name].shape for name in own):
            raise CorruptData("the checkpoint's reference policy is from another model; do not change model.path")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


class AdapterReference:
    """The policy's own model with its adapter disabled or, after `refresh`, with the adapter copied then. The model is
    switched for one pass and restored afterwards."""

    def __init__(self, adapters: LoraAdapters, forward: Forward) -> None:
        self._adapters = adapters
        self._forward = forward
        self._adapter_tensors: Tensors = {}  # empty: the model without adapter

    @torch.no_grad()
    def logp(self, packed: PackedBatch) -> Tensor:
        with self._adapters.with_values(self._adapter_tensors) if self._adapter_tensors else self._adapters.disabled():
            return self._forward(packed).logp_N

    def refresh(self) -> None:
        self._adapter_tensors = {name: tensor.detach().clone() for name, tensor in self._adapters.tensors().items()}

    def tensors(self) -> Tensors:
        return self._adapter_tensors

    def load(self, tensors: Tensors) -> None:
        device = next(iter(self._adapters.tensors().values())).device
        self._adapter_tensors = {name: tensor.to(device) for name, tensor in tensors.items()}


Reference = CopiedReference | AdapterReference


def make_reference(
    model: PreTrainedModel, adapters: LoraAdapters | None, copied: PreTrainedModel | None, forward: Forward
) -> Reference:
    """Return a reference to the policy before training. `copied` is a copy of `model`, or None if it has adapters.
    `forward` runs the copy or, without one, the model."""
    if adapters is not None:
        return AdapterReference(adapters, forward)
    assert copied is not None
    return CopiedReference(model, copied, forward)
