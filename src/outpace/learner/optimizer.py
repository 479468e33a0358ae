"""AdamW over policy and critic, the learning-rate schedule, and the critic's value head.

The learning rate is a pure function of the step: there is no scheduler state to save or restore.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from outpace.config import Config
from outpace.errors import BadInput

Parameters = Mapping[str, nn.Parameter]


def make_optimizer(policy: Parameters, critic: Parameters, config: Config) -> torch.optim.AdamW:
    """Create the optimizer. Weight decay applies to matrices only, not to biases and norms. Each update sets the
    learning rate of a parameter group to the scheduled rate times its `ratio`."""
    learner, decay = config.learner, config.learner.weight_decay
    groups: list[dict[str, Any]] = [
        {"params": [p for p in policy.values() if p.ndim >= 2], "weight_decay": decay, "ratio": 1.0},
        {"params": [p for p in policy.values() if p.ndim < 2], "weight_decay": 0.0, "ratio": 1.0},
    ]
    if critic:
        assert config.critic.lr is not None, "the config must be resolved"
        assert learner.lr is not None, "the config must be resolved"
        groups.append({"params": [*critic.values()], "weight_decay": 0.0, "ratio": config.critic.lr / learner.lr})
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, betas=(learner.beta1, learner.beta2), fused=True)


def optimizer_settings(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return the settings of an AdamW object. Its own parameters are ignored; the model's are trained."""
    if optimizer is None:
        return {}
    if not isinstance(optimizer, torch.optim.AdamW) or optimizer.defaults["eps"] != 1e-8:
        raise BadInput("optimizers: only torch's AdamW with its default eps is supported")
    group = optimizer.param_groups[0]
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    return {"learner.lr": group["lr"], "learner.weight_decay": decay, "learner.beta1": beta1, "learner.beta2": beta2}


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor that clips a gradient of this norm to the limit."""
    return min(1.0, limit / (norm + 1e-6))


Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(peak: float, step: int, total_steps: int | None, schedule: Schedule, warmup_steps: int) -> float:
    """Return the learning rate of step `step`, counted from 0.

    Warm-up rises linearly; step 0 is already above 0, and step `warmup_steps` is the first at `peak`. `linear` and
    `cosine` then decay to 0, reached one step after the last. Without `total_steps` they stay at `peak`; beyond
    `total_steps` they stay at 0.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "constant" or total_steps is None:
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


class ValueHead(nn.Linear):
    """Value head: one linear layer from the hidden state that predicts a token to the expected return.

    Initialized to zero, so GAE starts as the discounted return. Unless `shared`, no gradient flows into the hidden
    states."""

    def __init__(self, width: int, shared: bool) -> None:
        super().__init__(width, 1)
        self._shared = shared
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        states_ND = hidden_ND if self._shared else hidden_ND.detach()
        return super().forward(states_ND.to(self.weight.dtype)).squeeze(-1)
