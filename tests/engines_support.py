"""A context manager that builds a small embedded engine and closes it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from transformers import PreTrainedModel

from outpace.engines.embedded.engine import EmbeddedEngine


@asynccontextmanager
async def engine_of(model: PreTrainedModel, **options: Any) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(model, **{"slots": 4, "threads": 1, **options})
    try:
        yield engine
    finally:
        await engine.close()
