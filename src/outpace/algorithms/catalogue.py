"""The registries with all built-in functions loaded. Import them from here, not from `registry`."""

from __future__ import annotations

from outpace.algorithms import advantages, normalisers, surrogates
from outpace.algorithms.registry import ADVANTAGES, NORMALISERS, SURROGATES

__all__ = ["ADVANTAGES", "NORMALISERS", "SURROGATES", "advantages", "normalisers", "surrogates"]
