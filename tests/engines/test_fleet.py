"""A fleet answers every request while somebody is there to answer it, whatever becomes of single engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_support import FakeEngine, answer_to, logprobs_of
from outpace.engines import fleet as module
from outpace.engines.fleet import MAX_MOVES, EngineFleet, backoff_s
from outpace.errors import ComponentFailed, ComponentLost, ContextFull, RequestFailed
from outpace.protocols import Engine
from outpace.types import FleetMember, Generation, Sampling, StopReason

pytestmark = pytest.mark.timeout(120)

PROMPT = np.array([5, 6, 7], dtype=np.int32)
LENGTH = 10
LOST = ComponentLost("a", "closed its connection")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.0)


def asked(
    fleet: EngineFleet, request_id: str = "0.0.0", min_version: int = 0, **changes: object
) -> asyncio.Task[Generation]:
    sampling = Sampling(LENGTH, 1, **changes)  # type: ignore[arg-type]
    return asyncio.create_task(fleet.generate(request_id, PROMPT, sampling, min_version, None))


def whole(generation: Generation, length: int = LENGTH, stop: StopReason = "length") -> bool:
    """Whether this is what one engine alone would have said."""
    tokens = answer_to(PROMPT, length)
    return (generation.tokens.tolist(), generation.logprobs.tolist(), generation.stop) == (
        tokens,
        logprobs_of(tokens),
        stop,
    )


def other(engine: FakeEngine, pair: Iterable[FakeEngine]) -> FakeEngine:
    return next(one for one in pair if one is not engine)


async def holder(*engines: FakeEngine, request_id: str = "0.0.0") -> FakeEngine:
    """The one that has the request."""
    while True:
        for engine in engines:
            if request_id in engine.asked:
                return engine
        await asyncio.sleep(0)


def two() -> tuple[FakeEngine, FakeEngine, EngineFleet]:
    one, another = FakeEngine(version=1), FakeEngine(version=2)
    return one, another, EngineFleet({"a": one, "b": another})


async def test_what_one_engine_answers_is_handed_on_as_it_is() -> None:
    engine = FakeEngine()
    assert whole(await asked(EngineFleet({"a": engine})))
    assert engine.samplings == [Sampling(LENGTH, 1)]


async def test_partial_output_is_gone_on_with_elsewhere() -> None:
    one, another, fleet = two()
    one.prompt_answers = another.prompt_answers = False
    answer = asked(fleet)
    first = await holder(one, another)
    first.end("0.0.0", 4, "lost")
    second = other(first, (one, another))
    await second.has("0.0.0")
    second.end("0.0.0", LENGTH - 4, "length")
    made = await answer
    assert whole(made)
    assert made.versions.tolist() == [first.version] * 4 + [second.version] * 6
    assert second.samplings[0].max_tokens == LENGTH - 4
    assert second.samplings[0].seed != first.samplings[0].seed
    assert fleet.moves == 1


async def test_an_engine_that_dies_in_the_middle_is_replaced_by_another_one() -> None:
    one, another, fleet = two()
    one.prompt_answers = another.prompt_answers = False
    answers = [asked(fleet, f"{group}.0.0") for group in range(6)]
    await asyncio.sleep(0.01)
    assert one.asked
    assert another.asked
    another.prompt_answers = True
    one.die()
    for request_id in list(another._ends):
        another.end(request_id, LENGTH, "length")
    assert all(whole(made) for made in await asyncio.gather(*answers))
    assert set(another.asked) == {f"{group}.0.0" for group in range(6)}


async def test_the_only_engine_is_asked_again_as_before() -> None:
    engine = FakeEngine()
    engine.troubles = [LOST, LOST]
    assert whole(await asked(EngineFleet({"a": engine})))
    assert engine.samplings == [Sampling(LENGTH, 1)] * 3, "nobody has seen a token of it: the noise is the same"


@given(st.lists(st.integers(-1, 3), max_size=MAX_MOVES))
def test_an_answer_is_the_same_however_often_it_was_lost(lost: list[int]) -> None:
    async def run() -> None:
        one, another, fleet = two()
        troubles: list[Exception | tuple[int, StopReason]] = [LOST if n < 0 else (n, "lost") for n in lost]
        one.troubles = another.troubles = troubles  # which both share, so any of them is met by whoever is asked
        made = await asked(fleet)
        assert len(made.tokens) == LENGTH
        assert whole(made)

    total = 0
    kept = [n for n in lost if (total := total + max(n, 0)) < LENGTH]
    lost[:] = kept
    asyncio.run(run())


@pytest.mark.parametrize("trouble", [LOST, (0, "lost")])
async def test_a_request_that_is_lost_too_often_fails_with_the_causes(
    trouble: ComponentLost | tuple[int, StopReason],
) -> None:
    one, another, fleet = two()
    one.troubles = another.troubles = [trouble] * (MAX_MOVES + 1)
    with pytest.raises(RequestFailed, match=rf"\b{MAX_MOVES + 1}\b.*\b[ab]: "):
        await asked(fleet)
    assert not one.troubles


async def test_an_engine_that_loses_all_it_is_given_is_not_asked_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 1e6)
    monkeypatch.setattr(module, "MAX_BACKOFF_S", 1e6)
    losing, joining = FakeEngine(), FakeEngine()
    losing.troubles = [(2, "lost")]
    fleet = EngineFleet({"a": losing, "b": joining})
    resting = [FleetMember("a", "", True), FleetMember("b", "", serves=False)]
    await fleet.update(resting)
    answer = asked(fleet)
    await holder(losing)
    for _ in range(10):
        await fleet.update(resting)
        await asyncio.sleep(0)
    assert losing.asked == ["0.0.0"]
    await fleet.update([FleetMember("a", "", True), FleetMember("b", "", True)])
    assert whole(await answer)
    assert (losing.asked, joining.asked) == (["0.0.0"], ["0.0.0"])


def test_pauses_grow_to_a_bound_and_outlast_a_dead_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pauses = [backoff_s(failures) for failures in range(1, MAX_MOVES + 1)]
    assert pauses == sorted(pauses)
    assert sum(pauses) > 30


async def test_an_answer_that_was_complete_when_it_was_lost_is_complete() -> None:
    one, another, fleet = two()
    one.troubles = another.troubles = [(LENGTH, "lost")]
    assert whole(await asked(fleet))
    one.troubles = another.troubles = [(2, "lost")]
    assert whole(await asked(fleet, stop_ids=answer_to(PROMPT, 2)[1:]), 2, "stop")


async def test_a_stop_string_across_two_engines_ends_the_answer() -> None:
    one, another = FakeEngine(), FakeEngine()
    one.troubles = another.troubles = [(3, "lost")]
    fleet = EngineFleet({"a": one, "b": another}, decode=lambda tokens: "".join(f"<{token}>" for token in tokens))
    tokens = answer_to(PROMPT, LENGTH)
    made = await asked(fleet, stop_strings=[f"<{tokens[2]}><{tokens[3]}>"])
    assert whole(made, 4, "stop")


async def test_parts_that_fill_the_context_are_an_answer_that_was_cut_off() -> None:
    one, another, fleet = two()
    one.troubles = another.troubles = [(3, "lost"), ContextFull("no room")]
    assert whole(await asked(fleet), 3, "length")
    one.troubles = another.troubles = [ContextFull("no room")]
    with pytest.raises(ContextFull):
        await asked(fleet)


async def test_what_an_engine_refuses_is_not_asked_of_others() -> None:
    one, another, fleet = two()
    one.troubles = another.troubles = [RequestFailed("the prompt is empty")]
    with pytest.raises(RequestFailed, match="the prompt is empty"):
        await asked(fleet)
    assert len(one.asked + another.asked) == 1


async def test_a_broken_engine_is_left_to_others_and_its_failure_goes_up_where_all_are() -> None:
    broken = ComponentFailed("a", "TypeError: oh", "a traceback")
    one, another, fleet = two()
    one.troubles = another.troubles = [broken]
    assert whole(await asked(fleet))
    one.troubles = another.troubles = [broken, broken]
    with pytest.raises(ComponentFailed, match="TypeError: oh") as caught:
        await asked(fleet)
    assert caught.value.remote_traceback == "a traceback"
    one.troubles = [broken]
    with pytest.raises(ComponentFailed, match="TypeError: oh"):
        await asked(EngineFleet({"a": one}))


async def test_a_silent_engine_holds_up_nobody_but_those_it_has() -> None:
    one, _, fleet = two()
    one.prompt_answers = False
    answers = [asked(fleet, f"{group}.0.0") for group in range(8)]
    await asyncio.sleep(0.01)
    stuck = list(one._ends)
    assert stuck
    assert [made.done() for made in answers] == [f"{group}.0.0" not in stuck for group in range(8)]
    one.die()
    assert all(whole(made) for made in await asyncio.gather(*answers))


# ------------------------------------------------------------------------------------------------------------- members


async def test_requests_wait_while_nobody_serves_however_long_and_wake_when_somebody_does() -> None:
    engine = FakeEngine()
    fleet = EngineFleet({"a": engine})
    await fleet.update([FleetMember("a", "", serves=False)])
    answer = asked(fleet)
    for version in range(3 * MAX_MOVES):
        await fleet.update([FleetMember("a", "", serves=False, version=version)])
        await asyncio.sleep(0)
    assert not engine.asked
    await fleet.update([FleetMember("a", "", serves=True)])
    assert whole(await answer)


async def test_a_request_waits_until_somebody_has_its_version() -> None:
    one, another, fleet = two()
    await fleet.update([FleetMember("a", "", True, version=1), FleetMember("b", "", True, version=2)])
    answer = asked(fleet, min_version=3)
    await asyncio.sleep(0)
    assert not one.asked + another.asked
    await fleet.update([FleetMember("a", "", True, version=3), FleetMember("b", "", True, version=2)])
    assert whole(await answer)
    assert one.asked


async def test_a_pinned_request_may_overtake_the_word_of_its_weights_but_does_not_wait_in_vain() -> None:
    one, another, fleet = two()
    bare = [FleetMember("a", "", True), FleetMember("b", "", True)]
    await fleet.update(bare)
    answer = asyncio.create_task(fleet.generate("eval-4.0.0.0", PROMPT, Sampling(LENGTH, 1), 4, 4))
    await asyncio.sleep(0)
    assert not answer.done()
    await fleet.update([FleetMember("a", "", True), FleetMember("b", "", True, pinned=4)])
    assert whole(await answer)
    assert (one.asked, another.asked) == ([], ["eval-4.0.0.0"])
    answer = asyncio.create_task(fleet.generate("eval-5.0.0.0", PROMPT, Sampling(LENGTH, 1), 5, 5))
    await asyncio.sleep(0)
    await fleet.update(bare)
    with pytest.raises(RequestFailed, match="version 5"):
        await answer


async def test_an_engine_that_joins_is_called_and_one_that_is_gone_finishes_what_it_has() -> None:
    old, young = FakeEngine(), FakeEngine()
    old.prompt_answers = False
    called: list[FleetMember] = []

    async def connect(member: FleetMember) -> Engine:
        called.append(member)
        return young

    fleet = EngineFleet({"old": old}, connect=connect)
    late = asked(fleet, "0.0.0")
    await old.has("0.0.0")
    await fleet.update([FleetMember("young", "a socket", True)])
    assert whole(await asked(fleet, "1.0.0"))
    assert [(member.name, member.socket) for member in called] == [("young", "a socket")]
    old.end("0.0.0", LENGTH, "length")
    assert whole(await late)
    assert young.asked == ["1.0.0"]
    assert not fleet._connections.is_reachable("old")


async def test_an_idle_engine_that_is_gone_is_forgotten_at_once() -> None:
    _, _, fleet = two()
    await fleet.update([FleetMember("b", "", True)])
    assert [fleet._connections.is_reachable(name) for name in "ab"] == [False, True]


async def test_an_engine_that_cannot_be_called_is_called_again_when_it_is_named_again() -> None:
    calls = 0

    async def connect(member: FleetMember) -> Engine:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ComponentFailed(member.name, "did not listen within 600 s")
        return FakeEngine()

    fleet = EngineFleet({}, connect=connect)
    answer = asked(fleet)
    for _ in range(2):
        await fleet.update([FleetMember("a", "a socket", True)])
        await asyncio.sleep(0.01)
    assert whole(await answer)


async def test_an_engine_that_leaves_gets_nothing_more() -> None:
    one, _, fleet = two()
    await fleet.update([FleetMember("a", "", True, leaving=True), FleetMember("b", "", True)])
    await asyncio.gather(*(asked(fleet, f"{group}.0.0") for group in range(8)))
    assert not one.asked


async def test_a_request_id_is_under_way_once() -> None:
    engine = FakeEngine()
    engine.prompt_answers = False
    fleet = EngineFleet({"a": engine})
    answer = asked(fleet)
    await engine.has("0.0.0")
    with pytest.raises(RequestFailed, match=r"0\.0\.0"):
        await asked(fleet)
    engine.end("0.0.0", LENGTH, "length")
    assert whole(await answer)


# ------------------------------------------------------------------------------------------------------ abort and peek


async def test_an_abort_reaches_the_engine_that_has_the_request() -> None:
    one, another, fleet = two()
    one.prompt_answers = another.prompt_answers = False
    answer = asked(fleet)
    first = await holder(one, another)
    first.end("0.0.0", 3, "lost")
    second = other(first, (one, another))
    await second.has("0.0.0")
    await fleet.abort(["0.0.0", "unknown"])
    assert whole(await answer, 3, "aborted")
    assert (first.aborted, second.aborted) == ([], ["0.0.0"])


async def test_a_request_that_waits_for_an_engine_can_be_aborted() -> None:
    fleet = EngineFleet({"a": FakeEngine()})
    await fleet.update([FleetMember("a", "", serves=False)])
    answer = asked(fleet)
    await asyncio.sleep(0)
    await fleet.abort(["0.0.0"])
    assert whole(await answer, 0, "aborted")


@pytest.mark.parametrize("trouble", [LOST, (2, "lost")])
async def test_a_request_that_is_lost_over_its_abort_is_not_made_again(
    trouble: ComponentLost | tuple[int, StopReason], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    engine.prompt_answers = False
    fleet = EngineFleet({"a": engine})
    answer = asked(fleet)
    await engine.has("0.0.0")

    async def abort(_: list[str]) -> None:
        if isinstance(trouble, ComponentLost):
            engine.die()
            raise trouble
        engine.end("0.0.0", *trouble)

    monkeypatch.setattr(engine, "abort", abort)
    await fleet.abort(["0.0.0"])
    assert whole(await answer, 0 if isinstance(trouble, ComponentLost) else 2, "aborted")
    assert len(engine.asked) == 1


async def test_a_look_goes_on_across_engines() -> None:
    one, another, fleet = two()
    one.prompt_answers = another.prompt_answers = False
    tokens = answer_to(PROMPT, LENGTH)
    answer = asked(fleet)
    first = await holder(one, another)
    await first.write("0.0.0", tokens[:2])
    assert (await fleet.stream_tokens("0.0.0", 0)).tolist() == tokens[:2]
    look = asyncio.create_task(fleet.stream_tokens("0.0.0", 2))
    await asyncio.sleep(0)
    first.end("0.0.0", 4, "lost")
    assert (await look).tolist() == tokens[2:4], "what the first one had is known"
    second = other(first, (one, another))
    look = asyncio.create_task(fleet.stream_tokens("0.0.0", 4))
    await second.has("0.0.0")
    await second.write("0.0.0", tokens[4:5])
    assert (await look).tolist() == tokens[4:5]
    look = asyncio.create_task(fleet.stream_tokens("0.0.0", 5))
    await asyncio.sleep(0)
    second.end("0.0.0", LENGTH - 4, "length")
    assert whole(await answer)
    assert (await look).tolist() == []
    assert (await fleet.stream_tokens("0.0.0", 0)).tolist() == []


async def test_a_look_waits_while_the_request_does() -> None:
    engine = FakeEngine()
    engine.prompt_answers = False
    fleet = EngineFleet({"a": engine})
    await fleet.update([FleetMember("a", "", serves=False)])
    answer = asked(fleet)
    await asyncio.sleep(0)
    look = asyncio.create_task(fleet.stream_tokens("0.0.0", 0))
    await asyncio.sleep(0)
    assert not look.done()
    await fleet.update([FleetMember("a", "", serves=True)])
    await engine.has("0.0.0")
    await engine.write("0.0.0", [1])
    assert (await look).tolist() == [1]
    engine.end("0.0.0", LENGTH, "length")
    assert whole(await answer)


async def test_weights_are_no_business_of_a_worker() -> None:
    fleet = EngineFleet({"a": FakeEngine()})
    for call in (fleet.stats(), fleet.release_pinned(), fleet.load(None, False)):  # type: ignore[arg-type]
        with pytest.raises(NotImplementedError, match="controller"):
            await call


async def test_a_request_fails_when_the_last_engine_that_could_have_served_it_leaves() -> None:
    bad, resting = FakeEngine(), FakeEngine()
    bad.troubles = [ComponentFailed("a", "ValueError: a bug")]
    there, away = FleetMember("a", "", True, version=5), FleetMember("b", "", False, version=5)
    fleet = EngineFleet({"a": bad, "b": resting}, [there, away])
    answer = asked(fleet)
    await asyncio.sleep(0.01)
    assert not bad.troubles
    assert not answer.done()
    await fleet.update([there])
    with pytest.raises(RequestFailed, match=r"0\.0\.0.*ValueError: a bug"):
        async with asyncio.timeout(60):
            await answer
