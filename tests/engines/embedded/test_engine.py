"""The public interface of the embedded engine: an asyncio object over one compute thread."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engines_support import engine_of
from outpace.engines.embedded.engine import EmbeddedEngine
from outpace.engines.embedded.requests import FinishedRequest
from outpace.errors import ComponentFailed, CorruptData, RequestFailed
from outpace.protocols import Engine
from outpace.runtime.rpc import Channel, close_proxy, proxy, serve_calls
from outpace.types import Generation, Manifest, Sampling

Models = Callable[..., PreTrainedModel]
Prompts = Callable[..., list[np.ndarray]]
Logprobs = Callable[..., np.ndarray]


async def generate(
    engine: EmbeddedEngine, name: str, prompt: np.ndarray, tokens: int = 8, pinned: int | None = None
) -> Generation:
    return await engine.generate(name, prompt, Sampling(max_tokens=tokens, seed=3), 0, pinned)


def flip_one_bit(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 0x10
    file.write_bytes(data)


async def until_running(engine: EmbeddedEngine, steps: int = 1) -> None:
    while (await engine.stats()).steps < steps:  # noqa: ASYNC110 - the compute thread sets no asyncio event
        await asyncio.sleep(0)


async def test_many_concurrent_requests_all_complete(
    model_of: Models, prompts: Prompts, forced_logprobs: Logprobs
) -> None:
    model = model_of("llama")
    given = prompts(*range(1, 21))
    async with engine_of(model) as engine:
        finished = await asyncio.gather(*(generate(engine, str(i), p, 3 + i) for i, p in enumerate(given)))
        stats = await engine.stats()
    for index, (prompt, generation) in enumerate(zip(given, finished, strict=True)):
        assert len(generation.tokens) == 3 + index
        np.testing.assert_allclose(generation.logprobs, forced_logprobs(model, prompt, generation.tokens), atol=1e-4)
    assert stats.tokens == sum(3 + index for index in range(20))
    assert (stats.running, stats.waiting, stats.version, stats.slots, stats.threads) == (0, 0, 0, 4, 1)
    assert stats.busy_s > 0
    assert stats.eval_busy_s == 0


async def test_a_corrupt_snapshot_leaves_the_current_version_loaded(
    model_of: Models, prompts: Prompts, publish: Callable[..., Manifest], forced_logprobs: Logprobs
) -> None:
    model = model_of("llama")
    manifest = publish(model_of("llama", seed=1), 1)
    flip_one_bit(Path(manifest.path), manifest.tensors[3].offset + 5)
    (prompt,) = prompts(5)
    async with engine_of(model) as engine:
        with pytest.raises(CorruptData):
            await engine.load(manifest, pinned=False)
        generation = await generate(engine, "x", prompt)
    assert set(generation.versions.tolist()) == {0}
    np.testing.assert_allclose(generation.logprobs, forced_logprobs(model, prompt, generation.tokens), atol=1e-4)


async def test_a_pinned_version_is_served_alongside_the_newest_one(
    model_of: Models, prompts: Prompts, publish: Callable[..., Manifest], forced_logprobs: Logprobs
) -> None:
    main, pinned = model_of("llama"), model_of("llama", seed=1)
    first, second = prompts(5, 6)
    async with engine_of(main) as engine:
        await engine.load(publish(pinned, 3), pinned=True)
        ours, theirs = await asyncio.gather(
            generate(engine, "a", first, 30), generate(engine, "b", second, 30, pinned=3)
        )
        stats = await engine.stats()
    assert set(ours.versions.tolist()) == {0}
    assert set(theirs.versions.tolist()) == {3}
    np.testing.assert_allclose(ours.logprobs, forced_logprobs(main, first, ours.tokens), atol=1e-4)
    np.testing.assert_allclose(theirs.logprobs, forced_logprobs(pinned, second, theirs.tokens), atol=1e-4)
    assert stats.version == 0
    assert stats.eval_busy_s > 0


async def test_a_pinned_version_with_fewer_slots_serves_requests_in_turn(
    model_of: Models, prompts: Prompts, publish: Callable[..., Manifest], forced_logprobs: Logprobs
) -> None:
    model = model_of("llama", seed=1)
    given = prompts(5, 6, 7)
    async with engine_of(model_of("llama"), pinned_slots=1) as engine:
        await engine.load(publish(model, 3), pinned=True)
        answers = await asyncio.gather(
            *(generate(engine, str(index), prompt, 9, pinned=3) for index, prompt in enumerate(given))
        )
    for prompt, answer in zip(given, answers, strict=True):
        np.testing.assert_allclose(answer.logprobs, forced_logprobs(model, prompt, answer.tokens), atol=1e-4)


async def test_replacing_the_pinned_version_fails_the_requests_of_the_old_one(
    model_of: Models, prompts: Prompts, publish: Callable[..., Manifest]
) -> None:
    model = model_of("llama")
    async with engine_of(model, slots=1) as engine:
        await engine.load(publish(model, 1), pinned=True)
        requests = [asyncio.create_task(generate(engine, str(i), prompts(5)[0], 90, pinned=1)) for i in range(30)]
        await asyncio.sleep(0)
        await engine.load(publish(model, 2), pinned=True)
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert isinstance(results[-1], RequestFailed)
        assert set((await generate(engine, "new", prompts(5)[0], pinned=2)).versions.tolist()) == {2}


async def test_abort_returns_the_partial_output(model_of: Models, prompts: Prompts) -> None:
    async with engine_of(model_of("llama"), slots=1) as engine:
        requests = [asyncio.create_task(generate(engine, str(i), prompts(5)[0], 91)) for i in range(3)]
        await until_running(engine, 3)
        await engine.abort(["0", "2"])
        first, second, third = await asyncio.gather(*requests)
    assert (first.stop, second.stop, third.stop) == ("aborted", "length", "aborted")
    assert 0 < len(first.tokens) < 91
    assert len(third.tokens) == 0


async def test_reusing_the_id_of_a_cancelled_request_returns_the_new_answer(
    model_of: Models, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_of(model_of("llama")) as engine:
        turn, may_turn = engine._main.advance, threading.Semaphore(0)

        def advance() -> list[FinishedRequest]:
            may_turn.acquire()
            return turn()

        monkeypatch.setattr(engine._main, "advance", advance)
        given_up = asyncio.create_task(generate(engine, "x", prompts(5)[0], 50))
        may_turn.release(2)
        await until_running(engine, 2)
        given_up.cancel()  # during a decode step, so its result arrives after the id is reused
        await asyncio.gather(given_up, return_exceptions=True)
        again = asyncio.create_task(generate(engine, "x", prompts(5)[0], 6))
        await asyncio.sleep(0)
        may_turn.release(100)
        answer = await again
        assert (answer.stop, len(answer.tokens)) == ("length", 6)
        assert (await engine.stats()).running == 0


async def test_an_abort_ends_the_newest_request_with_its_id(model_of: Models, prompts: Prompts) -> None:
    async with engine_of(model_of("llama")) as engine:
        for _ in range(2):
            request = asyncio.create_task(generate(engine, "x", prompts(5)[0], 85))
            await asyncio.sleep(0)
            await engine.abort(["x", "unknown"])
            assert (await request).stop == "aborted"


async def test_a_compute_thread_failure_fails_all_pending_and_later_calls(
    model_of: Models, prompts: Prompts, publish: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama")
    async with engine_of(model) as engine:

        def broken(*_: object) -> torch.Tensor:
            raise MemoryError("no room for the logits")

        monkeypatch.setattr(engine._main.decoder, "step", broken)
        results = await asyncio.gather(
            generate(engine, "a", prompts(5)[0]), generate(engine, "b", prompts(5)[0]), return_exceptions=True
        )
        assert all(isinstance(result, ComponentFailed) for result in results)
        assert "no room for the logits" in results[0].remote_traceback  # type: ignore[union-attr]
        for later in (
            engine.stats(),
            engine.abort(["a"]),
            engine.release_pinned(),
            generate(engine, "c", prompts(5)[0]),
        ):
            with pytest.raises(ComponentFailed, match="no room for the logits"):
                await later
        with pytest.raises(ComponentFailed):
            await engine.load(publish(model, 1), pinned=False)


async def test_a_load_fails_when_the_compute_thread_fails_during_it(
    model_of: Models, publish: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama")
    async with engine_of(model) as engine:

        def broken(*_: object) -> float:
            raise MemoryError("no room for the second cache")

        monkeypatch.setattr(engine._weight_sets, "swap_pinned", broken)
        with pytest.raises(ComponentFailed, match="no room for the second cache"):
            await asyncio.wait_for(engine.load(publish(model, 1), pinned=True), timeout=20)


async def test_a_cancelled_control_call_does_not_break_the_engine(model_of: Models, prompts: Prompts) -> None:
    async with engine_of(model_of("llama")) as engine:
        busy, given_up = threading.Event(), threading.Event()

        def hold() -> None:
            busy.set()
            given_up.wait()

        engine._post(hold)
        await asyncio.to_thread(busy.wait)
        release = asyncio.create_task(engine.release_pinned())
        await asyncio.sleep(0)
        release.cancel()
        with pytest.raises(asyncio.CancelledError):
            await release
        given_up.set()
        assert len((await generate(engine, "x", prompts(5)[0])).tokens) == 8


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (Sampling(max_tokens=4, seed=0, stop_strings=["x", ""]), "stop string"),
        (Sampling(max_tokens=4, seed=0, stop_strings=["\ud800"]), "UnicodeEncodeError"),
        (Sampling(max_tokens=4, seed=0, top_k=2**70), "OverflowError"),
        (Sampling(max_tokens=4, seed=0, stop_ids=[[1]]), "TypeError"),  # type: ignore[list-item]
    ],
)
async def test_a_request_that_cannot_be_admitted_does_not_affect_other_requests(
    sampling: Sampling, reason: str, model_of: Models, prompts: Prompts
) -> None:
    async with engine_of(model_of("llama"), slots=1) as engine:
        engine._main._decode = lambda tokens: "." * len(tokens)
        other = asyncio.create_task(generate(engine, "other", prompts(5)[0], 40))
        with pytest.raises(RequestFailed, match=reason):
            await engine.generate("bad", prompts(5)[0], sampling, 0, None)
        assert len((await other).tokens) == 40
        stats = await engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)


async def test_closing_the_engine_fails_pending_requests_and_ends_the_compute_thread(
    model_of: Models, prompts: Prompts
) -> None:
    engine = EmbeddedEngine(model_of("llama"), slots=1, threads=1)
    requests = [asyncio.create_task(generate(engine, str(i), prompts(5)[0], 91)) for i in range(20)]
    await asyncio.sleep(0)
    await engine.close()
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert isinstance(results[-1], RequestFailed)
    assert not any(thread.name == "outpace-engine" and thread.is_alive() for thread in threading.enumerate())
    with pytest.raises(RequestFailed, match="closed"):
        await generate(engine, "late", prompts(5)[0])


async def test_an_idle_engine_uses_no_cpu(model_of: Models, prompts: Prompts) -> None:
    async with engine_of(model_of("llama")) as engine:
        await generate(engine, "x", prompts(5)[0])
        waiting = asyncio.create_task(engine.generate("later", prompts(5)[0], Sampling(max_tokens=1, seed=0), 9, None))
        turns = 0
        take_turn = engine._take_turn

        def counted() -> bool:
            nonlocal turns
            turns += 1
            return take_turn()

        engine._take_turn = counted  # type: ignore[method-assign]
        await asyncio.sleep(0.2)
        assert turns <= 2  # a request that waits for newer weights causes no decode steps
        await engine.abort(["later"])
        assert (await waiting).stop == "aborted"


async def test_streams_end_when_the_engine_fails(
    model_of: Models, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_of(model_of("llama")) as engine:
        waits = asyncio.create_task(engine.generate("later", prompts(5)[0], Sampling(max_tokens=1, seed=0), 9, None))
        await asyncio.sleep(0)
        stream = asyncio.create_task(engine.stream_tokens("later", 0))
        await asyncio.sleep(0)

        def broken(*_: object) -> torch.Tensor:
            raise MemoryError("no room for the logits")

        monkeypatch.setattr(engine._main.decoder, "step", broken)
        results = await asyncio.gather(waits, generate(engine, "x", prompts(5)[0]), return_exceptions=True)
        assert all(isinstance(result, ComponentFailed) for result in results)
        assert len(await stream) == 0
        with pytest.raises(ComponentFailed):
            await engine.stream_tokens("x", 0)


async def test_tokens_can_be_streamed_over_an_rpc_channel(model_of: Models, prompts: Prompts) -> None:
    ours, theirs = socket.socketpair()
    near = Channel(*await asyncio.open_connection(sock=ours))
    far = Channel(*await asyncio.open_connection(sock=theirs))
    async with engine_of(model_of("llama")) as engine:
        server = asyncio.create_task(serve_calls(engine, Engine, far))
        remote = proxy(Engine, near, "engine-0")
        request = asyncio.create_task(remote.generate("x", prompts(5)[0], Sampling(max_tokens=85, seed=3), 0, None))
        await asyncio.sleep(0)
        seen = (await remote.stream_tokens("x", 0)).tolist()
        assert seen
        assert seen == (await request).tokens.tolist()[: len(seen)]
        close_proxy(remote)
        await server
        far.close()
