"""Requests that share a prompt get the same results as requests that are served alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from outpace.engines.embedded.decode_batch import DecodeBatch, KvPolicy
from outpace.engines.embedded.load_decoder import DecoderPath, build_decoder
from outpace.engines.embedded.requests import FinishedRequest
from outpace.engines.embedded.shared_prompts import PromptAttention, SharedPrompts, attend, log_sum_exp, merge
from outpace.types import Generation, Sampling
from support import examples, needs_bfloat16

REQUESTS = 12


@dataclass(frozen=True)
class Turn:
    """What happens before one turn of the batch."""

    prompts: list[int]  # of the requests that arrive
    aborted: int | None  # index of a request
    new_weights: bool


def some_turns() -> st.SearchStrategy[list[Turn]]:
    turn = st.builds(
        Turn,
        st.lists(st.sampled_from([0, 1, 2, 2, 2, 3, 3, 3]), max_size=REQUESTS),
        st.none() | st.integers(0, REQUESTS - 1),
        st.sampled_from([False, False, False, True]),
    )
    return st.lists(turn, min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("family", "path", "kv"),
    [("llama", "fast", "keep"), ("llama", "fast", "recompute"), ("gpt2", "general", "recompute")],
)
def test_a_shared_prompt_does_not_change_tokens_logprobs_or_versions(
    family: str, path: DecoderPath, kv: KvPolicy, model_of: Callable[..., PreTrainedModel],
    prompts: Callable[..., list[np.ndarray]],
) -> None:  # fmt: skip
    decoder = build_decoder(model_of(family), REQUESTS, None, deterministic=False, path=path)
    weights = [decoder.prepare(dict(model_of(family, seed=seed).named_parameters())) for seed in range(2)]
    batch = DecodeBatch(decoder, 0, kv, None)
    alone = [DecodeBatch(decoder.sibling(weights[0], 1), 0, kv, None) for _ in range(REQUESTS)]
    given_prompts, versions = prompts(1, 20, 50, 80), count(1)

    def serve(turns: list[Turn]) -> tuple[dict[str, Generation], dict[str, Generation]]:
        """Serve the same requests together and each in a batch of its own, turn by turn."""
        together: list[FinishedRequest] = []
        apart: list[FinishedRequest] = []
        requests = 0
        for turn in turns:
            for prompt in turn.prompts[: REQUESTS - requests]:
                sampling = Sampling(max_tokens=2 + 3 * (requests % 4), seed=requests, temperature=float(requests % 2))
                for each in (batch, alone[requests]):
                    each.submit(str(requests), given_prompts[prompt], sampling, 0)
                requests += 1
            together += batch.abort({str(turn.aborted)})
            apart += [done for each in alone for done in each.abort({str(turn.aborted)})]
            if turn.new_weights:
                version = next(versions)
                for each in (batch, *alone):
                    each.swap(weights[version % 2], version)
            together += batch.advance()
            apart += [done for each in alone for done in each.advance()]
        while batch.has_work:
            together += batch.advance()
            apart += [done for each in alone for done in each.advance()]
        return results(together, requests), results(apart, requests)

    @examples(25)
    @given(turns=some_turns())
    def any_turns(turns: list[Turn]) -> None:
        together, apart = serve(turns)
        for name, generation in together.items():
            assert generation.tokens.tolist() == apart[name].tokens.tolist()
            assert generation.versions.tolist() == apart[name].versions.tolist()
            assert generation.stop == apart[name].stop
            np.testing.assert_allclose(generation.logprobs, apart[name].logprobs, atol=1e-4)

    any_turns()
    assert batch.shared_tokens > 0


def results(finished: list[FinishedRequest], requests: int) -> dict[str, Generation]:
    assert len(finished) == requests
    return {done.id: done.result for done in finished if isinstance(done.result, Generation)}


def test_attempts_share_the_keys_and_values_of_a_long_prompt(
    model_of: Callable[..., PreTrainedModel], prompts: Callable[..., list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = build_decoder(model_of("llama"), 8, None, deterministic=False, path="fast")
    copied: list[int] = []
    copy = decoder.copy
    monkeypatch.setattr(decoder, "copy", lambda *given, **options: copied.extend(given[2]) or copy(*given, **options))
    batch = DecodeBatch(decoder, 0, "keep", None)
    (prompt,) = prompts(40)
    for index in range(12):
        batch.submit(str(index), prompt, Sampling(max_tokens=5 + index, seed=index), 0)
    while batch.has_work:
        batch.advance()
    assert batch.prefill_tokens == 39
    assert max(copied) < 40
    assert copied[:7] == [1] * 7  # the followers of the first, which was stepped with the last token of the prompt


def test_prompts_of_different_lengths_come_and_go(
    model_of: Callable[..., PreTrainedModel], prompts: Callable[..., list[np.ndarray]],
    forced_logprobs: Callable[..., np.ndarray],
) -> None:  # fmt: skip
    model = model_of("llama")
    batch = DecodeBatch(build_decoder(model, 48, None, deterministic=False, path="fast"), 0, "keep", None)
    given_prompts = prompts(*([34, 36, 80, 35] * 20))
    requests = {
        f"{index}-{attempt}": (prompt, Sampling(max_tokens=1 + (7 * index + 3 * attempt) % 12, seed=index))
        for index, prompt in enumerate(given_prompts)
        for attempt in range(12 if index % 9 == 0 else 4)
    }
    for name, (prompt, sampling) in requests.items():
        batch.submit(name, prompt, sampling, 0)
    finished: list[FinishedRequest] = []
    while batch.has_work:
        finished += batch.advance()
    for name, generation in results(finished, len(requests)).items():
        expected = forced_logprobs(model, requests[name][0], generation.tokens)
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)


@needs_bfloat16
@pytest.mark.parametrize("length", [200, 2000])
def test_the_first_own_token_counts_after_a_long_prompt_in_bfloat16(length: int) -> None:
    random = torch.Generator().manual_seed(0)
    q = torch.randn(16, 1, 64, generator=random).bfloat16() / 8
    keys, values = torch.randn(2, 16, length + 1, 64, generator=random).bfloat16()
    shared = PromptAttention(SharedPrompts(np.zeros(1, dtype=np.int64), np.array([length])), 16, torch.bfloat16)
    output, scores, weights = attend(q, keys[:, length:], values[:, length:], torch.zeros(1, dtype=torch.bfloat16))
    merged = merge(output, log_sum_exp(scores, weights), *shared(q, keys[:, :length], values[:, :length]))
    expected = (q.double() @ keys.double().transpose(1, 2) / 8).softmax(-1) @ values.double()
    assert (merged.double() - expected).norm() < 0.01 * expected.norm()


@examples(100)
@given(data=st.data())
def test_attention_over_prompt_and_own_tokens_equals_attention_over_both(data: st.DataObject) -> None:
    rows, slots, capacity = data.draw(st.integers(1, 24)), 6, 80
    kv_heads, groups, size = data.draw(st.sampled_from([(1, 1, 4), (2, 3, 8)]))
    slot = data.draw(st.lists(st.integers(-1, slots - 1), min_size=rows, max_size=rows))
    length_of = data.draw(st.lists(st.integers(1, capacity), min_size=slots, max_size=slots))
    if max(slot) < 0:
        return
    random = torch.Generator().manual_seed(rows)
    q = torch.randn(rows * kv_heads, groups, size, generator=random)
    prompt_keys, prompt_values = torch.randn(2, slots * kv_heads, capacity, size, generator=random)
    own_keys, own_values = torch.randn(2, rows * kv_heads, 7, size, generator=random)

    lengths = np.array([length_of[each] if each >= 0 else 0 for each in slot])
    shared = PromptAttention(SharedPrompts(np.array(slot), lengths), kv_heads, torch.float32)
    output, scores, weights = attend(q, own_keys, own_values, torch.zeros(1))
    merged = merge(output, log_sum_exp(scores, weights), *shared(q, prompt_keys, prompt_values))

    for row in range(rows):
        for head in range(kv_heads):
            place, source = row * kv_heads + head, slot[row] * kv_heads + head
            prompt = slice(0, lengths[row])
            keys, values = (
                torch.cat((shared_part[source][prompt], own_part[place]))
                for shared_part, own_part in ((prompt_keys, own_keys), (prompt_values, own_values))
            )
            expected = (q[place] @ keys.T / size**0.5).softmax(-1) @ values
            torch.testing.assert_close(merged[place], expected, atol=1e-5, rtol=1e-5)
