"""The server engine: requests and weight updates under all kinds of server faults."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from engines.server.fake_server import FakeServer, Fault, FaultKind
from engines.server.fake_transport import FakeTransport
from outpace.engines.fleet import EngineFleet
from outpace.engines.server.admission import ConcurrencyLimit
from outpace.engines.server.http import HttpClient
from outpace.engines.server.protocol import STALE, Piece, ServerRequest
from outpace.engines.server.server_engine import ServerEngine
from outpace.engines.server.state import ActiveRequest, HealthMachine, ServerEngineSettings
from outpace.engines.server.vllm import VllmServer
from outpace.errors import CorruptData, RequestFailed, ServerFaulty, UpdateFailed, UpdateTorn
from outpace.types import Generation, LoadPhases, Manifest, Sampling
from support import examples

pytestmark = pytest.mark.timeout(120)

PROMPT = np.arange(4, dtype=np.int32)
FAULTS: list[FaultKind] = ["500", "429", "malformed", "no_logprobs", "nan", "no_end", "error", "drop", "abort", "more"]


@dataclass
class EngineSetup:
    fake: FakeServer
    engine: ServerEngine
    transport: FakeTransport
    health: HealthMachine
    limit: ConcurrencyLimit

    async def generate(self, name: str = "r", max_tokens: int = 8, min_version: int = 0, **how: Any) -> Generation:
        pinned = how.pop("pinned", None)
        sampling = Sampling(max_tokens=max_tokens, seed=1, **how)
        return await self.engine.generate(name, PROMPT, sampling, min_version, pinned)

    async def load(self, version: int, pinned: bool = False) -> Any:
        return await self.engine.load(Manifest("run", version, "", []), pinned)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not true():  # noqa: ASYNC110 - state of the other side of a socket
                await asyncio.sleep(0.005)


@asynccontextmanager
async def engine_setup(
    fake: FakeServer | None = None, transport: FakeTransport | None = None, slots: int = 64, **given: Any
) -> AsyncIterator[EngineSetup]:
    fake, transport = fake or FakeServer(), transport or FakeTransport()
    chosen = {
        "slots": slots,
        "probe_s": 600.0,
        "idle_s": 30.0,
        "control_s": 5.0,
        "probe_deadline_s": 0.2,
        "context": 64,
        **given,
    }
    async with fake.serving():
        server = VllmServer(HttpClient(fake.url, retries=0), control_s=5, incarnation="run")
        engine = ServerEngine(server, transport, ServerEngineSettings("engine-0", "run", **chosen))
        await engine.start()
        try:
            yield EngineSetup(fake, engine, transport, engine._state.health, engine._state.limit)
        finally:
            await engine.close()


def is_whole(answer: Generation, count: int) -> bool:
    """Return whether the answer has every token from the first position on exactly once."""
    return (
        answer.tokens.tolist() == list(range(4, 4 + count))
        and len(answer.logprobs) == len(answer.versions) == count
        and bool(np.isfinite(answer.logprobs).all())
    )


# ------------------------------------------------------------------------------------------------------- requests


async def test_an_answer_has_tokens_logprobs_and_versions() -> None:
    async with engine_setup() as setup:
        answer = await setup.generate()
        assert is_whole(answer, 8)
        assert answer.versions.tolist() == [0] * 8
        assert answer.stop == "length"
        assert setup.fake.received[0]["cache_salt"] == "run.0"


@pytest.mark.parametrize("kind", FAULTS)
async def test_a_failed_request_is_lost_with_the_tokens_received_so_far(kind: FaultKind) -> None:
    async with engine_setup() as setup:
        setup.fake.fault = lambda: Fault(kind, after=3)
        answer = await setup.generate()
        assert answer.stop == "lost"
        assert is_whole(answer, 0 if kind in ("500", "429") else 3)
        assert len(setup.fake.received) == (kind not in ("500", "429"))
        assert (await setup.engine.stats()).retries == 1


@pytest.mark.parametrize("kind", ["400", "refusal"])
async def test_a_refused_request_fails_at_once(kind: FaultKind) -> None:
    async with engine_setup() as setup:
        received = 0

        def refuse() -> Fault:
            nonlocal received
            received += 1
            return Fault(kind)

        setup.fake.fault = refuse
        with pytest.raises(RequestFailed, match=r"\b400\b"):
            await setup.generate()
        assert received == 1
        assert setup.health.state == "healthy"


async def test_a_request_without_new_tokens_is_lost_after_the_idle_deadline() -> None:
    async with engine_setup(idle_s=0.1) as setup:
        setup.fake.fault = lambda: Fault("hang", after=3)
        answer = await setup.generate()
        assert answer.stop == "lost"
        assert is_whole(answer, 3)


async def test_the_idle_deadline_does_not_run_while_the_server_is_paused() -> None:
    transport = FakeTransport()
    async with engine_setup(FakeServer(delay_s=0.01), transport, idle_s=0.2) as setup:
        request = asyncio.create_task(setup.generate(max_tokens=50))
        await setup.until(lambda: bool(setup.fake.running))
        slow = transport.swap

        async def swap(ready: Any) -> None:
            await asyncio.sleep(0.5)
            await slow(ready)

        transport.swap = swap  # type: ignore[method-assign]
        await setup.load(1)
        assert is_whole(await request, 50)


async def test_the_idle_deadline_restarts_when_the_server_resumes() -> None:
    async with engine_setup(idle_s=0.3) as setup:
        setup.fake.fault = lambda: Fault("hang", after=3)
        request = asyncio.create_task(setup.generate())
        await _begun(setup)
        await setup.engine.stream_tokens("r", 2)
        began = asyncio.get_running_loop().time()
        with setup.engine._state.updating(paused=True):
            await asyncio.sleep(0.5)
        assert (await request).stop == "lost"
        assert asyncio.get_running_loop().time() - began >= 0.5 + 0.3


async def test_no_request_is_sent_while_the_server_is_paused() -> None:
    transport = FakeTransport()
    async with engine_setup(transport=transport) as setup:
        requests: list[asyncio.Task[Generation]] = []
        taken = transport.swap

        async def swap(ready: Any) -> None:
            requests.append(asyncio.create_task(setup.generate()))
            await asyncio.sleep(0.05)
            await taken(ready)

        transport.swap = swap  # type: ignore[method-assign]
        await setup.load(1)
        assert (await requests[0]).versions.tolist() == [1] * 8
        assert [received["cache_salt"] for received in setup.fake.received] == ["run.1"]


@pytest.mark.parametrize("by_name", [True, False])
async def test_an_abort_returns_the_partial_output(by_name: bool) -> None:
    routes = FakeServer().routes if by_name else ["/inference/v1/generate", "/pause"]
    async with engine_setup(FakeServer(delay_s=0.01, routes=routes)) as setup:
        request = asyncio.create_task(setup.generate(max_tokens=50))
        await setup.engine.stream_tokens("r", 2) if (await _begun(setup)) else None
        await setup.engine.abort(["r", "unknown"])
        answer = await request
        assert answer.stop == "aborted"
        assert 3 <= len(answer.tokens) < 50
        assert is_whole(answer, len(answer.tokens))


async def _begun(setup: EngineSetup) -> bool:
    await setup.until(lambda: bool(setup.fake.running))
    return True


async def test_the_connection_is_closed_when_a_server_ignores_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.engines.server.request._ABORT_S", 0.05)
    async with engine_setup(FakeServer(delay_s=0.01)) as setup:
        setup.fake.silent.add("/abort_requests")
        request = asyncio.create_task(setup.generate(max_tokens=50))
        await _begun(setup)
        await setup.engine.abort(["r"])
        assert (await request).stop == "aborted"
        await setup.until(lambda: not setup.fake.running)


async def test_aborting_a_request_without_tokens_closes_its_connection() -> None:
    async with engine_setup() as setup:
        setup.fake.fault = lambda: Fault("hang")
        request = asyncio.create_task(setup.generate())
        await _begun(setup)
        await setup.engine.abort(["r"])
        assert (await request).stop == "aborted"
        assert "/abort_requests" not in setup.fake.calls


async def test_a_torn_update_during_admission_makes_the_request_wait_again() -> None:
    async with engine_setup() as setup:
        request = asyncio.create_task(setup.generate(min_version=1))
        await asyncio.sleep(0)
        state = setup.engine._state
        state.loaded_versions.record_load(1)
        state.admission.wake()  # admits the request, but its task has not run yet
        state.torn("half-way")
        await asyncio.sleep(0.05)
        assert not request.done()
        assert not setup.fake.received
        await setup.load(2)
        assert (await request).versions.tolist() == [2] * 8


async def test_cancelling_the_caller_cancels_its_request() -> None:
    async with engine_setup(FakeServer(delay_s=0.01), slots=1) as setup:
        request = asyncio.create_task(setup.generate(max_tokens=50))
        await _begun(setup)
        await setup.engine.stream_tokens("r", 0)
        setup.fake.delay_s = 60.0
        request.cancel()
        await setup.until(lambda: not setup.fake.running)
        setup.fake.delay_s = 0.0
        assert is_whole(await setup.generate(), 8)  # and its slot is free


async def test_no_more_requests_than_the_limit_are_sent() -> None:
    async with engine_setup(FakeServer(delay_s=0.002), slots=2) as setup:
        most = 0

        def count() -> None:
            nonlocal most
            most = max(most, len(setup.fake.running))

        setup.fake.fault = lambda: count()  # type: ignore[func-returns-value]
        answers = await asyncio.gather(*(setup.generate(f"r{n}") for n in range(10)))
        assert all(is_whole(answer, 8) for answer in answers)
        assert most <= 2


# ---------------------------------------------------------------------------------------------------------- the fleet


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.engines.fleet.FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr("outpace.engines.fleet.MAX_BACKOFF_S", 0.02)
    monkeypatch.setattr("outpace.engines.server.server_engine._SUSPECT_PROBE_S", 0.001)


@pytest.mark.usefixtures("quick_retries")
@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.none(), st.tuples(st.sampled_from(FAULTS), st.integers(0, 9))), max_size=5))
async def test_no_token_is_missing_or_duplicated_under_any_faults(faults: list[Any]) -> None:
    async with engine_setup(probe_deadline_s=5.0) as setup:
        left = [None if fault is None else Fault(*fault) for fault in faults]
        setup.fake.fault = lambda: left.pop() if left else None
        fleet = EngineFleet({"engine-0": setup.engine})
        answer = await fleet.generate("0.0.0", PROMPT, Sampling(10, 1), 0, None)
        assert is_whole(answer, 10)
        assert answer.stop == "length"


@pytest.mark.usefixtures("quick_retries")
async def test_an_answer_that_lost_only_its_last_chunk_is_complete() -> None:
    async with engine_setup() as setup:
        setup.fake.fault = lambda: Fault("last_chunk", after=6)
        answer = await EngineFleet({"engine-0": setup.engine}).generate("0.0.0", PROMPT, Sampling(7, 1), 0, None)
        assert answer.stop == "length"
        assert is_whole(answer, 7)
        assert len(setup.fake.received) == 1


@pytest.mark.usefixtures("quick_retries")
async def test_with_five_percent_faults_no_request_is_lost() -> None:
    dice = random.Random(3)
    async with engine_setup(slots=16, probe_deadline_s=5.0) as setup:
        setup.fake.fault = lambda: Fault(dice.choice(FAULTS), dice.randrange(8)) if dice.random() < 0.05 else None
        fleet = EngineFleet({"engine-0": setup.engine})
        answers = await asyncio.gather(
            *(fleet.generate(f"{n}.0.0", PROMPT, Sampling(8, 1), 0, None) for n in range(200))
        )
        assert all(is_whole(answer, 8) and answer.stop == "length" for answer in answers)
        assert (await setup.engine.stats()).retries > 0


# -------------------------------------------------------------------------------------------------------- updates


async def test_a_weight_swap_during_a_sequence_is_recorded_in_its_versions() -> None:
    async with engine_setup(FakeServer(delay_s=0.01)) as setup:
        request = asyncio.create_task(setup.generate(max_tokens=30))
        await setup.until(lambda: bool(setup.fake.running))
        await setup.engine.stream_tokens("r", 3)
        report = await setup.load(1)
        answer = await request
        assert is_whole(answer, 30)
        assert set(answer.versions.tolist()) == {0, 1}
        assert sorted(answer.versions.tolist()) == answer.versions.tolist()
        assert report.version == 1
        assert report.bytes == 10
        assert 0 < report.pause_s <= report.seconds
        assert report.phases is not None
        assert min(report.phases.hold_s, report.phases.copy_s, report.phases.resume_s) > 0
        assert report.phases.pause_s == report.pause_s
        assert (await setup.generate()).versions.tolist() == [1] * 8
        assert setup.fake.received[-1]["cache_salt"] == "run.1"


async def test_a_server_that_pauses_by_itself_gets_requests_during_the_swap() -> None:
    transport = FakeTransport(needs_pause=False, phases=LoadPhases(hold_s=0.1, copy_s=0.2, resume_s=0.3))
    async with engine_setup(transport=transport) as setup:
        swapping, go_on, taken = asyncio.Event(), asyncio.Event(), transport.swap

        async def swap(ready: Any) -> LoadPhases | None:
            swapping.set()
            await go_on.wait()
            return await taken(ready)

        transport.swap = swap  # type: ignore[method-assign]
        update = asyncio.create_task(setup.load(1))
        await swapping.wait()
        assert (await setup.generate("during")).versions.tolist() == [0] * 8
        go_on.set()
        report = await update
        assert report.pause_s == pytest.approx(0.6)
        assert report.phases is not None
        assert (report.phases.hold_s, report.phases.copy_s, report.phases.resume_s) == (0.1, 0.2, 0.3)
        assert not {"/pause", "/resume"} & set(setup.fake.calls)
        transport.swap_fails = ServerFaulty("half-way")
        with pytest.raises(UpdateTorn, match="half-way"):
            await setup.load(2)
        assert setup.fake.calls[-1] == "/resume"  # it stays paused after a failure


async def test_an_answer_may_end_before_the_server_confirms_the_resume() -> None:
    async with engine_setup(FakeServer(delay_s=0.01, resume_s=3.0)) as setup:
        request = asyncio.create_task(setup.generate(max_tokens=30))
        await _begun(setup)
        await setup.engine.stream_tokens("r", 3)
        update = asyncio.create_task(setup.load(1))
        answer = await request
        assert not update.done()
        assert is_whole(answer, 30)
        assert set(answer.versions.tolist()) == {0, 1}
        await update


async def test_without_version_spans_tokens_have_the_version_of_their_request() -> None:
    fake = FakeServer(delay_s=0.01, routes=["/inference/v1/generate", "/pause"])
    async with engine_setup(fake) as setup:
        request = asyncio.create_task(setup.generate(max_tokens=30))
        await setup.until(lambda: bool(setup.fake.running))
        await setup.load(1)
        assert (await request).versions.tolist() == [0] * 30


async def test_a_stale_server_serves_nothing_before_its_first_load() -> None:
    async with engine_setup(version=STALE) as setup:
        request = asyncio.create_task(setup.generate())
        await asyncio.sleep(0.05)
        assert not request.done()
        assert not setup.fake.received
        assert (await setup.engine.stats()).health == "stale"
        await setup.load(7)
        assert (await request).versions.tolist() == [7] * 8


async def test_a_load_that_fails_before_the_swap_keeps_the_old_version() -> None:
    async with engine_setup() as setup:
        setup.transport.prepare_fails = CorruptData("a bit has flipped")
        with pytest.raises(CorruptData):
            await setup.load(1)
        setup.transport.prepare_fails = ServerFaulty("busy")
        with pytest.raises(UpdateFailed, match="busy") as failed:
            await setup.load(1)
        assert not isinstance(failed.value, UpdateTorn)
        assert (await setup.generate()).versions.tolist() == [0] * 8


async def test_a_server_that_fails_to_pause_is_resumed() -> None:
    async with engine_setup() as setup:
        setup.fake.failing.add("/pause")
        with pytest.raises(UpdateFailed) as failed:
            await setup.load(1)
        assert not isinstance(failed.value, UpdateTorn)
        assert setup.fake.calls[-1] == "/resume"
        assert is_whole(await setup.generate(), 8)


async def test_a_torn_update_ends_all_requests_and_serves_nothing_until_the_next_load() -> None:
    async with engine_setup(FakeServer(delay_s=0.01)) as setup:
        running = asyncio.create_task(setup.generate(max_tokens=50))
        waiting = asyncio.create_task(setup.generate("w", min_version=9))
        await setup.engine.stream_tokens("r", 2) if await _begun(setup) else None
        setup.transport.swap_fails = ServerFaulty("half-way")
        with pytest.raises(UpdateTorn, match="half-way"):
            await setup.load(1)
        lost = await running
        assert lost.stop == "lost"
        assert is_whole(lost, len(lost.tokens))
        assert lost.versions.tolist() == [0] * len(lost.tokens)
        assert (await waiting).stop == "lost"
        assert (await setup.engine.stats()).health == "stale"
        assert setup.fake.resumed.is_set()  # so that probes can check its health
        later = asyncio.create_task(setup.generate("later"))
        await asyncio.sleep(0.05)
        assert not later.done()
        setup.transport.swap_fails = None
        await setup.load(1)
        assert (await later).versions.tolist() == [1] * 8


@pytest.mark.parametrize("path", ["/update_weight_version", "/resume"])
async def test_a_failure_after_the_swap_also_tears_the_update(path: str) -> None:
    async with engine_setup() as setup:
        setup.fake.failing.add(path)
        with pytest.raises(UpdateTorn):
            await setup.load(1)
        assert setup.health.state == "stale"
        setup.fake.failing.clear()
        await setup.load(1)
        assert (await setup.generate()).versions.tolist() == [1] * 8


async def test_a_swap_that_never_ends_times_out() -> None:
    transport = FakeTransport(swapping=asyncio.Event())
    async with engine_setup(transport=transport, control_s=0.1) as setup:
        with pytest.raises(UpdateTorn, match=r"\b0\.1 s"):
            await setup.load(1)


async def test_an_update_continues_when_its_caller_is_cancelled() -> None:
    transport = FakeTransport()
    async with engine_setup(FakeServer(delay_s=0.01), transport) as setup:
        request = asyncio.create_task(setup.generate(max_tokens=30))
        await _begun(setup)
        swapping, go_on, taken = asyncio.Event(), asyncio.Event(), transport.swap

        async def swap(ready: Any) -> LoadPhases | None:
            swapping.set()
            await go_on.wait()
            return await taken(ready)

        transport.swap = swap  # type: ignore[method-assign]
        update = asyncio.create_task(setup.load(1))
        await swapping.wait()
        update.cancel()
        await asyncio.sleep(0.05)
        go_on.set()
        assert is_whole(await request, 30)
        assert (await setup.generate(min_version=1)).versions.tolist() == [1] * 8


async def test_closing_the_engine_during_an_update_resumes_the_server() -> None:
    transport = FakeTransport(swapping=asyncio.Event())
    async with engine_setup(transport=transport) as setup:
        update = asyncio.create_task(setup.load(1))
        assert transport.swapping is not None
        await transport.swapping.wait()
        assert not setup.fake.resumed.is_set()
        await setup.engine.close()
        assert setup.fake.resumed.is_set()
        with pytest.raises(UpdateTorn):
            await update


async def test_preemptions_caused_by_kv_recompute_do_not_lower_the_limit() -> None:
    async with engine_setup(FakeServer(delay_s=0.01), kv="recompute", slots=8, probe_s=0.02) as setup:
        requests = [asyncio.create_task(setup.generate(f"r{n}", max_tokens=60)) for n in range(4)]
        await setup.until(lambda: len(setup.fake.running) == 4)
        await setup.load(1)
        await asyncio.gather(*requests)
        assert setup.fake.preemptions >= 4
        assert setup.limit.value == 8


async def test_a_second_weight_set_is_refused_when_the_server_has_room_for_one() -> None:
    async with engine_setup() as setup:
        with pytest.raises(UpdateFailed, match="weight set"):
            await setup.load(1, pinned=True)
        with pytest.raises(RequestFailed, match="version 1"):
            await setup.generate(pinned=1)


async def test_foreign_weights_in_the_server_break_the_engine() -> None:
    async with engine_setup() as setup:
        await setup.load(1)
        setup.fake.version = "default"  # as after a restart
        answer = await setup.generate()
        assert answer.stop == "lost"
        assert len(answer.tokens) == 0
        async with asyncio.timeout(60):
            assert "weights" in str(await setup.engine.broken())


async def test_foreign_weights_discard_the_tokens_of_all_running_requests() -> None:
    async with engine_setup(FakeServer(delay_s=0.02)) as setup:
        await setup.load(1)
        setup.fake.version = "default"
        longer = asyncio.create_task(setup.generate("longer", max_tokens=50, min_version=1))
        await _begun(setup)
        await setup.engine.stream_tokens("longer", 2)
        assert (await setup.generate("shorter", max_tokens=3, min_version=1)).stop == "lost"
        lost = await longer
        assert lost.stop == "lost"
        assert len(lost.tokens) == 0


async def test_foreign_weights_discard_an_answer_that_is_complete_but_not_returned() -> None:
    request = ActiveRequest("a", trust_spans=True)
    reader = asyncio.create_task(asyncio.Event().wait())
    request.send(ServerRequest("a.1", PROMPT, Sampling(2, 1), "salt"), 1, reader)  # type: ignore[arg-type]
    request.take(Piece([4, 5], [-0.5, -0.5], stop="length"))
    request.discard()
    assert len(request.generation("lost").tokens) == 0
    assert request.stop is None
    assert request.end_reason == "lost"


async def test_weights_loaded_by_another_run_are_detected() -> None:
    async with engine_setup() as setup:
        await setup.load(1)
        theirs = VllmServer(HttpClient(setup.fake.url, retries=0), incarnation="another")
        await theirs.label(1)
        await theirs.close()
        answer = await setup.generate(min_version=1)
        assert answer.stop == "lost"
        assert len(answer.tokens) == 0
        assert setup.health.state == "dead"


# ------------------------------------------------------------------------------------------------------- adapters


async def test_running_requests_finish_under_their_own_adapter() -> None:
    transport = FakeTransport(needs_pause=False)
    async with engine_setup(FakeServer(delay_s=0.01), transport, pins=True) as setup:
        await setup.load(1)
        request = asyncio.create_task(setup.generate(max_tokens=30))
        await _begun(setup)
        report = await setup.load(2)
        assert report.pause_s == 0
        assert "/pause" not in setup.fake.calls
        assert transport.forgotten == []
        newer = await setup.generate("newer")
        assert newer.versions.tolist() == [2] * 8
        assert (await request).versions.tolist() == [1] * 30
        assert [received["model"] for received in setup.fake.received] == ["v1", "v2"]
        await setup.until(lambda: transport.forgotten == [1])


async def test_an_adapter_can_be_pinned_for_evaluation() -> None:
    transport = FakeTransport(needs_pause=False)
    async with engine_setup(transport=transport, pins=True) as setup:
        await setup.load(1)
        await setup.load(1, pinned=True)
        await setup.load(2)
        assert (await setup.generate(pinned=1)).versions.tolist() == [1] * 8
        assert transport.swapped == [1, 2]
        stats = await setup.engine.stats()
        assert stats.tokens == 0  # evaluation tokens do not count
        await setup.engine.release_pinned()
        await setup.until(lambda: transport.forgotten == [1])
        with pytest.raises(RequestFailed, match="version 1"):
            await setup.generate(pinned=1)


async def test_an_adapter_that_fails_to_load_leaves_the_old_one_in_place() -> None:
    transport = FakeTransport(needs_pause=False)
    async with engine_setup(transport=transport, pins=True) as setup:
        await setup.load(1)
        transport.swap_fails = ServerFaulty("no room")
        with pytest.raises(UpdateFailed) as failed:
            await setup.load(2)
        assert not isinstance(failed.value, UpdateTorn)
        assert (await setup.generate()).versions.tolist() == [1] * 8


async def test_a_server_that_lost_its_adapters_breaks_the_engine() -> None:
    async with engine_setup(transport=FakeTransport(needs_pause=False), pins=True) as setup:
        await setup.load(1)
        setup.fake.unknown.add("v1")
        assert (await setup.generate()).stop == "lost"
        async with asyncio.timeout(60):
            assert "weights" in str(await setup.engine.broken())


async def test_files_prepared_for_an_adapter_that_fails_to_load_are_removed() -> None:
    transport = FakeTransport(needs_pause=False, swap_fails=ServerFaulty("no room"))
    async with engine_setup(transport=transport, pins=True) as setup:
        with pytest.raises(UpdateFailed):
            await setup.load(1)
        await setup.until(lambda: transport.forgotten == [1])


async def test_closing_the_engine_closes_its_transport_and_leaves_the_server_running() -> None:
    async with engine_setup() as setup:
        await setup.engine.close()
        assert setup.transport.closed == [True]


# ---------------------------------------------------------------------------------------------------------- death


async def test_a_server_that_answers_no_probe_is_dead_and_its_requests_are_lost() -> None:
    async with engine_setup(FakeServer(delay_s=0.01), probe_s=0.02) as setup:
        running = asyncio.create_task(setup.generate(max_tokens=50))
        waiting = asyncio.create_task(setup.generate("w", min_version=1))
        await setup.engine.stream_tokens("r", 2) if await _begun(setup) else None
        setup.fake.resumed.clear()
        lost = await running
        assert lost.stop == "lost"
        assert is_whole(lost, len(lost.tokens))
        assert len(lost.tokens) >= 3
        assert (await waiting).stop == "lost"
        failure = await setup.engine.broken()
        assert re.search(r"\b3\b.*\bprobes\b", str(failure))
        assert (await setup.engine.stats()).health == "dead"
        assert (await setup.generate("new")).stop == "lost"
        with pytest.raises(UpdateFailed, match="dead"):
            await setup.load(1)


async def test_a_probe_queued_behind_progressing_requests_counts_as_passed() -> None:
    fake = FakeServer(delay_s=0.02, probes_wait=True)
    async with engine_setup(fake, probe_s=0.02, probe_deadline_s=0.1) as setup:
        assert is_whole(await setup.generate(max_tokens=50), 50)  # long enough for three failed probes
        async with asyncio.timeout(60):
            assert re.search(
                r"\b3\b.*\bprobes\b", str(await setup.engine.broken())
            )  # an idle server must answer probes


async def test_a_suspect_server_is_checked_for_a_restart_before_it_serves_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outpace.engines.server.server_engine._SUSPECT_PROBE_S", 0.01)
    monkeypatch.setattr("outpace.engines.server.server_engine._METRICS_S", 600.0)
    routes = ["/inference/v1/generate", "/pause", "/abort_requests"]  # the server reports no versions
    async with engine_setup(FakeServer(routes=routes)) as setup:
        await setup.until(lambda: "/metrics" in setup.fake.calls)
        await setup.load(1)
        setup.fake.fault = lambda: Fault("500")
        setup.fake.began = 2.0  # it was restarted with its initial weights
        for name in "abc":
            assert (await setup.generate(name)).stop == "lost"
        setup.fake.fault = lambda: None
        answer = await setup.generate("later", min_version=1)
        assert answer.stop == "lost"
        assert len(answer.tokens) == 0
        assert "restarted" in setup.health.why


async def test_invalid_metrics_do_not_stop_the_metrics_loop() -> None:
    async with engine_setup(FakeServer(metrics='vllm:num_requests_running{e="0"} NaN\n'), probe_s=0.02) as setup:
        await setup.until(lambda: setup.fake.calls.count("/metrics") >= 3)


async def test_a_passed_probe_clears_the_suspicion_caused_by_failed_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.engines.server.server_engine._SUSPECT_PROBE_S", 0.01)
    async with engine_setup() as setup:
        setup.fake.fault = lambda: Fault("500")
        for name in "abc":
            assert (await setup.generate(name)).stop == "lost"
        setup.fake.fault = lambda: None
        assert is_whole(await setup.generate(), 8)  # after a passed probe, long before the next regular probe


async def test_no_probes_are_sent_while_the_server_is_paused() -> None:
    transport = FakeTransport()
    async with engine_setup(transport=transport, probe_s=0.01, probe_deadline_s=0.02) as setup:
        slow = transport.swap

        async def swap(ready: Any) -> None:
            await asyncio.sleep(0.3)
            await slow(ready)

        transport.swap = swap  # type: ignore[method-assign]
        await setup.load(1)
        assert is_whole(await setup.generate(), 8)


async def test_a_server_that_was_restarted_externally_breaks_the_engine() -> None:
    async with engine_setup(probe_s=0.02) as setup:
        await setup.until(lambda: setup.fake.calls.count("/metrics") >= 2)
        setup.fake.began = 2.0
        assert "restarted" in str(await setup.engine.broken())


async def test_the_exit_of_the_server_process_breaks_the_engine() -> None:
    @dataclass
    class Ended:
        over: asyncio.Event = field(default_factory=asyncio.Event)
        stopped: bool = False

        async def ended(self) -> str:
            await self.over.wait()
            return "killed by SIGKILL"

        async def stop(self) -> None:
            self.stopped = True

        def log_tail(self, lines: int = 30) -> str:
            return "the last line"

        def cpu_s(self) -> float:
            return 1.0

    fake, process, transport = FakeServer(delay_s=0.01), Ended(), FakeTransport()
    async with fake.serving():
        chosen = ServerEngineSettings("engine-0", "run", probe_s=600.0)
        server = VllmServer(HttpClient(fake.url, retries=0))
        engine = ServerEngine(server, transport, chosen, process)
        await engine.start()
        request = asyncio.create_task(engine.generate("r", PROMPT, Sampling(50, 1), 0, None))
        await asyncio.sleep(0.1)
        process.over.set()
        assert (await request).stop == "lost"
        failure = await engine.broken()
        assert "killed by SIGKILL" in str(failure)
        assert "the last line" in failure.remote_traceback
        assert process.stopped
        await engine.close()
        assert transport.closed == [False]


async def test_a_server_found_paused_at_startup_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.engines.server.launch.LEFT_PAUSED_S", 0.0)
    fake = FakeServer()
    async with fake.serving():
        fake.resumed.clear()
        server = VllmServer(HttpClient(fake.url, retries=0))
        engine = ServerEngine(server, FakeTransport(), ServerEngineSettings("engine-0", "run"))
        await engine.start()
        assert is_whole(await engine.generate("r", PROMPT, Sampling(8, 1), 0, None), 8)
        await engine.close()


async def test_a_draining_engine_finishes_its_requests_and_accepts_no_new_ones() -> None:
    async with engine_setup(FakeServer(delay_s=0.01)) as setup:
        request = asyncio.create_task(setup.generate(max_tokens=20))
        await _begun(setup)
        await setup.engine.drain()
        assert (await setup.generate("new")).stop == "lost"
        assert is_whole(await request, 20)
