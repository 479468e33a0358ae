"""TorchBackend: the built-in learner backend. `LearnerCore` with a loaded model and saved state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from outpace.learner import state
from outpace.learner.backend import LearnerSettings, WriteState
from outpace.learner.core import LearnerCore, needs_reference_model, sequence_logprobs
from outpace.learner.sharding import ShardedModel, shard
from outpace.learner.state import StateCopies
from outpace.models.loading import call_at_every_layer, load_model, set_up_device
from outpace.models.sharded_loading import CheckpointMismatch, load_sharded_model
from outpace.types import Floats, Ints, StepReport, Version

log = logging.getLogger(__name__)


class TorchBackend(LearnerCore):
    """Implements `LearnerBackend`. The constructor loads the model unless it is given."""

    def __init__(self, settings: LearnerSettings, model: PreTrainedModel | None = None) -> None:
        config = settings.config
        if settings.threads:  # torch's thread count is per calling thread
            torch.set_num_threads(settings.threads)
        set_up_device(settings.device, settings.gpu_memory)
        torch.manual_seed(config.run.seed)
        loaded = None if model else _load_in_place(settings)
        if loaded is not None:
            super().__init__(loaded.model, config, ranks=settings.ranks, reference=loaded.reference)
        elif settings.ranks is None:
            super().__init__(model or _load_whole(settings, settings.device), config)
        else:
            for rank in range(settings.ranks.size):  # one after the other: there may be memory for one whole model only
                if rank == settings.ranks.rank:
                    super().__init__(model or _load_whole(settings, "cpu"), config, ranks=settings.ranks)
                settings.ranks.barrier()
        if settings.sharing is not None:
            call_at_every_layer(self.compute_model, settings.sharing.adjust)
        self._copies = StateCopies()
        self._reserving = ThreadPoolExecutor(1, "reserve")
        self.reserved: Future[None] | None = None
        """Done when the memory of the first state copy is allocated. Starts after the first step, when the optimizer
        has all its state."""

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    def finish_step(self) -> StepReport:
        report = super().finish_step()
        if self.config.checkpoint.every > 0 and self.reserved is None:
            self.reserved = self._reserving.submit(self._copies.reserve, state.changing_tensors(self))
        return report

    def copy_state(self) -> WriteState:
        copied = state.copy(self, self._copies)

        def write(directory: Path) -> None:
            try:
                state.write(copied, directory)
            finally:
                self._copies.release(copied)

        return write

    def load_state(self, directory: Path) -> Version:
        return state.restore(self, directory)

    def logprobs(self, sequences: Sequence[Ints], temperature: float) -> list[Floats]:
        return sequence_logprobs(self, sequences, temperature)

    def close(self) -> None:
        self._reserving.shutdown()


def _load_whole(settings: LearnerSettings, device: str) -> PreTrainedModel:
    config = settings.config.model
    return load_model(config.path, dtype="float32", device=device, trust_remote_code=config.trust_remote_code)


class _Loaded(NamedTuple):
    model: PreTrainedModel | ShardedModel
    reference: ShardedModel | None = None


def _load_in_place(settings: LearnerSettings) -> _Loaded | None:
    """Load the model from its files directly into the memory that training uses: only this rank's part, and frozen
    matrices in `model.dtype` if the files have it. Returns None if transformers must load the whole model in float32
    instead: for full fine-tuning on one device, or because transformers has to convert the checkpoint."""
    config, ranks = settings.config, settings.ranks
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    if ranks is None and config.lora.adapter is None:
        return None

    def load() -> PreTrainedModel | ShardedModel:
        roots: list[ShardedModel] = []

        def shard_if_wanted(model: PreTrainedModel) -> None:
            if ranks is not None:
                roots.append(shard(model, ranks, config.learner, dtype))

        model = load_sharded_model(
            config.model.path,
            shard=shard_if_wanted,
            device=settings.device,
            parameter_device="cpu" if ranks and config.learner.offload else None,
            trust_remote_code=config.model.trust_remote_code,
            adapter=config.lora.adapter,
            frozen_dtype=dtype,
        )
        return roots[0] if roots else model

    try:
        model = load()
        reference = load() if needs_reference_model(config) else None
    except CheckpointMismatch as error:
        log.warning("the whole model is loaded in float32, by one learner process after the other: %s", error)
        return None
    assert not isinstance(reference, PreTrainedModel), "only a sharded model needs a second one"
    return _Loaded(model, reference)
