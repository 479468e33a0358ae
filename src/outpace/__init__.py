"""outpace: fully asynchronous reinforcement learning for language models and agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.config import Config
    from outpace.observe.callbacks import Callback
    from outpace.trainer import Trainer
    from outpace.types import Episode, Task, Trajectory

__version__ = "0.1.0"
__all__ = ["Callback", "Config", "Episode", "Task", "Trainer", "Trajectory", "__version__"]

_HOMES = {
    "Callback": "outpace.observe.callbacks",
    "Config": "outpace.config",
    "Episode": "outpace.types",
    "Task": "outpace.types",
    "Trainer": "outpace.trainer",
    "Trajectory": "outpace.types",
}


def __getattr__(name: str) -> Any:
    """Public names are loaded when first used, so that `import outpace` in a child costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'outpace' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
