"""Fleet orders: checks before an order is sent, and reports of its outcome."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outpace.config import Config
from outpace.config.load import make_config
from outpace.errors import BadInput
from outpace.monitoring import fleet_orders
from outpace.monitoring.fleet_orders import (
    EngineStatus,
    FleetFile,
    FleetOrder,
    FleetState,
    OrderOutcome,
    OrderReader,
    check_order,
    current_fleet,
    send_orders,
)
from outpace.monitoring.run_directory import RunLock
from support import names, write_resolved

EMBEDDED = Config()
SERVERS = make_config({"engine.kind": "vllm", "engine.urls": ["http://127.0.0.1:8000"]})
STARTED = make_config({"engine.kind": "vllm", "launch.python": "/opt/python"})
ENGINES = [
    EngineStatus("engine-0", "http://127.0.0.1:8000", serves=True, version=3),
    EngineStatus("engine-1", "", serves=False, version=-1),
    EngineStatus("engine-2", "", serves=False, version=2, leaving=True),
]


@pytest.mark.parametrize(
    ("order", "config", "expected"),
    [
        (FleetOrder(add="localhost:8001"), SERVERS, "--add 'localhost:8001' http://host:port"),
        (FleetOrder(add="http://me:secret@h:1"), SERVERS, "--add engine.api_key_env"),
        (FleetOrder(add="http://h:notaport"), SERVERS, "--add 'http://h:notaport' http://host:port"),
        (FleetOrder(add="http://127.0.0.1:8000/"), SERVERS, "--add http://127.0.0.1:8000/ engine-0"),
        (FleetOrder(add="http://localhost:8000"), SERVERS, "--add http://localhost:8000 engine-0"),
        (FleetOrder(add="http://h:1"), EMBEDDED, "--add engine.kind vllm sglang"),
        (FleetOrder(add=""), SERVERS, "--add engine.urls outpace serve"),
        (FleetOrder(remove="engine-7"), SERVERS, "--remove engine-7 engine-0 engine-1"),
        (FleetOrder(remove="engine-2"), SERVERS, "--remove engine-2 already"),
        (FleetOrder(remove="engine-0"), SERVERS, "--remove engine-0 add"),
    ],
)
def test_an_order_that_cannot_be_carried_out_is_refused_in_one_line(
    order: FleetOrder, config: Config, expected: str
) -> None:
    with pytest.raises(BadInput) as refusal:
        check_order(order, config, ENGINES)
    assert names(str(refusal.value), expected)
    assert "secret" not in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("order", "config"),
    [
        (FleetOrder(add="http://127.0.0.1:8001"), SERVERS),
        (FleetOrder(add="https://elsewhere"), STARTED),
        (FleetOrder(add=""), STARTED),
        (FleetOrder(add=""), EMBEDDED),
        (FleetOrder(remove="engine-1"), SERVERS),
    ],
)
def test_an_order_that_can_be_carried_out_is_accepted(order: FleetOrder, config: Config) -> None:
    check_order(order, config, ENGINES)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The directory of an active run with server engines."""
    lock = RunLock(tmp_path / "run.lock")
    write_resolved(tmp_path, '[engine]\nkind = "vllm"\nurls = ["http://127.0.0.1:8000"]\n')
    FleetFile(tmp_path).write(
        FleetState([*ENGINES[:1], EngineStatus("engine-1", "http://b:1", serves=True, version=3)])
    )
    yield tmp_path
    lock.release()


def test_no_order_is_sent_if_one_of_several_cannot_be_carried_out(run: Path) -> None:
    with pytest.raises(BadInput, match=r"--remove: .*engine-1\b"):
        send_orders(run, [FleetOrder(remove="engine-0"), FleetOrder(remove="engine-1")], lambda _: None)
    with pytest.raises(BadInput, match=r"--add: .*http://c:1"):
        send_orders(run, [FleetOrder(add="http://c:1"), FleetOrder(add="http://c:1")], lambda _: None)
    assert not (run / fleet_orders.ORDERS_FILE).exists()


class AnsweringRun(OrderReader):
    """A run that has answered an order, with this outcome, by the next poll."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch, **outcome: str) -> None:
        super().__init__(run)
        monkeypatch.setattr("outpace.monitoring.fleet_orders.time.sleep", lambda _: self.answer(run, outcome))

    def answer(self, run: Path, outcome: dict[str, str]) -> None:
        orders, _ = self.read_new()
        FleetFile(run).write(FleetState(ENGINES, [OrderOutcome(order, **outcome) for order in orders]))  # type: ignore[arg-type]


def test_an_order_refused_by_the_run_raises_bad_input_with_the_reason(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AnsweringRun(run, monkeypatch, state="refused", why="no answer at http://c:1")
    with pytest.raises(BadInput, match="no answer at http://c:1"):
        send_orders(run, [FleetOrder(add="http://c:1")], lambda _: None)


def test_an_order_reports_when_the_engine_has_joined(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    AnsweringRun(run, monkeypatch, state="joined", engine="engine-3")
    printed: list[str] = []
    send_orders(run, [FleetOrder(add="http://c:1")], printed.append)
    (line,) = printed
    assert names(line, "engine-3 joined")


def test_an_order_that_takes_longer_is_reported_as_in_progress(run: Path) -> None:
    printed: list[str] = []
    send_orders(run, [FleetOrder(add="http://c:1"), FleetOrder(remove="engine-1")], printed.append, wait_s=0.0)
    added, removed = printed
    assert names(added, "http://c:1 outpace fleet")
    assert names(removed, "engine-1 outpace fleet")


def test_a_starting_run_is_distinguished_from_a_running_and_from_a_killed_one(run: Path) -> None:
    (run / fleet_orders.STATE_FILE).rename(run / "aside")
    with pytest.raises(BadInput, match="starting"):
        current_fleet(run)
    (run / "aside").rename(run / fleet_orders.STATE_FILE)
    assert [engine.name for engine in current_fleet(run).engines] == ["engine-0", "engine-1"]
    (run / "run.lock").unlink()
    with pytest.raises(BadInput, match="no run"):
        current_fleet(run)


def test_a_deterministic_run_refuses_fleet_changes(run: Path) -> None:
    (run / fleet_orders.STATE_FILE).unlink()
    write_resolved(run, "[run]\ndeterministic = true\n")
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
    path.write_text("1\n")  # the pid of a live process that does not hold the lock
    assert not is_lock_held(path)
