from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.learner.packing import PackedBatch, input_length, pack
from outpace.types import Row

lengths_and_prompts = st.lists(
    st.integers(2, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), max_size=20
)


def row_of(length: int, prompt: int, first_token: int = 0) -> Row:
    index = np.arange(length)
    return Row(
        tokens=(first_token + index).astype(np.int32),
        mask=index >= prompt,
        logprobs=(-0.1 * index).astype(np.float32),
        versions=np.where(index >= prompt, 7, -1).astype(np.int32),
        advantages=(0.5 * index).astype(np.float32),
    )


@given(lengths_and_prompts, st.integers(1, 64))
def test_every_trained_token_is_predicted_once_from_its_predecessor(
    shapes: list[tuple[int, int]], tokens_per_pass: int
) -> None:
    rows = [row_of(n, p, first_token=100 * i) for i, (n, p) in enumerate(shapes)]
    expected = [int(t) for row in rows for t in row.tokens[row.mask]]
    found: list[int] = []
    for packed in pack(rows, tokens_per_pass):
        # Tokens count up inside a row, so the predecessor of a target is the target minus one.
        assert (packed.tokens_T[packed.sources_N] == packed.targets_N - 1).all()
        found.extend(packed.targets_N.tolist())
    assert found == expected


@given(lengths_and_prompts, st.integers(1, 64))
def test_a_pass_exceeds_its_token_limit_only_if_it_holds_a_single_row(
    shapes: list[tuple[int, int]], tokens_per_pass: int
) -> None:
    for packed in pack([row_of(n, p) for n, p in shapes], tokens_per_pass):
        assert len(packed.tokens_T) <= tokens_per_pass or packed.rows == 1


branching = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=5).map(lambda parts: [part for part in parts for _ in range(9)]),
    max_size=12,
)
"""Rows of runs of equal tokens, so that many have a common prefix."""


@given(branching, st.integers(1, 100), st.sampled_from([None, 1, 8]))
def test_every_token_is_predicted_from_the_whole_history_of_its_row(
    histories: list[list[int]], tokens_per_pass: int, min_shared: int | None
) -> None:
    rows = [with_tokens(row_of(len(tokens), 1), tokens) for tokens in histories]
    trained = [row for row in rows if row.mask.any()]
    for packed in pack(rows, tokens_per_pass, min_shared=min_shared):
        assert packed.cu_seqlens_S1[-1] == len(packed.tokens_T)
        assert len(packed.tokens_T) <= tokens_per_pass or packed.rows == 1
        history_T = histories_of(packed)
        for number in range(packed.rows):
            row, at = trained.pop(0), packed.sources_N[packed.sequence_N == number]
            expected = [row.tokens[:end].tolist() for end in np.flatnonzero(row.mask)]
            assert [packed.tokens_T[history_T[place]].tolist() for place in at] == expected
            assert packed.position_ids_T[at].tolist() == [len(tokens) - 1 for tokens in expected]
    assert trained == []


def histories_of(packed: PackedBatch) -> list[np.ndarray]:
    """Return the places that each token sees: its segment's context up to itself."""
    histories: list[np.ndarray] = []
    bounds = zip(pairwise(packed.cu_seqlens_S1), pairwise(packed.cu_context_S1), strict=True)
    for (start, end), (first, last) in bounds:
        context = packed.context_K[first:last]
        assert context[len(context) - (end - start) :].tolist() == list(range(start, end))
        histories += [context[: len(context) - (end - start) + index + 1] for index in range(end - start)]
    return histories


def with_tokens(row: Row, tokens: list[int]) -> Row:
    return Row(np.array(tokens, dtype=np.int32), row.mask, row.logprobs, row.versions, row.advantages)


def test_a_prompt_is_packed_once_for_all_attempts_and_a_history_once_for_all_turns() -> None:
    prompt, answer = list(range(20)), list(range(30, 42))
    answers = [answer, list(range(60, 65)), answer + list(range(50, 60)), [*answer[:10], 99]]
    rows = [with_tokens(row_of(20 + len(tokens), 20), prompt + tokens) for tokens in answers]
    (packed,) = pack(rows, 100)
    assert len(packed.tokens_T) == len(prompt) + (len(answers[1]) - 1) + (len(answers[2]) - 1)
    (apart,) = pack(rows, 200, min_shared=None)
    assert len(apart.tokens_T) == sum(len(row.tokens) - 1 for row in rows)


def test_rows_fill_passes_in_the_order_given() -> None:
    passes = pack([row_of(n, 1, 100 * i) for i, n in enumerate((5, 4, 9, 2, 2))], tokens_per_pass=8)
    assert [np.diff(p.cu_seqlens_S1).tolist() for p in passes] == [[4, 3], [8], [1, 1]]


def test_tokens_after_the_last_trained_token_are_dropped() -> None:
    row = row_of(10, 3)
    row.mask[6:] = False
    assert input_length(row) == 5
    (packed,) = pack([row], 100)
    assert packed.tokens_T.tolist() == [0, 1, 2, 3, 4]
    assert packed.targets_N.tolist() == [3, 4, 5]


def test_per_token_values_follow_their_tokens() -> None:
    (packed,) = pack([row_of(4, 2), row_of(3, 2)], 100)
    assert packed.advantages_N.tolist() == [1.0, 1.5, 1.0]
    np.testing.assert_allclose(packed.sampler_logp_N, [-0.2, -0.3, -0.2])
    assert packed.versions_N.tolist() == [7, 7, 7]


def test_rows_without_trained_tokens_are_skipped() -> None:
    assert pack([row_of(5, 5), row_of(0, 0)], 100) == []


def test_observed_tokens_inside_a_row_are_inputs_but_not_targets() -> None:
    row = row_of(8, 2)
    row.mask[3:6] = False
    (packed,) = pack([row], 100)
    assert packed.targets_N.tolist() == [2, 6, 7]
    assert len(packed.tokens_T) == 7


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda r: r.mask.__setitem__(0, True),
        lambda r: with_missing_logprob(r),
        lambda r: Row(r.tokens, r.mask, r.logprobs, r.versions),  # without advantages
    ],
)
def test_an_invalid_row_is_rejected(corrupt: Callable[[Row], object]) -> None:
    row = row_of(4, 2)
    row = corrupt(row) or row  # type: ignore[assignment]
    with pytest.raises(ValueError, match="row"):
        pack([row], 100)


def with_missing_logprob(row: Row) -> Row:
    return Row(row.tokens, row.mask, row.logprobs[:-1], row.versions, row.advantages)


def test_packing_twice_gives_the_same_passes() -> None:
    rows = [row_of(n, 2) for n in (9, 3, 7, 12)]

    def as_lists(packed: PackedBatch) -> list[list[float]]:
        names = set(packed.__dataclass_fields__) - {"extras", "rows"}
        return [getattr(packed, name).tolist() for name in sorted(names)]

    assert [as_lists(p) for p in pack(rows, 16)] == [as_lists(p) for p in pack(rows, 16)]


def test_extra_per_token_values_are_packed_with_their_tokens() -> None:
    rows = [row_of(9, 2), row_of(4, 4), row_of(6, 3)]
    extras = [{"value": np.arange(row.mask.sum(), dtype=np.float32) + 10 * i} for i, row in enumerate(rows)]
    (packed,) = pack(rows, 100, extras)
    assert packed.extras["value"].tolist() == [0, 1, 2, 3, 4, 5, 6, 20, 21, 22]
    assert packed.sequence_N.tolist() == [0] * 7 + [1] * 3
