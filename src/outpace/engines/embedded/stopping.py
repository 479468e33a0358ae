"""MERGED"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Maps token ids to text, keeping special tokens and all spaces."""

_PARTIAL = "\ufffd"  # the replacement character: decoded bytes that are not yet a whole character
_SLACK = 4  # tokens: a character has at most four bytes, and some decoders strip a leading space


class StopStrings:
    """Detects whether the newest token completes one of `strings`. Shared by all requests with the same strings.

    Decoding text at every token would cost more than a decode step of a small model. A token can complete a stop
    string only if its text contains the string's last character, so a set lookup rules out most tokens, and only the
    tail of the output is decoded for the others.
    """

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings = tuple(strings)
        self._decode = decode
        self._last_characters = {string[-1] for string in strings}
        self._ends_in_space = any(character.isspace() for character in self._last_characters)
        self._tail = max(len(string.encode()) for string in strings) + _SLACK
        self._may_complete: dict[int, bool] = {}

    def completed_by_last(self, tokens: Sequence[int]) -> bool:
        newest = tokens[-1]
        possible = self._may_complete.get(newest)
        if possible is None:
            possible = self._may_complete[newest] = self._can_complete(self._decode([newest]))
        if not possible:
            return False
        text = self._decode(tokens[-self._tail :])
        return any(string in text for string in self._strings)

    def _can_complete(self, text: str) -> bool:
        undecided = not text or _PARTIAL in text or self._ends_in_space
        return undecided or any(character in text for character in self._last_characters)
