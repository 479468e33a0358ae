"""Python's search for cyclic garbage, in a process that is there to stay.

The search stops everything, and goes through every object that is there: with a thousand episodes under way that is
longer than anything else an event loop does. What was imported and built by the time a part is ready will not become
garbage, so it is never searched again; and young objects, most of which an answer of an engine outlives, are searched
less often.
"""

from __future__ import annotations

import gc

THRESHOLDS = (20_000, 20, 20)
"""New objects between two searches; how many of these between searches of the older ones, and of the oldest."""


def settle() -> None:
    """Everything that is here now stays. Call it once, when a process is ready for its work."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
