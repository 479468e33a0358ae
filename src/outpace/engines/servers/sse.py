"""MERGED"""

from __future__ import annotations


class Events:
    """Incremental parser: feed it bytes, get the payloads of complete events."""

    def __init__(self) -> None:
        self._line_parts: list[bytes] = []  # of the incomplete line
        self._data: list[bytes] = []  # of the incomplete event

    def feed(self, chunk: bytes) -> list[bytes]:
        *ends, rest = chunk.split(b"\n")
        payloads = []
        for end in ends:
            self._line_parts.append(end)
            line = b"".join(self._line_parts).removesuffix(b"\r")
            self._line_parts.clear()
            payload = self._process_line(line)
            if payload is not None:
                payloads.append(payload)
        if rest:
            self._line_parts.append(rest)
        return payloads

    def _process_line(self, line: bytes) -> bytes | None:
        """Process one line. A blank line completes an event and returns its payload."""
        if line:
            if line.startswith(b"data:"):
                self._data.append(line.removeprefix(b"data:").removeprefix(b" "))
            return None
        if not self._data:
            return None
        payload = b"\n".join(self._data)
        self._data.clear()
        return payload
