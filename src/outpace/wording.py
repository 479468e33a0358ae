"""Counts and articles for messages: "1 step", "2 steps", "an int"."""

from __future__ import annotations

import re


def plural(count: int, noun: str) -> str:
    """The count with its noun: `plural(1, "step")` is "1 step", `plural(2048, "step")` is "2,048 steps"."""
    return f"{count:,} {noun if count == 1 else _plural_of(noun)}"


def _plural_of(noun: str) -> str:
    if re.search("[^aeiou]y$", noun):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


def with_article(noun: str) -> str:
    """The noun after "a" or "an", by its first letter: right for the type names and nouns that messages use."""
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"
