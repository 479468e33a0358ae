"""Orders for the engines of a run: what is refused before it is given, and what is told of the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outpace.errors import BadInput
from outpace.observe import fleet
from outpace.observe.fleet import Fleet, FleetFile, Order, OrdersRead, Outcome, Seat
from outpace.observe.fleet_orders import Terms, check, current, order_all
from outpace.observe.runlock import RunLock

SERVERS = Terms("vllm", ("http://127.0.0.1:8000",))
STARTED = Terms("vllm", (), "/opt/python")
SEATS = [
    Seat("engine-0", "http://127.0.0.1:8000", serves=True, version=3),
    Seat("engine-1", "", serves=False, version=-1),
    Seat("engine-2", "", serves=False, version=2, leaving=True),
]


@pytest.mark.parametrize(
    ("order", "terms", "complaint"),
    [
        (
            Order(add="localhost:8001"),
            SERVERS,
            "--add: 'localhost:8001' is no server's address; write http://host:port",
        ),
        (
            Order(add="http://me:secret@h:1"),
            SERVERS,
            "--add: the address holds a user name or password; leave that out",
        ),
        (Order(add="http://h:notaport"), SERVERS, "is no server's address"),
        (Order(add="http://127.0.0.1:8000/"), SERVERS, "is engine-0 already; a server takes part once"),
        (Order(add="http://localhost:8000"), SERVERS, "is engine-0 already; a server takes part once"),
        (Order(add="http://h:1"), Terms(), "engines are embedded; a server can join a run with engine.kind vllm or"),
        (Order(add=""), SERVERS, "start one with `outpace serve`, and add its URL"),
        (Order(remove="engine-7"), SERVERS, "--remove: there is no engine engine-7; there are engine-0, engine-1"),
        (Order(remove="engine-2"), SERVERS, "--remove: engine-2 leaves already"),
        (Order(remove="engine-0"), SERVERS, "--remove: engine-0 cannot leave: nobody else serves; add an engine first"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_in_one_line(order: Order, terms: Terms, complaint: str) -> None:
    with pytest.raises(BadInput) as refusal:
        check(order, terms, SEATS)
    assert complaint in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("order", "terms"),
    [
        (Order(add="http://127.0.0.1:8001"), SERVERS),
        (Order(add="https://elsewhere"), STARTED),
        (Order(add=""), STARTED),
        (Order(add=""), Terms()),
        (Order(remove="engine-1"), SERVERS),
    ],
)
def test_what_can_be_carried_out_is_not(order: Order, terms: Terms) -> None:
    check(order, terms, SEATS)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run with servers, under way."""
    lock = RunLock(tmp_path / "run.lock")
    (tmp_path / "config.toml").write_text('[engine]\nkind = "vllm"\nurls = ["http://127.0.0.1:8000"]\n')
    FleetFile(tmp_path).write(Fleet([*SEATS[:1], Seat("engine-1", "http://b:1", serves=True, version=3)]))
    yield tmp_path
    lock.release()


def test_nothing_is_ordered_where_one_of_several_orders_cannot_be_carried_out(run: Path) -> None:
    with pytest.raises(BadInput, match="engine-1 cannot leave: nobody else serves"):
        order_all(run, [Order(remove="engine-0"), Order(remove="engine-1")], lambda _: None)
    with pytest.raises(BadInput, match="http://c:1 is there twice"):
        order_all(run, [Order(add="http://c:1"), Order(add="http://c:1")], lambda _: None)
    assert not (run / fleet.ORDERS).exists()


class Answering(OrdersRead):
    """A run that has carried an order out, in some way, by the time that somebody looks again."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch, **outcome: str) -> None:
        super().__init__(run)
        monkeypatch.setattr("outpace.observe.fleet_orders.time.sleep", lambda _: self.answer(run, outcome))

    def answer(self, run: Path, outcome: dict[str, str]) -> None:
        orders, _ = self.new()
        FleetFile(run).write(Fleet(SEATS, [Outcome(order, **outcome) for order in orders]))  # type: ignore[arg-type]


def test_an_order_that_the_run_refuses_is_bad_input_with_the_reason(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Answering(run, monkeypatch, state="refused", why="nobody answers at http://c:1")
    with pytest.raises(BadInput, match="the fleet stays as it is: nobody answers at http://c:1"):
        order_all(run, [Order(add="http://c:1")], lambda _: None)


def test_whoever_gives_an_order_is_told_when_the_engine_serves(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Answering(run, monkeypatch, state="joined", engine="engine-3")
    said: list[str] = []
    order_all(run, [Order(add="http://c:1")], said.append)
    assert said == ["engine-3 has joined, and serves"]


def test_what_takes_longer_is_said_to_be_under_way(run: Path) -> None:
    said: list[str] = []
    order_all(run, [Order(add="http://c:1"), Order(remove="engine-1")], said.append, wait_s=0.0)
    assert said == [
        "asked to add http://c:1; it is under way, `outpace fleet` says when it serves",
        "engine-1 finishes what it has, and leaves then; `outpace fleet` says when",
    ]


def test_a_run_that_starts_is_told_from_one_that_is_not_there_and_from_one_that_was_killed(run: Path) -> None:
    (run / fleet.STATE).rename(run / "aside")
    with pytest.raises(BadInput, match="is still starting"):
        current(run)
    (run / "aside").rename(run / fleet.STATE)
    assert [seat.name for seat in current(run).engines] == ["engine-0", "engine-1"]
    (run / "run.lock").unlink()
    with pytest.raises(BadInput, match="no run is under way"):
        current(run)


def test_a_run_in_lockstep_says_that_nobody_comes_or_goes(run: Path) -> None:
    (run / fleet.STATE).unlink()
    (run / "config.toml").write_text("[run]\ndeterministic = true\n")
    with pytest.raises(BadInput, match=r"the engines of .* stay as they are: run\.deterministic"):
        current(run)


def test_a_lock_is_held_only_while_its_run_lives(tmp_path: Path) -> None:
    from outpace.observe.runlock import is_held

    path = tmp_path / "run.lock"
    assert not is_held(path)
    lock = RunLock(path)
    assert is_held(path)
    lock.release()
    assert not is_held(path)
    path.write_text("1\n")  # of somebody who lives and has no lock
    assert not is_held(path)
