"""The behavior of every runtime. A test class derives from `RuntimeConformance` and overrides `runtime`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from outpace.errors import BadInput, ComponentFailed
from outpace.runtime.components import Resources, RestartSettings, Runtime
from runtime_support import is_gone, start_toy


class RuntimeConformance:
    replaces: bool
    """Whether the runtime can kill and restart a component."""

    @pytest.fixture
    def runtime(self) -> Runtime:
        raise NotImplementedError

    async def test_a_started_component_answers_calls_and_pings(self, runtime: Runtime) -> None:
        toy = await start_toy(runtime)
        assert await toy.attempt() == 0
        assert await runtime.ping("toy", 10)
        assert runtime.deaths.empty()

    async def test_the_spec_of_a_component_is_kept(self, runtime: Runtime) -> None:
        resources, restart = Resources(cpus=2, gpus=["1"], gpu_memory=0.5), RestartSettings(3, 60.0)
        await start_toy(runtime, kind="engine", resources=resources, restart=restart, settings={"closes_for_s": 0})
        spec = runtime.spec("toy")
        assert (spec.name, spec.kind, spec.resources, spec.restart) == ("toy", "engine", resources, restart)
        assert spec.settings == {"closes_for_s": 0}

    async def test_components_reach_their_peers(self, runtime: Runtime, tmp_path: Path) -> None:
        path = str(tmp_path / "one.sock")
        one, two = await asyncio.gather(
            start_toy(runtime, "one", listen=path, token="secret"),
            start_toy(runtime, "two", peers={"one": path}, token="secret"),
        )
        assert await two.call_peer() == await one.pid()

    async def test_bad_input_of_a_factory_is_raised_by_start(self, runtime: Runtime) -> None:
        with pytest.raises(BadInput):
            await start_toy(runtime, settings={"bad": True})
        assert await (await start_toy(runtime, "another")).attempt() == 0

    async def test_a_retired_component_is_gone_and_its_death_is_not_reported(self, runtime: Runtime) -> None:
        one, _ = [await start_toy(runtime, name) for name in ("one", "two")]
        pid = await one.pid()
        await runtime.retire("one")
        assert not self.replaces or is_gone(pid)
        assert await runtime.ping("two", 10)
        assert runtime.deaths.empty()
        with pytest.raises(KeyError):
            runtime.spec("one")

    async def test_a_killed_component_is_reported_and_comes_back_behind_the_same_object(self, runtime: Runtime) -> None:
        toy = await start_toy(runtime)
        if not self.replaces:
            for refused in (runtime.kill, runtime.restart):
                with pytest.raises(ComponentFailed):
                    await refused("toy")
            assert await toy.attempt() == 0
            return
        await runtime.kill("toy")
        assert (await runtime.deaths.get()).component == "toy"
        await runtime.restart("toy")
        assert await toy.attempt() == runtime.spec("toy").attempt == 1

    async def test_a_dump_names_what_is_going_on(self, runtime: Runtime) -> None:
        toy = await start_toy(runtime)
        waiting = asyncio.create_task(toy.wait())
        await toy.attempt()
        assert "_wait_for_ever" in await runtime.dump()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    async def test_stop_closes_every_component_and_may_be_called_twice(self, runtime: Runtime) -> None:
        pids = [await (await start_toy(runtime, name)).pid() for name in ("one", "two")]
        await runtime.stop()
        assert not self.replaces or all(map(is_gone, pids))
        assert runtime.deaths.empty()
        await runtime.stop()
