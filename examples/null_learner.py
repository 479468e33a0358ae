"""A learner backend that trains nothing: the smallest class that implements `outpace.learner.backend.LearnerBackend`.

    outpace train --learner.backend examples/null_learner.py:NullLearner --run.steps 3

Everything around the gradient runs as usual: rollouts, rewards, advantages, weight updates, checkpoints and resume. Use
it as a template for a backend of your own, and to measure a run without the cost of training.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from outpace.checkpoint.commit import write_durably
from outpace.errors import CorruptData
from outpace.learner.backend import (
    OLD_LOGP,
    OLD_VALUES,
    REFERENCE_LOGP,
    Extras,
    LearnerSettings,
    WriteState,
    check_rows,
    count_lags,
)
from outpace.learner.state import load_tensors, write_tensors
from outpace.models.loading import load_model
from outpace.types import ChunkReport, Floats, Ints, LoraAdapter, Row, StepReport, Version
from outpace.weights.shared_memory import distinct_tensors

WEIGHTS = "model.safetensors"  # the name that `outpace export` looks for
COUNTERS = "null_learner.json"


class NullLearner:
    def __init__(self, settings: LearnerSettings) -> None:
        config = settings.config
        self._model = load_model(
            config.model.path, device=settings.device, trust_remote_code=config.model.trust_remote_code
        )
        self._temperature = config.rollout.temperature
        self._accumulated: Counter[int] = Counter()  # tokens by lag, since the last update
        self._step: Counter[int] = Counter()  # since the last version
        self.version: Version = 0
        self.tokens = 0

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())

    def score(self, rows: Sequence[Row]) -> list[dict[str, Floats]]:
        scores = []
        for row, logp in zip(rows, self.logprobs([row.tokens for row in rows], self._temperature), strict=True):
            trained = logp[row.mask[1:]]
            scores.append({OLD_LOGP: trained, REFERENCE_LOGP: trained, OLD_VALUES: 0 * trained})
        return scores

    def warm_up(self) -> None:
        """There is nothing to prepare."""

    def accumulate(self, rows: Sequence[Row], extras: Sequence[Extras] = (), replayed: bool = False) -> ChunkReport:
        check_rows(rows)
        lags = count_lags(rows, self.version)  # a real backend runs forward and backward here
        self._accumulated.update(lags)
        return ChunkReport(
            tokens=sum(lags.values()),
            rows=len(rows),
            loss_sum=0.0,
            lag_counts={} if replayed else lags,
            replay_lag_counts=lags if replayed else {},
        )

    def update(self) -> None:
        self._step.update(self._accumulated)  # a real backend takes its optimizer step here
        self.drop_gradients()

    def finish_step(self) -> StepReport:
        tokens, self._step = sum(self._step.values()), Counter()
        self.version += 1
        self.tokens += tokens
        return StepReport(version=self.version, loss=0.0, tokens=tokens, grad_norm=0.0, lr=0.0)

    def drop_gradients(self) -> None:
        self._accumulated.clear()

    def weights(self) -> dict[str, Tensor]:
        return distinct_tensors(self._model.state_dict())

    @property
    def published_adapter(self) -> LoraAdapter | None:
        return None

    def copy_state(self) -> WriteState:
        weights = {name: tensor.clone() for name, tensor in self.weights().items()}
        counters = json.dumps({"version": self.version, "tokens": self.tokens})

        def write(directory: Path) -> None:
            write_tensors(directory / WEIGHTS, weights)
            write_durably(directory / COUNTERS, counters.encode())

        return write

    def load_state(self, directory: Path) -> Version:
        try:
            counters = json.loads((directory / COUNTERS).read_text())
            self._model.load_state_dict(load_tensors(directory / WEIGHTS), strict=False)  # tied weights are there once
        except (OSError, ValueError, RuntimeError) as error:
            raise CorruptData(f"{directory}: {error}") from error
        self.version, self.tokens = counters["version"], counters["tokens"]
        self.drop_gradients()
        return self.version

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[Ints], temperature: float) -> list[Floats]:
        found = []
        for tokens in sequences:
            ids = torch.as_tensor(tokens, dtype=torch.int64, device=self._model.device)
            logits = self._model(ids[None, :-1]).logits[0].float() / temperature
            logp = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            found.append(logp.cpu().numpy())
        return found

    def close(self) -> None:
        """Nothing to free."""
