"""What every engine guarantees to its callers: the embedded engine, and server engines with vLLM and SGLang.

The servers speak the real protocols but compute nothing; with the marker `vllm` there is also a real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.implementations import LOADED, Subject, embedded, real_vllm, sglang_protocol, vllm_protocol
from outpace.errors import ContextFull, OutpaceError, RequestFailed
from outpace.types import Generation, Ints, Sampling

pytestmark = pytest.mark.timeout(120)

SLOTS = 2
NAME = "1.0.0"
REAL = pytest.param("real vLLM", marks=[pytest.mark.vllm, pytest.mark.xdist_group("one server")])
PROTOCOLS = {"embedded": embedded, "vLLM protocol": vllm_protocol, "SGLang protocol": sglang_protocol}


@pytest.fixture(params=[*PROTOCOLS, REAL])
async def subject(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    make = PROTOCOLS.get(request.param)
    opened = make(tmp_path, slots=SLOTS) if make else real_vllm(tmp_path, request.getfixturevalue("vllm"), SLOTS)
    async with opened as subject:
        yield subject


@pytest.fixture(params=list(PROTOCOLS))
async def pinning(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    """An engine that has pinned the version it started with."""
    async with PROTOCOLS[request.param](tmp_path, pins=True, slots=SLOTS) as subject:
        yield subject


async def generate(
    subject: Subject, tokens: int = 8, min_version: int = 0, pinned: int | None = None, name: str = NAME, **how: Any
) -> Generation:
    return await subject.engine.generate(name, subject.prompt, Sampling(tokens, 1, **how), min_version, pinned)


async def start(subject: Subject, *args: Any, **options: Any) -> asyncio.Task[Generation]:
    """Start a request; it is in flight afterwards."""
    request = asyncio.create_task(generate(subject, *args, **options))
    await asyncio.sleep(0)
    return request


async def reads(subject: Subject) -> list[Ints]:
    """Read the stream of a request to its end."""
    found: list[Ints] = []
    while len(new := await subject.engine.stream_tokens(NAME, sum(map(len, found)))):
        found.append(new)
    return found


# ------------------------------------------------------------------------------------------------------------ answers


async def test_every_token_of_an_answer_has_a_logprob_and_a_version(subject: Subject) -> None:
    answer = await generate(subject)
    assert (len(answer.tokens), answer.stop) == (8, "length")
    assert answer.versions.tolist() == [LOADED] * 8
    assert len(answer.logprobs) == 8
    assert (np.isfinite(answer.logprobs) & (answer.logprobs <= 0)).all()


async def test_a_stop_token_ends_an_answer_and_is_part_of_it(subject: Subject) -> None:
    free = (await generate(subject, temperature=0.0)).tokens.tolist()
    stopped = await generate(subject, temperature=0.0, stop_ids=[free[2]])
    assert stopped.tokens.tolist() == free[: free.index(free[2]) + 1]
    assert stopped.stop == "stop"


async def test_an_answer_ends_at_the_context_and_a_prompt_that_fills_it_is_refused(subject: Subject) -> None:
    answer = await generate(subject, 10_000)
    assert (len(answer.tokens), answer.stop) == (subject.long, "length")
    with pytest.raises(ContextFull):
        await subject.engine.generate(NAME, np.ones(subject.context, dtype=np.int32), Sampling(1, 1), 0, None)


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"stop_strings": ["x", ""]}])
async def test_a_request_that_makes_no_sense_is_refused(subject: Subject, wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestFailed):
        await generate(subject, **wrong)


async def test_an_empty_prompt_is_refused(subject: Subject) -> None:
    with pytest.raises(RequestFailed):
        await subject.engine.generate(NAME, np.zeros(0, dtype=np.int32), Sampling(4, 1), 0, None)


async def test_a_request_id_cannot_be_in_flight_twice(subject: Subject) -> None:
    first = await start(subject, min_version=LOADED + 1)
    with pytest.raises(RequestFailed, match=NAME):
        await generate(subject)
    await subject.engine.abort([NAME])
    assert (await first).stop == "aborted"


async def test_more_requests_than_slots_all_complete(subject: Subject) -> None:
    answers = await asyncio.gather(*(generate(subject, 5, name=f"{number}.0.0") for number in range(10)))
    assert [len(answer.tokens) for answer in answers] == [5] * 10
    stats = await subject.engine.stats()
    assert (stats.tokens, stats.running, stats.waiting) == (50, 0, 0)


async def test_a_closed_engine_refuses_requests(subject: Subject) -> None:
    await subject.engine.close()
    with pytest.raises(RequestFailed):
        await generate(subject)


# ----------------------------------------------------------------------------------------------------- abort and stream


async def test_an_abort_returns_the_tokens_so_far(subject: Subject) -> None:
    for _ in range(10):  # on a busy machine a request may be complete before the abort
        request = await start(subject, subject.long)
        seen = await subject.engine.stream_tokens(NAME, 0)
        await subject.engine.abort([NAME, "unknown"])
        answer = await request
        if answer.stop == "aborted":
            break
    assert answer.stop == "aborted"
    assert answer.tokens[: len(seen)].tolist() == seen.tolist()
    assert 0 < len(answer.tokens) == len(answer.logprobs) == len(answer.versions) < subject.long


async def test_a_waiting_request_can_be_aborted_and_its_stream_ends(subject: Subject) -> None:
    request = await start(subject, min_version=LOADED + 1)
    stream = asyncio.create_task(subject.engine.stream_tokens(NAME, 0))
    await asyncio.sleep(0)
    await subject.engine.abort([NAME])
    answer = await request
    assert (answer.stop, len(answer.tokens)) == ("aborted", 0)
    assert len(await stream) == 0


async def test_cancelled_requests_free_their_slots_and_ids(subject: Subject) -> None:
    requests = [await start(subject, subject.long, name=name) for name in (NAME, "2.0.0")]
    await subject.engine.stream_tokens(NAME, 0)
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    assert len((await generate(subject)).tokens) == 8


async def test_tokens_are_streamed_as_they_are_sampled(subject: Subject) -> None:
    gradual = False
    for _ in range(5):  # on a busy machine a request may be complete before its first tokens are read
        request = await start(subject, subject.long)
        found, again = await asyncio.gather(reads(subject), reads(subject))
        expected = (await request).tokens.tolist()
        assert np.concatenate(found).tolist() == np.concatenate(again).tolist() == expected
        gradual = len(found) > 1
        if gradual:
            break
    assert gradual


async def test_tokens_of_a_pinned_request_are_streamed(pinning: Subject) -> None:
    request = await start(pinning, pinning.long, pinned=LOADED)
    found = await reads(pinning)
    answer = await request
    assert np.concatenate(found).tolist() == answer.tokens.tolist()
    assert answer.versions.tolist() == [LOADED] * pinning.long


async def test_a_request_that_is_not_in_flight_has_no_stream(subject: Subject) -> None:
    assert len(await subject.engine.stream_tokens("unknown", 0)) == 0
    await generate(subject)
    assert len(await subject.engine.stream_tokens(NAME, 0)) == 0


# ------------------------------------------------------------------------------------------------------------ versions


async def test_a_request_waits_for_its_min_version(subject: Subject) -> None:
    request = await start(subject, min_version=LOADED + 1)
    await generate(subject, name="2.0.0")
    assert not request.done()
    await subject.engine.load(subject.publish(LOADED + 1), pinned=False)
    assert (await request).versions.tolist() == [LOADED + 1] * 8


async def test_a_load_during_an_answer_is_recorded_in_its_versions(subject: Subject) -> None:
    for version in range(LOADED + 1, LOADED + 7):  # on a busy machine an answer may be complete before the load
        manifest = subject.publish(version)
        request = await start(subject, subject.long)
        await subject.engine.stream_tokens(NAME, 0)
        report = await subject.engine.load(manifest, pinned=False)
        assert report.version == version
        assert 0 < report.pause_s <= report.seconds
        answer = await request
        assert len(answer.tokens) == subject.long
        assert (np.diff(answer.versions) >= 0).all()
        mixed = set(answer.versions.tolist()) == {version - 1, version}
        if mixed:
            break
    assert mixed
    assert (await generate(subject)).versions.tolist() == [version] * 8


async def test_loading_an_older_version_is_refused(subject: Subject) -> None:
    older, newer = subject.publish(LOADED + 1), subject.publish(LOADED + 2)
    await subject.engine.load(newer, pinned=False)
    with pytest.raises(OutpaceError, match=rf"\b{LOADED + 1}\b"):
        await subject.engine.load(older, pinned=False)
    assert (await generate(subject)).versions.tolist() == [LOADED + 2] * 8


async def test_a_pinned_version_is_served_beside_the_newest_until_it_is_released(pinning: Subject) -> None:
    await pinning.engine.load(pinning.publish(LOADED + 1), pinned=False)
    old, new = await asyncio.gather(generate(pinning, pinned=LOADED), generate(pinning, name="2.0.0"))
    assert (old.versions.tolist(), new.versions.tolist()) == ([LOADED] * 8, [LOADED + 1] * 8)
    await pinning.engine.release_pinned()
    with pytest.raises(RequestFailed, match=rf"version {LOADED}\b"):
        await generate(pinning, pinned=LOADED)


async def test_a_request_pinned_to_a_version_that_is_not_pinned_fails_at_once(subject: Subject) -> None:
    with pytest.raises(RequestFailed, match=rf"version {LOADED}\b"):
        await generate(subject, pinned=LOADED)
