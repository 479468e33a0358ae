"""Policy losses, advantages, corrections and KL: small pure functions that the config composes. Never imports torch."""

from __future__ import annotations

from outpace.algorithms import advantages, corrections, losses
from outpace.algorithms.registry import ADVANTAGES, MASKS, NORMALIZERS, POLICY_LOSSES

__all__ = ["ADVANTAGES", "MASKS", "NORMALIZERS", "POLICY_LOSSES", "advantages", "corrections", "losses"]
