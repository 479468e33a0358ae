"""The vLLM client: requests, parsed answers, and which answers are failures."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

from engines.server.fake_server import ROUTES, FakeServer, Fault, FaultKind
from outpace.engines.server.http import HttpClient
from outpace.engines.server.protocol import STALE, Piece, Pressure, ServerRequest
from outpace.engines.server.vllm import COMPLETIONS, GENERATE, VllmServer, parse_chunk, request_body
from outpace.errors import ServerFaulty, ServerRefused, ServerSilent
from outpace.types import Sampling

pytestmark = pytest.mark.timeout(120)

PROMPT = np.arange(3, dtype=np.int32)
VERSION_OF = VllmServer(HttpClient("http://here"), incarnation="run")._version_of


def make_request(max_tokens: int = 5, name: str = "a", **how: object) -> ServerRequest:
    sampling = Sampling(max_tokens=max_tokens, seed=2**63 + 5, **how)  # type: ignore[arg-type]
    return ServerRequest(name, PROMPT, sampling, salt="run.4")


async def pieces_of(server: VllmServer, request: ServerRequest) -> list[Piece]:
    return [piece async for piece in server.stream(request)]


@pytest.fixture
async def fake() -> AsyncIterator[FakeServer]:
    async with FakeServer().serving() as server:
        yield server


@pytest.fixture
async def server(fake: FakeServer) -> AsyncIterator[VllmServer]:
    server = VllmServer(HttpClient(fake.url, retries=0), control_s=5)
    yield server
    await server.close()


async def test_server_facts_are_read_from_several_routes(fake: FakeServer, server: VllmServer) -> None:
    facts = await server.facts()
    assert (facts.kind, facts.version, facts.model, facts.context) == ("vllm", "0.32.0", "toy", 64)
    assert facts.controls
    assert not facts.adapters
    assert facts.logprobs is None  # not reported without dev mode
    assert facts.details["root"] == "/toy"


async def test_without_a_list_of_routes_each_route_is_tried(fake: FakeServer, server: VllmServer) -> None:
    fake.routes = []
    hidden = await server.facts()
    assert not hidden.controls
    assert "/server_info" in fake.calls


async def test_tokens_logprobs_and_version_spans_are_streamed(fake: FakeServer, server: VllmServer) -> None:
    fake.version = "outpace.4"
    pieces = await pieces_of(server, make_request())
    assert [token for piece in pieces for token in piece.tokens] == [3, 4, 5, 6, 7]
    assert [logprob for piece in pieces for logprob in piece.logprobs] == [-0.5] * 5
    assert pieces[-1].stop == "length"
    assert pieces[-1].spans == [(4, 0, 5)]


async def test_a_stop_token_is_part_of_the_answer(server: VllmServer) -> None:
    pieces = await pieces_of(server, make_request(stop_ids=[5]))
    assert [token for piece in pieces for token in piece.tokens] == [3, 4, 5]
    assert pieces[-1].stop == "stop"


async def test_weights_without_a_version_label_are_stale(server: VllmServer) -> None:
    assert (await pieces_of(server, make_request()))[-1].spans == [(STALE, 0, 5)]


@pytest.mark.parametrize("kind", ["malformed", "no_logprobs", "nan", "no_end", "error", "500", "429"])
async def test_an_answer_that_cannot_be_trained_on_raises_server_faulty(
    kind: FaultKind, fake: FakeServer, server: VllmServer
) -> None:
    fake.fault = lambda: Fault(kind, after=2)
    with pytest.raises(ServerFaulty, match=fake.url):
        await pieces_of(server, make_request())


@pytest.mark.parametrize("kind", ["refusal", "400"])
async def test_a_wrong_request_raises_server_refused_by_status_or_in_the_stream(
    kind: FaultKind, fake: FakeServer, server: VllmServer
) -> None:
    fake.fault = lambda: Fault(kind)
    with pytest.raises(ServerRefused):
        await pieces_of(server, make_request())


async def test_an_abort_returns_the_last_piece(fake: FakeServer, server: VllmServer) -> None:
    fake.delay_s = 0.01
    pieces = server.stream(make_request(60, name="b"))
    assert (await anext(pieces)).tokens == [3]
    assert await server.abort(["b"])
    assert [piece.stop async for piece in pieces][-1] == "aborted"


async def test_abort_returns_false_if_the_server_cannot_abort_by_request_id(
    fake: FakeServer, server: VllmServer
) -> None:
    fake.routes = [route for route in ROUTES if route != "/abort_requests"]
    assert not await server.abort(["b"])


async def test_an_abort_of_no_requests_sends_nothing(fake: FakeServer, server: VllmServer) -> None:
    assert await server.abort([])
    assert "/abort_requests" not in fake.calls


async def test_a_probe_fails_unless_a_token_is_sampled(fake: FakeServer, server: VllmServer) -> None:
    await server.probe(5)
    fake.resumed.clear()
    with pytest.raises(ServerSilent):
        await server.probe(0.1)


async def test_pressure_is_read_from_the_server_metrics(fake: FakeServer, server: VllmServer) -> None:
    fake.preemptions = 7
    assert await server.pressure() == Pressure(running=0, waiting=0, cache_used=0.25, preemptions=7, began=1.0)


async def test_the_prefix_cache_is_reset_before_the_server_resumes(fake: FakeServer, server: VllmServer) -> None:
    await server.pause()
    assert await server.paused()
    await server.resume(recompute=True)
    assert not await server.paused()
    assert fake.calls.index("/reset_prefix_cache") < fake.calls.index("/resume")


async def test_a_server_without_version_support_is_not_labelled(fake: FakeServer, server: VllmServer) -> None:
    fake.routes = [GENERATE]
    await server.label(5)
    assert fake.version == "default"


async def test_closing_the_stream_ends_the_request(fake: FakeServer, server: VllmServer) -> None:
    fake.delay_s = 0.01
    pieces = server.stream(make_request(60))
    await anext(pieces)
    assert fake.running
    await pieces.aclose()
    async with asyncio.timeout(5):
        while fake.running:  # noqa: ASYNC110 - state of the other side of a socket
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS])
def test_every_sampling_parameter_is_sent(route: str) -> None:
    request = make_request(stop_ids=[1], stop_strings=["end"], temperature=0.7, top_p=0.9, top_k=3)
    sent = request_body(route, request, "toy", seeded=True)
    how = sent["sampling_params"] if route == GENERATE else sent
    assert sent["cache_salt"] == "run.4"
    assert (how["temperature"], how["top_p"], how["top_k"], how["min_p"]) == (0.7, 0.9, 3, 0.0)
    assert (how["repetition_penalty"], how["presence_penalty"], how["frequency_penalty"]) == (1.0, 0.0, 0.0)
    assert (how["stop"], how["stop_token_ids"], how["ignore_eos"]) == (["end"], [1], True)
    assert 0 <= how["seed"] < 2**63
    assert how["logprobs"] == 0


def test_detokenization_is_enabled_only_for_stop_strings() -> None:
    assert request_body(GENERATE, make_request(stop_strings=["x"]), "toy", seeded=False)["sampling_params"][
        "detokenize"
    ]
    plain = request_body(GENERATE, make_request(), "toy", seeded=False)["sampling_params"]
    assert not plain["detokenize"]
    assert plain["seed"] is None


def test_both_logprob_formats_are_parsed() -> None:
    completed = b'{"choices": [{"token_ids": [7, 8], "logprobs": {"token_logprobs": [-1.5, -2.5]}}]}'
    older = b'{"choices": [{"token_ids": [7], "logprobs": {"content": [{"token": "token_id:7", "logprob": -1.5}]}}]}'
    assert parse_chunk("here", completed, VERSION_OF) == Piece([7, 8], [-1.5, -2.5])
    assert parse_chunk("here", older, VERSION_OF) == Piece([7], [-1.5])
    assert parse_chunk("here", b'{"choices": [], "usage": {}}', VERSION_OF) is None


@pytest.mark.parametrize("logprob", ["-9999.0", "NaN", "null", "1e999", "3.5"])
def test_an_invalid_logprob_raises_server_faulty(logprob: str) -> None:
    text = f'{{"choices": [{{"token_ids": [7], "logprobs": {{"content": [{{"logprob": {logprob}}}]}}}}]}}'
    with pytest.raises(ServerFaulty):
        parse_chunk("here", text.encode(), VERSION_OF)


@pytest.mark.parametrize(("label", "version"), [("run.7", 7), ("other.7", STALE), ("7", STALE), ("default", STALE)])
def test_only_labels_of_this_run_are_read_as_versions(label: str, version: int) -> None:
    spans = [{"version": label, "start": 0, "end": 1}]
    choice = {"token_ids": [1], "logprobs": {"content": [{"logprob": -1}]}, "weight_versions": spans}
    piece = parse_chunk("here", msgspec.json.encode({"choices": [choice]}), VERSION_OF)
    assert piece is not None
    assert piece.spans == [(version, 0, 1)]


async def test_the_first_probe_uses_a_long_prompt_that_fits_the_context(fake: FakeServer, server: VllmServer) -> None:
    await server.probe(5)
    assert len(fake.received[-1]["token_ids"]) == 62  # of a context of 64


@pytest.mark.parametrize("value", ["NaN", "+Inf", "much"])
async def test_a_metric_that_is_not_a_number_raises_server_faulty(
    fake: FakeServer, server: VllmServer, value: str
) -> None:
    fake.metrics = f"vllm:num_requests_running {value}\n"
    with pytest.raises(ServerFaulty, match=re.escape(value)):
        await server.pressure()
