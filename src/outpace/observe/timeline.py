"""MERGED"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from outpace.observe.linefile import write_atomically

MAX_SPANS = 100_000


class Span(NamedTuple):
    component: str
    name: str
    start: float
    end: float
    notes: dict[str, Any]


class Timeline:
    """Collects spans and writes them as a Chrome trace. `start` and `end` are readings of `clock`."""

    def __init__(self, cap: int = MAX_SPANS, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.dropped = 0
        self._origin = clock()
        self._spans: deque[Span] = deque(maxlen=cap)

    def __len__(self) -> int:
        return len(self._spans)

    def span(self, component: str, name: str, start: float, end: float, **notes: Any) -> None:
        """Record that `component` did `name` from `start` to `end`."""
        if len(self._spans) == self._spans.maxlen:
            self.dropped += 1
        self._spans.append(Span(component, name, start, max(end, start), notes))

    @contextlib.contextmanager
    def measure(self, component: str, name: str, **notes: Any) -> Iterator[None]:
        """Record the body of the `with` block as a span."""
        start = self.clock()
        try:
            yield
        finally:
            self.span(component, name, start, self.clock(), **notes)

    def write(self, path: str | Path) -> None:
        """Write the trace. Blocking; do not call it on an event loop."""
        events = self._events()
        head = json.dumps({"displayTimeUnit": "ms", "otherData": {"dropped": self.dropped}})[:-1]
        write_atomically(Path(path), _trace_text(head, events))

    def _events(self) -> Iterator[dict[str, Any]]:
        lanes = _Lanes()
        for span in sorted(self._spans, key=lambda span: span.start):
            lane, is_new = lanes.place(span)
            if is_new:
                yield {"ph": "M", "name": "thread_name", "pid": 1, "tid": lane, "args": {"name": span.component}}
                yield {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": lane, "args": {"sort_index": lane}}
            yield {
                "ph": "X",
                "name": span.name,
                "cat": span.component,
                "pid": 1,
                "tid": lane,
                "ts": round((span.start - self._origin) * 1e6, 1),
                "dur": round((span.end - span.start) * 1e6, 1),
                "args": span.notes,
            }


class _Lanes:
    """Assigns each span to the first lane of its component that is free when the span starts."""

    def __init__(self) -> None:
        self._ends: dict[str, dict[int, float]] = {}
        self._count = 0

    def place(self, span: Span) -> tuple[int, bool]:
        lanes = self._ends.setdefault(span.component, {})
        for lane, end in lanes.items():
            if end <= span.start:
                lanes[lane] = span.end
                return lane, False
        self._count += 1
        lanes[self._count] = span.end
        return self._count, True


def _trace_text(head: str, events: Iterator[dict[str, Any]]) -> Iterator[str]:
    yield head + ', "traceEvents": [\n'
    separator = ""
    for event in events:
        yield separator + json.dumps(event, default=str)
        separator = ",\n"
    yield "\n]}\n"
