"""Loss assembly: from the logprobs of one pass to the gradient that backward starts with.

The loss works on vectors with one entry per trained token, detached from the model. Its derivatives with respect to
logprob, entropy and value are computed here and passed to a single backward through the model. Policy loss,
corrections, KL and aggregation therefore cost a few vector operations, independent of the model.

    logp ──▶ policy loss(current / old) ──▶ × correction weight × kept? × aggregation weight ─┐
         ──▶ KL to the reference ─────────▶ × aggregation weight ─────────────────────────────┼─▶ sum ─▶ d/d logp
    entropy, values ──────────────────────▶ × aggregation weight ─────────────────────────────┘       d/d entropy, value

Everything is a sum. The step divides once, by the denominator of the whole batch. A masked token is removed from the
numerator only.

Legend: _N one entry per trained token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outpace.algorithms import corrections, losses
from outpace.algorithms.corrections import staleness_sums
from outpace.algorithms.losses import Tokens
from outpace.config import Config
from outpace.config.algorithm import configured_masks, configured_policy_loss, weight_settings
from outpace.errors import BadInput, plural
from outpace.learner.backend import KEEP, OLD_LOGP, OLD_VALUES, RETURNS
from outpace.learner.forward import ForwardOutputs
from outpace.learner.packing import PackedBatch
from outpace.types import Floats, Ints, Version


@dataclass(frozen=True)
class LossGradient:
    """Gradients that backward starts with, and the sums of the pass, still on the device. `loss_sum` is the total loss
    of all terms."""

    logp_N: Tensor
    entropy_N: Tensor | None
    values_N: Tensor | None
    loss_sum: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


class LossAssembly:
    """Combines policy loss, corrections, KL, entropy and value loss into one loss."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._policy_loss = configured_policy_loss(config.policy_loss)
        assert config.policy_loss.aggregation is not None, "the config must be resolved"
        self._old_policy, self._aggregation = config.policy_loss.old_policy, config.policy_loss.aggregation
        masks = configured_masks(config.correction).values()  # batch masks arrive as `KEEP`
        self._masks = [mask for mask in masks if mask.registration.scope != "batch"]

    def gradient(
        self,
        packed: PackedBatch,
        outputs: ForwardOutputs,
        version: Version,
        reference_logp_N: Tensor | None = None,
        values_N: Tensor | None = None,
    ) -> LossGradient:
        tokens = self._tokens(packed, outputs.logp_N, version)
        weights_N = losses.aggregation_weights(self._aggregation, tokens)
        correction_N, keep_N = self._corrections(tokens, packed.extras)
        policy = (self._policy_losses(tokens) * (correction_N * weights_N)).sum(dtype=torch.float64)
        (coefficient_N,) = torch.autograd.grad(policy, tokens.logp_N)
        sums, maxima = staleness_sums(
            tokens.logp_N.detach(),
            tokens.sampler_logp_N,
            tokens.advantages_N,
            coefficient_N,
            keep_N,
            _like(packed.versions_N == version, keep_N),
        )
        total = policy.detach()
        sums["entropy"] = outputs.entropy_N.detach().sum(dtype=torch.float64)
        sums["policy"] = total
        if reference_logp_N is not None:
            kl_N, coefficients_N = self._kl_to_reference(tokens, reference_logp_N, weights_N)
            coefficient_N = coefficient_N + coefficients_N
            sums["kl_reference"] = kl_N.sum(dtype=torch.float64)
            total = total + self._config.kl.coefficient * (kl_N * weights_N).sum(dtype=torch.float64)
        entropy_N = value_N = None
        if self._config.algorithm.entropy_coefficient != 0:
            entropy_N, loss = self._entropy(outputs.entropy_N, weights_N)
            total = total + loss
        if values_N is not None:
            value_N, loss, sums["value"] = self._values(packed.extras, values_N, weights_N)
            total = total + loss
        return LossGradient(coefficient_N, entropy_N, value_N, total, sums, maxima)

    def _policy_losses(self, tokens: Tokens) -> Tensor:
        """Call the policy loss and validate its result; it may be user code."""
        name, loss_N = self._policy_loss.registration.name, self._policy_loss(tokens)
        if not isinstance(loss_N, Tensor) or loss_N.shape != tokens.logp_N.shape:
            found = f"a tensor of shape {tuple(loss_N.shape)}" if isinstance(loss_N, Tensor) else type(loss_N).__name__
            raise BadInput(
                f"policy_loss.name: {name} returned {found} for {plural(len(tokens.logp_N), 'token')}; "
                "return a tensor with one loss per token"
            )
        if not loss_N.requires_grad:
            raise BadInput(f"policy_loss.name: the loss of {name} has no gradient; compute it from tokens.logp_N")
        return loss_N

    def _tokens(self, packed: PackedBatch, logp_N: Tensor, version: Version) -> Tokens:
        leaf_N = logp_N.detach().requires_grad_()
        sampler_logp_N = _like(packed.sampler_logp_N, logp_N)
        return Tokens(
            logp_N=leaf_N,
            old_logp_N=self._old_logp(packed, leaf_N.detach(), sampler_logp_N, version),
            sampler_logp_N=sampler_logp_N,
            advantages_N=_like(packed.advantages_N, logp_N),
            sequence_N=torch.from_numpy(packed.sequence_N).to(logp_N.device),
            sequences=packed.rows,
        )

    def _old_logp(self, packed: PackedBatch, logp_N: Tensor, sampler_logp_N: Tensor, version: Version) -> Tensor:
        """Return logprobs of the old policy. Before the first update of a step it is the current policy, so no second
        forward is needed."""
        if self._old_policy == "rollout":
            return sampler_logp_N
        if self._old_policy == "interpolated":
            nearness_N = _like(interpolation_weights(packed.versions_N, version), logp_N)
            return sampler_logp_N + nearness_N * (logp_N - sampler_logp_N)
        old = packed.extras.get(OLD_LOGP)
        return logp_N if old is None else _like(old, logp_N)

    def _corrections(self, tokens: Tokens, extras: Mapping[str, Floats]) -> tuple[Tensor, Tensor]:
        """Return the correction weight of every token (0 if rejected), and which tokens are kept."""
        correction = self._config.correction
        current_N = tokens.logp_N.detach()
        corrected = (
            self._old_policy != "rollout" and self._policy_loss.registration.ratio
        )  # the loss itself uses current / old
        log_rho_N = (tokens.old_logp_N if corrected else current_N) - tokens.sampler_logp_N
        keep_N = corrections.keep_mask(tokens, log_rho_N, self._masks)
        if KEEP in extras:
            keep_N = keep_N & _like(extras[KEEP], current_N).bool()
        weight_N = corrections.correction_weights(
            tokens, log_rho_N, correction.weight or "none", **weight_settings(correction)
        )
        return weight_N * keep_N, keep_N

    def _kl_to_reference(self, tokens: Tokens, reference_logp_N: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the KL to the reference per token, and its gradient including coefficient and weights."""
        config = self._config.kl
        leaf_N = tokens.logp_N
        kl_N = losses.kl_penalty(config.estimator or "k3", leaf_N, reference_logp_N, leaf_N - tokens.sampler_logp_N)
        (gradient_N,) = torch.autograd.grad((kl_N * weights_N).sum(), leaf_N)
        return kl_N.detach(), config.coefficient * gradient_N

    def _entropy(self, entropy_N: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of the entropy bonus and its contribution to the loss."""
        gradient_N = -self._config.algorithm.entropy_coefficient * weights_N.to(entropy_N.dtype)
        return gradient_N, (gradient_N * entropy_N.detach()).sum(dtype=torch.float64)

    def _values(
        self, extras: Mapping[str, Floats], values_N: Tensor, weights_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Clipped value loss: half the larger squared error of the value and of the value clipped around the old one.

        Returns its gradient, its contribution to the loss, and its unweighted sum over tokens."""
        critic = self._config.critic
        leaf_N = values_N.detach().requires_grad_()
        old_N, returns_N = _like(extras[OLD_VALUES], leaf_N), _like(extras[RETURNS], leaf_N)
        clipped_N = old_N + (leaf_N - old_N).clamp(-critic.clip, critic.clip)
        error_N = (leaf_N - returns_N).square().maximum((clipped_N - returns_N).square())
        loss = 0.5 * critic.coefficient * (error_N * weights_N).sum(dtype=torch.float64)
        (gradient_N,) = torch.autograd.grad(loss, leaf_N)
        return gradient_N, loss.detach(), 0.5 * error_N.detach().sum(dtype=torch.float64)


def interpolation_weights(versions_N: Ints, version: Version) -> Floats:
    """Return the weight of the current policy in the log-linear interpolation between sampler and current policy that
    approximates the policy at the start of the step (`policy_loss.old_policy = "interpolated"`).

    The step from version v to v + 1 is the last of v + 1 - b steps since the sampling version b, so v - b of them lie
    before it."""
    next_version = version + 1
    distance = np.maximum(next_version - versions_N, 1).astype(np.float64)
    return np.clip((distance - 1) / distance, 0.0, 1.0).astype(np.float32)


def _like(values: np.ndarray[tuple[int], np.dtype[np.generic]], other: Tensor) -> Tensor:
    return torch.from_numpy(values).to(device=other.device, dtype=other.dtype)
