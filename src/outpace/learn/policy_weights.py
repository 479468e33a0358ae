"""MERGED"""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.learn.core import LearnerCore
from outpace.types import Adapter


def published(core: LearnerCore) -> dict[str, Tensor]:
    """Return the tensors of the current policy to publish, valid until the next update or the next call."""
    if core.adapters is None:
        return core.model.state_dict()
    if core.settings.bare:
        return core.adapters.tensors()
    return core.adapters.merged(getattr(torch, core.settings.dtype))


def published_adapter(core: LearnerCore) -> Adapter | None:
    """Return the adapter that the published tensors belong to, None if they are a whole model."""
    return core.settings.adapter if core.settings.bare else None
