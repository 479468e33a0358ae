"""LearnerCore: the training step without processes, files or event loops.

Exact by linearity: `accumulate` adds gradients of unnormalized sums, `update` divides once by the denominator of
everything accumulated. An update therefore does not depend on how its rows were split into chunks and passes, up to
rounding. With the same chunks in the same order and the same thread count it is bit-identical.

    accumulate* ─▶ update ─▶ finish_step        one update per batch: groups are trained as they arrive
    (accumulate* ─▶ update)* ─▶ finish_step     several updates: the whole batch is collected first (`BatchLearner`)

Parameters are float32, independent of the dtype of matrix products. With LoRA, `parameters` are the adapter's. The
model's own parameters stay frozen, and matrices that were loaded in the dtype of matrix products keep it.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.algorithms import losses
from outpace.algorithms.token_advantages import with_advantages
from outpace.config import Config
from outpace.config.algorithm import CriticConfig, configured_advantage
from outpace.errors import plural
from outpace.learner.backend import (
    OLD_LOGP,
    OLD_VALUES,
    REFERENCE_LOGP,
    Extras,
    NotFinite,
    check_rows,
    count_lags,
)
from outpace.learner.balance import share_rows
from outpace.learner.compute_copy import ComputeCopy
from outpace.learner.forward import (
    Forward,
    ForwardOptions,
    ForwardOutputs,
    ShardedForward,
    choose_forward,
    compute_device,
    matching_forward,
)
from outpace.learner.loss import LossAssembly
from outpace.learner.metrics import StepTotals, TotalsParts, step_metrics, totals_from, totals_parts
from outpace.learner.optimizer import ValueHead, clip_factor, learning_rate, make_optimizer
from outpace.learner.packing import PackedBatch, input_length, pack
from outpace.learner.ranks import Ranks
from outpace.learner.reference import Reference, make_reference
from outpace.learner.sharding import ShardedModel, idle_batch, probe_model, shard
from outpace.models.lora import LoraAdapters, frozen_matrices
from outpace.models.slices import local_part
from outpace.types import OBSERVED, ChunkReport, Floats, Ints, LoraAdapter, Row, StepReport, Version

_NO_ADVANTAGE = np.zeros(())

SMALL_PASS = 64
"""Tokens of the smaller pass that `warm_up` makes."""

Update = tuple[float, float]
"""Loss and gradient norm of one update."""


class LearnerCore:
    """Owns the model, the optimizer and, if the algorithm needs them, a reference and a critic. Not thread-safe."""

    def __init__(
        self,
        model: PreTrainedModel | ShardedModel,
        config: Config,
        dtype: torch.dtype | None = None,
        ranks: Ranks | None = None,
        reference: ShardedModel | None = None,
    ) -> None:
        """`config` must be resolved. `dtype` is the dtype of matrix products and published weights, by default
        `model.dtype`. Trained parameters, gradients and optimizer state are always float32 (float64 is for tests).
        With `ranks`, every rank makes the same calls with the same rows. The constructor shards the model over them
        unless it is a `ShardedModel` already; then `reference` is a second one, if the algorithm needs it."""
        self.config = config
        self.ranks = ranks
        root = model if isinstance(model, ShardedModel) else None
        model = model.model if isinstance(model, ShardedModel) else model
        self.dtype = dtype or getattr(torch, config.model.dtype)
        self.model = model
        self.version: Version = 0
        self.tokens = 0  # trained since the start of the run
        self.bad_steps = 0  # consecutive steps with a skipped update
        self.engine_kl = 0.0  # latest KL on tokens sampled by the version being trained
        self.adapters = LoraAdapters(model, config.lora.adapter) if config.lora.adapter else None
        _prepare(model, config.learner.gradient_checkpointing, self.dtype)
        has_critic = configured_advantage(config.advantage).registration.critic
        logprobs_only = ForwardOptions(config.rollout.temperature, self.dtype)
        reference_model = None if reference is None else reference.model
        if needs_reference_model(config) and root is None:
            reference_model = copy.deepcopy(model)
        if ranks is not None and root is None:
            root = shard(model, ranks, config.learner, self.dtype)
            if reference_model is not None:
                reference = shard(reference_model, ranks, config.learner, self.dtype)
        self.device = compute_device(model)
        options = replace(
            logprobs_only,
            entropy_gradient=config.algorithm.entropy_coefficient != 0,
            hidden=has_critic,
            compiled=self.device.type == "cuda" and config.learner.compile,
        )
        copies = self.dtype == torch.bfloat16 and not self.adapters and ranks is None
        self._copy = ComputeCopy(model, self.dtype) if copies else None
        self.compute_model = self._copy.model if self._copy else model
        mixed = len({parameter.dtype for parameter in model.parameters()}) > 1
        small = partial(probe_model, model) if root is not None or mixed else lambda: model
        self._forward = choose_forward(self.compute_model, options, small)
        if root is not None:
            self._forward = ShardedForward(self._forward, root)
        self.reference: Reference | None = None
        if config.kl.coefficient > 0:
            forward = matching_forward(self._forward, reference_model or model, logprobs_only, reference)
            self.reference = make_reference(model, self.adapters, reference_model, forward)
        self.critic = _make_critic(model, config.critic, self.device) if has_critic else None
        self._loss = LossAssembly(config)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.critic_parameters = (
            {f"critic.{name}": p for name, p in self.critic.named_parameters()} if self.critic else {}
        )
        self.optimizer = make_optimizer(self.parameters, self.critic_parameters, config)
        self._accumulated = StepTotals()  # since the last update
        self._step = StepTotals()  # since the last version
        self._updates: list[Update] = []  # since the last version
        self._seconds = 0.0

    def warm_up(self) -> None:
        """Compile for large and small passes in advance, so that the first passes do not have to."""
        for tokens in (self.config.learner.resolved_tokens_per_pass, SMALL_PASS):
            self._forward.warm_up(tokens)

    # ------------------------------------------------------------------------------------------------- gradients

    def accumulate(self, rows: Sequence[Row], extras: Sequence[Extras] = (), replayed: bool = False) -> ChunkReport:
        """Run forward and backward over these rows, adding to the gradient of the next update."""
        started = time.perf_counter()
        chunk = StepTotals()
        for _, packed in self.passes(rows, extras):
            chunk.add(self._train_pass(packed, replayed))
        self._accumulated.add(chunk)
        seconds = time.perf_counter() - started
        self._seconds += seconds
        lags = count_lags(rows, self.version)  # of all ranks
        return ChunkReport(
            tokens=sum(lags.values()),
            rows=len(rows),
            loss_sum=chunk.loss_sum,
            lag_counts={} if replayed else lags,
            replay_lag_counts=lags if replayed else {},
            seconds=seconds,
        )

    def passes(self, rows: Sequence[Row], extras: Sequence[Extras] = ()) -> list[tuple[list[int], PackedBatch]]:
        """Return this rank's passes, each with the indices of its rows. All ranks have the same number, longest first,
        because they wait for one another in each pass."""
        limit, shortest = self.config.learner.resolved_tokens_per_pass, self._forward.min_shared
        own: Sequence[int] = range(len(rows))
        if self.ranks is not None:
            check_rows(rows)  # raise on all ranks, or the others would wait for the one that raised
            own = share_rows(rows, self.ranks.size, limit, _width(self.model))[self.ranks.rank]
        chosen = [extras[index] for index in own] if extras else ()
        batches = pack([rows[index] for index in own], limit, chosen, shortest)
        trained = iter([index for index in own if input_length(rows[index])])
        found = [([next(trained) for _ in range(batch.rows)], batch) for batch in batches]
        if self.ranks is not None:
            found.sort(key=lambda each: -len(each[1].tokens_T))
            found += [([], idle_batch())] * (self.ranks.largest(len(found)) - len(found))
        return found

    def _train_pass(self, packed: PackedBatch, replayed: bool) -> StepTotals:
        reference_logp_N = self.reference.logp(packed) if self.reference and self.config.kl.in_loss else None
        outputs = self._forward(packed)
        values_N = self._values(outputs)
        if not packed.rows:
            outputs_with_gradient = [each for each in (*outputs, values_N) if each is not None and each.requires_grad]
            torch.autograd.backward(outputs_with_gradient, [torch.zeros_like(each) for each in outputs_with_gradient])
            return StepTotals()
        gradient = self._loss.gradient(packed, outputs, self.version, reference_logp_N, values_N)
        pairs = [
            (outputs.logp_N, gradient.logp_N),
            (outputs.entropy_N, gradient.entropy_N),
            (values_N, gradient.values_N),
        ]
        starts = [(tensor, start) for tensor, start in pairs if tensor is not None and start is not None]
        torch.autograd.backward([tensor for tensor, _ in starts], [start for _, start in starts])
        if self._copy is not None:
            self._copy.collect_gradients()
        return StepTotals.from_pass(packed, gradient, self.version, replayed, before_first_update=not self._updates)

    def _values(self, outputs: ForwardOutputs) -> Tensor | None:
        if self.critic is None:
            return None
        assert outputs.hidden_ND is not None
        values_N: Tensor = self.critic(outputs.hidden_ND)
        return values_N

    @torch.no_grad()
    def score(self, rows: Sequence[Row]) -> list[dict[str, Floats]]:
        """Score every trained token with the current weights. Per row: logprobs, and values and reference logprobs if
        the algorithm needs them."""
        started = time.perf_counter()
        empty = np.zeros(0, dtype=np.float32)
        scores = [dict.fromkeys(self._score_names, empty) for _ in rows]
        unweighted = [with_advantages(row, _NO_ADVANTAGE) for row in rows]  # scoring does not read advantages
        found: dict[int, dict[str, Floats]] = {}
        for indices, packed in self.passes(unweighted):
            ends = np.cumsum(np.bincount(packed.sequence_N, minlength=packed.rows))[:-1]
            by_name = {name: np.split(values, ends) for name, values in self._score_pass(packed).items()}
            for document, index in enumerate(indices):
                found[index] = {name: parts[document] for name, parts in by_name.items()}
        for index, score in (self.ranks.gather_arrays(found) if self.ranks else found).items():
            scores[index] = score
        self._seconds += time.perf_counter() - started
        return scores

    @property
    def _score_names(self) -> list[str]:
        names = {OLD_LOGP: True, OLD_VALUES: self.critic is not None, REFERENCE_LOGP: self.config.kl.in_reward}
        return [name for name, wanted in names.items() if wanted]

    def _score_pass(self, packed: PackedBatch) -> dict[str, Floats]:
        outputs = self._forward(packed)
        found = {OLD_LOGP: outputs.logp_N}
        if (values_N := self._values(outputs)) is not None:
            found[OLD_VALUES] = values_N
        if self.reference is not None and self.config.kl.in_reward:
            found[REFERENCE_LOGP] = self.reference.logp(packed)
        return {name: values.cpu().numpy() for name, values in found.items()}

    # --------------------------------------------------------------------------------------------------- updates

    def update(self) -> None:
        """Normalize the gradients accumulated since the last update and take one optimizer step. Skip the step if loss
        or gradient norm is not finite."""
        started = time.perf_counter()
        totals, self._accumulated = self._accumulated, StepTotals()
        aggregation, limit = self.config.policy_loss.aggregation, self.config.rollout.max_tokens
        assert aggregation is not None, "the config must be resolved"
        assert limit is not None, "the config must be resolved"
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = float(nn.utils.get_total_norm([local_part(gradient) for gradient in gradients]))
        if self.ranks is not None:
            totals, norm = self._over_all_ranks(totals, norm)
        denominator = losses.loss_denominator(aggregation, totals.tokens, totals.sequences, limit)
        loss = totals.loss_sum / denominator
        grad_norm = norm / denominator if totals.tokens else 0.0
        if totals.tokens and _is_finite((loss, grad_norm)):
            self._apply(gradients, grad_norm, denominator)
        self.drop_gradients()
        self._step.add(totals)
        self._updates.append((loss, grad_norm))
        self._seconds += time.perf_counter() - started

    def _over_all_ranks(self, totals: StepTotals, norm: float) -> tuple[StepTotals, float]:
        """Return the totals and the gradient norm of all ranks, and sum the gradients of the critic, which is not
        sharded."""
        assert self.ranks is not None
        for parameter in self.critic_parameters.values():
            if parameter.grad is not None:
                self.ranks.sum(parameter.grad)
        everything, squares = StepTotals(), 0.0
        for parts, square in self.ranks.gather_values((totals_parts(totals), norm**2), tuple[TotalsParts, float]):
            everything.add(totals_from(parts))
            squares += square
        return everything, math.sqrt(squares)

    def _apply(self, gradients: list[Tensor], grad_norm: float, denominator: float) -> None:
        limit = self.config.learner.max_grad_norm
        torch._foreach_mul_(gradients, clip_factor(grad_norm, limit) / denominator)
        if self.critic_parameters:
            critic_gradients = [p.grad for p in self.critic_parameters.values() if p.grad is not None]
            norm = float(nn.utils.get_total_norm(critic_gradients)) / denominator
            torch._foreach_mul_(critic_gradients, clip_factor(norm, limit) / denominator)
        lr = self._learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["ratio"]
        self.optimizer.step()
        self.weights_changed()

    def weights_changed(self) -> None:
        """Must be called after any change of the model's weights."""
        if self._copy is not None:
            self._copy.refresh()

    def finish_step(self) -> StepReport:
        """Finish the batch after its last update: increment the version and report."""
        step, self._step = self._step, StepTotals()
        updates, self._updates = self._updates, []
        skipped = self._check_finite(updates)
        if fresh := step.sums["tokens_fresh"]:
            self.engine_kl = step.sums["kl_fresh"] / fresh
        lr = self._learning_rate()
        passes = self.config.algorithm.epochs_per_batch
        self.version += 1
        self.tokens += step.tokens // passes
        if self.reference is not None and (every := self.config.kl.sync_every) and self.version % every == 0:
            self.reference.refresh()
        seconds, self._seconds = self._seconds, 0.0
        update_losses, norms = zip(*([*filter(_is_finite, updates)] or updates), strict=True)
        return StepReport(
            version=self.version,
            loss=sum(update_losses) / len(update_losses),
            tokens=step.tokens // passes,
            grad_norm=sum(norms) / len(norms),
            lr=lr,
            skipped=skipped,
            seconds=seconds,
            metrics=step_metrics(step, self.engine_kl, passes),
        )

    def step(self) -> StepReport:
        """Finish a batch with one update."""
        self.update()
        return self.finish_step()

    def drop_gradients(self) -> None:
        trained = (self.parameters | self.critic_parameters).values()
        gradients = [local_part(p.grad) for p in trained if p.grad is not None]
        if gradients:
            torch._foreach_zero_(gradients)  # they stay allocated for the next batch
        self._accumulated = StepTotals()

    def _learning_rate(self) -> float:
        config, steps = self.config.learner, self.config.run.steps
        assert config.lr is not None, "the config must be resolved"
        return learning_rate(config.lr, self.version, steps, config.schedule, config.lr_warmup_steps)

    def _check_finite(self, updates: list[Update]) -> bool:
        """Return whether an update of this step was skipped. Raise `NotFinite` after too many such steps in a row."""
        bad = [update for update in updates if not _is_finite(update)]
        self.bad_steps = self.bad_steps + 1 if bad else 0
        if self.bad_steps >= self.config.learner.max_bad_steps:
            raise NotFinite(
                f"{plural(self.bad_steps, 'consecutive step')} with a non-finite loss or gradient "
                f"(version {self.version}: loss {bad[-1][0]}, gradient norm {bad[-1][1]})"
            )
        return bool(bad)

    # --------------------------------------------------------------------------------------------------- weights

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of the current policy to publish, valid until the next update or the next call.

        full fine-tuning                         the model
        LoRA, engines load adapters (servers)    the adapter, with the tensor names of a PEFT file
        LoRA, other engines                      the model with the adapter merged, with its own tensor names"""
        if self.adapters is None:
            return self.model.state_dict()
        return self.adapters.merged(self.dtype) if self.published_adapter is None else self.adapters.tensors()

    @property
    def published_adapter(self) -> LoraAdapter | None:
        """Servers get the adapter alone, because they already have the model."""
        return self.config.lora.adapter if self.config.engine.kind != "embedded" else None


def _width(model: PreTrainedModel) -> int:
    embeddings = model.get_input_embeddings().weight
    assert isinstance(embeddings, Tensor)
    return int(getattr(model.config, "hidden_size", embeddings.shape[1]))


def _is_finite(update: Update) -> bool:
    return all(map(math.isfinite, update))


def needs_reference_model(config: Config) -> bool:
    """Return whether the reference policy is a second model. With LoRA it is the model without its adapters."""
    return config.kl.coefficient > 0 and config.lora.adapter is None


def _make_critic(model: PreTrainedModel, config: CriticConfig, device: torch.device) -> ValueHead:
    return ValueHead(_width(model), config.shared).to(device=device, dtype=model.dtype)


def _prepare(model: PreTrainedModel, gradient_checkpointing: bool, dtype: torch.dtype) -> None:
    """Make parameters float32, except frozen matrices that are in the `dtype` of matrix products. Disable dropout: the
    sampler has none, and importance weights compare with it."""
    kept = {id(parameter) for parameter in frozen_matrices(model) if parameter.dtype == dtype}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and id(tensor) not in kept:
            tensor.data = tensor.data.to(torch.float64 if dtype == torch.float64 else torch.float32)
    nn.Module.eval(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        # transformers only checkpoints modules in training mode; their submodules stay in evaluation mode.
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True


@torch.no_grad()
def sequence_logprobs(core: LearnerCore, sequences: Sequence[Ints], temperature: float) -> list[Floats]:
    """Score whole sequences with the learner's weights and training arithmetic: one logprob per token except the first.

    Used by the logprob check to compare the sampler with the learner, not for training. A sequence with an out-of-range
    token id gets NaN throughout: an out-of-range embedding lookup would leave a GPU unusable for this process."""
    vocabulary = int(core.model.get_input_embeddings().weight.shape[0])  # type: ignore[index]
    known = [bool(np.all((tokens >= 0) & (tokens < vocabulary))) for tokens in sequences]
    rows = [_trained_row(tokens) for tokens, valid in zip(sequences, known, strict=True) if valid and len(tokens) > 1]
    forward = matching_forward(core._forward, core.compute_model, ForwardOptions(temperature, core.dtype))
    scored = iter(_scores(core, forward, rows))
    nan = np.float32(np.nan)
    return [
        next(scored) if valid and len(tokens) > 1 else np.full(max(len(tokens) - 1, 0), nan)
        for tokens, valid in zip(sequences, known, strict=True)
    ]


def _scores(core: LearnerCore, forward: Forward, rows: Sequence[Row]) -> list[Floats]:
    found: dict[int, dict[str, Floats]] = {}
    for indices, packed in core.passes(rows):
        logp_N = forward(packed).logp_N.float().cpu().numpy()
        parts = np.split(logp_N, np.cumsum(np.bincount(packed.sequence_N))[:-1])
        found |= {index: {OLD_LOGP: part} for index, part in zip(indices, parts, strict=False)}
    scored = core.ranks.gather_arrays(found) if core.ranks else found
    return [scored[index][OLD_LOGP] for index in range(len(rows))]


def _trained_row(tokens: Ints) -> Row:
    count = len(tokens)
    zeros = np.zeros(count, dtype=np.float32)
    return Row(tokens, np.arange(count) > 0, zeros, np.full(count, OBSERVED, dtype=np.int32), zeros)
