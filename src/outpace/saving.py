"""Checkpoints of a run: the learner's part and the controller's, one directory that gets its name when it is whole."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from outpace.checkpoint import commit
from outpace.checkpoint.retention import CHECKPOINTS, best_step
from outpace.config.sections import CheckpointConfig
from outpace.errors import NotSaved
from outpace.observe.runlog import RunLog
from outpace.pipeline.account import STATE_FILE
from outpace.pipeline.training import Memory
from outpace.protocols import Learner
from outpace.types import Version

logger = logging.getLogger(__name__)


class Checkpoints:
    """One at a time: one that falls due while the last is still being written waits for it, and is skipped if the
    learner has moved on meanwhile. After the last step it never has."""

    def __init__(self, log: RunLog, learner: Learner, config: CheckpointConfig, tokenizer: str) -> None:
        """`tokenizer` is its digest, by which a resume notices that the model has another one."""
        self._log = log
        self._root = log.dir / CHECKPOINTS
        self._learner = learner
        self._config = config
        self._tokenizer = tokenizer
        self._saving = asyncio.Lock()

    async def save(self, version: Version, memory: Callable[[], Awaitable[Memory | None]]) -> bool:
        """Whether there is one now. What cannot be written is `NotSaved`, and costs no earlier one."""
        async with self._saving:
            try:
                return await self._made(version, memory)
            except OSError as error:
                raise NotSaved(f"{self._root}: {error.strerror or error}") from error

    async def _made(self, version: Version, memory: Callable[[], Awaitable[Memory | None]]) -> bool:
        # Not on another thread: `save` must be the very next call that the learner hears.
        temporary = commit.begin(self._root, version)
        try:
            saved = await self._learner.save(str(temporary.absolute()), version)
            known = await memory() if saved else None
            if known is None:
                return False
            await asyncio.to_thread(self._commit, temporary, known)
        finally:
            await asyncio.to_thread(commit.discard, temporary)
        await asyncio.to_thread(self._prune)
        return True

    def _commit(self, temporary: Path, memory: Memory) -> None:
        (temporary / STATE_FILE).write_text(json.dumps(memory | {"tokenizer": self._tokenizer}))
        self._log.sync()
        commit.commit(temporary)

    def _prune(self) -> None:
        best = best_step(self._log.dir) if self._config.keep_best else None
        try:
            commit.prune(self._root, self._config.keep, best)
        except OSError as error:  # which leaves more than needed, and is tried again with the next one
            logger.warning("cannot remove old checkpoints: %s", error)
