"""MERGED"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.config.serving import LaunchConfig

Values = Mapping[str, Any]
"""Settings by dotted key."""

LAUNCH_KEYS = {f"launch.{key}" for key in LaunchConfig.model_fields}
"""Settings that apply only to servers that outpace starts."""

ENGINE_KIND_KEYS = {
    "engine.urls", "engine.count", "engine.path", "engine.api_key_env", "engine.seeded", "weights.transport",
    *LAUNCH_KEYS,
}  # fmt: skip
"""Settings that apply to, or name, engines of one kind."""


def given_way(file: Values, overrides: Values) -> set[str]:
    """Return the file settings that the overrides replace.

    The saved config of a run spells out every setting, including those that only its engine kind reads. Resuming it
    with another engine kind, or with running servers instead of launched ones, drops the settings of the old choice
    instead of rejecting each of them. Settings given in the overrides are never dropped."""
    before = file.get("engine.kind", "embedded")
    if overrides.get("engine.kind", before) != before:
        uses_dir = overrides["engine.kind"] != "embedded" or {**file, **overrides}.get("weights.delta")
        return ENGINE_KIND_KEYS | (set() if uses_dir else {"weights.dir"})
    if overrides.get("engine.urls"):
        return {"engine.count", *LAUNCH_KEYS}
    if any(overrides.get(key) is not None for key in LAUNCH_KEYS):
        return {"engine.urls"}
    return set()
