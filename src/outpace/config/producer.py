"""Settings of a data producer. `tasks.producer` names it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from outpace.config.base import OpenedBy, Section


class ProducerConfig(Section):
    """When a data producer is asked for a round of data, and how often each round is used.

    These settings apply if `tasks.producer` names a producer.
    """

    mini_epochs: int = Field(default=1, ge=1)
    """Passes over each produced dataset: every row once, then every row again."""
    max_rollouts: int | None = Field(default=None, ge=1)
    """End the tasks after this many rounds."""
    steps_per_generation: int | None = Field(default=None, ge=1)
    """Training steps per round. Default: as many as its rows give."""
    num_iterations: int = Field(default=1, ge=1)
    """Passes of the optimizer over each batch. The same as `algorithm.epochs_per_batch`."""
    async_prefetch: bool = False
    """Produce the next rounds in the background while the current one is trained."""
    prefetch_depth: Annotated[int, OpenedBy("async_prefetch")] = Field(default=1, ge=1)
    """Rounds produced ahead of the one that is trained."""
    sync_warmup_rollouts: Annotated[int, OpenedBy("async_prefetch")] = Field(default=0, ge=0)
    """First rounds that are produced only when the rounds before them are trained, hence on policy."""
    eval_during_produce: bool = True
    """Put the module into evaluation mode while `produce` runs. Applies if the learner runs in the same process."""
    empty_cache_before_produce: bool = False
    """Empty the GPU cache before `produce`. Applies if the learner runs in the same process."""
    empty_cache_after_produce: bool = False
    """Empty the GPU cache after `produce`. Applies if the learner runs in the same process."""
    options: dict[str, Any] = {}
    """Keyword arguments of the producer's class, beside `config`."""

    def in_background(self, number: int) -> bool:
        """Return whether this round is produced while earlier ones are trained."""
        return self.async_prefetch and number >= self.sync_warmup_rollouts
