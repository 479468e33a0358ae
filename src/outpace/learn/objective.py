"""From the logprobs of one pass to the gradient that its backward starts with.

The mathematics works on vectors, one entry per trained token, cut off from the model: the derivative of the whole
objective with respect to logprob, entropy and value is computed here and then handed to one backward through the
model. So surrogates, corrections, KL and aggregation cost a few vector operations, whatever the model.

    logp ──▶ surrogate(current / anchor) ─▶ × correction weight × kept? × aggregation weight ─┐
         ──▶ KL to the reference ──────────▶ × aggregation weight ────────────────────────────┼─▶ sum ─▶ d/d logp
    entropy, values ───────────────────────▶ × aggregation weight ────────────────────────────┘       d/d entropy, value

Everything is a sum. The step divides once, by the denominator of the whole batch; a rejected token leaves the
numerator only.

Legend: _N one entry per trained token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outpace.algorithms import aggregation, corrections, kl
from outpace.algorithms.statistics import staleness_sums
from outpace.algorithms.tokens import Tokens
from outpace.config.methods import chosen_masks, chosen_surrogate
from outpace.errors import BadInput
from outpace.learn.forward import Outputs
from outpace.learn.packing import Packed
from outpace.learn.settings import CoreSettings
from outpace.types import Floats, Ints, Version
from outpace.wording import plural

OLD_LOGP = "old_logp"
OLD_VALUES = "old_values"
RETURNS = "returns"
KEEP = "keep"
"""Names of what a closed batch knows beforehand of every trained token: `Packed.extras`."""


@dataclass(frozen=True)
class Gradient:
    """What backward starts with, and what the pass adds to the batch's totals. `loss_sum` is the whole objective."""

    logp_N: Tensor
    entropy_N: Tensor | None
    values_N: Tensor | None
    loss_sum: float
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)


class Objective:
    def __init__(self, settings: CoreSettings) -> None:
        self._settings = settings
        self._surrogate = chosen_surrogate(settings.algorithm)
        self._anchor = settings.anchor
        masks = chosen_masks(settings.correction)  # those of the batch come as `KEEP`
        self._masks = {name: mask.settings for name, mask in masks.items() if mask.facts.scope != "batch"}

    def gradient(
        self,
        packed: Packed,
        outputs: Outputs,
        version: Version,
        reference_logp_N: Tensor | None = None,
        values_N: Tensor | None = None,
    ) -> Gradient:
        tokens = self._tokens(packed, outputs.logp_N, version)
        weights_N = aggregation.token_weights(self._settings.aggregation, tokens)
        correction_N, keep_N = self._correct(tokens, packed.extras)
        policy = (self._losses(tokens) * (correction_N * weights_N)).sum(dtype=torch.float64)
        (coefficient_N,) = torch.autograd.grad(policy, tokens.logp_N)
        sums, maxima = staleness_sums(
            tokens.logp_N.detach(),
            tokens.sampler_logp_N,
            tokens.advantages_N,
            coefficient_N,
            keep_N,
            _like(packed.versions_N == version, keep_N),
        )
        total = policy.item()
        sums["entropy"] = outputs.entropy_N.detach().sum(dtype=torch.float64).item()
        sums["policy"] = total
        if reference_logp_N is not None:
            pull_N, coefficients_N = self._pull(tokens, reference_logp_N, weights_N)
            coefficient_N = coefficient_N + coefficients_N
            sums["kl_reference"] = pull_N.sum(dtype=torch.float64).item()
            total += self._settings.kl.coefficient * (pull_N * weights_N).sum(dtype=torch.float64).item()
        entropy_N, entropy_loss = self._entropy(outputs.entropy_N, weights_N)
        value_N, value_loss, error_sum = self._values(packed.extras, values_N, weights_N)
        if values_N is not None:
            sums["value"] = error_sum
        return Gradient(coefficient_N, entropy_N, value_N, total + entropy_loss + value_loss, sums, maxima)

    def _losses(self, tokens: Tokens) -> Tensor:
        """What the surrogate says, which may be a user's."""
        name, loss_N = self._surrogate.facts.name, self._surrogate(tokens)
        if not isinstance(loss_N, Tensor) or loss_N.shape != tokens.logp_N.shape:
            found = f"a tensor of shape {tuple(loss_N.shape)}" if isinstance(loss_N, Tensor) else type(loss_N).__name__
            raise BadInput(
                f"algorithm.surrogate: {name} gave {found} for {plural(len(tokens.logp_N), 'token')}; "
                "return one loss per token"
            )
        if not loss_N.requires_grad:
            raise BadInput(f"algorithm.surrogate: the loss of {name} has no gradient; make it of tokens.logp_N")
        return loss_N

    def _tokens(self, packed: Packed, logp_N: Tensor, version: Version) -> Tokens:
        leaf_N = logp_N.detach().requires_grad_()
        sampler_logp_N = _like(packed.sampler_logp_N, logp_N)
        return Tokens(
            logp_N=leaf_N,
            anchor_logp_N=self._anchor_logp(packed, leaf_N.detach(), sampler_logp_N, version),
            sampler_logp_N=sampler_logp_N,
            advantages_N=_like(packed.advantages_N, logp_N),
            sequence_N=torch.from_numpy(packed.sequence_N).to(logp_N.device),
            sequences=packed.documents,
        )

    def _anchor_logp(self, packed: Packed, logp_N: Tensor, sampler_logp_N: Tensor, version: Version) -> Tensor:
        """Before the first update of a step the current policy is the proximal one: no second forward is needed."""
        if self._anchor == "rollout":
            return sampler_logp_N
        if self._anchor == "approximate":
            nearness_N = _like(nearness(packed.versions_N, version), logp_N)
            return sampler_logp_N + nearness_N * (logp_N - sampler_logp_N)
        old = packed.extras.get(OLD_LOGP)
        return logp_N if old is None else _like(old, logp_N)

    def _correct(self, tokens: Tokens, extras: Mapping[str, Floats]) -> tuple[Tensor, Tensor]:
        """The weight of every token (0 where it is rejected), and which are kept."""
        correction = self._settings.correction
        current_N = tokens.logp_N.detach()
        counted = self._anchor != "rollout" and self._surrogate.facts.ratio  # current / anchor is in the surrogate
        log_rho_N = (tokens.anchor_logp_N if counted else current_N) - tokens.sampler_logp_N
        keep_N = corrections.keep(tokens, log_rho_N, self._masks)
        if KEEP in extras:
            keep_N = keep_N & _like(extras[KEEP], current_N).bool()
        weight_N = corrections.weights(
            tokens, log_rho_N, correction.weight or "none", correction.floor or 0.0, correction.cap or None
        )
        return weight_N * keep_N, keep_N

    def _pull(self, tokens: Tokens, reference_logp_N: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor]:
        """The divergence from the reference at every token, and its gradient with coefficient and weights."""
        config = self._settings.kl
        leaf_N = tokens.logp_N
        pull_N = kl.penalty(config.estimator or "k3", leaf_N, reference_logp_N, leaf_N - tokens.sampler_logp_N)
        (gradient_N,) = torch.autograd.grad((pull_N * weights_N).sum(), leaf_N)
        return pull_N.detach(), config.coefficient * gradient_N

    def _entropy(self, entropy_N: Tensor, weights_N: Tensor) -> tuple[Tensor | None, float]:
        bonus = self._settings.algorithm.entropy
        if bonus == 0:
            return None, 0.0
        gradient_N = -bonus * weights_N.to(entropy_N.dtype)
        return gradient_N, (gradient_N * entropy_N.detach()).sum(dtype=torch.float64).item()

    def _values(
        self, extras: Mapping[str, Floats], values_N: Tensor | None, weights_N: Tensor
    ) -> tuple[Tensor | None, float, float]:
        """Half the squared error, of the value or of the value clipped near the old one, whichever is worse: its
        gradient, its part of the objective, and its sum over the tokens."""
        if values_N is None:
            return None, 0.0, 0.0
        critic = self._settings.critic
        assert critic.clip is not None
        assert critic.coefficient is not None
        leaf_N = values_N.detach().requires_grad_()
        old_N, returns_N = _like(extras[OLD_VALUES], leaf_N), _like(extras[RETURNS], leaf_N)
        clipped_N = old_N + (leaf_N - old_N).clamp(-critic.clip, critic.clip)
        error_N = (leaf_N - returns_N).square().maximum((clipped_N - returns_N).square())
        loss = 0.5 * critic.coefficient * (error_N * weights_N).sum(dtype=torch.float64)
        (gradient_N,) = torch.autograd.grad(loss, leaf_N)
        return gradient_N, loss.item(), 0.5 * error_N.detach().sum(dtype=torch.float64).item()


def nearness(versions_N: Ints, version: Version) -> Floats:
    """How far between sampler and current policy the proximal one is assumed to lie, log-linearly by version.

    The step that makes version v + 1 starts from v: of the v + 1 - b versions between the one that sampled and the one
    being made, v - b lie before the step."""
    made = version + 1
    distance = np.maximum(made - versions_N, 1).astype(np.float64)
    return np.clip((distance - 1) / distance, 0.0, 1.0).astype(np.float32)


def _like(values: np.ndarray[tuple[int], np.dtype[np.generic]], other: Tensor) -> Tensor:
    return torch.from_numpy(values).to(device=other.device, dtype=other.dtype)
