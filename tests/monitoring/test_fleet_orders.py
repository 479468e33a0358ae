"""Orders for the engines of a run: what is refused before it is given, and what is told of the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outpace.commands.fleet import JoinRules, check_order, current_fleet, send_orders
from outpace.errors import BadInput
from outpace.monitoring import fleet_orders
from outpace.monitoring.fleet_orders import EngineStatus, FleetFile, FleetOrder, FleetState, OrderOutcome, OrderReader
from outpace.monitoring.run_directory import RunLock
from support import names

SERVERS = JoinRules("vllm", ("http://127.0.0.1:8000",))
STARTED = JoinRules("vllm", (), "/opt/python")
SEATS = [
    EngineStatus("engine-0", "http://127.0.0.1:8000", serves=True, version=3),
    EngineStatus("engine-1", "", serves=False, version=-1),
    EngineStatus("engine-2", "", serves=False, version=2, leaving=True),
]


@pytest.mark.parametrize(
    ("order", "terms", "complaint"),
    [
        (FleetOrder(add="localhost:8001"), SERVERS, "--add 'localhost:8001' http://host:port"),
        (FleetOrder(add="http://me:secret@h:1"), SERVERS, "--add engine.api_key_env"),
        (FleetOrder(add="http://h:notaport"), SERVERS, "--add 'http://h:notaport' http://host:port"),
        (FleetOrder(add="http://127.0.0.1:8000/"), SERVERS, "--add http://127.0.0.1:8000/ engine-0"),
        (FleetOrder(add="http://localhost:8000"), SERVERS, "--add http://localhost:8000 engine-0"),
        (FleetOrder(add="http://h:1"), JoinRules(), "--add engine.kind vllm sglang"),
        (FleetOrder(add=""), SERVERS, "--add engine.urls outpace serve"),
        (FleetOrder(remove="engine-7"), SERVERS, "--remove engine-7 engine-0 engine-1"),
        (FleetOrder(remove="engine-2"), SERVERS, "--remove engine-2 already"),
        (FleetOrder(remove="engine-0"), SERVERS, "--remove engine-0 add"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_in_one_line(order: FleetOrder, terms: JoinRules, complaint: str) -> None:
    with pytest.raises(BadInput) as refusal:
        check_order(order, terms, SEATS)
    assert names(str(refusal.value), complaint)
    assert "secret" not in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("order", "terms"),
    [
        (FleetOrder(add="http://127.0.0.1:8001"), SERVERS),
        (FleetOrder(add="https://elsewhere"), STARTED),
        (FleetOrder(add=""), STARTED),
        (FleetOrder(add=""), JoinRules()),
        (FleetOrder(remove="engine-1"), SERVERS),
    ],
)
def test_what_can_be_carried_out_is_not(order: FleetOrder, terms: JoinRules) -> None:
    check_order(order, terms, SEATS)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run with servers, under way."""
    lock = RunLock(tmp_path / "run.lock")
    (tmp_path / "config.toml").write_text('[engine]\nkind = "vllm"\nurls = ["http://127.0.0.1:8000"]\n')
    FleetFile(tmp_path).write(FleetState([*SEATS[:1], EngineStatus("engine-1", "http://b:1", serves=True, version=3)]))
    yield tmp_path
    lock.release()


def test_nothing_is_ordered_where_one_of_several_orders_cannot_be_carried_out(run: Path) -> None:
    with pytest.raises(BadInput, match=r"--remove: .*engine-1\b"):
        send_orders(run, [FleetOrder(remove="engine-0"), FleetOrder(remove="engine-1")], lambda _: None)
    with pytest.raises(BadInput, match=r"--add: .*http://c:1"):
        send_orders(run, [FleetOrder(add="http://c:1"), FleetOrder(add="http://c:1")], lambda _: None)
    assert not (run / fleet_orders.ORDERS_FILE).exists()


class Answering(OrderReader):
    """A run that has carried an order out, in some way, by the time that somebody looks again."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch, **outcome: str) -> None:
        super().__init__(run)
        monkeypatch.setattr("outpace.commands.fleet.time.sleep", lambda _: self.answer(run, outcome))

    def answer(self, run: Path, outcome: dict[str, str]) -> None:
        orders, _ = self.read_new()
        FleetFile(run).write(FleetState(SEATS, [OrderOutcome(order, **outcome) for order in orders]))  # type: ignore[arg-type]


def test_an_order_that_the_run_refuses_is_bad_input_with_the_reason(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Answering(run, monkeypatch, state="refused", why="no answer at http://c:1")
    with pytest.raises(BadInput, match="no answer at http://c:1"):
        send_orders(run, [FleetOrder(add="http://c:1")], lambda _: None)


def test_whoever_gives_an_order_is_told_when_the_engine_serves(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Answering(run, monkeypatch, state="joined", engine="engine-3")
    said: list[str] = []
    send_orders(run, [FleetOrder(add="http://c:1")], said.append)
    (line,) = said
    assert names(line, "engine-3 joined")


def test_what_takes_longer_is_said_to_be_under_way(run: Path) -> None:
    said: list[str] = []
    send_orders(run, [FleetOrder(add="http://c:1"), FleetOrder(remove="engine-1")], said.append, wait_s=0.0)
    added, removed = said
    assert names(added, "http://c:1 outpace fleet")
    assert names(removed, "engine-1 outpace fleet")


def test_a_run_that_starts_is_told_from_one_that_is_not_there_and_from_one_that_was_killed(run: Path) -> None:
    (run / fleet_orders.STATE_FILE).rename(run / "aside")
    with pytest.raises(BadInput, match="starting"):
        current_fleet(run)
    (run / "aside").rename(run / fleet_orders.STATE_FILE)
    assert [seat.name for seat in current_fleet(run).engines] == ["engine-0", "engine-1"]
    (run / "run.lock").unlink()
    with pytest.raises(BadInput, match="no run"):
        current_fleet(run)


def test_a_run_in_lockstep_says_that_nobody_comes_or_goes(run: Path) -> None:
    (run / fleet_orders.STATE_FILE).unlink()
    (run / "config.toml").write_text("[run]\ndeterministic = true\n")
    with pytest.raises(BadInput, match=r"run\.deterministic"):
        current_fleet(run)


def test_a_lock_is_held_only_while_its_run_lives(tmp_path: Path) -> None:
    from outpace.monitoring.run_directory import is_lock_held

    path = tmp_path / "run.lock"
    assert not is_lock_held(path)
    lock = RunLock(path)
    assert is_lock_held(path)
    lock.release()
    assert not is_lock_held(path)
    path.write_text("1\n")  # of somebody who lives and has no lock
    assert not is_lock_held(path)
