"""MERGED"""

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
    """Score whole sequences with the learner's weights and training arithmetic: one logprob per token except the first.

    Used by the logprob check to compare the sampler with the learner, not for training. A sequence with an out-of-range
    token id gets NaN throughout: an out-of-range embedding lookup would leave a GPU unusable for this process."""
    vocabulary = int(core.model.get_input_embeddings().weight.shape[0])  # type: ignore[index]
    known = [bool(np.all((tokens >= 0) & (tokens < vocabulary))) for tokens in sequences]
    rows = [_trained_row(tokens) for tokens, valid in zip(sequences, known, strict=True) if valid and len(tokens) > 1]
    scored = _scores(_forward_at(core, temperature), rows, core.settings.learner.tokens_per_pass)
    nan = np.float32(np.nan)
    return [
        next(scored) if valid and len(tokens) > 1 else np.full(max(len(tokens) - 1, 0), nan)
        for tokens, valid in zip(sequences, known, strict=True)
    ]


def _scores(forward: Forward, rows: Sequence[Row], tokens_per_pass: int) -> Iterator[Floats]:
    for packed in pack(rows, tokens_per_pass):
        logp_N = forward(packed).logp_N.float().cpu().numpy()
        yield from np.split(logp_N, np.cumsum(np.bincount(packed.sequence_N))[:-1])


def _forward_at(core: LearnerCore, temperature: float) -> Forward:
    """Return a forward at this temperature, packed or padded like the core's."""
    kind = PackedForward if isinstance(core._forward, PackedForward) else PaddedForward
    return kind(core.model, Wanted(temperature, getattr(torch, core.settings.dtype)))


def _trained_row(tokens: Ints) -> Row:
    count = len(tokens)
    zeros = np.zeros(count, dtype=np.float32)
    return Row(tokens, np.arange(count) > 0, zeros, np.full(count, OBSERVED, dtype=np.int32), zeros)
