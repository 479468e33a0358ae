"""A new decoder against the model it was made from, before it serves anybody.

Both paths read a model by what they know of it: the fast one by names and settings, the general one by the cache and
mask it hands over. A model that needs something else would be sampled from wrong logits without a word; two short
sequences through the decoder and through the model's plain forward tell.

Shapes: B rows, L tokens, V vocabulary.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace.engines.embedded.decoder import Decoder

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Of the largest logit; what is not listed is as coarse as bfloat16."""
LENGTHS = (9, 5)


@torch.inference_mode()
def mismatch(decoder: Decoder, model: PreTrainedModel) -> str | None:
    """Why the decoder must not serve this model, or None. Overwrites the first slots of the cache."""
    reference = copy.deepcopy(model).train(False) if model.training else model  # dropout would differ by itself
    rows = min(len(LENGTHS), decoder.slots)
    lengths = [min(decoder.context, length) for length in LENGTHS[:rows]]
    sequences = [np.arange(1, length + 1, dtype=np.int32) % decoder.vocabulary for length in lengths]
    decoder.prefill(range(rows), [sequence[:-1] for sequence in sequences])
    newest_B = np.array([sequence[-1] for sequence in sequences], dtype=np.int64)
    logits_B_V = decoder.step(newest_B, np.array(lengths, dtype=np.int64) - 1)
    for row, sequence in enumerate(sequences):
        tokens_1_L = torch.from_numpy(sequence.astype(np.int64)).to(model.device).unsqueeze(0)
        expected_V = reference(input_ids=tokens_1_L, use_cache=False).logits[0, -1].float()
        if not _error(logits_B_V[row], expected_V) < TOLERANCE.get(model.dtype, 0.3):  # NaN is an error too
            return "its logits do not match those of the model's plain forward"
    return None


def _error(logits_V: Tensor, expected_V: Tensor) -> float:
    return float((expected_V - logits_V).abs().max() / expected_V.abs().max().clamp(min=1))
