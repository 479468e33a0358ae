"""The door before a server: what becomes of requests and updates, whatever the server does."""

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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.server.fake_server import FakeServer, Fault, Trouble
from outpace.engines.server import http as http_module
from outpace.engines.server.admission import ConcurrencyLimit
from outpace.engines.server.http import HttpClient
from outpace.engines.server.protocol import STALE, Piece, ServerRequest
from outpace.engines.server.server_engine import ServerEngine, ServerEngineSettings
from outpace.engines.server.state import HealthMachine, RequestSegment
from outpace.engines.server.vllm import VllmServer
from outpace.errors import ContextFull, CorruptData, RequestFailed, ServerFaulty, UpdateFailed, UpdateTorn
from outpace.types import Generation, Manifest, Sampling

pytestmark = pytest.mark.timeout(120)

PROMPT = np.arange(4, dtype=np.int32)
FAULTS: list[Trouble] = ["500", "429", "malformed", "no_logprobs", "nan", "no_end", "error", "drop", "abort", "more"]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "_BACKOFF_S", 0.001)


@dataclass(frozen=True)
class Weights:
    version: int
    nbytes: int = 10


@dataclass(frozen=True)
class AdapterWeights(Weights):
    adapter: str = "a name"


@dataclass
class FakeTransport:
    needs_pause: bool = True
    prepare_fails: Exception | None = None
    swap_fails: Exception | None = None
    swapping: asyncio.Event | None = None  # set while it goes on, which then is for ever
    swapped: list[int] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    closed: list[bool] = field(default_factory=list)  # with whether the server stays

    async def prepare(self, manifest: Manifest) -> Weights:
        if self.prepare_fails is not None:
            raise self.prepare_fails
        version = manifest.version
        return Weights(version) if self.needs_pause else AdapterWeights(version, adapter=f"v{version}")

    async def swap(self, ready: Any) -> None:
        if self.swapping is not None:
            self.swapping.set()
            await asyncio.Event().wait()
        if self.swap_fails is not None:
            raise self.swap_fails
        self.swapped.append(ready.version)

    async def forget(self, version: int) -> None:
        self.forgotten.append(version)

    async def close(self, server_stays: bool) -> None:
        self.closed.append(server_stays)


@dataclass
class Scene:
    fake: FakeServer
    door: ServerEngine
    transport: FakeTransport
    health: HealthMachine
    limit: ConcurrencyLimit

    async def ask(self, name: str = "r", max_tokens: int = 8, min_version: int = 0, **how: Any) -> Generation:
        pinned = how.pop("pinned", None)
        sampling = Sampling(max_tokens=max_tokens, seed=1, **how)
        return await self.door.generate(name, PROMPT, sampling, min_version, pinned)

    async def load(self, version: int, pinned: bool = False) -> Any:
        return await self.door.load(Manifest("run", version, "", []), pinned)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not true():  # noqa: ASYNC110 - of the other side of a socket
                await asyncio.sleep(0.005)


@asynccontextmanager
async def a_scene(
    fake: FakeServer | None = None, transport: FakeTransport | None = None, slots: int = 64, **given: Any
) -> AsyncIterator[Scene]:
    fake, transport = fake or FakeServer(), transport or FakeTransport()
    health, limit = HealthMachine(), ConcurrencyLimit(slots)
    chosen = {"probe_s": 600.0, "idle_s": 30.0, "control_s": 5.0, "probe_deadline_s": 0.2, "context": 64, **given}
    async with fake.serving():
        server = VllmServer(HttpClient(fake.url, retries=0), control_s=5, incarnation="run")
        door = ServerEngine(server, transport, health, limit, ServerEngineSettings("engine-0", "run", **chosen))
        await door.start()
        try:
            yield Scene(fake, door, transport, health, limit)
        finally:
            await door.close()


def is_whole(answer: Generation, count: int) -> bool:
    """Every token from the first position on, once."""
    return (
        answer.tokens.tolist() == list(range(4, 4 + count))
        and len(answer.logprobs) == len(answer.versions) == count
        and bool(np.isfinite(answer.logprobs).all())
    )


# ------------------------------------------------------------------------------------------------------- requests


async def test_an_answer_has_tokens_logprobs_and_versions() -> None:
    async with a_scene() as scene:
        answer = await scene.ask()
        assert is_whole(answer, 8)
        assert answer.versions.tolist() == [0] * 8
        assert answer.stop == "length"
        assert scene.fake.asked[0]["cache_salt"] == "run.0"


@pytest.mark.parametrize("trouble", FAULTS)
async def test_a_request_that_fails_once_goes_on_from_what_it_has(trouble: Trouble) -> None:
    async with a_scene() as scene:
        faults = [Fault(trouble, after=3)]
        scene.fake.fault = lambda: faults.pop() if faults else None
        answer = await scene.ask()
        assert is_whole(answer, 8)
        assert answer.stop == "length"
        assert (await scene.door.stats()).retries == 1
        began = scene.fake.asked[-1]
        left = began["sampling_params"]["max_tokens"]
        assert len(began["token_ids"]) + left == len(PROMPT) + 8


async def test_retries_have_an_end_and_what_there_is_is_answered_as_lost() -> None:
    async with a_scene(retries=2) as scene:
        scene.fake.fault = lambda: Fault("drop", after=2)
        answer = await scene.ask(max_tokens=20)
        assert answer.stop == "lost"
        assert is_whole(answer, 6)


async def test_zero_retries_are_legal() -> None:
    async with a_scene(retries=0) as scene:
        scene.fake.fault = lambda: Fault("drop", after=2)
        answer = await scene.ask()
        assert answer.stop == "lost"
        assert is_whole(answer, 2)


async def test_an_answer_that_lost_only_its_last_word_is_whole() -> None:
    async with a_scene(retries=0) as scene:
        scene.fake.fault = lambda: Fault("last_word", after=6)
        answer = await scene.ask(max_tokens=7)
        assert answer.stop == "length"
        assert is_whole(answer, 7)


async def test_with_stop_strings_the_rest_is_left_to_whoever_can_decode() -> None:
    async with a_scene(retries=2) as scene:
        scene.fake.fault = lambda: Fault("drop", after=2)
        answer = await scene.ask(stop_strings=["x"])
        assert answer.stop == "lost"
        assert is_whole(answer, 2)


@pytest.mark.parametrize("trouble", ["400", "refusal"])
async def test_a_refused_request_fails_at_once(trouble: Trouble) -> None:
    async with a_scene() as scene:
        asked = 0

        def refuse() -> Fault:
            nonlocal asked
            asked += 1
            return Fault(trouble)

        scene.fake.fault = refuse
        with pytest.raises(RequestFailed, match=r"\b400\b"):
            await scene.ask()
        assert asked == 1
        assert scene.health.state == "healthy"


async def test_a_silent_request_is_lost_after_its_deadline() -> None:
    async with a_scene(retries=0, idle_s=0.1) as scene:
        scene.fake.fault = lambda: Fault("hang", after=3)
        answer = await scene.ask()
        assert answer.stop == "lost"
        assert is_whole(answer, 3)


async def test_the_deadline_does_not_run_while_we_hold_the_server_still() -> None:
    transport = FakeTransport()
    async with a_scene(FakeServer(delay_s=0.01), transport, retries=0, idle_s=0.2) as scene:
        request = asyncio.create_task(scene.ask(max_tokens=50))
        await scene.until(lambda: bool(scene.fake.running))
        slow = transport.swap

        async def swap(ready: Any) -> None:
            await asyncio.sleep(0.5)
            await slow(ready)

        transport.swap = swap  # type: ignore[method-assign]
        await scene.load(1)
        assert is_whole(await request, 50)


async def test_the_deadline_begins_anew_when_the_server_goes_on() -> None:
    async with a_scene(retries=0, idle_s=0.3) as scene:
        scene.fake.fault = lambda: Fault("hang", after=3)
        request = asyncio.create_task(scene.ask())
        await _begun(scene)
        await scene.door.stream_tokens("r", 2)
        began = asyncio.get_running_loop().time()
        with scene.door._state.pausing():
            await asyncio.sleep(0.5)
        assert (await request).stop == "lost"
        assert asyncio.get_running_loop().time() - began >= 0.5 + 0.3


async def test_nothing_is_sent_while_we_hold_the_server_still() -> None:
    transport = FakeTransport()
    async with a_scene(transport=transport) as scene:
        requests: list[asyncio.Task[Generation]] = []
        taken = transport.swap

        async def swap(ready: Any) -> None:
            requests.append(asyncio.create_task(scene.ask()))
            await asyncio.sleep(0.05)
            await taken(ready)

        transport.swap = swap  # type: ignore[method-assign]
        await scene.load(1)
        assert (await requests[0]).versions.tolist() == [1] * 8
        assert [asked["cache_salt"] for asked in scene.fake.asked] == ["run.1"]


async def test_nothing_outgrows_the_context() -> None:
    async with a_scene() as scene:
        answer = await scene.ask(max_tokens=1000)
        assert len(answer.tokens) == 60
        assert answer.stop == "length"
        with pytest.raises(ContextFull):
            await scene.door.generate("x", np.zeros(64, dtype=np.int32), Sampling(1, 1), 0, None)


async def test_the_same_id_is_not_under_way_twice() -> None:
    async with a_scene(FakeServer(delay_s=0.01)) as scene:
        first = asyncio.create_task(scene.ask())
        await scene.until(lambda: bool(scene.fake.running))
        with pytest.raises(RequestFailed, match=r"\br\b"):
            await scene.ask()
        assert is_whole(await first, 8)


@pytest.mark.parametrize("by_name", [True, False])
async def test_an_abort_answers_with_what_there_is(by_name: bool) -> None:
    routes = FakeServer().routes if by_name else ["/inference/v1/generate", "/pause"]
    async with a_scene(FakeServer(delay_s=0.01, routes=routes)) as scene:
        request = asyncio.create_task(scene.ask(max_tokens=50))
        await scene.door.stream_tokens("r", 2) if (await _begun(scene)) else None
        await scene.door.abort(["r", "nobody"])
        answer = await request
        assert answer.stop == "aborted"
        assert 3 <= len(answer.tokens) < 50
        assert is_whole(answer, len(answer.tokens))


async def _begun(scene: Scene) -> bool:
    await scene.until(lambda: bool(scene.fake.running))
    return True


async def test_a_server_that_ignores_an_abort_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.engines.server.request._ABORT_S", 0.05)
    async with a_scene(FakeServer(delay_s=0.01)) as scene:
        scene.fake.silent.add("/abort_requests")
        request = asyncio.create_task(scene.ask(max_tokens=50))
        await _begun(scene)
        await scene.door.abort(["r"])
        assert (await request).stop == "aborted"
        await scene.until(lambda: not scene.fake.running)


async def test_a_request_that_waits_can_be_aborted() -> None:
    async with a_scene() as scene:
        request = asyncio.create_task(scene.ask(min_version=5))
        await asyncio.sleep(0)
        await scene.door.abort(["r"])
        assert (await request).stop == "aborted"


async def test_a_request_without_a_token_yet_is_hung_up_on() -> None:
    async with a_scene() as scene:
        scene.fake.fault = lambda: Fault("hang")
        request = asyncio.create_task(scene.ask())
        await _begun(scene)
        await scene.door.abort(["r"])
        assert (await request).stop == "aborted"
        assert "/abort_requests" not in scene.fake.calls


async def test_an_update_that_overtakes_a_request_in_the_moment_of_entering_goes_first() -> None:
    async with a_scene() as scene:
        request = asyncio.create_task(scene.ask(min_version=1))
        await asyncio.sleep(0)
        desk = scene.door._state
        desk.loaded_versions.record_load(1)
        desk.admission.wake()  # lets it in, but it has not run yet
        desk.torn("half-way")
        await asyncio.sleep(0.05)
        assert not request.done()
        assert not scene.fake.asked
        await scene.load(2)
        assert (await request).versions.tolist() == [2] * 8


async def test_a_caller_that_goes_away_takes_its_request_along() -> None:
    async with a_scene(FakeServer(delay_s=0.01), slots=1) as scene:
        request = asyncio.create_task(scene.ask(max_tokens=50))
        await _begun(scene)
        await scene.door.stream_tokens("r", 0)
        scene.fake.delay_s = 60.0
        request.cancel()
        await scene.until(lambda: not scene.fake.running)
        scene.fake.delay_s = 0.0
        assert is_whole(await scene.ask(), 8)  # and its place is free


async def test_peek_shows_tokens_as_they_come_over_all_parts() -> None:
    async with a_scene(FakeServer(delay_s=0.01)) as scene:
        faults = [Fault("drop", after=3)]
        scene.fake.fault = lambda: faults.pop() if faults else None
        request = asyncio.create_task(scene.ask(max_tokens=20))
        await asyncio.sleep(0)
        seen: list[int] = []
        while len(found := await scene.door.stream_tokens("r", len(seen))):
            seen += found.tolist()
        assert seen == list(range(4, 4 + len(seen)))
        assert len(seen) > 3
        assert is_whole(await request, 20)
        assert len(await scene.door.stream_tokens("r", 0)) == 0


async def test_no_more_than_the_limit_are_sent() -> None:
    async with a_scene(FakeServer(delay_s=0.002), slots=2) as scene:
        most = 0

        def count() -> None:
            nonlocal most
            most = max(most, len(scene.fake.running))

        scene.fake.fault = lambda: count()  # type: ignore[func-returns-value]
        answers = await asyncio.gather(*(scene.ask(f"r{n}") for n in range(10)))
        assert all(is_whole(answer, 8) for answer in answers)
        assert most <= 2


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(st.none(), st.tuples(st.sampled_from(FAULTS), st.integers(0, 9))), max_size=5),
    st.integers(0, 3),
)
async def test_whatever_fails_no_token_is_missing_or_comes_twice(faults: list[Any], retries: int) -> None:
    async with a_scene(retries=retries) as scene:
        left = [None if fault is None else Fault(*fault) for fault in faults]
        scene.fake.fault = lambda: left.pop() if left else None
        answer = await scene.ask(max_tokens=10)
        assert is_whole(answer, len(answer.tokens))
        assert answer.stop == ("length" if len(answer.tokens) == 10 else "lost")


async def test_one_failure_in_twenty_costs_hardly_anybody_an_answer() -> None:
    """Several at the same moment bring the server into doubt: those are for another engine to go on with."""
    dice = random.Random(3)
    async with a_scene(retries=4, slots=16, probe_s=0.05, probe_deadline_s=5.0) as scene:
        scene.fake.fault = lambda: Fault(dice.choice(FAULTS), dice.randrange(8)) if dice.random() < 0.05 else None
        answers = await asyncio.gather(*(scene.ask(f"r{n}") for n in range(200)))
        assert all(is_whole(answer, len(answer.tokens)) for answer in answers)
        assert sum(answer.stop == "lost" for answer in answers) < 20
        assert (await scene.door.stats()).retries > 0


# -------------------------------------------------------------------------------------------------------- updates


async def test_a_swap_in_mid_sequence_shows_in_the_versions() -> None:
    async with a_scene(FakeServer(delay_s=0.01)) as scene:
        request = asyncio.create_task(scene.ask(max_tokens=30))
        await scene.until(lambda: bool(scene.fake.running))
        await scene.door.stream_tokens("r", 3)
        report = await scene.load(1)
        answer = await request
        assert is_whole(answer, 30)
        assert set(answer.versions.tolist()) == {0, 1}
        assert sorted(answer.versions.tolist()) == answer.versions.tolist()
        assert report.version == 1
        assert report.bytes == 10
        assert 0 < report.pause_s <= report.seconds
        assert (await scene.ask()).versions.tolist() == [1] * 8
        assert scene.fake.asked[-1]["cache_salt"] == "run.1"


async def test_an_answer_may_end_before_the_server_says_that_it_goes_on() -> None:
    async with a_scene(FakeServer(delay_s=0.01, resume_s=3.0)) as scene:
        request = asyncio.create_task(scene.ask(max_tokens=30))
        await _begun(scene)
        await scene.door.stream_tokens("r", 3)
        update = asyncio.create_task(scene.load(1))
        answer = await request
        assert not update.done()
        assert is_whole(answer, 30)
        assert set(answer.versions.tolist()) == {0, 1}
        await update


async def test_without_the_servers_account_a_token_is_as_old_as_its_request() -> None:
    fake = FakeServer(delay_s=0.01, routes=["/inference/v1/generate", "/pause"])
    async with a_scene(fake) as scene:
        request = asyncio.create_task(scene.ask(max_tokens=30))
        await scene.until(lambda: bool(scene.fake.running))
        await scene.load(1)
        assert (await request).versions.tolist() == [0] * 30


async def test_requests_wait_for_the_version_they_need() -> None:
    async with a_scene() as scene:
        request = asyncio.create_task(scene.ask(min_version=2))
        await scene.load(1)
        assert not request.done()
        await scene.load(2)
        assert (await request).versions.tolist() == [2] * 8


async def test_a_stale_server_serves_nothing_before_its_first_load() -> None:
    async with a_scene(version=STALE) as scene:
        request = asyncio.create_task(scene.ask())
        await asyncio.sleep(0.05)
        assert not request.done()
        assert not scene.fake.asked
        assert (await scene.door.stats()).health == "stale"
        await scene.load(7)
        assert (await request).versions.tolist() == [7] * 8


async def test_weights_that_fail_before_the_swap_leave_the_old_version() -> None:
    async with a_scene() as scene:
        scene.transport.prepare_fails = CorruptData("a bit has flipped")
        with pytest.raises(CorruptData):
            await scene.load(1)
        scene.transport.prepare_fails = ServerFaulty("busy")
        with pytest.raises(UpdateFailed, match="busy") as failed:
            await scene.load(1)
        assert not isinstance(failed.value, UpdateTorn)
        assert (await scene.ask()).versions.tolist() == [0] * 8


async def test_a_server_that_does_not_pause_goes_on() -> None:
    async with a_scene() as scene:
        scene.fake.failing.add("/pause")
        with pytest.raises(UpdateFailed) as failed:
            await scene.load(1)
        assert not isinstance(failed.value, UpdateTorn)
        assert scene.fake.calls[-1] == "/resume"
        assert is_whole(await scene.ask(), 8)


async def test_a_torn_update_ends_what_runs_and_serves_nothing_until_the_next() -> None:
    async with a_scene(FakeServer(delay_s=0.01)) as scene:
        running = asyncio.create_task(scene.ask(max_tokens=50))
        waiting = asyncio.create_task(scene.ask("w", min_version=9))
        await scene.door.stream_tokens("r", 2) if await _begun(scene) else None
        scene.transport.swap_fails = ServerFaulty("half-way")
        with pytest.raises(UpdateTorn, match="half-way"):
            await scene.load(1)
        lost = await running
        assert lost.stop == "lost"
        assert is_whole(lost, len(lost.tokens))
        assert lost.versions.tolist() == [0] * len(lost.tokens)
        assert (await waiting).stop == "lost"
        assert (await scene.door.stats()).health == "stale"
        assert scene.fake.goes_on.is_set()  # so that probes can tell how it is
        later = asyncio.create_task(scene.ask("later"))
        await asyncio.sleep(0.05)
        assert not later.done()
        scene.transport.swap_fails = None
        await scene.load(1)
        assert (await later).versions.tolist() == [1] * 8


@pytest.mark.parametrize("path", ["/update_weight_version", "/resume"])
async def test_a_failure_behind_the_swap_tears_it_too(path: str) -> None:
    async with a_scene() as scene:
        scene.fake.failing.add(path)
        with pytest.raises(UpdateTorn):
            await scene.load(1)
        assert scene.health.state == "stale"
        scene.fake.failing.clear()
        await scene.load(1)
        assert (await scene.ask()).versions.tolist() == [1] * 8


async def test_a_swap_that_never_ends_is_given_up() -> None:
    transport = FakeTransport(swapping=asyncio.Event())
    async with a_scene(transport=transport, control_s=0.1) as scene:
        with pytest.raises(UpdateTorn, match=r"\b0\.1 s"):
            await scene.load(1)


async def test_an_update_outlives_whoever_waits_for_it() -> None:
    transport = FakeTransport()
    async with a_scene(FakeServer(delay_s=0.01), transport) as scene:
        request = asyncio.create_task(scene.ask(max_tokens=30))
        await _begun(scene)
        swapping, go_on, taken = asyncio.Event(), asyncio.Event(), transport.swap

        async def swap(ready: Any) -> None:
            swapping.set()
            await go_on.wait()
            await taken(ready)

        transport.swap = swap  # type: ignore[method-assign]
        update = asyncio.create_task(scene.load(1))
        await swapping.wait()
        update.cancel()
        await asyncio.sleep(0.05)
        go_on.set()
        assert is_whole(await request, 30)
        assert (await scene.ask(min_version=1)).versions.tolist() == [1] * 8


async def test_a_door_that_is_closed_in_mid_update_lets_the_server_go_on() -> None:
    transport = FakeTransport(swapping=asyncio.Event())
    async with a_scene(transport=transport) as scene:
        update = asyncio.create_task(scene.load(1))
        assert transport.swapping is not None
        await transport.swapping.wait()
        assert not scene.fake.goes_on.is_set()
        await scene.door.close()
        assert scene.fake.goes_on.is_set()
        with pytest.raises(UpdateTorn):
            await update


async def test_versions_never_go_back() -> None:
    async with a_scene() as scene:
        await scene.load(3)
        with pytest.raises(UpdateFailed, match="version 2"):
            await scene.load(2)
        await scene.load(3)
        assert (await scene.ask()).versions.tolist() == [3] * 8


async def test_recomputing_is_no_sign_of_pressure() -> None:
    async with a_scene(FakeServer(delay_s=0.01), kv="recompute", slots=8, probe_s=0.02) as scene:
        requests = [asyncio.create_task(scene.ask(f"r{n}", max_tokens=60)) for n in range(4)]
        await scene.until(lambda: len(scene.fake.running) == 4)
        await scene.load(1)
        await asyncio.gather(*requests)
        assert scene.fake.preemptions >= 4
        assert scene.limit.value == 8


async def test_a_second_weight_set_is_refused_where_there_is_room_for_one() -> None:
    async with a_scene(pins=True) as scene:
        with pytest.raises(UpdateFailed, match="weight set"):
            await scene.load(1, pinned=True)
        with pytest.raises(RequestFailed, match="version 1"):
            await scene.ask(pinned=1)


async def test_a_door_that_finds_other_weights_in_its_server_ends_so_that_another_is_loaded() -> None:
    async with a_scene() as scene:
        await scene.load(1)
        scene.fake.version = "default"  # as after a restart
        answer = await scene.ask()
        assert answer.stop == "lost"
        assert len(answer.tokens) == 0
        async with asyncio.timeout(60):
            assert "weights" in str(await scene.door.broken())


async def test_what_other_weights_have_sampled_for_others_is_thrown_away_too() -> None:
    async with a_scene(FakeServer(delay_s=0.02)) as scene:
        await scene.load(1)
        scene.fake.version = "default"
        longer = asyncio.create_task(scene.ask("longer", max_tokens=50, min_version=1))
        await _begun(scene)
        await scene.door.stream_tokens("longer", 2)
        assert (await scene.ask("shorter", max_tokens=3, min_version=1)).stop == "lost"
        lost = await longer
        assert lost.stop == "lost"
        assert len(lost.tokens) == 0


async def test_a_whole_answer_of_other_weights_that_nobody_has_taken_yet_is_thrown_away() -> None:
    part = RequestSegment(ServerRequest("a", PROMPT, Sampling(2, 1), "salt"), 1, spans=True)
    part.take(Piece([4, 5], [-0.5, -0.5], stop="length"))
    part.discard()
    assert part.generation().stop == "lost"
    assert len(part.generation().tokens) == 0
    assert part.end_reason == "lost"


async def test_two_runs_at_one_server_are_told_apart() -> None:
    async with a_scene() as scene:
        await scene.load(1)
        theirs = VllmServer(HttpClient(scene.fake.url, retries=0), incarnation="another")
        await theirs.label(1)
        await theirs.close()
        answer = await scene.ask(min_version=1)
        assert answer.stop == "lost"
        assert len(answer.tokens) == 0
        assert scene.health.state == "dead"


# ------------------------------------------------------------------------------------------------------- adapters


async def test_running_requests_finish_under_their_own_adapter() -> None:
    transport = FakeTransport(needs_pause=False)
    async with a_scene(FakeServer(delay_s=0.01), transport, pins=True) as scene:
        await scene.load(1)
        request = asyncio.create_task(scene.ask(max_tokens=30))
        await _begun(scene)
        report = await scene.load(2)
        assert report.pause_s == 0
        assert "/pause" not in scene.fake.calls
        assert transport.forgotten == []
        newer = await scene.ask("newer")
        assert newer.versions.tolist() == [2] * 8
        assert (await request).versions.tolist() == [1] * 30
        assert [asked["model"] for asked in scene.fake.asked] == ["v1", "v2"]
        await scene.until(lambda: transport.forgotten == [1])


async def test_an_adapter_is_pinned_for_evaluation() -> None:
    transport = FakeTransport(needs_pause=False)
    async with a_scene(transport=transport, pins=True) as scene:
        await scene.load(1)
        await scene.load(1, pinned=True)
        await scene.load(2)
        assert (await scene.ask(pinned=1)).versions.tolist() == [1] * 8
        assert transport.swapped == [1, 2]
        stats = await scene.door.stats()
        assert stats.tokens == 0  # evaluations do not count
        await scene.door.release_pinned()
        await scene.until(lambda: transport.forgotten == [1])
        with pytest.raises(RequestFailed, match="version 1"):
            await scene.ask(pinned=1)


async def test_an_adapter_that_is_not_taken_leaves_the_old_one() -> None:
    transport = FakeTransport(needs_pause=False)
    async with a_scene(transport=transport) as scene:
        await scene.load(1)
        transport.swap_fails = ServerFaulty("no room")
        with pytest.raises(UpdateFailed) as failed:
            await scene.load(2)
        assert not isinstance(failed.value, UpdateTorn)
        assert (await scene.ask()).versions.tolist() == [1] * 8


async def test_a_server_that_has_lost_its_adapters_is_not_ours_any_more() -> None:
    async with a_scene(transport=FakeTransport(needs_pause=False)) as scene:
        await scene.load(1)
        scene.fake.unknown.add("v1")
        assert (await scene.ask()).stop == "lost"
        async with asyncio.timeout(60):
            assert "weights" in str(await scene.door.broken())


async def test_what_was_prepared_for_an_adapter_that_is_not_taken_is_forgotten() -> None:
    transport = FakeTransport(needs_pause=False, swap_fails=ServerFaulty("no room"))
    async with a_scene(transport=transport) as scene:
        with pytest.raises(UpdateFailed):
            await scene.load(1)
        await scene.until(lambda: transport.forgotten == [1])


async def test_a_door_that_is_closed_closes_its_transport_and_says_that_the_server_stays() -> None:
    async with a_scene() as scene:
        await scene.door.close()
        assert scene.transport.closed == [True]


# ---------------------------------------------------------------------------------------------------------- death


async def test_a_server_that_answers_no_probe_is_dead_and_its_requests_are_lost() -> None:
    async with a_scene(FakeServer(delay_s=0.01), probe_s=0.02) as scene:
        running = asyncio.create_task(scene.ask(max_tokens=50))
        waiting = asyncio.create_task(scene.ask("w", min_version=1))
        await scene.door.stream_tokens("r", 2) if await _begun(scene) else None
        scene.fake.goes_on.clear()
        lost = await running
        assert lost.stop == "lost"
        assert is_whole(lost, len(lost.tokens))
        assert len(lost.tokens) >= 3
        assert (await waiting).stop == "lost"
        failure = await scene.door.broken()
        assert re.search(r"\b3\b.*\bprobes\b", str(failure))
        assert (await scene.door.stats()).health == "dead"
        assert (await scene.ask("new")).stop == "lost"
        with pytest.raises(UpdateFailed, match="dead"):
            await scene.load(1)


async def test_a_probe_that_waits_behind_requests_that_get_tokens_has_passed() -> None:
    fake = FakeServer(delay_s=0.02, probes_wait=True)
    async with a_scene(fake, probe_s=0.02, probe_deadline_s=0.1) as scene:
        assert is_whole(await scene.ask(max_tokens=50), 50)  # long enough for three probes that fail
        async with asyncio.timeout(60):
            assert re.search(r"\b3\b.*\bprobes\b", str(await scene.door.broken()))  # idle, it has no excuse


async def test_a_doubted_server_is_looked_at_before_it_is_trusted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.engines.server.health._SUSPECT_PROBE_S", 0.01)
    monkeypatch.setattr("outpace.engines.server.health._METRICS_S", 600.0)
    routes = ["/inference/v1/generate", "/pause", "/abort_requests"]  # it accounts for no versions
    async with a_scene(FakeServer(routes=routes), retries=0) as scene:
        await scene.until(lambda: "/metrics" in scene.fake.calls)
        await scene.load(1)
        scene.fake.fault = lambda: Fault("500")
        scene.fake.began = 2.0  # it was restarted, with the weights of its first start
        for name in "abc":
            assert (await scene.ask(name)).stop == "lost"
        scene.fake.fault = lambda: None
        answer = await scene.ask("later", min_version=1)
        assert answer.stop == "lost"
        assert len(answer.tokens) == 0
        assert "restarted" in scene.health.why


async def test_a_look_that_makes_no_sense_is_not_the_last() -> None:
    async with a_scene(FakeServer(metrics='vllm:num_requests_running{e="0"} NaN\n'), probe_s=0.02) as scene:
        await scene.until(lambda: scene.fake.calls.count("/metrics") >= 3)


async def test_requests_that_fail_are_for_a_probe_to_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.engines.server.health._SUSPECT_PROBE_S", 0.01)
    async with a_scene(retries=0) as scene:
        scene.fake.fault = lambda: Fault("500")
        for name in "abc":
            assert (await scene.ask(name)).stop == "lost"
        scene.fake.fault = lambda: None
        assert is_whole(await scene.ask(), 8)  # once a probe has passed, and long before the next one was due


async def test_probes_rest_while_we_hold_the_server_still() -> None:
    transport = FakeTransport()
    async with a_scene(transport=transport, probe_s=0.01, probe_deadline_s=0.02) as scene:
        slow = transport.swap

        async def swap(ready: Any) -> None:
            await asyncio.sleep(0.3)
            await slow(ready)

        transport.swap = swap  # type: ignore[method-assign]
        await scene.load(1)
        assert is_whole(await scene.ask(), 8)


async def test_a_server_that_was_restarted_by_somebody_is_not_ours() -> None:
    async with a_scene(probe_s=0.02) as scene:
        await scene.until(lambda: scene.fake.calls.count("/metrics") >= 2)
        scene.fake.began = 2.0
        assert "restarted" in str(await scene.door.broken())


async def test_the_end_of_its_process_is_the_end_of_the_server() -> None:
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
        door = ServerEngine(server, transport, HealthMachine(), ConcurrencyLimit(4), chosen, process)
        await door.start()
        request = asyncio.create_task(door.generate("r", PROMPT, Sampling(50, 1), 0, None))
        await asyncio.sleep(0.1)
        process.over.set()
        assert (await request).stop == "lost"
        failure = await door.broken()
        assert "killed by SIGKILL" in str(failure)
        assert "the last line" in failure.remote_traceback
        assert process.stopped
        await door.close()
        assert transport.closed == [False]


async def test_a_server_that_is_found_paused_is_let_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.engines.server.launch.LEFT_PAUSED_S", 0.0)
    fake = FakeServer()
    async with fake.serving():
        fake.goes_on.clear()
        server = VllmServer(HttpClient(fake.url, retries=0))
        door = ServerEngine(
            server, FakeTransport(), HealthMachine(), ConcurrencyLimit(4), ServerEngineSettings("engine-0", "run")
        )
        await door.start()
        assert is_whole(await door.generate("r", PROMPT, Sampling(8, 1), 0, None), 8)
        await door.close()


async def test_a_draining_door_finishes_what_it_has_and_takes_nothing_more() -> None:
    async with a_scene(FakeServer(delay_s=0.01)) as scene:
        request = asyncio.create_task(scene.ask(max_tokens=20))
        await _begun(scene)
        await scene.door.drain()
        assert (await scene.ask("new")).stop == "lost"
        assert is_whole(await request, 20)
