"""The SGLang client with a fake server of its protocol (see `engines.server.sglang_protocol`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engines.server.sglang_protocol import EOS, Sglang
from outpace.config import Config
from outpace.config.load import make_config
from outpace.engines.server.checks import check_server
from outpace.engines.server.http import HttpClient
from outpace.engines.server.protocol import Piece, ServerRequest
from outpace.engines.server.sglang import SglangServer
from outpace.errors import BadInput, ServerFaulty, ServerGone, ServerRefused, ServerSilent
from outpace.types import Sampling

pytestmark = pytest.mark.timeout(120)

VOCABULARY = 8
LONG = 50
Start = Callable[..., Awaitable[tuple[Sglang, SglangServer]]]


def a_model(folder: Path, seed: int) -> Path:
    """Write a model that never samples the end of a sequence."""
    logits = np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)
    logits[:, EOS] = -60.0
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"logits": logits}, folder / "model.safetensors")
    return folder


def logprobs_of(model: Path, tokens: list[int], temperature: float = 1.0) -> Any:
    rows = load_file(model / "model.safetensors")["logits"].astype(np.float64)[tokens[:-1]] / temperature
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows[np.arange(len(rows)), tokens[1:]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    ends: list[Callable[[], Awaitable[None]]] = []

    async def both(key: str | None = None, given: str | None = None, **how: Any) -> tuple[Sglang, SglangServer]:
        theirs = Sglang(a_model(tmp_path / "0", 0), key=key, **how)
        await theirs.start()
        ours = SglangServer(HttpClient(theirs.url, api_key=given or key, retries=0), control_s=10)
        ends.extend([ours.close, theirs.stop])
        return theirs, ours

    yield both
    for end in ends:
        await end()


def make_request(name: str = "a", tokens: int = 12, salt: str = "0", **sampling: Any) -> ServerRequest:
    return ServerRequest(name, np.array([1, 3], dtype=np.int32), Sampling(max_tokens=tokens, seed=7, **sampling), salt)


async def answer(ours: SglangServer, request: ServerRequest) -> tuple[list[int], list[float], Piece]:
    tokens: list[int] = []
    logprobs: list[float] = []
    async with aclosing(ours.stream(request)) as pieces:
        async for piece in pieces:
            tokens += piece.tokens
            logprobs += piece.logprobs
    return tokens, logprobs, piece


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110  # the server has no event to wait for
            await asyncio.sleep(0.002)


async def under_way(theirs: Sglang, count: int = 1, tokens: int = 3) -> None:
    await until(lambda: len([request for request in theirs.seen if request.streamed >= tokens]) >= count)


async def swap(theirs: Sglang, ours: SglangServer, model: Path, version: int, recompute: bool = False) -> None:
    await ours.pause()
    body = {"model_path": str(model), "flush_cache": False}
    await ours.http.post("/update_weights_from_disk", body, deadline_s=10)
    await ours.label(version)
    await asyncio.sleep(2 * theirs.lag_s)  # tokens in flight arrive, with either label
    await ours.resume(recompute)


# ------------------------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("streaming", ["cumulative", "incremental", "half"])
async def test_every_streaming_mode_gives_the_same_answer(start: Start, tmp_path: Path, streaming: Any) -> None:
    theirs, ours = await start(streaming=streaming)
    tokens, logprobs, last = await answer(ours, make_request(tokens=LONG, temperature=0.7))
    assert len(tokens) == LONG
    assert last.stop == "length"
    assert [token for _, token, _ in theirs.seen[-1].sampled[:LONG]] == tokens
    assert np.allclose(logprobs, logprobs_of(tmp_path / "0", [3, *tokens], 0.7))


async def test_every_sampling_parameter_is_sent(start: Start) -> None:
    theirs, ours = await start()
    await answer(ours, make_request(stop_ids=[5], stop_strings=["end"], top_k=4, top_p=0.9))
    body = theirs.seen[-1].body
    assert body["input_ids"] == [1, 3]
    assert body["extra_key"].startswith("0")
    assert body["sampling_params"] == {
        "n": 1, "max_new_tokens": 12, "min_new_tokens": 0, "temperature": 1.0, "top_p": 0.9, "top_k": 4, "min_p": 0.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "stop": ["end"],
        "stop_token_ids": [5], "ignore_eos": False, "no_stop_trim": True, "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }  # fmt: skip


async def test_a_stop_id_ends_an_answer_and_is_included(start: Start) -> None:
    _, ours = await start()
    tokens, _, last = await answer(ours, make_request(tokens=LONG, stop_ids=[0, 1, 4, 5, 6, 7]))
    assert last.stop == "stop"
    assert tokens[-1] in (0, 1, 4, 5, 6, 7)


async def test_a_seed_is_sent_only_if_seeding_is_enabled(start: Start) -> None:
    theirs, ours = await start()
    await answer(ours, make_request())
    await answer(SglangServer(ours.http, seeded=True), make_request())
    assert ["sampling_seed" in request.how for request in theirs.seen] == [False, True]


async def test_a_prompt_beyond_the_context_raises_server_refused(start: Start) -> None:
    _, ours = await start()
    with pytest.raises(ServerRefused, match="maximum context length of 64"):
        await answer(ours, make_request(tokens=500))


async def test_a_server_that_dies_during_an_answer_raises_server_gone(start: Start) -> None:
    theirs, ours = await start()
    answering = asyncio.create_task(answer(ours, make_request(tokens=LONG)))
    await under_way(theirs)
    await theirs.stop()
    with pytest.raises(ServerGone):
        await answering


# ------------------------------------------------------------------------------------------------------------ ending


@pytest.mark.parametrize("streaming", ["cumulative", "incremental"])
async def test_an_aborted_request_returns_partial_output_and_other_requests_continue(
    start: Start, streaming: Any
) -> None:
    theirs, ours = await start(streaming=streaming)
    answering = [asyncio.create_task(answer(ours, make_request(name, LONG))) for name in ("a", "a1")]
    await under_way(theirs, 2)
    assert await ours.abort(["a"])
    tokens, logprobs, last = await answering[0]
    assert last.stop == "aborted"
    assert 3 <= len(tokens) == len(logprobs) < LONG
    assert (await answering[1])[2].stop == "length"


async def test_closing_the_stream_ends_the_request(start: Start) -> None:
    theirs, ours = await start()
    async with aclosing(ours.stream(make_request(tokens=LONG))) as pieces:
        await anext(pieces)
    await until(lambda: theirs.seen[-1].finish is not None)
    assert theirs.seen[-1].finish["type"] == "abort"


async def test_a_request_that_waits_for_the_end_of_a_pause_can_be_aborted(start: Start) -> None:
    theirs, ours = await start()
    await ours.pause()
    answering = asyncio.create_task(answer(ours, make_request(tokens=LONG)))
    await under_way(theirs, tokens=0)
    await ours.abort(["a"])
    await ours.resume(recompute=False)
    tokens, _, last = await answering
    assert last.stop == "aborted"
    assert len(tokens) < LONG


# ---------------------------------------------------------------------------------------------------------- versions


async def test_without_a_version_label_there_are_no_spans(start: Start) -> None:
    _, ours = await start()
    assert (await answer(ours, make_request()))[2].spans is None


async def test_tokens_of_an_adapter_do_not_get_the_version_label_of_the_base_model(
    start: Start,
) -> None:
    _, ours = await start()
    await ours.label(3)
    assert (await answer(ours, replace(make_request(), adapter="outpace-run-7")))[2].spans is None


@pytest.mark.parametrize("lag_s", [0.0, 0.02])
async def test_a_weight_swap_during_an_answer_appears_in_its_spans_and_never_too_early(
    start: Start, tmp_path: Path, lag_s: float
) -> None:
    theirs, ours = await start()
    theirs.weights, theirs.lag_s = "0", lag_s
    await ours.label(0)
    answering = asyncio.create_task(answer(ours, make_request(tokens=LONG)))
    await under_way(theirs)
    await swap(theirs, ours, a_model(tmp_path / "1", 1), 1)
    tokens, _, last = await answering
    assert last.spans is not None
    recorded = [version for version, start_, end in last.spans for _ in range(start_, end)]
    truth = [int(name) for name in theirs.seen[-1].by[:LONG]]
    assert len(recorded) == len(tokens) == LONG
    assert set(recorded) == {0, 1} == set(truth)
    assert all(version <= true for version, true in zip(recorded, truth, strict=True))
    assert recorded[-1] == 1


async def test_weights_with_a_foreign_label_are_rejected(start: Start) -> None:
    theirs, ours = await start()
    await ours.label(3)
    theirs.label = "default"
    with pytest.raises(ServerFaulty, match="default"):
        await answer(ours, make_request())


async def test_with_kv_keep_the_same_request_continues_after_a_swap(start: Start, tmp_path: Path) -> None:
    theirs, ours = await start()
    await ours.label(0)
    answering = asyncio.create_task(answer(ours, make_request(tokens=LONG)))
    await under_way(theirs)
    await swap(theirs, ours, a_model(tmp_path / "1", 1), 1)
    assert len((await answering)[0]) == LONG
    assert len(theirs.seen) == 1


@pytest.mark.parametrize("streaming", ["cumulative", "incremental"])
async def test_with_kv_recompute_requests_end_as_interrupted_and_the_cache_is_empty(
    start: Start, tmp_path: Path, streaming: Any
) -> None:
    theirs, ours = await start(streaming=streaming)
    await ours.label(0)
    answering = [asyncio.create_task(answer(ours, make_request(name, LONG))) for name in ("a", "b")]
    await under_way(theirs, 2)
    await swap(theirs, ours, a_model(tmp_path / "1", 1), 1, recompute=True)
    for tokens, logprobs, last in await asyncio.gather(*answering):
        assert last.stop == "interrupted"
        assert 3 <= len(tokens) == len(logprobs) < LONG
        assert last.spans == [(0, 0, len(tokens))]
    assert len(theirs.seen) == 2
    assert not theirs.caches


# -------------------------------------------------------------------------------------------------------- facts


async def test_the_facts_of_a_server_are_read(start: Start) -> None:
    _, ours = await start()
    facts = await ours.facts()
    assert (facts.kind, facts.version, facts.model, facts.context) == ("sglang", "0.5.18", "tiny", 64)
    assert (facts.dtype, facts.controls, facts.adapters) == ("float32", True, True)
    assert facts.details["slots"] == 8


@pytest.mark.parametrize(("original", "mode"), [(False, "processed"), (True, "original")])
async def test_the_logprob_mode_is_detected_by_sampling(start: Start, original: bool, mode: str) -> None:
    theirs, ours = await start()
    theirs.original_logprobs = original
    assert (await ours.facts()).logprobs == mode


async def test_an_automatic_dtype_is_reported_as_unknown(start: Start) -> None:
    theirs, ours = await start()
    theirs.settings["dtype"] = "auto"
    assert (await ours.facts()).dtype is None


def run_config(**settings: Any) -> Config:
    return make_config({"engine.kind": "sglang", "engine.context": 32, "model.path": "tiny"} | settings)


async def refused(ours: SglangServer, tokens: dict[str, list[int]] | None = None, **settings: Any) -> str:
    """Return the refusal without the server's URL."""
    with pytest.raises(BadInput) as raised:
        await check_server(ours, run_config(**settings), tokens or {})
    return str(raised.value).removeprefix(ours.url)


async def test_a_mismatched_server_is_refused_with_the_remedy(start: Start) -> None:
    theirs, ours = await start()
    theirs.settings["model_path"] = "tiny"
    await check_server(ours, run_config(**{"lora.rank": 8}), {"ab": [1, 2]})
    assert "--context-length 100" in await refused(ours, **{"engine.context": 100})
    assert "--dtype bfloat16" in await refused(ours, **{"model.dtype": "bfloat16"})
    assert "model.path" in await refused(ours, **{"model.path": "other"})
    other_tokenizer = await refused(ours, {"ab": [7]})
    assert "'ab'" in other_tokenizer
    assert "--tokenizer-path tiny" in other_tokenizer
    theirs.settings["enable_lora"] = False
    assert "--enable-lora" in await refused(ours, **{"lora.rank": 8})
    theirs.original_logprobs = True
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" in await refused(ours)
    theirs.settings["version"] = "0.5.7"
    assert "0.5.8" in await refused(ours)


async def test_without_the_admin_key_a_server_is_refused(start: Start) -> None:
    _, ours = await start(admin="admin")
    line = await refused(ours)
    assert "engine.api_key_env" in line
    assert "admin" in line


async def test_a_wrong_key_is_refused(start: Start) -> None:
    _, ours = await start(key="right", given="wrong")
    with pytest.raises(ServerRefused) as raised:
        await ours.facts()
    assert raised.value.status == 401


async def test_an_unrelated_server_at_the_address_raises_server_faulty(start: Start) -> None:
    theirs, ours = await start()
    del theirs.settings["model_path"]
    with pytest.raises(ServerFaulty, match="/server_info: "):
        await ours.facts()


async def test_the_server_tokenizes_text(start: Start) -> None:
    _, ours = await start()
    assert await ours.tokenized("ab") == [1, 2]


async def test_pressure_accumulates_retractions_over_all_calls(start: Start) -> None:
    _, ours = await start()
    first, second = await ours.pressure(), await ours.pressure()
    assert (first.running, first.waiting, first.cache_used) == (0, 1, 0.25)
    assert (first.preemptions, second.preemptions) == (2, 4)


async def test_a_server_that_lost_its_version_label_counts_as_restarted(start: Start) -> None:
    theirs, ours = await start()
    before_any_label = (await ours.pressure()).began
    await ours.label(0)
    first = (await ours.pressure()).began
    await ours.label(1)
    second = (await ours.pressure()).began
    theirs.label = "default"
    assert before_any_label is None
    assert first == second != (await ours.pressure()).began


async def test_reading_the_facts_resumes_a_server_that_was_left_paused(start: Start) -> None:
    theirs, ours = await start()
    theirs.paused = True
    assert (await ours.facts()).controls
    await ours.probe(10)


async def test_the_paused_state_is_unknown_but_a_gone_server_is_detected(start: Start) -> None:
    theirs, ours = await start()
    assert await ours.paused() is None
    await theirs.stop()
    with pytest.raises(ServerGone):
        await ours.paused()


async def test_a_probe_samples_and_a_paused_server_fails_it(start: Start) -> None:
    theirs, ours = await start()
    await ours.probe(10)
    assert len(theirs.seen[-1].sampled) >= 1
    await ours.pause()
    with pytest.raises(ServerSilent):
        await ours.probe(0.2)
