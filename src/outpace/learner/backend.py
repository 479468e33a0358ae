"""The learner backend: the part of the learner that holds the weights and trains them.

    `LearnerHost` (one for all backends)                          `LearnerBackend` (`learner.backend`)
    groups of the journal ─▶ advantages, batches, updates  ──▶    score, accumulate, update, finish_step
    snapshots for the engines                              ◀──    weights
    checkpoints                                            ◀──    copy_state, load_state

A backend is a class whose constructor takes `LearnerSettings`. The host makes all calls on one thread, in order. Rows
arrive with their advantages: a backend knows neither rewards nor groups nor the journal.

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from outpace.config import Config
from outpace.errors import OutpaceError
from outpace.hardware.cores import CoreSharing
from outpace.types import ChunkReport, Floats, GroupRecord, Ints, JournalLocation, LoraAdapter, Row, StepReport, Version

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.learner.ranks import Ranks

OLD_LOGP = "old_logp"
OLD_VALUES = "old_values"
REFERENCE_LOGP = "reference_logp"
"""Names of scores: logprobs, values and reference logprobs of trained tokens under the weights at the start of the
step."""

RETURNS = "returns"
KEEP = "keep"
"""Names of the other values passed to training: critic targets, and which tokens the batch masks keep."""

Extras = Mapping[str, Floats]
"""Additional values of a row by name, one per trained token."""

WriteState = Callable[[Path], None]
"""Writes a copied state into a directory."""


class NotFinite(OutpaceError):
    """`learner.max_bad_steps` consecutive steps had a non-finite loss or gradient."""


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """Constructor argument of `LearnerHost` and its backend.

    - `config`: resolved
    - `read_group`: fetches a finished group, from wherever the workers put it
    - `snapshots`: directory for published weights: in memory, or on disk if the ranks are on several machines
    - `bad_steps`: directory for the groups of bad steps; None: they are not kept"""

    config: Config
    read_group: Callable[[JournalLocation], GroupRecord]
    snapshots: Path
    incarnation: str
    bad_steps: Path | None = None
    device: str = "cpu"
    gpu_memory: float = 1.0  # fraction of the GPU memory that the learner may use
    threads: int | None = None  # None: torch's default
    ranks: Ranks | None = None  # the processes that the learner is sharded over; None: it is not sharded
    sharing: CoreSharing | None = None  # adjusts the thread count during the run; None: it is fixed


class LearnerBackend(Protocol):
    version: Version
    """Number of finished steps; restored by `load_state`."""
    tokens: int
    """Tokens trained since the start of the run; restored by `load_state`."""

    @property
    def parameter_count(self) -> int:
        """Number of trained parameters."""
        ...

    def warm_up(self) -> None:
        """Do one-time work that would slow down the first batch. Called once, while the engines sample that batch."""
        ...

    def score(self, rows: Sequence[Row]) -> list[dict[str, Floats]]:
        """Score every trained token with the current weights. Per row: `OLD_LOGP`, with a critic `OLD_VALUES`, and with
        KL in the reward `REFERENCE_LOGP`. These rows need no advantages."""
        ...

    def accumulate(self, rows: Sequence[Row], extras: Sequence[Extras] = (), replayed: bool = False) -> ChunkReport:
        """Add the gradient of these rows to the next update. `extras` is empty or has one entry per row. Raises
        `ValueError` for rows without advantages, as `check_rows` does."""
        ...

    def update(self) -> None:
        """Normalize the gradients accumulated since the last update and take one optimizer step."""
        ...

    def finish_step(self) -> StepReport:
        """Finish the batch after its last update: increment the version and report. Raises `NotFinite` if training
        cannot continue."""
        ...

    def drop_gradients(self) -> None:
        """Discard the gradients accumulated since the last update."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of the current policy to publish, valid until the next call. Names, shapes and dtypes stay
        the same for the whole run."""
        ...

    @property
    def published_adapter(self) -> LoraAdapter | None:
        """The adapter whose tensors `weights` returns; None: it returns a whole model."""
        ...

    def copy_state(self) -> WriteState:
        """Copy everything that `load_state` needs. The result is called on another thread while training continues."""
        ...

    def load_state(self, directory: Path) -> Version:
        """Restore a written state and drop accumulated gradients. Returns the restored version. Raises `CorruptData` if
        the state does not fit."""
        ...

    def logprobs(self, sequences: Sequence[Ints], temperature: float) -> list[Floats]:
        """Return the current policy's logprobs of every token but the first, at this temperature."""
        ...

    def close(self) -> None:
        """Free resources. No other call follows."""
        ...


def count_lags(rows: Sequence[Row], version: Version) -> dict[int, int]:
    """Return the number of trained tokens by lag."""
    versions = np.concatenate([row.versions[row.mask] for row in rows]) if rows else np.zeros(0, dtype=np.int32)
    lags, counts = np.unique(version - versions, return_counts=True)
    return dict(zip(lags.tolist(), counts.tolist(), strict=True))


def check_rows(rows: Iterable[Row]) -> None:
    """Raise `ValueError` for a row that cannot be trained. Advantages are computed before a row reaches a backend
    (`outpace.learner.batch_learner`); a backend refuses rows without them."""
    for row in rows:
        count = len(row.tokens)
        if count and not len(row.advantages):
            raise ValueError("a row has no advantages; compute them before training")
        parts = (row.mask, row.logprobs, row.versions, row.advantages)
        if any(len(part) != count for part in parts):
            raise ValueError(f"a row of {count} tokens has arrays of other lengths: {[len(part) for part in parts]}")
        if count and row.mask[0]:
            raise ValueError("the first token of a row cannot be trained: no token predicts it")
