"""Building the decoder of a model: path selection, logit check, CPU thread tuning.

    LlamaDecoder         fast path: Llama-family models
    TransformersDecoder  general path: any causal LM with ordinary attention

Invariant: a decoder serves only after `logit_mismatch` has compared its logits with the model's own forward. Both paths
make assumptions about the model (tensor names and settings, or its cache and mask). A model that violates them would
silently be sampled from wrong logits.

Threads: a decode step of a small model is a hundred tiny matrix products. Splitting each over several threads costs
more than it saves and takes cores from other processes; large models gain. So the configured number is a maximum, and
`tune_threads` measures which number is fastest.
"""

from __future__ import annotations

import copy
import time
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace.engines.embedded.decoder import Decoder
from outpace.engines.embedded.llama import LlamaDecoder, unsupported_reason
from outpace.engines.embedded.transformers_decoder import TransformersDecoder
from outpace.errors import BadInput

LOGIT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Relative to the largest logit. Other dtypes get the tolerance of bfloat16."""
CHECK_LENGTHS = (9, 5)


@torch.inference_mode()
def logit_mismatch(decoder: Decoder, model: PreTrainedModel) -> str | None:
    """Run two short sequences through the decoder and the model's forward; return why they differ, or None.

    Overwrites the first slots of the cache. Shapes: B rows, L tokens, V vocabulary."""
    reference = copy.deepcopy(model).train(False) if model.training else model  # without dropout
    rows = min(len(CHECK_LENGTHS), decoder.slots)
    lengths = [min(decoder.context, length) for length in CHECK_LENGTHS[:rows]]
    sequences = [np.arange(1, length + 1, dtype=np.int32) % decoder.vocabulary for length in lengths]
    decoder.prefill(range(rows), [sequence[:-1] for sequence in sequences])
    newest_B = np.array([sequence[-1] for sequence in sequences], dtype=np.int64)
    logits_B_V = decoder.step(newest_B, np.array(lengths, dtype=np.int64) - 1)
    for row, sequence in enumerate(sequences):
        tokens_1_L = torch.from_numpy(sequence.astype(np.int64)).to(model.device).unsqueeze(0)
        expected_V = reference(input_ids=tokens_1_L, use_cache=False).logits[0, -1].float()
        if not _relative_error(logits_B_V[row], expected_V) < LOGIT_TOLERANCE.get(model.dtype, 0.3):  # or NaN
            return "its logits do not match those of the model's own forward"
    return None


def _relative_error(logits_V: Tensor, expected_V: Tensor) -> float:
    return float((expected_V - logits_V).abs().max() / expected_V.abs().max().clamp(min=1))


DecoderPath = Literal["auto", "fast", "general"]


def build_decoder(
    model: PreTrainedModel, slots: int, context: int | None, *, deterministic: bool, path: DecoderPath
) -> Decoder:
    """Return a decoder with a copy of the model's weights. `auto` takes the fast path where the model allows it."""
    context = resolve_context(model, context)
    if path != "general":
        reason = unsupported_reason(model, context)
        if reason is None:
            fast = LlamaDecoder.from_model(model, slots, context, deterministic=deterministic)
            reason = logit_mismatch(fast, model)
            if reason is None:
                return fast
            del fast  # free its weights and cache before building the other path
        if path == "fast":
            raise BadInput(f"engine.decoder = fast cannot serve this model: {reason}; use engine.decoder = general")
    general = TransformersDecoder.from_model(model, slots, context, deterministic=deterministic)
    reason = logit_mismatch(general, model)
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


TIMED_STEPS = 2
MAX_TIME_RATIO = 0.95
"""More threads must cut the step time by at least 5 percent."""


def tune_threads(decoder: Decoder, max_threads: int) -> int:
    """Return the fastest thread count up to `max_threads` for this decoder, on the calling thread. There must be no
    running requests: measuring overwrites the keys and values of their first token."""
    if decoder.deterministic or max_threads == 1:
        return max_threads  # results depend bitwise on the thread count, so keep it fixed
    best, best_s = 1, _step_seconds(decoder, 1)
    threads = 2
    while threads <= max_threads:
        seconds = _step_seconds(decoder, threads)
        if seconds < MAX_TIME_RATIO * best_s:
            best, best_s = threads, seconds
        threads = min(2 * threads, max_threads) if threads < max_threads else max_threads + 1
    return best


def _step_seconds(decoder: Decoder, threads: int) -> float:
    """Return the time of the fastest of a few steps over all slots, after a warm-up step."""
    torch.set_num_threads(threads)
    zeros_B = np.zeros(decoder.slots, dtype=np.int64)
    durations = []
    for _ in range(TIMED_STEPS + 1):
        started = time.perf_counter()
        decoder.step(zeros_B, zeros_B)
        durations.append(time.perf_counter() - started)
    return min(durations[1:])
