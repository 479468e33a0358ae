"""Who gets a request: never the wrong engine, the one with the prefix where that is fair, else the least busy one."""

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
wishes = st.builds(
    lambda group, episode, number, version, pinned: RequestNeeds(f"{group}.{episode}.{number}", version, pinned),
    st.integers(0, 5), st.integers(0, 3), st.integers(0, 3), versions, pins,
)  # fmt: skip


def equals(*names: str) -> list[FleetMember]:
    return [FleetMember(name, "", True) for name in names]


def needs(request_id: str, min_version: int = 0) -> RequestNeeds:
    return RequestNeeds(request_id, min_version)


def send(router: Router, request_id: str, now: float = 0.0) -> str:
    engine = router.choose(needs(request_id), now)
    assert engine is not None
    router.sent(engine, needs(request_id))
    return engine


def may_serve(member: FleetMember, wished: RequestNeeds) -> bool:
    fits = member.version >= wished.min_version if wished.pinned is None else member.pinned == wished.pinned
    return member.serves and not member.leaving and fits


@given(members, st.sets(names), st.lists(st.tuples(wishes, st.floats(0, 100)), max_size=30), st.data())
def test_nobody_is_asked_who_may_not_be(
    fleet: list[FleetMember], cut_off: set[str], wished: list[tuple[RequestNeeds, float]], data: st.DataObject
) -> None:
    router = Router(fleet)
    for one, now in wished:
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


@given(st.lists(st.tuples(wishes, st.booleans()), max_size=80), st.integers(2, 4), st.data())
def test_nobody_is_made_much_busier_than_the_least_busy(
    steps: list[tuple[RequestNeeds, bool]], count: int, data: st.DataObject
) -> None:
    router, under_way = Router(equals(*"abcd"[:count])), []
    for one, ends in steps:
        loads = [router.load.get(member.name, 0) for member in router.members]
        engine = send(router, one.request_id)
        under_way.append(engine)
        allowed = max(margin.requests + margin.share * min(loads) for margin in (TURN_MARGIN, PROMPT_MARGIN))
        assert router.load[engine] <= min(loads) + allowed + 1
        if ends:
            router.ended(under_way.pop(data.draw(st.integers(0, len(under_way) - 1))))


@given(st.integers(1, 40), st.integers(1, 10), st.integers(2, 4))
def test_groups_that_begin_at_once_are_shared_out_evenly(groups: int, size: int, count: int) -> None:
    router = Router(equals(*"abcd"[:count]))
    for group in range(groups):
        for episode in range(size):
            send(router, f"{group}.{episode}.0")
    loads = [router.load.get(member.name, 0) for member in router.members]
    assert max(loads) - min(loads) <= PROMPT_MARGIN.requests + PROMPT_MARGIN.share * min(loads) + 1


@given(st.integers(2, 4), st.integers(1, 20), st.integers(1, 8))
def test_in_a_balanced_fleet_an_episode_stays_where_its_prefix_is(count: int, episodes: int, turns: int) -> None:
    router = Router(equals(*"abcd"[:count]))
    homes: dict[int, str] = {}
    for turn in range(turns):
        for episode in range(episodes):  # one after the other, so all engines are idle
            engine = send(router, f"{episode // 4}.{episode}.{turn}")
            assert homes.setdefault(episode, engine) == engine
            router.ended(engine)


def test_episodes_of_one_group_share_an_engine_as_far_as_the_margin_goes() -> None:
    router = Router(equals("a", "b", "c"))
    asked = [send(router, f"0.{episode}.0") for episode in range(PROMPT_MARGIN.requests + 2)]
    assert len(set(asked[: PROMPT_MARGIN.requests + 1])) == 1
    assert asked[-1] != asked[0]


def test_an_episode_leaves_an_engine_that_is_markedly_busier() -> None:
    router = Router(equals("a", "b"))
    home = send(router, "0.0.0")
    router.ended(home)
    router.load = {home: TURN_MARGIN.requests}
    assert router.choose(needs("0.0.1"), 0.0) == home
    router.load = {home: TURN_MARGIN.requests + 1}
    assert router.choose(needs("0.0.1"), 0.0) != home


def test_groups_that_come_one_by_one_do_not_all_go_to_the_first_engine() -> None:
    router = Router(equals("a", "b", "c"))
    for group in range(60):
        router.ended(send(router, f"{group}.0.0"))
    homes = [home for key, home in router._last_engine.items() if key.count(".") == 0]
    assert min(homes.count(name) for name in "abc") >= 10


def test_an_engine_that_failed_is_avoided_for_a_while_where_there_is_another() -> None:
    router = Router(equals("a", "b"))
    home = send(router, "0.0.0")
    router.failed(home, now=50.0)
    assert router.choose(needs("0.0.1"), 50.0) != home
    assert router.choose(needs("0.0.1"), 50.0 + FAILURE_COOLDOWN_S) == home
    router.update([FleetMember(home, "", True)])
    assert router.choose(needs("0.0.1"), 50.0) == home, "there is nobody else"


def test_a_request_waits_for_weights_that_nobody_has_yet() -> None:
    router = Router(equals("a", "b"))
    assert router.choose(needs("0.0.0", min_version=1), 0.0) is None
    router.update([FleetMember("a", "", True, version=0), FleetMember("b", "", True, version=1)])
    assert router.choose(needs("0.0.0", min_version=1), 0.0) == "b"


def test_the_only_engine_judges_for_itself_what_it_has() -> None:
    alone = equals("a")
    assert eligible(alone, RequestNeeds("0.0.0", min_version=5)) == ["a"]
    assert eligible(alone, RequestNeeds("0.0.0", 5, pinned=5)) == ["a"]
    assert eligible([FleetMember("a", "", serves=False)], RequestNeeds("0.0.0", 0)) == []


def test_a_pinned_request_waits_for_its_engine_but_not_for_weights_that_nobody_has_pinned() -> None:
    router = Router([FleetMember("a", "", serves=False, version=3, pinned=2), FleetMember("b", "", True, version=3)])
    two, four = RequestNeeds("eval-2.0.0.0", 2, pinned=2), RequestNeeds("eval-4.0.0.0", 4, pinned=4)
    assert [eligible(router.members, wished) for wished in (two, four)] == [[], []]
    assert [router.can_never_serve(wished) for wished in (two, four)] == [False, True]
    assert not router.can_never_serve(RequestNeeds("0.0.0", min_version=9))
    assert not Router(equals("a")).can_never_serve(four), "it judges for itself"


def test_only_so_much_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_REMEMBERED", 10)
    router = Router(equals("a", "b"))
    for group in range(100):
        router.ended(send(router, f"{group}.0.0"))
        router.ended(send(router, f"0.0.{group}"))
    assert len(router._last_engine) == 10
    assert {"99.0", "0.0", "0"} <= router._last_engine.keys(), "those that were served last"
