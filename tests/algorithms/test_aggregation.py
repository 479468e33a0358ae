from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.reference import Pass, lay_out, passes
from outpace.algorithms.losses import aggregation_weights, loss_denominator
from outpace.algorithms.registry import Aggregation
from support import examples

AGGREGATIONS: list[Aggregation] = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo"]
LONGEST = 8


def plain(aggregation: Aggregation, losses: list[list[float]]) -> float:
    """The textbook mean over a whole step."""
    if aggregation == "token_mean":
        return float(np.mean([x for sequence in losses for x in sequence]))
    if aggregation == "seq_mean_token_mean":
        return float(np.mean([np.mean(sequence) if sequence else 0.0 for sequence in losses]))
    sums = [sum(sequence) for sequence in losses]
    return float(np.mean(sums)) if aggregation == "seq_mean_token_sum" else sum(sums) / (len(losses) * LONGEST)


def weighted_sum(aggregation: Aggregation, sequences: Pass) -> float:
    tokens = lay_out(sequences)
    return float((tokens.logp_N.detach() * aggregation_weights(aggregation, tokens)).sum())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@examples(100)
@given(sequences=passes.filter(lambda sequences: any(sequences)), cut=st.integers(0, 4))
def test_weighted_sums_of_passes_divided_by_the_step_denominator_are_the_mean_of_the_step(
    aggregation: Aggregation, sequences: Pass, cut: int
) -> None:
    below = loss_denominator(aggregation, sum(len(sequence) for sequence in sequences), len(sequences), LONGEST)
    total = weighted_sum(aggregation, sequences[:cut]) + weighted_sum(aggregation, sequences[cut:])
    losses = [[token.logp for token in sequence] for sequence in sequences]
    assert total / below == pytest.approx(plain(aggregation, losses), rel=1e-9)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_step_without_tokens_has_a_nonzero_denominator(aggregation: Aggregation) -> None:
    assert aggregation_weights(aggregation, lay_out([[]])).shape == (0,)
    assert loss_denominator(aggregation, tokens=0, sequences=0, max_completion_tokens=0) == 1.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_have_the_dtype_of_the_tokens(aggregation: Aggregation) -> None:
    tokens = lay_out([[(-1.0, -1.0, -1.0, 1.0)]], torch.float32)  # type: ignore[list-item]
    assert aggregation_weights(aggregation, tokens).dtype == torch.float32
