"""The learner without processes, files or event loops: rows in, sums of gradients, one update per batch.

Exactness by linearity: `accumulate` adds gradients of un-normalised loss sums, `step` divides once by the number of
tokens trained in the whole batch. So the update is the token-mean over the batch however it was cut into chunks and
passes, up to rounding; with the same chunks in the same order and the same threads it is the same bits.

Parameters are float32, whatever dtype the matrix products run in.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.config import LearnerConfig
from outpace.errors import OutpaceError
from outpace.learn.forward import choose_forward
from outpace.learn.losses import effective_sample_size, mismatch, truncated_importance
from outpace.learn.packing import Packed, pack
from outpace.learn.schedule import learning_rate
from outpace.learn.settings import CoreSettings
from outpace.types import ChunkReport, Row, StepReport, Version


@dataclass
class Totals:
    """What the open batch, or one chunk of it, has seen so far. Sums add up; so do these."""

    tokens: int = 0
    rows: int = 0
    loss_sum: float = 0.0
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    ratio_max: float = 0.0
    lag_counts: Counter[int] = field(default_factory=Counter)

    def add(self, other: Totals) -> None:
        self.tokens += other.tokens
        self.rows += other.rows
        self.loss_sum += other.loss_sum
        for name, value in other.sums.items():
            self.sums[name] += value
        self.ratio_max = max(self.ratio_max, other.ratio_max)
        self.lag_counts.update(other.lag_counts)


class LearnerCore:
    """Owns the model and its optimizer. Not thread-safe: one thread at a time."""

    def __init__(self, model: PreTrainedModel, settings: CoreSettings) -> None:
        self.settings = settings
        self.model = model
        self.version: Version = 0
        self.tokens = 0  # trained since the start
        self.bad_steps = 0  # in a row
        _prepare(model, settings.learner.gradient_checkpointing)
        self._forward = choose_forward(model, settings.temperature, getattr(torch, settings.dtype))
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = _make_optimizer(list(self.parameters.values()), settings.learner)
        self._batch = Totals()
        self._seconds = 0.0

    def accumulate(self, rows: Sequence[Row]) -> ChunkReport:
        """Forward and backward over these rows as part of the open batch."""
        started = time.perf_counter()
        chunk = Totals(rows=len(rows))
        for packed in pack(rows, self.settings.learner.tokens_per_pass):
            chunk.add(self._train_pass(packed))
        self._batch.add(chunk)
        seconds = time.perf_counter() - started
        self._seconds += seconds
        return ChunkReport(
            tokens=chunk.tokens,
            rows=chunk.rows,
            loss_sum=chunk.loss_sum,
            sums=dict(chunk.sums),
            maxima={"ratio": chunk.ratio_max},
            lag_counts=dict(chunk.lag_counts),
            seconds=seconds,
        )

    def step(self) -> StepReport:
        """Close the open batch: one normalisation, one update, one version more."""
        started = time.perf_counter()
        batch, self._batch = self._batch, Totals()
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        tokens = max(1, batch.tokens)
        loss = batch.loss_sum / tokens
        grad_norm = float(nn.utils.get_total_norm(gradients)) / tokens if batch.tokens else 0.0
        lr = self._learning_rate()
        skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        if batch.tokens and not skipped:
            self._update(gradients, grad_norm, tokens, lr)
        self.drop_gradients()
        self._count_bad_steps(skipped, loss, grad_norm)
        self.version += 1
        self.tokens += batch.tokens
        seconds, self._seconds = self._seconds + time.perf_counter() - started, 0.0
        return StepReport(
            version=self.version,
            loss=loss,
            tokens=batch.tokens,
            grad_norm=grad_norm,
            lr=lr,
            skipped=skipped,
            seconds=seconds,
            metrics=step_metrics(batch),
        )

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)  # kept allocated: the next batch needs the same memory
        self._batch = Totals()

    def _train_pass(self, packed: Packed) -> Totals:
        logp_N, entropy_N = self._forward(packed)
        sampler_logp_N = torch.from_numpy(packed.sampler_logp_N).to(logp_N.device)
        advantages_N = torch.from_numpy(packed.advantages_N).to(logp_N.device)
        cap = self.settings.importance_cap
        loss_sum = truncated_importance(logp_N, sampler_logp_N, advantages_N, cap).sum(dtype=torch.float64)
        loss_sum.backward()  # type: ignore[no-untyped-call]
        sums, ratio_max = mismatch(logp_N, sampler_logp_N, cap)
        return Totals(
            tokens=len(packed.targets_N),
            loss_sum=loss_sum.item(),
            sums=defaultdict(float, sums, entropy=entropy_N.sum(dtype=torch.float64).item()),
            ratio_max=ratio_max,
            lag_counts=Counter((self.version - packed.versions_N).tolist()),
        )

    def _update(self, gradients: list[Tensor], grad_norm: float, tokens: int, lr: float) -> None:
        clip = min(1.0, self.settings.learner.max_grad_norm / (grad_norm + 1e-6))
        torch._foreach_mul_(gradients, clip / tokens)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def _learning_rate(self) -> float:
        config = self.settings.learner
        assert config.lr is not None, "the config was resolved"
        return learning_rate(
            config.lr, self.version, self.settings.total_steps, config.schedule, config.lr_warmup_steps
        )

    def _count_bad_steps(self, skipped: bool, loss: float, grad_norm: float) -> None:
        self.bad_steps = self.bad_steps + 1 if skipped else 0
        if self.bad_steps >= self.settings.learner.max_bad_steps:
            raise OutpaceError(
                f"{self.bad_steps} steps in a row had a loss or gradient that is not finite "
                f"(version {self.version}: loss {loss}, gradient norm {grad_norm})"
            )


def step_metrics(batch: Totals) -> dict[str, float]:
    """Means and shares of one batch; all finite and defined for a batch that trained nothing."""
    tokens = max(1, batch.tokens)
    lags = sorted(batch.lag_counts.items())
    metrics = {
        "offpolicy/ess": effective_sample_size(batch.sums, batch.tokens),
        "offpolicy/kl": batch.sums["kl"] / tokens,
        "offpolicy/truncated": batch.sums["truncated"] / tokens,
        "offpolicy/ratio_max": batch.ratio_max,
        "entropy": batch.sums["entropy"] / tokens,
        "lag/mean": sum(lag * count for lag, count in lags) / tokens,
        "lag/p95": float(_percentile(lags, 0.95)),
        "lag/max": float(lags[-1][0]) if lags else 0.0,
    }
    return metrics | {f"lag/tokens_{lag}": float(count) for lag, count in lags}


def _percentile(counts: list[tuple[int, int]], share: float) -> int:
    """The smallest value that at least `share` of all counted things do not exceed."""
    needed = share * sum(count for _, count in counts)
    for value, count in counts:
        needed -= count
        if needed <= 0:
            return value
    return 0


def _prepare(model: PreTrainedModel, gradient_checkpointing: bool) -> None:
    """Float32 parameters, no dropout anywhere: the sampler has none, and the weights compare with the sampler."""
    nn.Module.float(model)
    nn.Module.eval(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        # transformers checkpoints only what is in training mode; everything inside stays in evaluation mode.
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True


def _make_optimizer(parameters: list[nn.Parameter], config: LearnerConfig) -> torch.optim.AdamW:
    """Weight decay is for matrices: biases and norms stay. Each step sets its own learning rate."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), fused=True)
