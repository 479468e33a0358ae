"""The run continues when engines leave, die or fail at awkward moments."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver_support import FakeEngine, Rig, until
from outpace.controller import engine_registry, policy_versions
from outpace.errors import ComponentFailed, ComponentLost, UpdateFailed
from outpace.monitoring import fleet_orders
from outpace.types import EngineStats, GroupOrder, LoadReport, Manifest

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A rig with a second engine and short polling intervals."""
    monkeypatch.setattr(engine_registry, "ORDER_POLL_S", 0.001)
    monkeypatch.setattr(engine_registry, "DRAIN_POLL_S", 0.005)
    rig = Rig(tmp_path / "run")
    rig.engines["e1"] = FakeEngine()
    rig.start_engine = lambda url: ("e2", "/e2", FakeEngine())
    yield rig
    rig.log.close()


class PausedRun:
    """A run that pauses after its first groups until `resume_and_finish` is called."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._go = asyncio.Event()

        async def wait_for_go(order: GroupOrder) -> None:
            if order.group >= 8 and not order.heldout:
                await self._go.wait()

        rig.worker.behave = wait_for_go
        self._run = asyncio.create_task(rig.run())

    async def until_both_serve(self) -> None:
        fleets = self._rig.worker.fleets
        await until(lambda: fleets and len(fleets[-1]) == 2 and all(member.serves for member in fleets[-1]))
        await until((self._rig.log.dir / fleet_orders.STATE_FILE).exists)

    def remove(self, name: str) -> None:
        fleet_orders.send_order(self._rig.log.dir, fleet_orders.FleetOrder(remove=name))

    async def resume_and_finish(self) -> None:
        self._go.set()
        assert await self._run == "done"


def members(rig: Rig) -> list[str]:
    return [member.name for member in rig.worker.fleets[-1]]


async def test_a_second_remove_order_for_the_same_engine_is_harmless(rig: Rig) -> None:
    run = PausedRun(rig)
    await run.until_both_serve()
    rig.engines["e1"].running = 1
    run.remove("e1")
    run.remove("e1")
    await until(lambda: rig.worker.fleets[-1][1].leaving)
    rig.engines["e1"].running = 0
    await until(lambda: members(rig) == ["e0"])
    await run.resume_and_finish()


@pytest.mark.parametrize("comes_back", [True, False])
async def test_an_engine_can_be_removed_while_it_is_being_restarted(rig: Rig, comes_back: bool) -> None:
    run = PausedRun(rig)
    await run.until_both_serve()
    restarting = asyncio.Event()

    async def restart(name: str) -> None:
        restarting.set()
        await asyncio.sleep(0.05)
        if not comes_back:
            raise ComponentFailed(name, "was stopped")

    rig.runtime.restart = restart  # type: ignore[method-assign]
    rig.runtime.deaths.put_nowait(ComponentLost("e1", "was killed"))
    await restarting.wait()
    run.remove("e1")
    await until(lambda: members(rig) == ["e0"])
    await run.resume_and_finish()
    assert members(rig) == ["e0"], "the removed engine does not come back"


async def test_removing_an_engine_that_was_already_given_up_is_harmless(rig: Rig) -> None:
    rig.restarts = 0
    run = PausedRun(rig)
    await run.until_both_serve()
    rig.runtime.deaths.put_nowait(ComponentLost("e1", "was killed"))
    await until(lambda: members(rig) == ["e0"])
    run.remove("e1")
    await run.resume_and_finish()


async def test_a_load_failure_of_a_dead_engine_is_not_attributed_to_its_replacement(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_versions, "FIRST_PAUSE_S", 0.1)
    loads: list[int] = []

    async def load(manifest: Manifest, pinned: bool) -> LoadReport:
        loads.append(manifest.version)
        if len(loads) == 1:
            raise UpdateFailed("no answer")
        if len(loads) == 2:  # by its replacement: in progress when the failure would be reported
            await asyncio.sleep(0.2)
        return LoadReport(manifest.version, 0.0, 0.0, 0)

    rig.engines["e1"].load = load  # type: ignore[method-assign]
    rig.settings = rig.settings.__class__(**{**vars(rig.settings), "eval_enabled": False})
    run = PausedRun(rig)
    await until(lambda: len(loads) == 1)
    rig.runtime.deaths.put_nowait(ComponentLost("e1", "its server is dead"))
    await until(lambda: len(loads) >= 3 or (len(loads) == 2 and members(rig) and rig.worker.fleets[-1][1].serves))
    await run.resume_and_finish()


async def test_an_evaluation_leaves_out_an_engine_that_cannot_load_pinned_weights(rig: Rig) -> None:
    async def load(manifest: Manifest, pinned: bool) -> LoadReport:
        if pinned:
            raise UpdateFailed("registering has taken more than 120 s")
        return LoadReport(manifest.version, 0.0, 0.0, 0)

    rig.engines["e1"].load = load  # type: ignore[method-assign]
    assert await rig.run() == "done"
    assert rig.engine.pinned == [0, -1, 6, -1]


async def test_an_engine_can_join_while_a_step_is_being_recorded(rig: Rig) -> None:
    fast_stats = rig.engine.stats

    async def slow_stats() -> EngineStats:
        await asyncio.sleep(0.02)
        return await fast_stats()

    rig.engine.stats = slow_stats  # type: ignore[method-assign]
    run = PausedRun(rig)
    await run.until_both_serve()
    fleet_orders.send_order(rig.log.dir, fleet_orders.FleetOrder(add="http://elsewhere:8000"))
    await until(lambda: "e2" in members(rig))
    await run.resume_and_finish()


async def test_an_engine_can_leave_while_it_loads_the_weights_of_an_evaluation(rig: Rig) -> None:
    retired, pinning = asyncio.Event(), asyncio.Event()

    async def load(manifest: Manifest, pinned: bool) -> LoadReport:
        if pinned:
            pinning.set()
            await retired.wait()
            raise ComponentFailed("e1", "was stopped")
        return LoadReport(manifest.version, 0.0, 0.0, 0)

    async def retire(name: str) -> None:
        retired.set()

    rig.engines["e1"].load = load  # type: ignore[method-assign]
    run = PausedRun(rig)
    await run.until_both_serve()
    rig.runtime.retire = retire  # type: ignore[method-assign]
    await pinning.wait()
    run.remove("e1")
    await run.resume_and_finish()
