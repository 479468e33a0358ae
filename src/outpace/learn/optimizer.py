"""AdamW over policy and critic, the learning-rate schedule, and the critic's value head.

The learning rate is a pure function of the step: there is no scheduler state to save or restore.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from outpace.learn.settings import CoreSettings

Parameters = Mapping[str, nn.Parameter]


def make_optimizer(policy: Parameters, critic: Parameters, settings: CoreSettings) -> torch.optim.AdamW:
    """Create the optimizer. Weight decay applies to matrices only, not to biases and norms. Each update sets the
    learning rate of a parameter group to the scheduled rate times its `ratio`."""
    config = settings.learner
    decay = config.weight_decay
    groups: list[dict[str, Any]] = [
        {"params": [p for p in policy.values() if p.ndim >= 2], "weight_decay": decay, "ratio": 1.0},
        {"params": [p for p in policy.values() if p.ndim < 2], "weight_decay": 0.0, "ratio": 1.0},
    ]
    if critic:
        assert settings.critic.lr is not None
        assert config.lr is not None, "the config must be resolved"
        groups.append({"params": [*critic.values()], "weight_decay": 0.0, "ratio": settings.critic.lr / config.lr})
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), fused=True)


def clipped_norm(norm: float, limit: float) -> float:
    """Return the factor that clips a gradient of this norm to the limit."""
    return min(1.0, limit / (norm + 1e-6))
