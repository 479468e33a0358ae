"""Checkpoints of a run: the learner's part and the controller's, one directory that gets its name when it is whole.

Invariants
- `Learner.save` is the very next call that the learner hears after a checkpoint was ordered, unless it had to wait for
  the one before: nothing comes before it that gives way to others.
- Whoever is cancelled while a thread is at the directory leaves when the thread is done with it, not before.
"""

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
    """One at a time: one that falls due while the last is still being written waits for it, and is skipped if the
    learner has moved on meanwhile. After the last step it never has."""

    def __init__(self, run: RunLog, learner: Learner, config: CheckpointConfig, tokenizer: str) -> None:
        """`tokenizer` is its digest, by which a resume notices that the model has another one."""
        self._run = run
        self._root = run.dir / CHECKPOINTS
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
        temporary = commit.begin(self._root, version)  # on this thread: see the invariants
        try:
            saved = await self._learner.save(str(temporary.absolute()), version)
            known = await memory() if saved else None
            if known is None:
                return False
            await _to_the_end(self._commit, temporary, known)
        finally:
            await _to_the_end(self._tidy_up, temporary)
        await _to_the_end(self._prune)
        return True

    def _commit(self, temporary: Path, memory: Memory) -> None:
        (temporary / STATE_FILE).write_text(json.dumps(memory | {"tokenizer": self._tokenizer}))
        self._run.sync()
        commit.commit(temporary)

    def _tidy_up(self, temporary: Path) -> None:
        """Also after writers of earlier starts, which may be what fills the disk."""
        commit.discard(temporary)
        try:
            commit.clean(self._root)
        except OSError as error:  # tried again with the next one
            log.warning("cannot tidy up after checkpoints that were not finished: %s", error)

    def _prune(self) -> None:
        best = best_step(self._run.dir) if self._config.keep_best else None
        try:
            commit.prune(self._root, self._config.keep, best)
        except OSError as error:  # which leaves more than needed, and is tried again with the next one
            log.warning("cannot remove old checkpoints: %s", error)


async def _to_the_end(work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Run it on a thread. A cancellation is heard when the thread is done: nothing can stop it before."""
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
