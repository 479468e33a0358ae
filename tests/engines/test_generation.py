"""Continuation: a generation sampled in several parts equals the whole generation, token for token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.engines.generation import ContinuedGeneration
from outpace.types import Generation, Ints, Sampling, StopReason

PROMPT = np.array([7, 8, 9], dtype=np.int32)
END = 99


def part(tokens: Sequence[int], version: int = 0, stop: StopReason = "lost") -> Generation:
    return Generation(
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.array([-token / 100 for token in tokens], dtype=np.float32),
        versions=np.full(len(tokens), version, dtype=np.int32),
        stop=stop,
    )


def letters(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def spelled(text: str) -> list[int]:
    return list(map(ord, text))


def sampling(max_tokens: int = 100, seed: int = 5, **changes: object) -> Sampling:
    return Sampling(max_tokens, seed, stop_ids=[END], **changes)  # type: ignore[arg-type]


parts = st.lists(st.lists(st.integers(0, 90), max_size=6), max_size=8)


@given(parts, st.integers(0, 2**63 - 1), st.integers(0, 20))
def test_no_token_is_lost_duplicated_or_changed(pieces: list[list[int]], seed: int, spare: int) -> None:
    tokens = [token for piece in pieces for token in piece]
    answer = ContinuedGeneration(PROMPT, sampling(len(tokens) + spare, seed))
    for version, piece in enumerate(pieces):
        before = len(answer)
        assert answer.prompt.tolist() == [*PROMPT, *tokens[:before]]
        assert answer.sampling.max_tokens == answer.left == len(tokens) + spare - before
        answer.add(part(piece, version))
    made = answer.generation("length")
    assert made.tokens.tolist() == tokens
    assert made.logprobs.tolist() == part(tokens).logprobs.tolist()
    assert made.versions.tolist() == [version for version, piece in enumerate(pieces) for _ in piece]
    assert [made.tokens.dtype, made.logprobs.dtype, made.versions.dtype] == [np.int32, np.float32, np.int32]
    assert made.stop == "length"


@given(parts, st.integers(0, 2**63 - 1))
def test_every_part_uses_its_own_seed_and_otherwise_the_requested_sampling(pieces: list[list[int]], seed: int) -> None:
    requested = sampling(100, seed, temperature=0.7, top_p=0.9, top_k=3, stop_strings=["x"])
    answer, seeds = ContinuedGeneration(PROMPT, requested), {0: seed}
    for piece in pieces:
        answer.add(part(piece))
        seeds[len(answer)] = answer.sampling.seed
        assert answer.sampling == Sampling(answer.left, seeds[len(answer)], 0.7, 0.9, 3, [END], ["x"])
    assert len(set(seeds.values())) == len(seeds)
    assert all(0 <= one < 2**63 for one in seeds.values())


def test_the_seed_of_the_rest_does_not_depend_on_how_earlier_tokens_were_split() -> None:
    one, other = ContinuedGeneration(PROMPT, sampling()), ContinuedGeneration(PROMPT, sampling())
    one.add(part([1, 2, 3]))
    other.add(part([1]))
    other.add(part([2, 3]))
    assert one.sampling == other.sampling


def test_before_the_first_token_the_request_is_sent_unchanged() -> None:
    requested = sampling()
    answer = ContinuedGeneration(PROMPT, requested)
    answer.add(part([]))
    assert answer.sampling == requested
    assert answer.prompt.tolist() == PROMPT.tolist()


def test_a_generation_lost_after_its_last_token_is_complete() -> None:
    full, stopped, half = (ContinuedGeneration(PROMPT, sampling(2)) for _ in range(3))
    full.add(part([1, 2]))
    stopped.add(part([END]))
    half.add(part([1]))
    assert [full.ended, stopped.ended, half.ended] == ["length", "stop", None]


def test_a_stop_token_at_the_length_limit_counts_as_stop() -> None:
    answer = ContinuedGeneration(PROMPT, sampling(2))
    answer.add(part([1, END]))
    assert answer.ended == "stop"


@given(st.text("ab", max_size=12), st.lists(st.integers(0, 12), max_size=4))
def test_a_stop_string_is_found_across_part_boundaries(text: str, cuts: list[int]) -> None:
    answer = ContinuedGeneration(PROMPT, sampling(stop_strings=["aba"]), letters)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    for start, end in pairwise(edges):
        if answer.ended is None:
            answer.add(part(spelled(text[start:end])))
    found = text.find("aba")
    assert letters(answer.generation("stop").tokens.tolist()) == (text if found < 0 else text[: found + 3])
    assert answer.ended == (None if found < 0 else "stop")


def uneven() -> Generation:
    none: Ints = np.zeros(0, dtype=np.int32)
    return Generation(np.array([1], dtype=np.int32), np.zeros(1, dtype=np.float32), none, "lost")


@pytest.mark.parametrize(("wrong", "why"), [(part([1, 2, 3]), r"^(?=.*\b3 tokens\b).*\b2\b"), (uneven(), "logprob")])
def test_an_invalid_part_is_refused(wrong: Generation, why: str) -> None:
    answer = ContinuedGeneration(PROMPT, sampling(2))
    with pytest.raises(ValueError, match=why):
        answer.add(wrong)


def test_nothing_can_be_added_after_the_end() -> None:
    answer = ContinuedGeneration(PROMPT, sampling())
    answer.add(part([END]))
    answer.add(part([]))
    with pytest.raises(ValueError, match="end"):
        answer.add(part([1]))
