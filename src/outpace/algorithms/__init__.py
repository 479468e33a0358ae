"""Policy losses, advantages, corrections and KL: small pure functions that the config composes. Never imports torch."""

from __future__ import annotations

from outpace.algorithms import advantages, losses
from outpace.algorithms.registry import ADVANTAGES, NORMALIZERS, POLICY_LOSSES

__all__ = ["ADVANTAGES", "NORMALIZERS", "POLICY_LOSSES", "advantages", "losses"]
