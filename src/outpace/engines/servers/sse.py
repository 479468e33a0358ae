"""Reading a stream of server-sent events, in whichever chunks it arrives.

Only the payloads (`data:`) count; comments, which some servers send to keep a connection open, say nothing of the
request. Lines may be as long as they like: one event can carry the logprobs of many tokens.
"""

from __future__ import annotations


class Events:
    """Takes bytes, gives the payloads that are complete."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of the line that has no end yet
        self._data: list[bytes] = []  # of the event that has no end yet

    def feed(self, chunk: bytes) -> list[bytes]:
        *ends, rest = chunk.split(b"\n")
        payloads = []
        for end in ends:
            self._parts.append(end)
            line = b"".join(self._parts).removesuffix(b"\r")
            self._parts.clear()
            payload = self._take(line)
            if payload is not None:
                payloads.append(payload)
        if rest:
            self._parts.append(rest)
        return payloads

    def _take(self, line: bytes) -> bytes | None:
        """A blank line ends an event."""
        if line:
            if line.startswith(b"data:"):
                self._data.append(line.removeprefix(b"data:").removeprefix(b" "))
            return None
        if not self._data:
            return None
        payload = b"\n".join(self._data)
        self._data.clear()
        return payload
