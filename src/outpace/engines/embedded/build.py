"""Building the decoder of a model: path selection, logit check, CPU thread tuning.

    LlamaDecoder         fast path: Llama-family models
    TransformersDecoder  general path: any causal LM with ordinary attention

Invariant: a decoder serves only after `logit_mismatch` has compared its logits with the model's own forward. Both
paths make assumptions about the model (tensor names and settings, or its cache and mask). A model that breaks them
would be sampled from wrong logits without an error.

Threads: a decode step of a small model is a hundred tiny matrix products. Splitting each over several threads costs
more than it saves and takes cores from other processes; large models gain. So the configured number is a maximum, and
`tune_threads` measures.
"""

from __future__ import annotations

from typing import Literal

from transformers import PreTrainedModel

from outpace.engines.embedded.decoder import Decoder
from outpace.engines.embedded.general import GeneralDecoder
from outpace.engines.embedded.llama import LlamaDecoder
from outpace.engines.embedded.llama_weights import unsupported
from outpace.engines.embedded.self_check import mismatch
from outpace.errors import BadInput

DecoderPath = Literal["auto", "fast", "general"]


def build_decoder(
    model: PreTrainedModel, slots: int, context: int | None, *, deterministic: bool, path: DecoderPath
) -> Decoder:
    """Return a decoder with a copy of the model's weights. `auto` takes the fast path where the model allows it."""
    context = resolve_context(model, context)
    if path != "general":
        reason = unsupported(model, context)
        if reason is None:
            fast = LlamaDecoder.of(model, slots, context, deterministic=deterministic)
            reason = mismatch(fast, model)
            if reason is None:
                return fast
            del fast  # free its weights and cache before building the other path
        if path == "fast":
            raise BadInput(f"engine.path = fast cannot serve this model: {reason}; use engine.path = general")
    general = GeneralDecoder.of(model, slots, context, deterministic=deterministic)
    reason = mismatch(general, model)
    if reason is not None:
        raise BadInput(f"the embedded engine cannot serve {type(model).__name__}: {reason}")
    return general


def resolve_context(model: PreTrainedModel, context: int | None) -> int:
    """Return the longest sequence length: `context`, or the model's own limit, which `context` must not exceed."""
    own: int | None = getattr(model.config, "max_position_embeddings", None)
    if context is None:
        if own is None:
            raise BadInput("the model config has no max_position_embeddings: set engine.context")
        return own
    if own is not None and context > own:
        raise BadInput(f"engine.context is {context}, but the model supports only {own} tokens")
    return context
