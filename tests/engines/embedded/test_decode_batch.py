"""Continuous batching: joining, leaving, stopping, weight swaps, and results independent of batch composition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedModel

from outpace.engines.embedded.decode_batch import DecodeBatch
from outpace.engines.embedded.load_decoder import build_decoder
from outpace.engines.embedded.requests import FinishedRequest
from outpace.errors import RequestFailed
from outpace.types import Generation, Sampling
from support import examples

Models = Callable[..., PreTrainedModel]
Prompts = Callable[..., list[np.ndarray]]
Logprobs = Callable[..., np.ndarray]
PATHS = [("llama", "fast"), ("gpt2", "general")]


def letters(tokens: Sequence[int]) -> str:
    """A fake tokenizer: token 0 is `a`, token 1 `bb`, token 2 `c`, the rest dots."""
    return "".join({0: "a", 1: "bb", 2: "c"}.get(token, ".") for token in tokens)


def make_batch(model: PreTrainedModel, slots: int = 4, **options: Any) -> DecodeBatch:
    decoder = build_decoder(
        model,
        slots,
        options.get("context"),
        deterministic=options.get("deterministic", False),
        path=options.get("path", "auto"),
    )
    return DecodeBatch(decoder, 0, options.get("kv", "keep"), letters)


def drain(batch: DecodeBatch) -> dict[str, Generation | RequestFailed]:
    finished: list[FinishedRequest] = []
    while batch.has_work:
        finished += batch.advance()
    return {done.id: done.result for done in finished}


def generation_of(result: object) -> Generation:
    assert isinstance(result, Generation)
    return result


# ----------------------------------------------------------------------------------------------- joining and leaving


def test_requests_join_and_leave_at_any_token(model_of: Models, prompts: Prompts, forced_logprobs: Logprobs) -> None:
    model = model_of("llama")
    batch = make_batch(model, slots=2)
    given = prompts(4, 9, 6)
    finished: dict[str, Generation] = {}
    batch.submit("long", given[0], Sampling(max_tokens=20, seed=1), 0)
    for _ in range(3):
        batch.advance()
    batch.submit("short", given[1], Sampling(max_tokens=2, seed=2), 0)
    batch.submit("queued", given[2], Sampling(max_tokens=5, seed=3), 0)
    ended_at = {}
    for turn in range(4, 24):
        for done in batch.advance():
            ended_at[done.id] = turn
            finished[done.id] = generation_of(done.result)
    assert ended_at == {"short": 5, "queued": 10, "long": 20}
    for name, prompt in zip(("long", "short", "queued"), given, strict=True):
        expected = forced_logprobs(model, prompt, finished[name].tokens)
        np.testing.assert_allclose(finished[name].logprobs, expected, atol=1e-4)


def test_only_running_rows_are_decoded(model_of: Models, prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(model_of("llama"), slots=8)
    for index, prompt in enumerate(prompts(3, 3, 3, 3)):
        batch.submit(str(index), prompt, Sampling(max_tokens=[1, 6, 2, 4][index], seed=index), 0)
    stepped = []
    step = batch.decoder.step
    monkeypatch.setattr(batch.decoder, "step", lambda tokens, *rest: stepped.append(len(tokens)) or step(tokens, *rest))
    drain(batch)
    assert stepped == [4, 3, 2, 2, 1, 1]


def test_equal_prompts_are_prefilled_once(model_of: Models, prompts: Prompts, forced_logprobs: Logprobs) -> None:
    model = model_of("llama")
    batch = make_batch(model, slots=4)
    (prompt,) = prompts(20)
    for index in range(6):
        batch.submit(str(index), prompt, Sampling(max_tokens=5 + index, seed=index), 0)
    finished = drain(batch)
    assert batch.prefill_tokens == 19
    assert batch.shared_tokens == 3 * 20 + 2 * 19  # three follow the first; two start later, from the last prompt token
    for result in finished.values():
        generation = generation_of(result)
        np.testing.assert_allclose(generation.logprobs, forced_logprobs(model, prompt, generation.tokens), atol=1e-4)
    assert len({tuple(generation_of(result).tokens[:5]) for result in finished.values()}) > 1


# ------------------------------------------------------------------------------------------------------------ endings


def test_a_stop_token_ends_the_request_and_is_kept(model_of: Models, prompts: Prompts) -> None:
    batch = make_batch(model_of("llama"))
    (prompt,) = prompts(5)
    batch.submit("free", prompt, Sampling(max_tokens=30, seed=7), 0)
    free = generation_of(drain(batch)["free"])
    wanted = int(free.tokens[11])
    first = free.tokens.tolist().index(wanted)
    batch.submit("stopped", prompt, Sampling(max_tokens=30, seed=7, stop_ids=[wanted]), 0)
    stopped = generation_of(drain(batch)["stopped"])
    assert stopped.stop == "stop"
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert len(stopped.logprobs) == len(stopped.versions) == first + 1


@pytest.mark.parametrize(("stop", "length"), [("bba", 3), ("c.", 6), ("b", 2), ("..b", None), ("zz", None)])
def test_a_stop_string_ends_the_request_at_the_token_that_completes_it(
    stop: str, length: int | None, model_of: Models, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(model_of("llama"))
    script = iter([0, 1, 0, 0, 2, 9, 9, 0])  # a bb a a c . . a

    def scripted(*_: object) -> torch.Tensor:
        logits = torch.zeros(1, 61)
        logits[0, next(script)] = 100.0
        return logits

    monkeypatch.setattr(batch.decoder, "step", scripted)
    (prompt,) = prompts(3)
    batch.submit("x", prompt, Sampling(max_tokens=8, seed=0, stop_strings=[stop]), 0)
    generation = generation_of(drain(batch)["x"])
    assert len(generation.tokens) == (length or 8)
    assert generation.stop == ("stop" if length else "length")


def test_a_request_that_outgrows_the_context_is_clamped(model_of: Models, prompts: Prompts) -> None:
    batch = make_batch(model_of("llama"), context=30)
    (prompt,) = prompts(21)
    batch.submit("x", prompt, Sampling(max_tokens=500, seed=0), 0)
    generation = generation_of(drain(batch)["x"])
    assert generation.stop == "length"
    assert len(generation.tokens) == 9


@pytest.mark.parametrize(
    ("length", "sampling", "reason"),
    [
        (30, Sampling(max_tokens=1, seed=0), r"30 tokens.*\b30\b"),
        (0, Sampling(max_tokens=1, seed=0), "empty"),
        (3, Sampling(max_tokens=0, seed=0), "max_tokens"),
        (3, Sampling(max_tokens=1, seed=0, temperature=-1.0), "temperature"),
        (3, Sampling(max_tokens=1, seed=0, top_p=0.0), "top_p"),
        (3, Sampling(max_tokens=1, seed=0, stop_strings=["a", ""]), "stop string"),
    ],
)
def test_a_request_that_cannot_be_served_fails_at_once(
    length: int, sampling: Sampling, reason: str, model_of: Models, prompts: Prompts
) -> None:
    batch = make_batch(model_of("llama"), context=30)
    with pytest.raises(RequestFailed, match=reason):
        batch.submit("x", prompts(length)[0], sampling, 0)
    assert batch.waiting == 0


def test_a_prompt_outside_the_vocabulary_fails_at_once(model_of: Models) -> None:
    with pytest.raises(RequestFailed, match="vocabulary"):
        make_batch(model_of("llama")).submit("x", np.array([61], dtype=np.int32), Sampling(max_tokens=1, seed=0), 0)


def test_an_abort_returns_the_partial_output(model_of: Models, prompts: Prompts, forced_logprobs: Logprobs) -> None:
    model = model_of("llama")
    batch = make_batch(model, slots=2)
    given = prompts(4, 5, 6)
    for name, prompt in zip("abc", given, strict=True):
        batch.submit(name, prompt, Sampling(max_tokens=9, seed=1), 0)
    for _ in range(4):
        batch.advance()
    aborted = {done.id: generation_of(done.result) for done in batch.abort({"a", "c", "unknown"})}
    assert {name: len(partial.tokens) for name, partial in aborted.items()} == {"a": 4, "c": 0}
    assert {partial.stop for partial in aborted.values()} == {"aborted"}
    np.testing.assert_allclose(aborted["a"].logprobs, forced_logprobs(model, given[0], aborted["a"].tokens), atol=1e-4)
    assert len(generation_of(drain(batch)["b"]).tokens) == 9


@pytest.mark.parametrize("length", [8, 40])  # a prompt that requests copy, and one that they share
def test_non_finite_logits_fail_their_requests_and_do_not_affect_later_requests(
    length: int, model_of: Models, prompts: Prompts, forced_logprobs: Logprobs
) -> None:
    model, broken = model_of("llama"), model_of("llama")
    batch = make_batch(model, slots=2)
    with torch.no_grad():
        broken.get_parameter("model.norm.weight").fill_(float("nan"))
        broken.get_parameter("model.layers.0.self_attn.v_proj.weight").fill_(float("nan"))
    long, short, other = prompts(length, length - 5, length - 3)
    batch.swap(batch.decoder.prepare(dict(broken.named_parameters())), 1)
    for name in "abcd":
        batch.submit(name, long, Sampling(max_tokens=9, seed=1), 0)
    for failed in drain(batch).values():
        assert isinstance(failed, RequestFailed)
        assert "version 1" in str(failed)
    batch.swap(batch.decoder.prepare(dict(model.named_parameters())), 2)
    given = {f"{index}": prompt for index, prompt in enumerate([short] * 4 + [other] * 4)}
    for name, prompt in given.items():
        batch.submit(name, prompt, Sampling(max_tokens=4, seed=1), 0)
    finished = drain(batch)
    for name, prompt in given.items():
        generation = generation_of(finished[name])
        np.testing.assert_allclose(generation.logprobs, forced_logprobs(model, prompt, generation.tokens), atol=1e-4)


# ------------------------------------------------------------------------------------------------------------ weights


def swapped_midway(batch: DecodeBatch, new: PreTrainedModel, prompt: np.ndarray, before: int, total: int) -> Generation:
    batch.submit("x", prompt, Sampling(max_tokens=total, seed=5), 0)
    for _ in range(before):
        assert not batch.advance()
    batch.swap(batch.decoder.prepare(dict(new.named_parameters())), 3)
    return generation_of(drain(batch)["x"])


@pytest.mark.parametrize(("family", "path"), PATHS)
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_weight_swap_changes_the_version_at_exactly_one_token(
    family: str, path: str, kv: str, model_of: Models, prompts: Prompts
) -> None:
    batch = make_batch(model_of(family), kv=kv, path=path)
    generation = swapped_midway(batch, model_of(family, seed=1), prompts(10)[0], 6, 15)
    assert generation.versions.tolist() == [0] * 6 + [3] * 9
    assert len(generation.tokens) == 15


@pytest.mark.parametrize(("family", "path"), PATHS)
def test_with_kv_recompute_sequences_continue_as_if_prefilled_with_the_new_weights(
    family: str, path: str, model_of: Models, prompts: Prompts, forced_logprobs: Logprobs
) -> None:
    old, new = model_of(family), model_of(family, seed=1)
    (prompt,) = prompts(10)
    generation = swapped_midway(make_batch(old, kv="recompute", path=path), new, prompt, 6, 15)
    np.testing.assert_allclose(generation.logprobs[:6], forced_logprobs(old, prompt, generation.tokens)[:6], atol=1e-4)
    np.testing.assert_allclose(generation.logprobs[6:], forced_logprobs(new, prompt, generation.tokens)[6:], atol=1e-4)


@pytest.mark.parametrize(("family", "path"), PATHS)
def test_with_kv_keep_cached_keys_and_values_come_from_the_old_weights(
    family: str, path: str, model_of: Models, prompts: Prompts, forced_logprobs: Logprobs
) -> None:
    old, new = model_of(family), model_of(family, seed=1)
    (prompt,) = prompts(10)
    generation = swapped_midway(make_batch(old, kv="keep", path=path), new, prompt, 6, 15)
    sequence = torch.from_numpy(np.concatenate((prompt, generation.tokens)).astype(np.int64)).unsqueeze(0)
    cache = DynamicCache()
    with torch.no_grad():
        # The old weights process the prompt and the first five outputs. The sixth output goes through the new weights.
        first = old(sequence[:, :15], past_key_values=cache, use_cache=True).logits[0, 9:]
        second = new(sequence[:, 15:-1], past_key_values=cache, use_cache=True).logits[0]
    expected = torch.cat((first, second)).log_softmax(-1).gather(1, sequence[0, 10:].unsqueeze(1)).squeeze(1)
    np.testing.assert_allclose(generation.logprobs, expected.numpy(), atol=1e-4)
    under_new = forced_logprobs(new, prompt, generation.tokens)[6:]
    assert np.abs(generation.logprobs[6:] - under_new).max() > 1e-2  # a plain forward pass would be the wrong reference


def test_a_request_waits_for_its_version_while_later_requests_are_served(model_of: Models, prompts: Prompts) -> None:
    model = model_of("llama")
    batch = make_batch(model, slots=1)
    first, second = prompts(4, 5)
    batch.submit("patient", first, Sampling(max_tokens=3, seed=0), 2)
    batch.submit("ready", second, Sampling(max_tokens=3, seed=0), 0)
    assert set(drain(batch)) == {"ready"}
    assert not batch.has_work
    prepared = batch.decoder.prepare(dict(model.named_parameters()))
    batch.swap(prepared, 1)
    assert not batch.has_work
    batch.swap(prepared, 2)
    assert generation_of(drain(batch)["patient"]).versions.tolist() == [2, 2, 2]


# -------------------------------------------------------------------------------------------------------- determinism

REQUESTS = 10


@pytest.mark.parametrize(("family", "path"), PATHS)
def test_in_deterministic_mode_results_do_not_depend_on_batch_composition_slot_or_order(
    family: str, path: str, model_of: Models, prompts: Prompts
) -> None:
    batch = make_batch(model_of(family), slots=5, path=path, deterministic=True)
    submitted = prompts(1, 4, 4, 9, 17, 30, 33, 40, 12, 12)
    submitted[2] = submitted[3] = submitted[1]  # requests with the same prompt, as in a group
    samplings = [Sampling(max_tokens=3 + 4 * index, seed=index, temperature=0.8) for index in range(REQUESTS)]

    def serve(chosen: Sequence[int], gaps: Sequence[int]) -> dict[str, Generation]:
        """Serve these requests, with `gaps` decode steps between arrivals."""
        finished: list[FinishedRequest] = []
        for index, gap in zip(chosen, gaps, strict=True):
            batch.submit(str(index), submitted[index], samplings[index], 0)
            for _ in range(gap):
                finished += batch.advance()
        results = {done.id: generation_of(done.result) for done in finished}
        return results | {name: generation_of(result) for name, result in drain(batch).items()}

    alone = {str(index): serve([index], [0])[str(index)] for index in range(REQUESTS)}

    @examples(15)
    @given(arrivals=some_arrivals())
    def any_arrivals(arrivals: list[tuple[int, int]]) -> None:
        results = serve([index for index, _ in arrivals], [gap for _, gap in arrivals])
        assert len(results) == len(arrivals)
        for name, generation in results.items():
            assert generation.tokens.tolist() == alone[name].tokens.tolist()
            assert generation.logprobs.tobytes() == alone[name].logprobs.tobytes()

    any_arrivals()


def some_arrivals() -> st.SearchStrategy[list[tuple[int, int]]]:
    """A subset of the requests in any order, with gaps of decode steps between arrivals."""
    arrival = st.tuples(st.integers(0, REQUESTS - 1), st.integers(0, 6))
    return st.lists(arrival, min_size=1, max_size=REQUESTS, unique_by=lambda item: item[0])
