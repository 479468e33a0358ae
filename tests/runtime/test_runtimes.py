"""Every runtime passes the conformance suite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from outpace.runtime.components import InlineRuntime, Resources, Runtime
from outpace.runtime.local import LocalRuntime
from runtime.conformance import RuntimeConformance
from runtime_support import start_toy

pytestmark = pytest.mark.timeout(120)


class TestLocalRuntime(RuntimeConformance):
    replaces = True

    @pytest.fixture
    async def runtime(self, tmp_path: Path) -> AsyncIterator[Runtime]:  # type: ignore[override]
        local = LocalRuntime(tmp_path / "logs")
        yield local
        await local.stop()


class TestInlineRuntime(RuntimeConformance):
    replaces = False

    @pytest.fixture
    async def runtime(self) -> AsyncIterator[Runtime]:  # type: ignore[override]
        inline = InlineRuntime()
        yield inline
        await inline.stop()


@pytest.mark.parametrize(("gpus", "visible"), [(None, "7"), ([], ""), (["2", "3"], "2,3")])
async def test_a_local_process_gets_the_resources_of_its_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[str] | None, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    local = LocalRuntime(tmp_path / "logs")
    toy = await start_toy(local, resources=Resources(cpus=3, gpus=gpus), environment={"OWN": "1"})
    variables = psutil.Process(await toy.pid()).environ()
    await local.stop()
    found = {name: variables[name] for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OWN")}
    assert found == {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": "3", "OWN": "1"}
