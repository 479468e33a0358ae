"""Noise and sampling, compared with exact probabilities and an independent float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outpace.engines.embedded.sampling import sample
from outpace.runtime.rng import request_seed, uniform_noise
from support import examples

Array = NDArray[np.float64]


def draw(
    logits: Array, uniform: Array, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    rows = len(logits)
    tokens, logprobs = sample(
        torch.tensor(logits, dtype=torch.float32),
        np.full(rows, temperature, dtype=np.float32),
        np.full(rows, top_k, dtype=np.int64),
        np.full(rows, top_p, dtype=np.float32),
        uniform,
    )
    return tokens.numpy(), logprobs.numpy()


def reference_distribution(logits: Array, temperature: float, top_k: int, top_p: float) -> Array:
    """Plain reference for one row: scale, keep the top k, keep the shortest prefix with mass p, renormalize."""
    scaled = [float(np.float32(value)) / temperature for value in logits]
    ranking = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    kept = ranking[:top_k] if top_k else ranking
    weight = {token: np.exp(scaled[token] - scaled[ranking[0]]) for token in kept}
    total, mass, head = sum(weight.values()), 0.0, []
    for token in kept:
        if mass >= np.float32(top_p) and top_p < 1:
            break
        head.append(token)
        mass += weight[token] / total
    result = np.zeros(len(scaled))
    for token in head:
        result[token] = weight[token] / sum(weight[kept_token] for kept_token in head)
    return result


def test_noise_depends_only_on_seed_and_index() -> None:
    seeds, indices = np.arange(50, dtype=np.int64) * 7919, np.arange(50, dtype=np.int64)
    together = uniform_noise(seeds, indices)
    alone = [uniform_noise(seeds[row : row + 1], indices[row : row + 1])[0] for row in range(50)]
    assert together.tolist() == alone


@pytest.mark.parametrize("axis", ["seed", "index"])
def test_noise_is_uniform_and_uncorrelated_along_both_axes(axis: str) -> None:
    moving, fixed = np.arange(100_000, dtype=np.int64), np.full(100_000, 12345, dtype=np.int64)
    uniform = uniform_noise(moving, fixed) if axis == "seed" else uniform_noise(fixed, moving)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    counts, _ = np.histogram(uniform, bins=100, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 160  # chi-square with 99 degrees of freedom: p < 1e-4
    assert abs(np.corrcoef(uniform[:-1], uniform[1:])[0, 1]) < 0.015


def test_request_seeds_differ_whenever_any_component_of_the_request_id_differs() -> None:
    parts = [(run, group, episode, turn) for run in range(3) for group in range(40) for episode in range(8)
             for turn in range(3)]  # fmt: skip
    seeds = {request_seed(*part) for part in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_sample_frequencies_follow_the_softmax() -> None:
    count = 200_000
    logits = np.random.default_rng(0).normal(size=12) * 2
    uniform = uniform_noise(np.zeros(count, dtype=np.int64), np.arange(count, dtype=np.int64))
    tokens, _ = draw(np.tile(logits, (count, 1)), uniform, temperature=0.7)
    expected = reference_distribution(logits, 0.7, 0, 1.0) * count
    observed = np.bincount(tokens, minlength=12)
    assert ((observed - expected) ** 2 / expected).sum() < 35  # chi-square with 11 degrees of freedom: p < 3e-4


@examples(60)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 30]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
)
def test_truncated_sampling_matches_a_plain_reference(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(seed).normal(size=20) * 3
    expected = reference_distribution(logits, temperature, top_k, top_p)
    uniform = (np.arange(400) + 0.5) / 400
    tokens, logprobs = draw(np.tile(logits, (400, 1)), uniform, temperature, top_k, top_p)
    assert set(tokens.tolist()) <= set(np.flatnonzero(expected).tolist())
    np.testing.assert_allclose(np.bincount(tokens, minlength=20) / 400, expected, atol=1.01 / 400)
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-5)


def test_temperature_zero_returns_the_argmax_with_its_logprob_at_temperature_one() -> None:
    logits = np.random.default_rng(1).normal(size=(5, 9))
    tokens, logprobs = draw(logits, np.full(5, 0.99), temperature=0.0, top_k=1, top_p=0.1)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    expected = torch.tensor(logits).log_softmax(-1).max(-1).values
    np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_extreme_uniform_noise_never_draws_a_zero_probability_token(uniform: float) -> None:
    logits = np.full((1, 6), -np.inf)
    logits[0, 2:4] = [0.3, 0.1]
    tokens, logprobs = draw(logits, np.array([uniform]))
    assert tokens[0] == (2 if uniform == 0 else 3)
    assert np.isfinite(logprobs).all()


@examples(40)
@given(data=st.data())
def test_sampling_a_row_does_not_depend_on_other_rows(data: st.DataObject) -> None:
    rows = data.draw(st.integers(2, 20))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    logits = torch.tensor(random.normal(size=(rows, 272)), dtype=torch.float32)
    temperature = random.choice(np.array([0, 0.5, 1, 1.3], dtype=np.float32), rows)
    top_k = random.choice(np.array([0, 0, 5, 50]), rows)
    top_p = random.choice(np.array([1, 1, 0.9], dtype=np.float32), rows)
    uniform = random.random(rows)
    tokens, logprobs = sample(logits, temperature, top_k, top_p, uniform)
    chosen = random.permutation(rows)[: data.draw(st.integers(1, rows))]
    some_tokens, some_logprobs = sample(
        logits[chosen], temperature[chosen], top_k[chosen], top_p[chosen], uniform[chosen]
    )
    assert some_tokens.tolist() == tokens[chosen].tolist()
    assert some_logprobs.tolist() == logprobs[chosen].tolist()
