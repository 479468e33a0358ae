"""MERGED"""

from __future__ import annotations

import re


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: `plural(1, "step")` is "1 step", `plural(2048, "step")` is "2,048 steps"."""
    return f"{count:,} {noun if count == 1 else _plural_of(noun)}"


def _plural_of(noun: str) -> str:
    if re.search("[^aeiou]y$", noun):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


def with_article(noun: str) -> str:
    """Put "a" or "an" before a noun, chosen by its first letter. Correct for the nouns that messages use."""
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"
