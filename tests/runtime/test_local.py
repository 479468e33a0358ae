"""Components as processes: death, reporting and restart."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from outpace.errors import ComponentFailed, ComponentLost
from outpace.runtime.components import BROKEN_PREFIX
from outpace.runtime.local import LocalRuntime
from runtime_support import start_toy, until

pytestmark = pytest.mark.timeout(120)


async def test_a_death_is_reported_with_its_exit_code_and_last_output(runtime: LocalRuntime) -> None:
    toy = await start_toy(runtime)
    with pytest.raises(ComponentLost):
        await toy.die(3)
    death = await runtime.deaths.get()
    assert death.component == "toy"
    assert "code 3" in death.message
    assert "these are my last words" in death.remote_traceback


async def test_ps_shows_the_name_of_a_component(runtime: LocalRuntime) -> None:
    toy = await start_toy(runtime)
    assert psutil.Process(await toy.pid()).cmdline()[-1] == "toy"


async def test_in_flight_calls_and_calls_to_a_dead_component_raise(runtime: LocalRuntime) -> None:
    toy = await start_toy(runtime)
    waiting = asyncio.create_task(toy.wait())
    os.kill(await toy.pid(), signal.SIGKILL)
    with pytest.raises(ComponentLost):
        await waiting
    await runtime.deaths.get()
    with pytest.raises(ComponentLost, match="SIGKILL"):
        await toy.pid()
    assert not await runtime.ping("toy", 1)


async def test_a_restarted_component_is_reached_through_the_same_proxy_and_can_die_again(runtime: LocalRuntime) -> None:
    toy = await start_toy(runtime)
    for attempt in range(3):
        assert await toy.attempt() == attempt
        await runtime.kill("toy")
        assert "SIGKILL" in (await runtime.deaths.get()).message
        await runtime.restart("toy")
    assert await toy.attempt() == 3
    assert runtime.deaths.empty()


async def test_a_failed_restart_raises_and_can_be_retried(runtime: LocalRuntime) -> None:
    toy = await start_toy(runtime, settings={"dies_at": [1]})
    await runtime.kill("toy")
    await runtime.deaths.get()
    with pytest.raises(ComponentFailed, match=r"\bcode 7\b"):
        await runtime.restart("toy")
    with pytest.raises(ComponentLost):
        await toy.pid()
    await runtime.restart("toy")
    assert await toy.attempt() == 2
    assert runtime.deaths.empty()


async def test_a_cancelled_restart_leaves_no_process(runtime: LocalRuntime) -> None:
    await start_toy(runtime)
    await runtime.kill("toy")
    await runtime.deaths.get()
    before = set(psutil.Process().children())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await runtime.restart("toy")
    started = set(psutil.Process().children()) - before
    _, alive = await asyncio.to_thread(psutil.wait_procs, started, 10)
    assert alive == []


async def test_a_stopped_component_fails_its_ping_and_can_be_killed(runtime: LocalRuntime) -> None:
    toy = await start_toy(runtime)
    assert await runtime.ping("toy", 10)
    process = psutil.Process(await toy.pid())
    process.suspend()
    assert not await runtime.ping("toy", 0.1)
    process.resume()
    assert await runtime.ping("toy", 10)
    process.suspend()
    await runtime.kill("toy")
    assert "SIGKILL" in (await runtime.deaths.get()).message


async def test_a_restart_keeps_the_log(runtime: LocalRuntime, tmp_path: Path) -> None:
    toy = await start_toy(runtime)
    with pytest.raises(ComponentLost):
        await toy.die(3)
    await runtime.deaths.get()
    await runtime.restart("toy")
    assert "my last words" in (tmp_path / "logs" / "toy.log").read_text()


async def test_a_component_that_breaks_down_is_reported_lost_with_the_reason_in_its_log(runtime: LocalRuntime) -> None:
    toy = await start_toy(runtime)
    with pytest.raises(ComponentLost):
        await toy.break_down()
    death = await runtime.deaths.get()
    assert death.message == "cannot go on"
    assert death.remote_traceback.endswith(f"Traceback: deep inside\n{BROKEN_PREFIX}cannot go on")


@pytest.mark.parametrize("label", ["child.started", "child.ready"])
async def test_a_component_can_be_crashed_during_startup_by_a_crash_point(
    label: str, runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTPACE_CRASH", f"toy@{label}")
    monkeypatch.setenv("OUTPACE_CRASH_MARK", str(tmp_path / "mark"))
    with pytest.raises(ComponentFailed, match="SIGKILL"):
        await start_toy(runtime)
    assert await (await start_toy(runtime)).attempt() == 0


@pytest.mark.slow
async def test_a_dump_shows_tasks_threads_and_a_blocked_event_loop(runtime: LocalRuntime) -> None:
    idle, stuck, halted = [await start_toy(runtime, name) for name in ("idle", "stuck", "halted")]
    halting = psutil.Process(await halted.pid())
    calls = [asyncio.create_task(call) for call in (idle.wait(), stuck.block(60), halted.stop_itself())]
    await asyncio.to_thread(until, lambda: halting.status() == psutil.STATUS_STOPPED)
    dump = await runtime.dump()
    assert "idle: wait" in dump.partition("\n\n")[0]
    assert "runtime_support.wait:" in dump
    assert "runtime_support._wait_for_ever:" in dump
    assert "in block" in dump
    assert re.search(rf"^halted\b.*\b{halting.pid}\b.*\bstopped\b", dump, re.MULTILINE), dump
    for name in ("idle", "stuck", "halted"):
        await runtime.kill(name)
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_dump_does_not_disturb_a_component_that_is_starting(runtime: LocalRuntime) -> None:
    starting = asyncio.create_task(start_toy(runtime))
    while not (about_toy := (await runtime.dump()).partition("\n\n")[2]):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert about_toy.startswith("toy")
    assert "starting" in about_toy
    assert await (await starting).attempt() == 0


async def test_stop_leaves_no_process_whatever_state_it_is_in(
    runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.runtime.local.STOP_DEADLINE_S", 0.5)
    toys = [await start_toy(runtime, name) for name in ("lively", "stuck", "halted", "dead")]
    processes = [psutil.Process(await toy.pid()) for toy in toys]
    blocked = asyncio.create_task(toys[1].block(60))
    await asyncio.sleep(0)
    processes[2].suspend()
    processes[3].kill()
    await runtime.deaths.get()
    await runtime.stop()
    assert not any(process.is_running() for process in processes)
    with pytest.raises(ComponentFailed):
        await blocked


async def test_a_component_stopped_together_with_its_peer_logs_no_lost_connection(
    runtime: LocalRuntime, tmp_path: Path
) -> None:
    path = f"{tmp_path}/s"
    await start_toy(runtime, "called", listen=path, token="t")
    caller = await start_toy(runtime, "caller", settings={"closes_for_s": 1.0}, token="t", peers={"called": path})
    assert await caller.call_peer()
    await runtime.stop()
    assert "called" not in (tmp_path / "logs" / "caller.log").read_text()


@pytest.mark.parametrize("in_its_place", [None, "a directory"])
async def test_a_death_is_reported_even_if_the_log_is_missing(
    in_its_place: str | None, runtime: LocalRuntime, tmp_path: Path
) -> None:
    await start_toy(runtime)
    log = tmp_path / "logs" / "toy.log"
    log.unlink()
    if in_its_place:
        log.mkdir()
    about_toy = (await runtime.dump()).partition("\n\n")[2]
    assert about_toy.startswith("toy")
    assert 'File "' not in about_toy
    await runtime.kill("toy")
    death = await runtime.deaths.get()
    # by SIGSEGV now and then: Python's faulthandler reads the frames of running threads
    assert re.search(r"SIGKILL|SIGSEGV", death.message), death
    assert death.remote_traceback == ""


async def test_a_component_that_can_no_longer_be_monitored_is_reported_lost(
    runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unknown_death(_: object) -> ComponentLost:
        raise ValueError("another waiter has reaped it")

    with monkeypatch.context() as broken:
        broken.setattr("outpace.runtime.local.Component.death", unknown_death)
        toy = await start_toy(runtime)
        death = await runtime.deaths.get()
    assert isinstance(death, ComponentLost)
    assert "ValueError: another waiter has reaped it" in str(death)
    await runtime.restart("toy")
    assert await toy.attempt() == 1


async def test_a_restart_that_fails_inside_the_component_can_be_retried_at_once(
    runtime: LocalRuntime, tmp_path: Path
) -> None:
    await start_toy(runtime, settings={"builds": str(tmp_path / "once")})
    await runtime.kill("toy")
    await runtime.deaths.get()
    for _ in range(2):
        with pytest.raises(ComponentFailed, match="FileExistsError"):
            await runtime.restart("toy")


async def test_a_component_that_is_still_running_cannot_be_restarted(
    runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = await start_toy(runtime)
    with monkeypatch.context() as impatient:
        impatient.setattr("outpace.runtime.local.STOP_DEADLINE_S", 0.01)
        with pytest.raises(ComponentFailed, match="running"):
            await runtime.restart("toy")
    assert await toy.attempt() == 0
