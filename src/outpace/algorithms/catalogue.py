"""Everything that can be named, loaded: import the registries from here, so that the built-in functions are in them."""

from __future__ import annotations

from outpace.algorithms import advantages, normalisers, surrogates
from outpace.algorithms.registry import ADVANTAGES, NORMALISERS, SURROGATES

__all__ = ["ADVANTAGES", "NORMALISERS", "SURROGATES", "advantages", "normalisers", "surrogates"]
