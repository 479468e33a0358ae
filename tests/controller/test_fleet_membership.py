"""Outcomes of the orders that add engines to a run or remove them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from driver_support import FakeEngine, Rig, until
from outpace.controller import engine_registry
from outpace.errors import BadInput
from outpace.monitoring import fleet_orders
from outpace.protocols import Engine
from outpace.types import GroupOrder

pytestmark = pytest.mark.timeout(120)
URL = "http://127.0.0.1:8000"


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    for pause in ("ORDER_POLL_S", "DRAIN_POLL_S", "JOIN_POLL_S"):
        monkeypatch.setattr(engine_registry, pause, 0.001)
    rig = Rig(tmp_path / "run")
    yield rig
    rig.log.close()


def start_paused(rig: Rig) -> tuple[asyncio.Task[str], asyncio.Event]:
    """Start a run that pauses after some groups until the event is set."""
    go = asyncio.Event()

    async def wait_for_go(order: GroupOrder) -> None:
        if order.group >= 8 and not order.heldout:
            await go.wait()

    rig.worker.behave = wait_for_go
    return asyncio.create_task(rig.run()), go


async def outcome(rig: Rig, order: fleet_orders.FleetOrder) -> fleet_orders.OrderOutcome:
    """Send the order and return its final outcome."""
    file = rig.log.dir / fleet_orders.STATE_FILE
    await until(file.exists)
    sent = fleet_orders.send_order(rig.log.dir, order)
    found: list[fleet_orders.OrderOutcome] = []

    def has_outcome() -> bool:
        known = msgspec.json.decode(file.read_bytes(), type=fleet_orders.FleetState).orders
        found[:] = [each for each in known if each.order == sent and each.is_final]
        return bool(found)

    await until(has_outcome)
    return found[0]


async def test_an_add_order_ends_as_joined_once_the_engine_serves_and_a_remove_order_as_left_once_it_is_gone(
    rig: Rig,
) -> None:
    rig.start_engine = lambda url: ("e1", "/e1", FakeEngine())
    run, go = start_paused(rig)
    joined = await outcome(rig, fleet_orders.FleetOrder(add=URL))
    assert (joined.state, joined.engine) == ("joined", "e1")
    assert rig.worker.fleets[-1][1].serves
    left = await outcome(rig, fleet_orders.FleetOrder(remove="e1"))
    assert (left.state, left.engine) == ("left", "e1")
    go.set()
    assert await run == "done"


async def test_orders_for_a_known_url_an_unreachable_server_or_an_unknown_engine_are_refused_and_the_run_continues(
    rig: Rig,
) -> None:
    started: list[str] = []

    def start_engine(url: str) -> tuple[str, str, Engine]:
        started.append(url)
        if url != URL:
            raise BadInput(f"no answer at {url}")
        return "e1", "/e1", FakeEngine()

    rig.start_engine = start_engine
    run, go = start_paused(rig)
    await outcome(rig, fleet_orders.FleetOrder(add=URL))
    for order, keys in (
        (fleet_orders.FleetOrder(add="http://localhost:8000/"), ("http://localhost:8000",)),
        (fleet_orders.FleetOrder(add="http://nowhere:1"), ("no answer at http://nowhere:1",)),
        (fleet_orders.FleetOrder(add="http://h:noport"), ("no answer at http://h:noport",)),
        (fleet_orders.FleetOrder(remove="e7"), ("e7", "e0, e1")),
    ):
        refused = await outcome(rig, order)
        assert refused.state == "refused"
        assert all(key in refused.why for key in keys), refused.why
    assert started == [URL, "http://nowhere:1", "http://h:noport"], (
        "an engine that is already in the fleet is not started again"
    )
    go.set()
    assert await run == "done"
