"""MERGED"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ParamSpec

from outpace.checkpoint import commit
from outpace.checkpoint.retention import CHECKPOINTS, best_step
from outpace.config.sections import CheckpointConfig
from outpace.errors import NotSaved
from outpace.observe.runlog import RunLog
from outpace.pipeline.account import STATE_FILE
from outpace.pipeline.training import Memory
from outpace.protocols import Learner
from outpace.types import Version

log = logging.getLogger(__name__)

P = ParamSpec("P")


class Checkpoints:
    """Writes checkpoints one at a time.

    A checkpoint that falls due while the previous one is being written waits for it, and is skipped if the
    learner has moved on meanwhile. The one after the last step is never skipped."""

    def __init__(self, run: RunLog, learner: Learner, config: CheckpointConfig, tokenizer: str) -> None:
        """`tokenizer` is the tokenizer's digest, by which a resume detects that it changed."""
        self._run = run
        self._root = run.dir / CHECKPOINTS
        self._learner = learner
        self._config = config
        self._tokenizer = tokenizer
        self._saving = asyncio.Lock()

    async def save(self, version: Version, controller_state: Callable[[], Awaitable[Memory | None]]) -> bool:
        """Write a checkpoint; return whether there is one now. `NotSaved` on I/O errors; earlier checkpoints are
        unaffected."""
        async with self._saving:
            try:
                return await self._write(version, controller_state)
            except OSError as error:
                raise NotSaved(f"{self._root}: {error.strerror or error}") from error

    async def _write(self, version: Version, controller_state: Callable[[], Awaitable[Memory | None]]) -> bool:
        temporary = commit.begin(self._root, version)  # on this thread: see the module's invariants
        try:
            saved = await self._learner.save(str(temporary.absolute()), version)
            state = await controller_state() if saved else None
            if state is None:
                return False
            await _run_uncancelled(self._commit, temporary, state)
        finally:
            await _run_uncancelled(self._clean_up, temporary)
        await _run_uncancelled(self._prune)
        return True

    def _commit(self, temporary: Path, state: Memory) -> None:
        (temporary / STATE_FILE).write_text(json.dumps(state | {"tokenizer": self._tokenizer}))
        self._run.sync()
        commit.commit(temporary)

    def _clean_up(self, temporary: Path) -> None:
        """Remove this and other unfinished checkpoints, which may be what fills the disk."""
        commit.discard(temporary)
        try:
            commit.clean(self._root)
        except OSError as error:  # retried with the next checkpoint
            log.warning("could not remove unfinished checkpoints: %s", error)

    def _prune(self) -> None:
        best = best_step(self._run.dir) if self._config.keep_best else None
        try:
            commit.prune(self._root, self._config.keep, best)
        except OSError as error:  # harmless; retried with the next checkpoint
            log.warning("could not remove old checkpoints: %s", error)


async def _run_uncancelled(work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Run `work` on a thread. A cancellation takes effect only when the thread is done, because it cannot be
    interrupted."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    cancelled = False
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError from running.exception()
    running.result()
