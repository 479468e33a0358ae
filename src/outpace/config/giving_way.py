"""Settings of a file that give way to a choice made on top of it, because only another choice would take them.

The config of a run says everything, also what only its kind of engine reads. Whoever resumes it with another kind, or
with servers of his own in place of those that it started, has made a choice against these; to refuse them one by one
would teach nobody anything. Settings that are given beside the choice never give way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.config.serving import LaunchConfig

Values = Mapping[str, Any]
"""Settings by dotted key."""

LAUNCHED = {f"launch.{key}" for key in LaunchConfig.model_fields}
"""What only servers that outpace starts have."""

OF_ONE_KIND = {
    "engine.urls", "engine.count", "engine.path", "engine.api_key_env", "engine.seeded", "weights.transport", *LAUNCHED,
}  # fmt: skip
"""What only one kind of engine has, or what names engines of one kind."""


def given_way(file: Values, on_top: Values) -> set[str]:
    """Keys of the file that what is on top has decided against."""
    before = file.get("engine.kind", "embedded")
    if on_top.get("engine.kind", before) != before:
        reads_files = on_top["engine.kind"] != "embedded" or {**file, **on_top}.get("weights.delta")
        return OF_ONE_KIND | (set() if reads_files else {"weights.dir"})
    if on_top.get("engine.urls"):
        return {"engine.count", *LAUNCHED}
    if any(on_top.get(key) is not None for key in LAUNCHED):
        return {"engine.urls"}
    return set()
