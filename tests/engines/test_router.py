"""Routing: only eligible engines, the engine with the cached prefix within the load margin, else the least busy one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.engines import router as rules
from outpace.engines.router import FAILURE_COOLDOWN_S, PROMPT_MARGIN, TURN_MARGIN, RequestNeeds, Router, eligible
from outpace.types import FleetMember

names = st.sampled_from(["a", "b", "c", "d"])
versions = st.integers(0, 3)
pins = st.none() | versions
members = st.lists(
    st.builds(FleetMember, names, st.just(""), st.booleans(), versions, pins, st.booleans()),
    unique_by=lambda member: member.name,
    max_size=4,
)
requests = st.builds(
    lambda group, episode, number, version, pinned: RequestNeeds(f"{group}.{episode}.{number}", version, pinned),
    st.integers(0, 5), st.integers(0, 3), st.integers(0, 3), versions, pins,
)  # fmt: skip


def equal_members(*names: str) -> list[FleetMember]:
    return [FleetMember(name, "", True) for name in names]


def needs(request_id: str, min_version: int = 0) -> RequestNeeds:
    return RequestNeeds(request_id, min_version)


def send(router: Router, request_id: str, now: float = 0.0) -> str:
    engine = router.choose(needs(request_id), now)
    assert engine is not None
    router.sent(engine, needs(request_id))
    return engine


def may_serve(member: FleetMember, requested: RequestNeeds) -> bool:
    fits = member.version >= requested.min_version if requested.pinned is None else member.pinned == requested.pinned
    return member.serves and not member.leaving and fits


@given(members, st.sets(names), st.lists(st.tuples(requests, st.floats(0, 100)), max_size=30), st.data())
def test_requests_are_routed_only_to_eligible_engines(
    fleet: list[FleetMember], cut_off: set[str], requested: list[tuple[RequestNeeds, float]], data: st.DataObject
) -> None:
    router = Router(fleet)
    for one, now in requested:
        fit = {m.name for m in fleet if m.name not in cut_off and (may_serve(m, one) or len(fleet) == 1)}
        fit -= {m.name for m in fleet if not m.serves or m.leaving}
        engine = router.choose(one, now, cut_off)
        assert engine in fit if fit else engine is None
        if engine is not None:
            router.sent(engine, one)
            if data.draw(st.booleans()):
                router.failed(engine, now)
            if data.draw(st.booleans()):
                router.ended(engine)


@given(st.lists(st.tuples(requests, st.booleans()), max_size=80), st.integers(2, 4), st.data())
def test_no_engine_gets_much_busier_than_the_least_busy_one(
    steps: list[tuple[RequestNeeds, bool]], count: int, data: st.DataObject
) -> None:
    router, under_way = Router(equal_members(*"abcd"[:count])), []
    for one, ends in steps:
        loads = [router.load.get(member.name, 0) for member in router.members]
        engine = send(router, one.request_id)
        under_way.append(engine)
        allowed = max(margin.requests + margin.share * min(loads) for margin in (TURN_MARGIN, PROMPT_MARGIN))
        assert router.load[engine] <= min(loads) + allowed + 1
        if ends:
            router.ended(under_way.pop(data.draw(st.integers(0, len(under_way) - 1))))


@given(st.integers(1, 40), st.integers(1, 10), st.integers(2, 4))
def test_groups_that_start_together_are_balanced_across_engines(groups: int, size: int, count: int) -> None:
    router = Router(equal_members(*"abcd"[:count]))
    for group in range(groups):
        for episode in range(size):
            send(router, f"{group}.{episode}.0")
    loads = [router.load.get(member.name, 0) for member in router.members]
    assert max(loads) - min(loads) <= PROMPT_MARGIN.requests + PROMPT_MARGIN.share * min(loads) + 1


@given(st.integers(2, 4), st.integers(1, 20), st.integers(1, 8))
def test_in_a_balanced_fleet_an_episode_stays_on_the_engine_with_its_prefix(
    count: int, episodes: int, turns: int
) -> None:
    router = Router(equal_members(*"abcd"[:count]))
    homes: dict[int, str] = {}
    for turn in range(turns):
        for episode in range(episodes):  # sequential, so all engines are idle
            engine = send(router, f"{episode // 4}.{episode}.{turn}")
            assert homes.setdefault(episode, engine) == engine
            router.ended(engine)


def test_episodes_of_one_group_share_an_engine_up_to_the_load_margin() -> None:
    router = Router(equal_members("a", "b", "c"))
    chosen = [send(router, f"0.{episode}.0") for episode in range(PROMPT_MARGIN.requests + 2)]
    assert len(set(chosen[: PROMPT_MARGIN.requests + 1])) == 1
    assert chosen[-1] != chosen[0]


def test_an_episode_leaves_an_engine_that_is_markedly_busier() -> None:
    router = Router(equal_members("a", "b"))
    home = send(router, "0.0.0")
    router.ended(home)
    router.load = {home: TURN_MARGIN.requests}
    assert router.choose(needs("0.0.1"), 0.0) == home
    router.load = {home: TURN_MARGIN.requests + 1}
    assert router.choose(needs("0.0.1"), 0.0) != home


def test_sequential_groups_are_spread_over_all_engines() -> None:
    router = Router(equal_members("a", "b", "c"))
    for group in range(60):
        router.ended(send(router, f"{group}.0.0"))
    homes = [home for key, home in router._last_engine.items() if key.count(".") == 0]
    assert min(homes.count(name) for name in "abc") >= 10


def test_an_engine_that_failed_is_avoided_during_its_cooldown_if_another_is_eligible() -> None:
    router = Router(equal_members("a", "b"))
    home = send(router, "0.0.0")
    router.failed(home, now=50.0)
    assert router.choose(needs("0.0.1"), 50.0) != home
    assert router.choose(needs("0.0.1"), 50.0 + FAILURE_COOLDOWN_S) == home
    router.update([FleetMember(home, "", True)])
    assert router.choose(needs("0.0.1"), 50.0) == home, "it is the only engine"


def test_a_request_waits_until_an_engine_has_its_min_version() -> None:
    router = Router(equal_members("a", "b"))
    assert router.choose(needs("0.0.0", min_version=1), 0.0) is None
    router.update([FleetMember("a", "", True, version=0), FleetMember("b", "", True, version=1)])
    assert router.choose(needs("0.0.0", min_version=1), 0.0) == "b"


def test_the_only_engine_is_eligible_for_any_version() -> None:
    alone = equal_members("a")
    assert eligible(alone, RequestNeeds("0.0.0", min_version=5)) == ["a"]
    assert eligible(alone, RequestNeeds("0.0.0", 5, pinned=5)) == ["a"]
    assert eligible([FleetMember("a", "", serves=False)], RequestNeeds("0.0.0", 0)) == []


def test_a_pinned_request_waits_for_its_engine_but_not_for_a_version_that_no_engine_pins() -> None:
    router = Router([FleetMember("a", "", serves=False, version=3, pinned=2), FleetMember("b", "", True, version=3)])
    two, four = RequestNeeds("eval-2.0.0.0", 2, pinned=2), RequestNeeds("eval-4.0.0.0", 4, pinned=4)
    assert [eligible(router.members, requested) for requested in (two, four)] == [[], []]
    assert [router.can_never_serve(requested) for requested in (two, four)] == [False, True]
    assert not router.can_never_serve(RequestNeeds("0.0.0", min_version=9))
    assert not Router(equal_members("a")).can_never_serve(four), "the only engine decides for itself"


def test_the_routing_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_REMEMBERED", 10)
    router = Router(equal_members("a", "b"))
    for group in range(100):
        router.ended(send(router, f"{group}.0.0"))
        router.ended(send(router, f"0.0.{group}"))
    assert len(router._last_engine) == 10
    assert {"99.0", "0.0", "0"} <= router._last_engine.keys(), "the most recently served ones"
