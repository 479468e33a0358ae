"""What of the policy is published: the one place that decides it, whoever then carries it to the engines.

all weights are trained                     the model
adapters are trained, engines hold the      the adapters alone, by the names of a PEFT file
model and take adapters (`bare`)
adapters are trained, other engines         the model with the adapters worked in, by its own names
"""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.learn.core import LearnerCore
from outpace.types import Adapter


def published(core: LearnerCore) -> dict[str, Tensor]:
    """The tensors of the policy as it is now, good until the next update or the next call."""
    if core.adapters is None:
        return core.model.state_dict()
    if core.settings.bare:
        return core.adapters.tensors()
    return core.adapters.merged(getattr(torch, core.settings.dtype))


def published_adapter(core: LearnerCore) -> Adapter | None:
    """What these tensors are an adapter of; None: they are a whole model."""
    return core.settings.adapter if core.settings.bare else None
