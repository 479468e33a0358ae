"""Forward pass: from a packed batch to the logprobs of its trained tokens, for any causal language model.

Two implementations with the same result:
- packed: no padding, attention per document, output head applied in slices. For models whose attention uses the
  transformers interface and whose logits are the output head times the last hidden state.
- padded: length-bucketed right-padded batches through the model's own forward. For all other models.

The choice does not depend on the model's name. `choose_forward` runs two short documents through both and selects
packed only if the logprobs match and those of the second document do not change with the first. A model that leaks
between documents does not pass.
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

from outpace.learner.logprobs import logprobs_from_logits, token_logprobs
from outpace.learner.packing import ATTENTION_NAME, DocumentBuckets, PackedBatch, PackingUnsupported

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ForwardOutputs:
    """Logprobs, entropies and hidden states (None unless requested) of the trained tokens of a pass."""

    logp_N: Tensor
    entropy_N: Tensor
    hidden_ND: Tensor | None = None


@dataclass(frozen=True)
class ForwardOptions:
    """Options of a forward pass. `entropy_gradient`: entropies carry a gradient. `hidden`: return hidden states."""

    temperature: float = 1.0
    dtype: torch.dtype = torch.float32
    entropy_gradient: bool = False
    hidden: bool = False


Forward = Callable[[PackedBatch], ForwardOutputs]

PROBE_TOLERANCE = 1e-3
"""Packed and padded float32 logprobs differ by about 1e-5 from rounding, by about 1 from a leak."""

LEAK_TOLERANCE = 1e-5
"""How much a document's logprobs may change with its neighbor: at most by rounding."""

PROBE_LENGTHS = (7, 12)

_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}


class PackedForward:
    def __init__(self, model: PreTrainedModel, options: ForwardOptions) -> None:
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if not isinstance(head, nn.Linear):
            raise PackingUnsupported("the output head is not a single linear layer")
        layer_types = set(getattr(model.config, "layer_types", None) or ())
        if not layer_types <= _PACKABLE_LAYERS:
            raise PackingUnsupported(f"unsupported layer types: {', '.join(sorted(layer_types - _PACKABLE_LAYERS))}")
        model.set_attn_implementation(ATTENTION_NAME)
        self._decoder: Any = model.base_model
        self._head = head
        self._device = model.device
        self._options = options

    def __call__(self, packed: PackedBatch) -> ForwardOutputs:
        device, options = self._device, self._options
        with autocast(device, options.dtype):
            hidden_TD = self._decoder(
                input_ids=torch.from_numpy(packed.tokens_T).to(device)[None],
                position_ids=torch.from_numpy(packed.position_ids_T).to(device)[None],
                use_cache=False,  # with a cache, the transformers mask ignores document boundaries
                documents=DocumentBuckets.plan(packed.cu_seqlens_D1, device),
            ).last_hidden_state[0]
        hidden_ND = hidden_TD.index_select(0, torch.from_numpy(packed.sources_N).to(device)).to(options.dtype)
        targets_N = torch.from_numpy(packed.targets_N).to(device)
        logp_N, entropy_N = token_logprobs(
            hidden_ND, self._head.weight, self._head.bias, targets_N, options.temperature, options.entropy_gradient
        )
        return ForwardOutputs(logp_N, entropy_N, hidden_ND if options.hidden else None)


class PaddedForward:
    def __init__(self, model: PreTrainedModel, options: ForwardOptions) -> None:
        self._model: Any = model
        self._options = options

    def __call__(self, packed: PackedBatch) -> ForwardOutputs:
        device, options = self._model.device, self._options
        documents = DocumentBuckets.plan(packed.cu_seqlens_D1, device)
        lengths_T = torch.from_numpy(np.repeat(np.diff(packed.cu_seqlens_D1), np.diff(packed.cu_seqlens_D1))).to(device)
        tokens_T = torch.from_numpy(packed.tokens_T).to(device)
        sources_P = documents.restore_T[torch.from_numpy(packed.sources_N).to(device)]
        chosen: list[Tensor] = []
        hidden: list[Tensor] = []
        indices: list[Tensor] = []
        offset = 0
        for bucket in documents.buckets:
            shape = (bucket.count, bucket.width)
            positions = torch.arange(bucket.width, device=device).expand(shape)
            lengths = lengths_T[bucket.gather].view(shape)
            with autocast(device, options.dtype):
                output = self._model(
                    input_ids=tokens_T[bucket.gather].view(shape),
                    attention_mask=(positions < lengths).long(),
                    position_ids=positions,
                    use_cache=False,
                    output_hidden_states=options.hidden,
                )
            logits = output.logits.flatten(0, 1)
            inside = torch.nonzero((sources_P >= offset) & (sources_P < offset + len(logits))).squeeze(-1)
            chosen.append(logits.index_select(0, sources_P[inside] - offset))
            if options.hidden:
                hidden.append(output.hidden_states[-1].flatten(0, 1).index_select(0, sources_P[inside] - offset))
            indices.append(inside)
            offset += len(logits)
        targets_N = torch.from_numpy(packed.targets_N).to(device)
        order = torch.cat(indices)
        logp, entropy = logprobs_from_logits(
            torch.cat(chosen), targets_N[order], options.temperature, options.entropy_gradient
        )
        back = torch.argsort(order)
        hidden_ND = torch.cat(hidden).index_select(0, back) if options.hidden else None
        return ForwardOutputs(logp.index_select(0, back), entropy.index_select(0, back), hidden_ND)


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Run matrix products in `dtype`. Parameters stay float32: bfloat16 would lose small updates."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype == torch.bfloat16)


def choose_forward(model: PreTrainedModel, options: ForwardOptions) -> Forward:
    """Return the packed forward if it reproduces this model's logprobs, else the padded one."""
    own_attention = model.config._attn_implementation
    try:
        _verify_packing(model)
    except (PackingUnsupported, ValueError, TypeError) as error:  # raised by transformers for unsupported arguments
        logger.info("packing disabled for this model, rows are padded: %s", error)
        model.set_attn_implementation(own_attention)
        return PaddedForward(model, options)
    return PackedForward(model, options)


def matching_forward(chosen: Forward, model: PreTrainedModel, options: ForwardOptions) -> Forward:
    """Return a forward for `model` of the same kind (packed or padded) as `chosen`, with other options."""
    return PackedForward(model, options) if isinstance(chosen, PackedForward) else PaddedForward(model, options)


@torch.no_grad()
def _verify_packing(model: PreTrainedModel) -> None:
    vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[index]
    documents = _probe_documents(vocabulary)
    plain = ForwardOptions(dtype=model.dtype)
    expected_N = PaddedForward(model, plain)(documents).logp_N
    packed = PackedForward(model, plain)
    found_N = packed(documents).logp_N
    error = float((found_N - expected_N).abs().max())
    if not error <= PROBE_TOLERANCE:
        raise PackingUnsupported(f"packed and padded logprobs differ by {error:.2g}")
    other_tokens_T = documents.tokens_T.copy()
    other_tokens_T[: PROBE_LENGTHS[0]] = (other_tokens_T[: PROBE_LENGTHS[0]] + 1) % vocabulary
    changed_N = packed(replace(documents, tokens_T=other_tokens_T)).logp_N
    leak = float((changed_N - found_N)[PROBE_LENGTHS[0] :].abs().max())
    if not leak <= LEAK_TOLERANCE:
        raise PackingUnsupported(f"a document's logprobs change by {leak:.2g} with its neighbor's tokens")


def _probe_documents(vocabulary: int) -> PackedBatch:
    """Return two documents of different lengths with a prediction at every position."""
    generator = np.random.default_rng(0)
    count = sum(PROBE_LENGTHS)
    return PackedBatch(
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
