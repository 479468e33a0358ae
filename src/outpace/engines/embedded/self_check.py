"""MERGED"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace.engines.embedded.decoder import Decoder

LOGIT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Relative to the largest logit. Other dtypes get the tolerance of bfloat16."""
CHECK_LENGTHS = (9, 5)


@torch.inference_mode()
def mismatch(decoder: Decoder, model: PreTrainedModel) -> str | None:
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
