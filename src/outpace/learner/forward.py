"""Forward pass: from a packed batch to the logprobs of its trained tokens, for any causal language model.

Two implementations with the same result:
- packed: no padding, attention per document, output head applied in slices. For models whose attention uses the
  transformers interface and whose logits are the output head times the last hidden state.
- padded: length-bucketed right-padded batches through the model's own forward. For all other models.

The choice does not depend on the model's name. `choose_forward` runs two short documents through both and selects
packed only if the logprobs match and those of the second document do not change with the first. A model that leaks
between documents does not pass.

The output head is applied to one slice of tokens at a time, in forward and again in backward, so memory is bounded by
one slice of logits.

Precision: matrix products in the dtype of the hidden states, everything from the logits on in at least float32. Logits
are divided by the sampling temperature, because tokens were drawn from that distribution. At temperature 0 the sampler
records logprobs of the softmax at temperature 1, and so does this module.

Legend: _N target tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from outpace.learner.packing import ATTENTION_NAME, DocumentBuckets, PackedBatch, PackingUnsupported

LOGITS_PER_SLICE = 1 << 24
"""Logits in memory at once: 64 MiB in float32."""


def token_logprobs(
    hidden_ND: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperature: float,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the logprob of each target and the entropy of its distribution, the latter without gradient unless
    `entropy_gradient`."""
    scale = _logit_scale(temperature)
    results: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_ND, head_VD, bias_V, targets_N, scale, entropy_gradient
    )
    return results


def logprobs_from_logits(
    logits_NV: Tensor, targets_N: Tensor, temperature: float, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Like `token_logprobs`, from logits: for models whose logits are not just head times hidden state."""
    log_probs_NV = (_at_least_float32(logits_NV) * _logit_scale(temperature)).log_softmax(-1)
    measured_NV = log_probs_NV if entropy_gradient else log_probs_NV.detach()
    entropy_N = -(measured_NV.exp() * measured_NV).sum(-1)
    return log_probs_NV.gather(-1, targets_N[:, None]).squeeze(-1), entropy_N


def _at_least_float32(values: Tensor) -> Tensor:
    """Cast to at least float32."""
    return values if values.dtype == torch.float64 else values.float()


def _logit_scale(temperature: float) -> float:
    return 1.0 / temperature if temperature > 0 else 1.0


def _slices(count: int, vocabulary: int) -> list[slice]:
    size = max(1, LOGITS_PER_SLICE // vocabulary)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _scaled_logits(hidden_ND: Tensor, head_VD: Tensor, bias_V: Tensor | None, scale: float) -> Tensor:
    logits_NV = _at_least_float32(hidden_ND @ head_VD.t())
    if bias_V is not None:
        logits_NV = logits_NV + _at_least_float32(bias_V)
    return logits_NV.mul_(scale)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        scale: float,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_ND, head_VD, bias_V, targets_N)
        ctx.scale = scale
        ctx.entropy_gradient = entropy_gradient
        logp_N = _at_least_float32(hidden_ND.new_empty(len(targets_N)))
        entropy_N = torch.empty_like(logp_N)
        for part in _slices(len(targets_N), len(head_VD)):
            logits = _scaled_logits(hidden_ND[part], head_VD.to(hidden_ND.dtype), bias_V, scale)
            log_total = logits.logsumexp(-1)
            logp_N[part] = logits.gather(-1, targets_N[part, None]).squeeze(-1) - log_total
            probs = (logits - log_total[:, None]).exp_()
            entropy_N[part] = log_total - (probs.mul_(logits)).sum(-1)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_N: Tensor, grad_entropy_N: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:
        hidden_ND, head_VD, bias_V, targets_N = ctx.saved_tensors
        head = head_VD.to(hidden_ND.dtype)
        grad_hidden = torch.empty_like(hidden_ND)
        _, trains_head, trains_bias, *_ = ctx.needs_input_grad
        grad_head = torch.zeros_like(head_VD) if trains_head else None
        grad_bias = torch.zeros_like(bias_V) if trains_bias else None
        for part in _slices(len(targets_N), len(head)):
            logits = _scaled_logits(hidden_ND[part], head, bias_V, ctx.scale)
            grad_entropy = _entropy_gradient(logits, grad_entropy_N[part]) if ctx.entropy_gradient else None
            # d logp / d logits = scale * (onehot - softmax)
            grad_logits = logits.softmax(-1).neg_()
            grad_logits.scatter_add_(-1, targets_N[part, None], torch.ones_like(grad_logits[:, :1]))
            grad_logits.mul_((grad_N[part] * ctx.scale)[:, None])
            if grad_entropy is not None:
                grad_logits.add_(grad_entropy, alpha=ctx.scale)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0).to(grad_bias.dtype)
            grad_logits = grad_logits.to(hidden_ND.dtype)
            grad_hidden[part] = grad_logits @ head
            if grad_head is not None:
                grad_head += grad_logits.t() @ hidden_ND[part]
        return grad_hidden, grad_head, grad_bias, None, None, None


def _entropy_gradient(logits_NV: Tensor, grad_N: Tensor) -> Tensor:
    """Return the incoming gradient times d entropy / d logits = -softmax * (log softmax + entropy)."""
    log_probs_NV = logits_NV.log_softmax(-1)
    probs_NV = log_probs_NV.exp()
    entropy_N = -(probs_NV * log_probs_NV).sum(-1)
    return -probs_NV * (log_probs_NV + entropy_N[:, None]) * grad_N[:, None]


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
