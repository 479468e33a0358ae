"""Stop strings, found cheaply.

Decoding text at every token costs more than a small model's decode step. A token can complete a stop string only if
its own text holds the string's last character, so most tokens are ruled out by a set lookup, and only the tail of
the output is decoded for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, keeping special tokens and every space."""

_PARTIAL = "\ufffd"  # what decoding puts for bytes that are not (yet) a whole character
_SLACK = 4  # tokens: one character has at most four bytes, and some decoders strip a leading space


class StopStrings:
    """Says whether the newest token completes one of `strings`. Shared by all requests with the same strings."""

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings = tuple(strings)
        self._decode = decode
        self._last_characters = {string[-1] for string in strings}
        self._blank_end = any(character.isspace() for character in self._last_characters)
        self._tail = max(len(string.encode()) for string in strings) + _SLACK
        self._may_complete: dict[int, bool] = {}

    def completed_by_last(self, tokens: Sequence[int]) -> bool:
        newest = tokens[-1]
        possible = self._may_complete.get(newest)
        if possible is None:
            possible = self._may_complete[newest] = self._possible(self._decode([newest]))
        if not possible:
            return False
        text = self._decode(tokens[-self._tail :])
        return any(string in text for string in self._strings)

    def _possible(self, text: str) -> bool:
        unclear = not text or _PARTIAL in text or self._blank_end
        return unclear or any(character in text for character in self._last_characters)
