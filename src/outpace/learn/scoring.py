"""What the learner's weights say of whole sequences, by the arithmetic that trains them.

Not for training: whoever samples is held to these numbers (`outpace.pipeline.agreement`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from outpace.learn.core import LearnerCore
from outpace.learn.forward import Forward, PackedForward, PaddedForward, Wanted
from outpace.learn.packing import pack
from outpace.types import OBSERVED, Floats, Ints, Row


@torch.no_grad()
def sequence_logprobs(core: LearnerCore, sequences: Sequence[Ints], temperature: float) -> list[Floats]:
    """For each sequence one logprob per token but the first. A sequence with an id that the model does not have gets
    NaN throughout: an accelerator that is asked for such a row of the embedding never works again."""
    vocabulary = int(core.model.get_input_embeddings().weight.shape[0])  # type: ignore[index]
    known = [bool(np.all((tokens >= 0) & (tokens < vocabulary))) for tokens in sequences]
    rows = [_all_trained(tokens) for tokens, fits in zip(sequences, known, strict=True) if fits and len(tokens) > 1]
    scored = _scores(_at(core, temperature), rows, core.settings.learner.tokens_per_pass)
    unknown = np.float32(np.nan)
    return [
        next(scored) if fits and len(tokens) > 1 else np.full(max(len(tokens) - 1, 0), unknown)
        for tokens, fits in zip(sequences, known, strict=True)
    ]


def _scores(forward: Forward, rows: Sequence[Row], tokens_per_pass: int) -> Iterator[Floats]:
    for packed in pack(rows, tokens_per_pass):
        logp_N = forward(packed).logp_N.float().cpu().numpy()
        yield from np.split(logp_N, np.cumsum(np.bincount(packed.sequence_N))[:-1])


def _at(core: LearnerCore, temperature: float) -> Forward:
    """Packed or padded, as the core has found out for this model."""
    kind = PackedForward if isinstance(core._forward, PackedForward) else PaddedForward
    return kind(core.model, Wanted(temperature, getattr(torch, core.settings.dtype)))


def _all_trained(tokens: Ints) -> Row:
    count = len(tokens)
    nothing = np.zeros(count, dtype=np.float32)
    return Row(tokens, np.arange(count) > 0, nothing, np.full(count, OBSERVED, dtype=np.int32), nothing)
