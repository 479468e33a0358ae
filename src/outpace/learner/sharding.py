"""Sharding a model over the ranks of a learner with FSDP2: every rank holds some rows of every weight.

    model ── shard ──▶ ShardedModel ─┬ unit: one layer        gathered for its forward and backward pass
                                     ├ unit: …
                                     └ root: the rest         embeddings, last norm, output head: gathered for the pass

Weights, gradients and optimizer state are float32 and sharded. A layer is gathered in the dtype of the matrix
products. Its gradients are summed over the ranks in float32 after each backward pass, not averaged: the loss is a sum
over the tokens of all ranks, which `LearnerCore.update` divides once.

Every rank must run the same passes in the same order. Ranks without rows run `idle_batch`, with zero as gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel

from outpace.config.sections import LearnerConfig
from outpace.errors import one_line
from outpace.learner.attention import PackingUnsupported
from outpace.learner.packing import PackedBatch
from outpace.learner.ranks import Ranks
from outpace.models.loading import decoder_layers

T = TypeVar("T")

PROBE_VOCABULARY = 64
"""Vocabulary size of the model that `probe_model` makes."""


class ShardedModel(nn.Module):
    """The root of a sharded model: `root(function)` calls `function` while the root's own parameters are gathered."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], T]) -> T:
        return function()

    def __call__(self, function: Callable[[], T]) -> T:
        result: T = super().__call__(function)
        if not torch.is_grad_enabled():  # no backward pass will free them, and the next update changes the shards
            self.free_gathered()
        return result

    def free_gathered(self) -> None:
        """Free the weights that a pass without backward left gathered, and clear the order of its layers, which FSDP2
        records for the backward pass. Torch has no public function for the latter."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
                state: Any = module._get_fsdp_state()
                state._comm_ctx.post_forward_order.clear()
                groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # before torch 2.12
                for group in filter(None, groups):
                    group._post_forward_indices.clear()


def shard(model: PreTrainedModel, ranks: Ranks, settings: LearnerConfig, dtype: torch.dtype) -> ShardedModel:
    """Shard a model in place. `dtype` is the dtype of matrix products. Parameters on the meta device stay there."""
    offload = CPUOffloadPolicy() if settings.offload and ranks.mesh.device_type == "cuda" else OffloadPolicy()
    in_layers = MixedPrecisionPolicy(
        param_dtype=dtype if dtype == torch.bfloat16 else None,
        reduce_dtype=torch.float32 if dtype == torch.bfloat16 else None,
        cast_forward_inputs=False,  # activations between layers stay float32
    )
    for layer in decoder_layers(model):
        fully_shard(
            layer,
            mesh=ranks.mesh,
            reshard_after_forward=settings.reshard,
            mp_policy=in_layers,
            offload_policy=offload,
        )
    root = ShardedModel(model)
    fully_shard(root, mesh=ranks.mesh, reshard_after_forward=False, offload_policy=offload)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot divide
    return root


def idle_batch() -> PackedBatch:
    """Return the shortest batch that runs every part of the model. It has no rows, so no total counts it."""
    one, places = np.zeros(1, dtype=np.float32), np.zeros(1, dtype=np.int64)
    bounds = np.array([0, 2])
    return PackedBatch(
        tokens_T=np.zeros(2, dtype=np.int64),
        position_ids_T=np.arange(2),
        cu_seqlens_S1=bounds,
        context_K=np.arange(2),
        cu_context_S1=bounds,
        sources_N=places,
        targets_N=places,
        sampler_logp_N=one,
        advantages_N=one,
        versions_N=places.astype(np.int32),
        sequence_N=places,
        rows=0,
    )


def probe_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the same kind with random weights, small enough to compute with unsharded: one layer of each
    type, and few tokens."""
    try:
        return _small_model(model)
    except (AttributeError, KeyError) as error:  # of a config that cannot be changed
        raise PackingUnsupported(f"no small model of this kind can be made: {one_line(error)}") from error


def _small_model(model: PreTrainedModel) -> PreTrainedModel:
    config = type(model.config).from_dict(model.config.to_dict())
    text = config.get_text_config()  # a part of the config of a model that also reads images
    types = list(getattr(text, "layer_types", None) or [])
    layers = sorted({types.index(each) for each in types}) or [0]
    text.num_hidden_layers = len(layers)
    if types:
        text.layer_types = [types[index] for index in layers]
    text.vocab_size = PROBE_VOCABULARY
    text.pad_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        probe: Any = type(model)(config)
    probed: PreTrainedModel = probe.float().eval()
    return probed
