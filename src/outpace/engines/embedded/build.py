"""Which decoder serves a model. None does before it has given the logits of the model's own forward."""

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
    """A decoder with a copy of the model's weights: fast where the architecture allows it, unless told otherwise."""
    context = resolve_context(model, context)
    if path != "general":
        reason = unsupported(model, context)
        if reason is None:
            fast = LlamaDecoder.of(model, slots, context, deterministic=deterministic)
            reason = mismatch(fast, model)
            if reason is None:
                return fast
            del fast  # its weights and cache make room for the other path's
        if path == "fast":
            raise BadInput(f"engine.path = fast cannot serve this model: {reason}; use engine.path = general")
    general = GeneralDecoder.of(model, slots, context, deterministic=deterministic)
    reason = mismatch(general, model)
    if reason is not None:
        raise BadInput(f"the embedded engine cannot serve {type(model).__name__}: {reason}")
    return general


def resolve_context(model: PreTrainedModel, context: int | None) -> int:
    """The longest sequence: what was asked for, or the model's own limit, which it may not exceed."""
    own: int | None = getattr(model.config, "max_position_embeddings", None)
    if context is None:
        if own is None:
            raise BadInput("the model does not say how long its sequences may be: set engine.context")
        return own
    if own is not None and context > own:
        raise BadInput(f"engine.context is {context}, but the model's own limit is {own} tokens")
    return context
