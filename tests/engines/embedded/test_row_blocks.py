"""Rows of similar lengths attend in blocks of their own, and are moved together when that pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from outpace.engines.embedded import row_blocks
from outpace.engines.embedded.decode_batch import DecodeBatch
from outpace.engines.embedded.llama import LlamaDecoder
from outpace.engines.embedded.load_decoder import build_decoder
from outpace.engines.embedded.requests import FinishedRequest
from outpace.engines.embedded.row_blocks import SHORTEST, moves, split
from outpace.types import Generation, Sampling
from support import examples

LIMIT = 1000
some_lengths = st.lists(st.integers(1, LIMIT), min_size=1, max_size=300).map(
    lambda each: np.array(each, dtype=np.int64)
)


@examples(200)
@given(some_lengths)
def test_blocks_cover_all_rows_in_order_and_every_row_fits_its_window(lengths: np.ndarray) -> None:
    blocks = split(lengths, LIMIT)
    assert [row for block in blocks for row in range(block.start, block.end)] == list(range(len(lengths)))
    for block in blocks:
        assert lengths[block.start : block.end].max() <= block.window <= LIMIT


@examples(200)
@given(some_lengths)
def test_blocks_never_read_more_keys_than_one_window_for_all(lengths: np.ndarray) -> None:
    one_window = min(LIMIT, -(-int(lengths.max()) // 8) * 8) * len(lengths)
    assert sum(block.keys for block in split(lengths, LIMIT)) <= one_window


@examples(200)
@given(some_lengths)
def test_moves_put_longer_classes_first_and_lose_no_row(lengths: np.ndarray) -> None:
    rows = np.sort(np.random.default_rng(len(lengths)).choice(2 * len(lengths), len(lengths), replace=False))
    moved = moves(rows, lengths, LIMIT)
    places = [moved.get(int(row), int(row)) for row in rows]
    assert len(set(places)) == len(rows)
    if moved:
        assert sorted(places) == list(range(len(rows)))
        ordered = lengths[np.argsort(places)]
        classes = np.ceil(np.log2(np.maximum(ordered, SHORTEST) / SHORTEST))
        assert (np.diff(classes) <= 0).all()


def test_one_long_sequence_does_not_widen_the_window_of_short_ones() -> None:
    lengths = np.full(200, 20)
    lengths[0] = 900
    assert [block.window for block in split(lengths, LIMIT)] == [904, 24]


def test_short_sequences_are_never_moved() -> None:
    assert moves(np.arange(0, 400, 2), np.full(200, SHORTEST), LIMIT) == {}


def test_a_step_in_blocks_computes_the_same_logits_as_a_step_with_one_window(
    model_of: Callable[..., PreTrainedModel],
) -> None:
    torch.manual_seed(0)
    noise = np.random.default_rng(0)
    lengths = noise.permutation([180, 150, 90, *[40] * 8, *[12] * 40])
    prefixes = [noise.integers(0, 32, length - 1).astype(np.int32) for length in lengths]
    found = []
    for in_blocks in (True, False):
        decoder = LlamaDecoder.from_model(model_of("llama"), len(lengths), 256, deterministic=False)
        decoder.attends_in_blocks = in_blocks
        decoder.prefill(range(len(lengths)), prefixes)
        found.append(decoder.step(np.ones(len(lengths), dtype=np.int64), lengths - 1))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_sequences_of_very_different_lengths_get_the_tokens_of_requests_that_are_served_alone(
    model_of: Callable[..., PreTrainedModel],
    prompts: Callable[..., list[np.ndarray]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved: list[dict[int, int]] = []

    def counted(*arguments: Any) -> dict[int, int]:
        moved.append(moves(*arguments))
        return moved[-1]

    monkeypatch.setattr(row_blocks, "moves", counted)
    decoder = build_decoder(model_of("llama"), 24, None, deterministic=False, path="fast")
    batch = DecodeBatch(decoder, 0, "keep", None)
    alone = DecodeBatch(
        decoder.sibling(decoder.prepare(dict(model_of("llama").named_parameters())), 1), 0, "keep", None
    )
    lengths = [70, 3, 5, 75, *[6, 40, 4, 60] * 20]
    groups = prompts(*range(3, 20))
    done: list[FinishedRequest] = []
    for index, length in enumerate(lengths):
        sampling = Sampling(max_tokens=length, seed=index, temperature=0.0, stop_ids=[])
        for each in (batch, alone):
            each.submit(str(index), groups[index % len(groups)], sampling, 0)
        done += batch.advance()
    together, apart = results(batch, done), results(alone, [])
    assert len(together) == len(lengths)
    assert sum(map(bool, moved)) >= 2
    for name, generation in together.items():
        assert generation.tokens.tolist() == apart[name].tokens.tolist()
        np.testing.assert_allclose(generation.logprobs, apart[name].logprobs, atol=1e-4)


def results(batch: DecodeBatch, done: list[FinishedRequest]) -> dict[str, Generation]:
    while batch.has_work:
        done += batch.advance()
    return {each.id: each.result for each in done if isinstance(each.result, Generation)}
