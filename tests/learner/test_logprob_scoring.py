"""The learner's logprobs of whole sequences, compared with the forward pass of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outpace.checkpoint.journal import JournalWriter, read_record
from outpace.learner.backend import OLD_LOGP, LearnerSettings
from outpace.learner.core import LearnerCore, sequence_logprobs
from outpace.learner.learner import LearnerHost
from outpace.learner.torch_backend import TorchBackend
from outpace.protocols import Learner
from outpace.types import Floats, GroupRecord, Ints, Row
from support import examples, kept_of, resolved

VOCABULARY = 48


def sequences_of(*lengths: int) -> list[Ints]:
    noise = np.random.default_rng(7)
    return [noise.integers(0, VOCABULARY, length).astype(np.int32) for length in lengths]


@torch.no_grad()
def plain(model: PreTrainedModel, tokens: Ints, temperature: float) -> Floats:
    ids = torch.from_numpy(tokens.astype(np.int64))
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / temperature
    found: Floats = logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1).numpy()
    return found


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)).eval()


def core_of(model: PreTrainedModel, tokens_per_pass: int = 64) -> LearnerCore:
    return LearnerCore(model, resolved({"learner.tokens_per_pass": tokens_per_pass}))


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_sequence_logprobs_match_a_plain_forward_pass(make: Callable[[], PreTrainedModel], temperature: float) -> None:
    sequences = sequences_of(9, 2, 33, 17, 40)
    expected = [plain(make(), tokens, temperature) for tokens in sequences]
    found = sequence_logprobs(core_of(make()), sequences, temperature)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


CORE = core_of(llama(), tokens_per_pass=32)


@given(st.lists(st.integers(0, 30), max_size=6))
@examples(25)
def test_there_is_one_logprob_per_token_but_the_first(lengths: list[int]) -> None:
    found = sequence_logprobs(CORE, sequences_of(*lengths), 1.0)
    assert [len(logprobs) for logprobs in found] == [max(length - 1, 0) for length in lengths]
    assert all(np.isfinite(logprobs).all() for logprobs in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sequence_logprobs_equal_the_logprobs_that_training_compares_with_the_sampler(
    dtype: str, make_rows: Callable[..., list[Row]]
) -> None:
    core = LearnerCore(llama(), resolved({"model.dtype": dtype, "rollout.temperature": 0.7}))
    rows = [msgspec.structs.replace(row, mask=np.arange(len(row.tokens)) > 0) for row in make_rows(5)]
    found = sequence_logprobs(core, [row.tokens for row in rows], 0.7)
    for ours, trained in zip(found, core.score(rows), strict=True):
        np.testing.assert_array_equal(ours, trained[OLD_LOGP])


def test_the_pass_size_does_not_change_the_logprobs() -> None:
    sequences = sequences_of(9, 2, 33, 17)
    whole, cut = (sequence_logprobs(core_of(llama(), size), sequences, 0.7) for size in (1024, 16))
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_a_token_id_outside_the_vocabulary_gives_nan_for_its_sequence_only() -> None:
    good, bad, negative = sequences_of(6, 6, 6)
    bad[3], negative[3] = VOCABULARY, -1
    found = sequence_logprobs(CORE, [good, bad, negative, good], 1.0)
    assert np.isnan(found[1]).all()
    assert np.isnan(found[2]).all()
    assert len(found[1]) == len(found[2]) == 5
    np.testing.assert_allclose(found[0], plain(llama(), good, 1.0), atol=2e-5)
    np.testing.assert_allclose(found[3], found[0], atol=2e-5)


async def test_logprob_requests_run_in_order_with_training_calls(
    tmp_path: Path, make_rows: Callable[..., list[Row]]
) -> None:
    writer = JournalWriter(tmp_path / "journal", "worker")
    location = writer.append(kept_of(0), GroupRecord(0, "task-0", 0, 0, make_rows(4), [0.0] * 4))
    writer.close()
    config = resolved({"learner.lr": 1e-2})
    weights = LearnerSettings(
        config=config,
        read_group=partial(read_record, tmp_path / "journal"),
        snapshots=tmp_path / "weights",
        incarnation="run",
        threads=1,
    )
    torch_learner = LearnerHost(weights, partial(TorchBackend, model=llama()))
    learner: Learner = torch_learner
    (tokens,) = sequences_of(20)
    before, _, _, after = await asyncio.gather(
        learner.logprobs([tokens], 0.7), learner.chunk(0, [location]), learner.step(0), learner.logprobs([tokens], 0.7)
    )
    await torch_learner.close()
    np.testing.assert_allclose(before[0], plain(llama(), tokens, 0.7), atol=2e-5)
    assert np.abs(after[0] - before[0]).max() > 1e-3
