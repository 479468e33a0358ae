"""How rows are shared among ranks, compared with what packing makes of every share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.learner.balance import HIDDEN_SIZE, TOLERANCE, estimated_work, share_rows
from outpace.learner.packing import MIN_SHARED, input_length, pack
from outpace.types import OBSERVED, Row

PASS = 16_384
LONGEST = 20_000


def make_group(noise: np.random.Generator, prompt: int, answers: Sequence[int]) -> list[Row]:
    """Return rows that share a prompt. An answer of no tokens is a row without trained tokens."""
    shared = noise.integers(0, 50_000, prompt)
    rows = []
    for answer in answers:
        tokens = np.concatenate([shared, noise.integers(0, 50_000, answer)]).astype(np.int32)
        mask = np.arange(len(tokens)) >= prompt
        zeros = np.zeros(len(tokens), dtype=np.float32)
        rows.append(Row(tokens, mask, zeros, np.where(mask, 0, OBSERVED).astype(np.int32), zeros))
    return rows


def long_tailed(groups: int, sigma: float, seed: int, size: int = 8) -> list[Row]:
    noise = np.random.default_rng(seed)
    rows = []
    for _ in range(groups):
        answers = np.minimum(noise.lognormal(np.log(600), sigma, size), LONGEST).astype(int) + 1
        rows += make_group(noise, int(noise.integers(40, 400)), answers.tolist())
    return rows


def packed_work(rows: Sequence[Row], tokens_per_pass: int = PASS, hidden_size: int = HIDDEN_SIZE) -> float:
    """Return the tokens of all passes, and their attention: pairs of a token and one that it attends to."""
    work = 0.0
    for packed in pack(rows, tokens_per_pass):
        own, context = np.diff(packed.cu_seqlens_S1), np.diff(packed.cu_context_S1)
        pairs = own * (context - own) + own * (own + 1) / 2
        work += float(own.sum() + pairs.sum() / (6 * hidden_size))
    return work


def imbalance(rows: Sequence[Row], shares: Sequence[Sequence[int]]) -> float:
    works = [packed_work([rows[index] for index in share]) for share in shares]
    return max(works) / (sum(works) / len(works))


def ranks_of_groups(rows: Sequence[Row], shares: Sequence[Sequence[int]]) -> dict[bytes, set[int]]:
    found = defaultdict(set)
    for rank, share in enumerate(shares):
        for index in share:
            prompt = int(rows[index].mask.argmax())
            found[rows[index].tokens[:prompt].tobytes()].add(rank)
    return found


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    noise = np.random.default_rng(draw(st.integers(0, 2**32)))
    answers = st.lists(st.integers(0, 3) | st.integers(0, 4_000), min_size=1, max_size=9)
    groups = draw(st.lists(st.tuples(st.integers(1, 300), answers), max_size=12))
    rows = [row for prompt, lengths in groups for row in make_group(noise, prompt, lengths)]
    return [rows[index] for index in noise.permutation(len(rows))] if draw(st.booleans()) else rows


RANKS = st.sampled_from([1, 2, 3, 4, 8, 16])
TOKENS_PER_PASS = st.sampled_from([1, 64, 2_048, PASS])


@given(batches(), RANKS, TOKENS_PER_PASS)
def test_every_trained_row_has_one_rank_and_no_rank_is_idle_without_need(
    rows: list[Row], ranks: int, tokens_per_pass: int
) -> None:
    shares = share_rows(rows, ranks, tokens_per_pass)
    trained = [index for index, row in enumerate(rows) if input_length(row)]
    assert len(shares) == ranks
    assert sorted(index for share in shares for index in share) == trained
    assert all(share == sorted(share) for share in shares)
    assert sum(bool(share) for share in shares) == min(ranks, len(trained))


@given(batches(), RANKS, TOKENS_PER_PASS)
def test_shares_depend_on_the_values_of_rows_alone(rows: list[Row], ranks: int, tokens_per_pass: int) -> None:
    copies = [Row(row.tokens.copy(), row.mask.copy(), row.logprobs, row.versions) for row in rows]
    assert share_rows(copies, ranks, tokens_per_pass) == share_rows(rows, ranks, tokens_per_pass)


@given(st.integers(0, 2**32), st.sampled_from([2, 3, 4]))
def test_groups_that_are_small_against_the_mean_work_are_never_split(seed: int, ranks: int) -> None:
    noise = np.random.default_rng(seed)
    count = int(2 / (TOLERANCE - 1)) * ranks  # no unit is more than TOLERANCE - 1 of the mean
    lengths = noise.integers(300, 600, (count, 4))
    rows = [row for answers in lengths for row in make_group(noise, 50, answers.tolist())]
    shares = share_rows(rows, ranks, PASS)
    assert all(len(found) == 1 for found in ranks_of_groups(rows, shares).values())


def test_equal_groups_stay_whole() -> None:
    noise = np.random.default_rng(0)
    rows = [row for _ in range(8) for row in make_group(noise, 100, [500] * 8)]
    shares = share_rows(rows, 8, PASS)
    assert sorted(shares) == [list(range(start, start + 8)) for start in range(0, 64, 8)]


def test_one_group_is_split_over_all_ranks() -> None:
    rows = make_group(np.random.default_rng(0), 100, [500] * 8)
    assert [len(share) for share in share_rows(rows, 4, PASS)] == [2, 2, 2, 2]


def test_a_group_beside_much_smaller_ones_is_split() -> None:
    noise = np.random.default_rng(0)
    rows = make_group(noise, 10, [1_000] * 8) + make_group(noise, 10, [10]) + make_group(noise, 10, [10])
    assert imbalance(rows, share_rows(rows, 3, PASS)) < 1.4  # 8 equal rows for 3 ranks: 3 of them at least


def test_a_group_is_not_split_if_its_prompt_is_nearly_all_of_its_work() -> None:
    noise = np.random.default_rng(0)
    rows = [row for prompt in (4_000, 4_000, 4_000) for row in make_group(noise, prompt, [2] * 8)]
    shares = share_rows(rows, 2, PASS)
    assert all(len(found) == 1 for found in ranks_of_groups(rows, shares).values())


def test_a_group_larger_than_a_pass_is_shared_in_whole_passes() -> None:
    rows = make_group(np.random.default_rng(0), 100, [451] * 16)  # a pass holds the prompt and two answers
    for share in share_rows(rows, 4, 1_000):
        assert all(index + 1 in share for index in share if index % 2 == 0)


def test_attention_counts_more_in_narrow_models() -> None:
    noise = np.random.default_rng(0)
    rows = make_group(noise, 1, [8_000]) + [row for _ in range(12) for row in make_group(noise, 1, [1_000])]
    wide, narrow = (share_rows(rows, 2, PASS, hidden_size) for hidden_size in (100_000, 64))
    assert [len(share) for share in wide] == [3, 10]
    assert [len(share) for share in narrow] == [1, 12]


@given(batches(), st.sampled_from([64, 2_048]))
def test_the_estimated_work_of_a_group_is_that_of_its_passes(rows: list[Row], hidden_size: int) -> None:
    packed = packed_work(rows, 10**9, hidden_size)
    unshared = MIN_SHARED * len(rows)  # packing does not share prompts that are shorter, the estimate does
    assert estimated_work(rows, 10**9, hidden_size) == pytest.approx(packed, rel=0.02, abs=unshared)


@pytest.mark.parametrize("sigma", [0.9, 1.2])
@pytest.mark.parametrize(("ranks", "groups"), [(4, 64), (8, 64), (64, 512)])
def test_long_tailed_rows_are_shared_evenly(ranks: int, groups: int, sigma: float) -> None:
    for seed in range(2 if ranks == 64 else 5):
        rows = long_tailed(groups, sigma, seed)
        assert imbalance(rows, share_rows(rows, ranks, PASS)) <= 1.1


def test_one_group_more_than_ranks_is_shared_among_them() -> None:
    noise = np.random.default_rng(0)
    rows = [row for _ in range(17) for row in make_group(noise, 50, [1_000] * 8)]
    assert imbalance(rows, share_rows(rows, 16, PASS)) < 1.15  # 8 rows and 1 more, against 8.5


def test_the_busiest_rank_has_no_more_than_the_longest_row_if_that_exceeds_the_mean() -> None:
    rows = long_tailed(8, 0.9, seed=0)
    works = [estimated_work([rows[index] for index in share], PASS) for share in share_rows(rows, 32, PASS)]
    assert max(works) == max(estimated_work([row], PASS) for row in rows)
