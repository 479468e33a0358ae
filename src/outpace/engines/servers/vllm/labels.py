"""Labels by which a server accounts for weights: whose they are, and which version.

Versions alone would not do: two runs count from the same beginning, and so does one that is started again.
"""

from __future__ import annotations

from outpace.types import Version


def label_of(incarnation: str, version: Version) -> str:
    return f"{incarnation}.{version}"


def version_of(incarnation: str, label: str) -> Version | None:
    """None: these weights are somebody else's, or nobody has labelled them."""
    owner, _, version = label.rpartition(".")
    return int(version) if owner == incarnation and version.isdecimal() else None
