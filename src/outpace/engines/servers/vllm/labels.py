"""MERGED"""

from __future__ import annotations

from outpace.types import Version


def label_of(incarnation: str, version: Version) -> str:
    """The label of a weight version on the server. It includes the incarnation because every run counts from 0."""
    return f"{incarnation}.{version}"


def version_of(incarnation: str, label: str) -> Version | None:
    """The version in a label; None if the label is not one of this run."""
    owner, _, version = label.rpartition(".")
    return int(version) if owner == incarnation and version.isdecimal() else None
