"""The engine fleet completes every request while any engine can serve it, whatever happens to single engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_support import FakeEngine, answer_to, logprobs_of
from outpace.engines import fleet as module
from outpace.engines.fleet import FIRST_BACKOFF_S, MAX_BACKOFF_S, MAX_MOVES, EngineFleet
from outpace.errors import ComponentFailed, ComponentLost, ContextFull, EngineClosed, RequestFailed
from outpace.protocols import Engine
from outpace.runtime.async_tools import backoff_s
from outpace.types import FleetMember, Generation, Sampling, StopReason

pytestmark = pytest.mark.timeout(120)

PROMPT = np.array([5, 6, 7], dtype=np.int32)
LENGTH = 10
LOST = ComponentLost("a", "closed its connection")


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.0)


def submit(
    fleet: EngineFleet, request_id: str = "0.0.0", min_version: int = 0, max_tokens: int = LENGTH, **changes: object
) -> asyncio.Task[Generation]:
    sampling = Sampling(max_tokens, 1, **changes)  # type: ignore[arg-type]
    return asyncio.create_task(fleet.generate(request_id, PROMPT, sampling, min_version, None))


def is_complete(generation: Generation, length: int = LENGTH, stop: StopReason = "length") -> bool:
    """Return whether the generation equals that of a single engine."""
    tokens = answer_to(PROMPT, length)
    return (generation.tokens.tolist(), generation.logprobs.tolist(), generation.stop) == (
        tokens,
        logprobs_of(tokens),
        stop,
    )


def other(engine: FakeEngine, pair: Iterable[FakeEngine]) -> FakeEngine:
    return next(one for one in pair if one is not engine)


async def holder(*engines: FakeEngine, request_id: str = "0.0.0") -> FakeEngine:
    """Return the engine that received the request."""
    while True:
        for engine in engines:
            if request_id in engine.received:
                return engine
        await asyncio.sleep(0)


def two_engines() -> tuple[FakeEngine, FakeEngine, EngineFleet]:
    one, another = FakeEngine(version=1), FakeEngine(version=2)
    return one, another, EngineFleet({"a": one, "b": another})


async def test_the_answer_of_an_engine_is_returned_unchanged() -> None:
    engine = FakeEngine()
    assert is_complete(await submit(EngineFleet({"a": engine})))
    assert engine.samplings == [Sampling(LENGTH, 1)]


async def test_partial_output_is_continued_on_another_engine() -> None:
    one, another, fleet = two_engines()
    one.answers_immediately = another.answers_immediately = False
    answer = submit(fleet)
    first = await holder(one, another)
    first.end("0.0.0", 4, "lost")
    second = other(first, (one, another))
    await second.wait_for("0.0.0")
    second.end("0.0.0", LENGTH - 4, "length")
    made = await answer
    assert is_complete(made)
    assert made.versions.tolist() == [first.version] * 4 + [second.version] * 6
    assert second.samplings[0].max_tokens == LENGTH - 4
    assert second.samplings[0].seed != first.samplings[0].seed


async def test_requests_of_an_engine_that_dies_move_to_another_engine() -> None:
    one, another, fleet = two_engines()
    one.answers_immediately = another.answers_immediately = False
    answers = [submit(fleet, f"{group}.0.0") for group in range(6)]
    await asyncio.sleep(0.01)
    assert one.received
    assert another.received
    another.answers_immediately = True
    one.die()
    for request_id in list(another._ends):
        another.end(request_id, LENGTH, "length")
    assert all(is_complete(made) for made in await asyncio.gather(*answers))
    assert set(another.received) == {f"{group}.0.0" for group in range(6)}


async def test_a_request_lost_by_the_only_engine_is_retried_unchanged() -> None:
    engine = FakeEngine()
    engine.faults = [LOST, LOST]
    assert is_complete(await submit(EngineFleet({"a": engine})))
    assert engine.samplings == [Sampling(LENGTH, 1)] * 3, "no token was sampled yet: the seed is the same"


@given(st.lists(st.integers(-1, 3), max_size=MAX_MOVES))
def test_an_answer_does_not_depend_on_how_often_it_was_lost(lost: list[int]) -> None:
    async def run() -> None:
        one, another, fleet = two_engines()
        faults: list[Exception | tuple[int, StopReason]] = [LOST if n < 0 else (n, "lost") for n in lost]
        one.faults = another.faults = faults  # shared: either engine takes the next fault
        made = await submit(fleet)
        assert len(made.tokens) == LENGTH
        assert is_complete(made)

    total = 0
    kept = [n for n in lost if (total := total + max(n, 0)) < LENGTH]
    lost[:] = kept
    asyncio.run(run())


@pytest.mark.parametrize("fault", [LOST, (0, "lost")])
async def test_a_request_survives_eight_failures_and_the_ninth_fails_it_with_the_causes(
    fault: ComponentLost | tuple[int, StopReason],
) -> None:
    one, another, fleet = two_engines()
    one.faults = another.faults = [fault] * 8
    assert is_complete(await submit(fleet))
    one.faults = another.faults = [fault] * 9
    with pytest.raises(RequestFailed, match=r"\b9\b.*\b[ab]: "):
        await submit(fleet)
    assert not one.faults


async def test_an_engine_that_loses_a_request_is_not_retried_before_its_backoff(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 1e6)
    monkeypatch.setattr(module, "MAX_BACKOFF_S", 1e6)
    losing, joining = FakeEngine(), FakeEngine()
    losing.faults = [(2, "lost")]
    fleet = EngineFleet({"a": losing, "b": joining})
    resting = [FleetMember("a", "", True), FleetMember("b", "", serves=False)]
    await fleet.update(resting)
    answer = submit(fleet)
    await holder(losing)
    for _ in range(10):
        await fleet.update(resting)
        await asyncio.sleep(0)
    assert losing.received == ["0.0.0"]
    await fleet.update([FleetMember("a", "", True), FleetMember("b", "", True)])
    assert is_complete(await answer)
    assert (losing.received, joining.received) == (["0.0.0"], ["0.0.0"])


def test_backoff_grows_to_a_bound_and_in_total_outlasts_a_dead_server() -> None:
    pauses = [backoff_s(failures, FIRST_BACKOFF_S, MAX_BACKOFF_S) for failures in range(1, MAX_MOVES + 1)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_BACKOFF_S
    assert sum(pauses) > 30


async def test_an_interrupted_request_returns_to_its_engine_at_once_however_often() -> None:
    one, another, fleet = two_engines()
    times = MAX_MOVES + 1
    one.answers_immediately = another.answers_immediately = False
    answer = submit(fleet, max_tokens=times + 1)
    first = await holder(one, another)
    for _ in range(times):
        first.end("0.0.0", 1, "interrupted")
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await first.wait_for("0.0.0")
    first.end("0.0.0", 1, "length")
    assert is_complete(await answer, times + 1)
    assert other(first, (one, another)).received == []


async def test_an_interrupted_request_moves_if_its_engine_has_left() -> None:
    one, another, fleet = two_engines()
    one.answers_immediately = another.answers_immediately = False
    answer = submit(fleet)
    first = await holder(one, another)
    second = other(first, (one, another))
    names = {id(one): "a", id(another): "b"}
    await fleet.update([FleetMember(names[id(first)], "", serves=False), FleetMember(names[id(second)], "", True)])
    first.end("0.0.0", 4, "interrupted")
    await second.wait_for("0.0.0")
    second.end("0.0.0", LENGTH - 4, "length")
    assert is_complete(await answer)


async def test_an_answer_lost_after_its_last_token_is_complete() -> None:
    one, another, fleet = two_engines()
    one.faults = another.faults = [(LENGTH, "lost")]
    assert is_complete(await submit(fleet))
    one.faults = another.faults = [(2, "lost")]
    assert is_complete(await submit(fleet, stop_ids=answer_to(PROMPT, 2)[1:]), 2, "stop")


async def test_a_stop_string_that_spans_two_engines_ends_the_answer() -> None:
    one, another = FakeEngine(), FakeEngine()
    one.faults = another.faults = [(3, "lost")]
    fleet = EngineFleet({"a": one, "b": another}, decode=lambda tokens: "".join(f"<{token}>" for token in tokens))
    tokens = answer_to(PROMPT, LENGTH)
    made = await submit(fleet, stop_strings=[f"<{tokens[2]}><{tokens[3]}>"])
    assert is_complete(made, 4, "stop")


async def test_a_continuation_that_fills_the_context_ends_with_length() -> None:
    one, another, fleet = two_engines()
    one.faults = another.faults = [(3, "lost"), ContextFull("no room")]
    assert is_complete(await submit(fleet), 3, "length")
    one.faults = another.faults = [ContextFull("no room")]
    with pytest.raises(ContextFull):
        await submit(fleet)


async def test_a_request_that_reaches_an_engine_after_it_closed_moves_to_another() -> None:
    one, another, fleet = two_engines()
    one.faults = another.faults = [EngineClosed("the engine is closed")]
    assert is_complete(await submit(fleet))
    assert len(one.received + another.received) == 2


async def test_a_request_refused_by_one_engine_is_not_sent_to_another() -> None:
    one, another, fleet = two_engines()
    one.faults = another.faults = [RequestFailed("the prompt is empty")]
    with pytest.raises(RequestFailed, match="the prompt is empty"):
        await submit(fleet)
    assert len(one.received + another.received) == 1


async def test_requests_of_a_broken_engine_move_and_its_failure_is_raised_when_all_engines_are_broken() -> None:
    broken = ComponentFailed("a", "TypeError: oh", "a traceback")
    one, another, fleet = two_engines()
    one.faults = another.faults = [broken]
    assert is_complete(await submit(fleet))
    one.faults = another.faults = [broken, broken]
    with pytest.raises(ComponentFailed, match="TypeError: oh") as caught:
        await submit(fleet)
    assert caught.value.remote_traceback == "a traceback"
    one.faults = [broken]
    with pytest.raises(ComponentFailed, match="TypeError: oh"):
        await submit(EngineFleet({"a": one}))


async def test_a_silent_engine_delays_only_its_own_requests() -> None:
    one, _, fleet = two_engines()
    one.answers_immediately = False
    answers = [submit(fleet, f"{group}.0.0") for group in range(8)]
    await asyncio.sleep(0.01)
    stuck = list(one._ends)
    assert stuck
    assert [made.done() for made in answers] == [f"{group}.0.0" not in stuck for group in range(8)]
    one.die()
    assert all(is_complete(made) for made in await asyncio.gather(*answers))


# ------------------------------------------------------------------------------------------------------------- members


async def test_requests_wait_without_limit_until_an_engine_serves() -> None:
    engine = FakeEngine()
    fleet = EngineFleet({"a": engine})
    await fleet.update([FleetMember("a", "", serves=False)])
    answer = submit(fleet)
    for version in range(3 * MAX_MOVES):
        await fleet.update([FleetMember("a", "", serves=False, version=version)])
        await asyncio.sleep(0)
    assert not engine.received
    await fleet.update([FleetMember("a", "", serves=True)])
    assert is_complete(await answer)


async def test_a_request_waits_until_an_engine_has_its_min_version() -> None:
    one, another, fleet = two_engines()
    await fleet.update([FleetMember("a", "", True, version=1), FleetMember("b", "", True, version=2)])
    answer = submit(fleet, min_version=3)
    await asyncio.sleep(0)
    assert not one.received + another.received
    await fleet.update([FleetMember("a", "", True, version=3), FleetMember("b", "", True, version=2)])
    assert is_complete(await answer)
    assert one.received


async def test_a_pinned_request_waits_for_its_version_and_fails_if_no_engine_pins_it() -> None:
    one, another, fleet = two_engines()
    bare = [FleetMember("a", "", True), FleetMember("b", "", True)]
    await fleet.update(bare)
    answer = asyncio.create_task(fleet.generate("eval-4.0.0.0", PROMPT, Sampling(LENGTH, 1), 4, 4))
    await asyncio.sleep(0)
    assert not answer.done()
    await fleet.update([FleetMember("a", "", True), FleetMember("b", "", True, pinned=4)])
    assert is_complete(await answer)
    assert (one.received, another.received) == ([], ["eval-4.0.0.0"])
    answer = asyncio.create_task(fleet.generate("eval-5.0.0.0", PROMPT, Sampling(LENGTH, 1), 5, 5))
    await asyncio.sleep(0)
    await fleet.update(bare)
    with pytest.raises(RequestFailed, match="version 5"):
        await answer


async def test_the_fleet_connects_to_a_joining_engine_and_a_removed_engine_finishes_its_requests() -> None:
    old, young = FakeEngine(), FakeEngine()
    old.answers_immediately = False
    called: list[FleetMember] = []

    async def connect(member: FleetMember) -> Engine:
        called.append(member)
        return young

    fleet = EngineFleet({"old": old}, connect=connect)
    late = submit(fleet, "0.0.0")
    await old.wait_for("0.0.0")
    await fleet.update([FleetMember("young", "a socket", True)])
    assert is_complete(await submit(fleet, "1.0.0"))
    assert [(member.name, member.socket) for member in called] == [("young", "a socket")]
    old.end("0.0.0", LENGTH, "length")
    assert is_complete(await late)
    assert young.received == ["1.0.0"]
    assert not fleet._connections.is_reachable("old")


async def test_a_removed_idle_engine_is_dropped_at_once() -> None:
    _, _, fleet = two_engines()
    await fleet.update([FleetMember("b", "", True)])
    assert [fleet._connections.is_reachable(name) for name in "ab"] == [False, True]


async def test_a_failed_connection_is_retried_at_the_next_membership_update() -> None:
    calls = 0

    async def connect(member: FleetMember) -> Engine:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ComponentFailed(member.name, "did not listen within 600 s")
        return FakeEngine()

    fleet = EngineFleet({}, connect=connect)
    answer = submit(fleet)
    for _ in range(2):
        await fleet.update([FleetMember("a", "a socket", True)])
        await asyncio.sleep(0.01)
    assert is_complete(await answer)


async def test_a_leaving_engine_gets_no_new_requests() -> None:
    one, _, fleet = two_engines()
    await fleet.update([FleetMember("a", "", True, leaving=True), FleetMember("b", "", True)])
    await asyncio.gather(*(submit(fleet, f"{group}.0.0") for group in range(8)))
    assert not one.received


async def test_a_request_id_cannot_be_in_flight_twice() -> None:
    engine = FakeEngine()
    engine.answers_immediately = False
    fleet = EngineFleet({"a": engine})
    answer = submit(fleet)
    await engine.wait_for("0.0.0")
    with pytest.raises(RequestFailed, match=r"0\.0\.0"):
        await submit(fleet)
    engine.end("0.0.0", LENGTH, "length")
    assert is_complete(await answer)


# ----------------------------------------------------------------------------------------------------- abort and stream


async def test_an_abort_reaches_the_engine_that_has_the_request() -> None:
    one, another, fleet = two_engines()
    one.answers_immediately = another.answers_immediately = False
    answer = submit(fleet)
    first = await holder(one, another)
    first.end("0.0.0", 3, "lost")
    second = other(first, (one, another))
    await second.wait_for("0.0.0")
    await fleet.abort(["0.0.0", "unknown"])
    assert is_complete(await answer, 3, "aborted")
    assert (first.aborted, second.aborted) == ([], ["0.0.0"])


async def test_the_abort_of_a_request_between_two_engines_reaches_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 1e6)
    monkeypatch.setattr(module, "MAX_BACKOFF_S", 1e6)
    engine = FakeEngine()
    engine.faults = [(2, "lost")]
    fleet = EngineFleet({"a": engine})
    answer = submit(fleet)
    await holder(engine)
    for _ in range(10):
        await asyncio.sleep(0)
    await fleet.abort(["0.0.0"])
    assert is_complete(await answer, 2, "aborted")
    assert engine.aborted == []


async def test_a_request_waiting_for_an_engine_can_be_aborted() -> None:
    fleet = EngineFleet({"a": FakeEngine()})
    await fleet.update([FleetMember("a", "", serves=False)])
    answer = submit(fleet)
    await asyncio.sleep(0)
    await fleet.abort(["0.0.0"])
    assert is_complete(await answer, 0, "aborted")


@pytest.mark.parametrize("fault", [LOST, (2, "lost")])
async def test_a_request_lost_during_its_abort_is_not_retried(
    fault: ComponentLost | tuple[int, StopReason], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    engine.answers_immediately = False
    fleet = EngineFleet({"a": engine})
    answer = submit(fleet)
    await engine.wait_for("0.0.0")

    async def abort(_: list[str]) -> None:
        if isinstance(fault, ComponentLost):
            engine.die()
            raise fault
        engine.end("0.0.0", *fault)

    monkeypatch.setattr(engine, "abort", abort)
    await fleet.abort(["0.0.0"])
    assert is_complete(await answer, 0 if isinstance(fault, ComponentLost) else 2, "aborted")
    assert len(engine.received) == 1


async def test_streaming_continues_across_engines() -> None:
    one, another, fleet = two_engines()
    one.answers_immediately = another.answers_immediately = False
    tokens = answer_to(PROMPT, LENGTH)
    answer = submit(fleet)
    first = await holder(one, another)
    await first.write("0.0.0", tokens[:2])
    assert (await fleet.stream_tokens("0.0.0", 0)).tolist() == tokens[:2]
    stream = asyncio.create_task(fleet.stream_tokens("0.0.0", 2))
    await asyncio.sleep(0)
    first.end("0.0.0", 4, "lost")
    assert (await stream).tolist() == tokens[2:4], "partial output of the first engine is kept"
    second = other(first, (one, another))
    stream = asyncio.create_task(fleet.stream_tokens("0.0.0", 4))
    await second.wait_for("0.0.0")
    await second.write("0.0.0", tokens[4:5])
    assert (await stream).tolist() == tokens[4:5]
    stream = asyncio.create_task(fleet.stream_tokens("0.0.0", 5))
    await asyncio.sleep(0)
    second.end("0.0.0", LENGTH - 4, "length")
    assert is_complete(await answer)
    assert (await stream).tolist() == []
    assert (await fleet.stream_tokens("0.0.0", 0)).tolist() == []


async def test_streaming_waits_while_the_request_waits() -> None:
    engine = FakeEngine()
    engine.answers_immediately = False
    fleet = EngineFleet({"a": engine})
    await fleet.update([FleetMember("a", "", serves=False)])
    answer = submit(fleet)
    await asyncio.sleep(0)
    stream = asyncio.create_task(fleet.stream_tokens("0.0.0", 0))
    await asyncio.sleep(0)
    assert not stream.done()
    await fleet.update([FleetMember("a", "", serves=True)])
    await engine.wait_for("0.0.0")
    await engine.write("0.0.0", [1])
    assert (await stream).tolist() == [1]
    engine.end("0.0.0", LENGTH, "length")
    assert is_complete(await answer)


async def test_weight_and_stats_calls_are_not_available_to_workers() -> None:
    fleet = EngineFleet({"a": FakeEngine()})
    for call in (fleet.stats(), fleet.release_pinned(), fleet.load(None, False)):  # type: ignore[arg-type]
        with pytest.raises(NotImplementedError, match="controller"):
            await call


async def test_a_request_fails_when_the_last_engine_that_could_serve_it_leaves() -> None:
    bad, resting = FakeEngine(), FakeEngine()
    bad.faults = [ComponentFailed("a", "ValueError: a bug")]
    there, away = FleetMember("a", "", True, version=5), FleetMember("b", "", False, version=5)
    fleet = EngineFleet({"a": bad, "b": resting}, [there, away])
    answer = submit(fleet)
    await asyncio.sleep(0.01)
    assert not bad.faults
    assert not answer.done()
    await fleet.update([there])
    with pytest.raises(RequestFailed, match=r"0\.0\.0.*ValueError: a bug"):
        async with asyncio.timeout(60):
            await answer
