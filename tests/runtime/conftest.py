from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outpace.runtime.local import LocalRuntime


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[LocalRuntime]:
    local = LocalRuntime(tmp_path / "logs")
    yield local
    await local.stop()
