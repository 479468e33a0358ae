"""From a packed pass to the logprobs of its trained tokens, for any causal language model.

Two ways, the same result:
- packed: padding-free, attention per document, head applied in slices. For models whose attention goes through
  transformers' interface and whose logits are the output head times the last hidden state.
- padded: length-bucketed right-padded batches through the model's own forward. For every other model.

Which one a model gets is not guessed from its name: `choose_forward` runs two short documents both ways and takes the
packed way only if the logprobs agree and if those of the second document do not feel the first. A model that leaks
between documents cannot pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.learn.attention import DOCUMENTS, Documents, PackingUnsupported
from outpace.learn.logprobs import chosen_logprobs, logprobs_of_logits
from outpace.learn.packing import Packed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outputs:
    """Of a pass's trained tokens: logprobs, entropies, the hidden states that predicted them (None unless wanted)."""

    logp_N: Tensor
    entropy_N: Tensor
    hidden_ND: Tensor | None = None


@dataclass(frozen=True)
class Wanted:
    """What a forward pass is for. Entropies carry a gradient, and hidden states are given, only where asked for."""

    temperature: float = 1.0
    dtype: torch.dtype = torch.float32
    entropy_gradient: bool = False
    hidden: bool = False


Forward = Callable[[Packed], Outputs]

PROBE_TOLERANCE = 1e-3
"""Packed and unpacked float32 logprobs differ by rounding, about 1e-5; by a leak, about 1."""

LEAK_TOLERANCE = 1e-5
"""How much a document's logprobs may move when its neighbour changes: rounding of another batch shape at most."""

PROBE_LENGTHS = (7, 12)

_LAYERS_PACKED = {"full_attention", "sliding_attention"}


class PackedForward:
    def __init__(self, model: PreTrainedModel, wanted: Wanted) -> None:
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if not isinstance(head, nn.Linear):
            raise PackingUnsupported("the output head is not one linear layer")
        layer_types = set(getattr(model.config, "layer_types", None) or ())
        if not layer_types <= _LAYERS_PACKED:
            raise PackingUnsupported(f"layers of type {', '.join(sorted(layer_types - _LAYERS_PACKED))}")
        model.set_attn_implementation(DOCUMENTS)
        self._decoder: Any = model.base_model
        self._head = head
        self._device = model.device
        self._wanted = wanted

    def __call__(self, packed: Packed) -> Outputs:
        device, wanted = self._device, self._wanted
        with autocast(device, wanted.dtype):
            hidden_TD = self._decoder(
                input_ids=torch.from_numpy(packed.tokens_T).to(device)[None],
                position_ids=torch.from_numpy(packed.position_ids_T).to(device)[None],
                use_cache=False,  # a cache makes transformers' own mask forget the document boundaries
                documents=Documents.plan(packed.cu_seqlens_D1, device),
            ).last_hidden_state[0]
        hidden_ND = hidden_TD.index_select(0, torch.from_numpy(packed.sources_N).to(device)).to(wanted.dtype)
        targets_N = torch.from_numpy(packed.targets_N).to(device)
        logp_N, entropy_N = chosen_logprobs(
            hidden_ND, self._head.weight, self._head.bias, targets_N, wanted.temperature, wanted.entropy_gradient
        )
        return Outputs(logp_N, entropy_N, hidden_ND if wanted.hidden else None)


class PaddedForward:
    def __init__(self, model: PreTrainedModel, wanted: Wanted) -> None:
        self._model: Any = model
        self._wanted = wanted

    def __call__(self, packed: Packed) -> Outputs:
        device, wanted = self._model.device, self._wanted
        documents = Documents.plan(packed.cu_seqlens_D1, device)
        lengths_T = torch.from_numpy(np.repeat(np.diff(packed.cu_seqlens_D1), np.diff(packed.cu_seqlens_D1))).to(device)
        tokens_T = torch.from_numpy(packed.tokens_T).to(device)
        sources_P = documents.restore_T[torch.from_numpy(packed.sources_N).to(device)]
        chosen: list[Tensor] = []
        hidden: list[Tensor] = []
        places: list[Tensor] = []
        offset = 0
        for bucket in documents.buckets:
            shape = (bucket.count, bucket.width)
            positions = torch.arange(bucket.width, device=device).expand(shape)
            lengths = lengths_T[bucket.gather].view(shape)
            with autocast(device, wanted.dtype):
                given = self._model(
                    input_ids=tokens_T[bucket.gather].view(shape),
                    attention_mask=(positions < lengths).long(),
                    position_ids=positions,
                    use_cache=False,
                    output_hidden_states=wanted.hidden,
                )
            logits = given.logits.flatten(0, 1)
            inside = torch.nonzero((sources_P >= offset) & (sources_P < offset + len(logits))).squeeze(-1)
            chosen.append(logits.index_select(0, sources_P[inside] - offset))
            if wanted.hidden:
                hidden.append(given.hidden_states[-1].flatten(0, 1).index_select(0, sources_P[inside] - offset))
            places.append(inside)
            offset += len(logits)
        targets_N = torch.from_numpy(packed.targets_N).to(device)
        order = torch.cat(places)
        logp, entropy = logprobs_of_logits(
            torch.cat(chosen), targets_N[order], wanted.temperature, wanted.entropy_gradient
        )
        back = torch.argsort(order)
        hidden_ND = torch.cat(hidden).index_select(0, back) if wanted.hidden else None
        return Outputs(logp.index_select(0, back), entropy.index_select(0, back), hidden_ND)


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Parameters stay float32 (small updates would be lost in bfloat16); matrix products run in `dtype`."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype == torch.bfloat16)


def choose_forward(model: PreTrainedModel, wanted: Wanted) -> Forward:
    """The packed way if it provably gives this model's own logprobs, otherwise the padded way."""
    own_attention = model.config._attn_implementation
    try:
        _prove_packing(model)
    except (PackingUnsupported, ValueError, TypeError) as error:  # what transformers raises for refused arguments
        logger.info("rows are padded, not packed: %s", error)
        model.set_attn_implementation(own_attention)
        return PaddedForward(model, wanted)
    return PackedForward(model, wanted)


def same_way(chosen: Forward, model: PreTrainedModel, wanted: Wanted) -> Forward:
    """The way that was chosen for this model, or for one of the same kind, to another end."""
    return PackedForward(model, wanted) if isinstance(chosen, PackedForward) else PaddedForward(model, wanted)


@torch.no_grad()
def _prove_packing(model: PreTrainedModel) -> None:
    vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[index]
    documents = _probe(vocabulary)
    plain = Wanted(dtype=model.dtype)
    expected_N = PaddedForward(model, plain)(documents).logp_N
    packed = PackedForward(model, plain)
    found_N = packed(documents).logp_N
    error = float((found_N - expected_N).abs().max())
    if not error <= PROBE_TOLERANCE:
        raise PackingUnsupported(f"packed logprobs differ by {error:.2g}")
    other_tokens_T = documents.tokens_T.copy()
    other_tokens_T[: PROBE_LENGTHS[0]] = (other_tokens_T[: PROBE_LENGTHS[0]] + 1) % vocabulary
    moved_N = packed(replace(documents, tokens_T=other_tokens_T)).logp_N
    leak = float((moved_N - found_N)[PROBE_LENGTHS[0] :].abs().max())
    if not leak <= LEAK_TOLERANCE:
        raise PackingUnsupported(f"a document's logprobs move by {leak:.2g} with its neighbour's tokens")


def _probe(vocabulary: int) -> Packed:
    """Two documents of unequal length with a prediction at every position."""
    generator = np.random.default_rng(0)
    count = sum(PROBE_LENGTHS)
    return Packed(
        tokens_T=generator.integers(0, vocabulary, count),
        position_ids_T=np.concatenate([np.arange(n) for n in PROBE_LENGTHS]),
        cu_seqlens_D1=np.cumsum([0, *PROBE_LENGTHS]),
        sources_N=np.arange(count),
        targets_N=generator.integers(0, vocabulary, count),
        sampler_logp_N=np.zeros(count, dtype=np.float32),
        advantages_N=np.zeros(count, dtype=np.float32),
        versions_N=np.zeros(count, dtype=np.int32),
        sequence_N=np.repeat(np.arange(len(PROBE_LENGTHS)), PROBE_LENGTHS),
    )
