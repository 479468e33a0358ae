"""A trajectory: one exact token sequence, built by appending."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.algorithms.token_advantages import trajectory_problem
from outpace.rollouts.transcript import TrajectoryBuilder
from outpace.types import OBSERVED, Generation, Trajectory
from support import naming

TOKENS = st.lists(st.integers(0, 1000), max_size=5)


def generation(tokens: list[int], version: int = 4) -> Generation:
    count = len(tokens)
    return Generation(
        np.array(tokens, np.int32), np.full(count, -0.5, np.float32), np.full(count, version, np.int32), "stop"
    )


def trajectory(**changes: Any) -> Trajectory:
    builder = TrajectoryBuilder()
    builder.observe([1, 2])
    builder.sampled(generation([3, 4]))
    return msgspec.structs.replace(builder.build(), **changes)


@settings(deadline=None)
@given(pieces=st.lists(st.tuples(st.booleans(), TOKENS, st.integers(0, 9)), max_size=6))
def test_tokens_keep_their_order_and_only_sampled_tokens_are_trainable(
    pieces: list[tuple[bool, list[int], int]],
) -> None:
    builder = TrajectoryBuilder()
    for sampled, tokens, version in pieces:
        if sampled:
            builder.sampled(generation(tokens, version))
        else:
            builder.observe(tokens)
    built = builder.build()
    flat = [(token, sampled, version) for sampled, tokens, version in pieces for token in tokens]
    assert built.tokens.tolist() == [token for token, _, _ in flat]
    assert built.mask.tolist() == [sampled for _, sampled, _ in flat]
    assert built.versions.tolist() == [version if sampled else OBSERVED for _, sampled, version in flat]
    assert built.logprobs.tolist() == [-0.5 if sampled else 0.0 for _, sampled, _ in flat]
    assert trajectory_problem(built) is None


def test_the_arrays_have_their_stored_dtypes() -> None:
    built = trajectory()
    dtypes = [array.dtype.name for array in (built.tokens, built.mask, built.logprobs, built.versions)]
    assert dtypes == ["int32", "bool", "float32", "int32"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": np.arange(3, dtype=np.int32)}, ("3, 4, 4, 4",)),
        ({"tokens": [1, 2, 3, 4]}, ("dimension",)),
        ({"mask": np.array([0, 0, 1, 1], np.int32)}, ("mask", "int32", "bool")),
        ({"logprobs": np.array([0, 0, -1, np.nan], np.float32)}, ("logprob",)),
        ({"versions": np.array([-1, -1, 2, -1], np.int32)}, ("version",)),
        ({"reward": float("nan")}, ("reward", "nan")),
        ({"reward": "1"}, ("reward", "'1'")),
        ({"turn_rewards": [1.0]}, ("turn", "reward", "dimension")),
        ({"turn_rewards": np.array(["1"])}, ("turn", "reward", "dimension")),
        ({"turn_rewards": np.array([np.inf], np.float32)}, ("turn", "reward", "finite")),
        ({"turn_rewards": np.array([1, 2], np.float32)}, ("turn", "reward", "2", "1")),
    ],
)
def test_an_invalid_trajectory_is_described(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    assert re.search(naming(*words), trajectory_problem(trajectory(**changes)) or "")


def test_a_trajectory_can_have_a_reward_and_turn_rewards() -> None:
    assert trajectory_problem(trajectory(reward=1, turn_rewards=np.array([0.5], np.float32))) is None


def test_observed_tokens_need_no_logprob() -> None:
    assert trajectory_problem(trajectory(logprobs=np.array([np.nan, np.nan, -1, -1], np.float32))) is None
