"""MERGED"""

from __future__ import annotations

import gc

THRESHOLDS = (20_000, 20, 20)
"""Arguments of `gc.set_threshold`: new objects per young collection, and collections per next older generation."""


def settle() -> None:
    """Tune the garbage collector of a long-lived process. Call once, when the process is ready for work.

    A full collection stops the process and visits every object; with a thousand episodes in flight that takes longer
    than anything else an event loop does. Objects that exist now are frozen and never scanned again, because they do
    not become garbage. Young objects are collected less often, because most of them outlive an engine's reply."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
