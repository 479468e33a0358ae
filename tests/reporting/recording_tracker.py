"""A tracker that writes what it gets to the file `calls.jsonl` next to the run's state, and fails on request."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.monitoring.trackers import TrackedRun


class RecordingTracker:
    """`fault` in the run's folder `trackers/` makes the next call raise (`raise`), block (`block`), or end the process
    (`exit`)."""

    def start(self, run: TrackedRun) -> str:
        self._folder = run.directory / "trackers"
        self._call("start", run_id=run.run_id, step=run.step, name=run.name, project=run.project)
        return run.run_id or "first"

    def metrics(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._call("metrics", step=step, values=dict(values))

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._call("table", step=step, rows=[dict(row) for row in rows])

    def flush(self) -> None:
        pass

    def finish(self, summary: Mapping[str, Any] | None, active: bool) -> None:
        self._call("finish", summary=None if summary is None else dict(summary), active=active)

    def _call(self, call: str, **values: Any) -> None:
        fault = self._folder / "fault"
        kind = fault.read_text() if fault.exists() else ""
        if kind == "raise":
            raise OSError("the tracker is down")
        if kind == "exit":
            os._exit(1)
        while kind == "block" and fault.exists():
            time.sleep(0.05)
        with open(self._folder / "calls.jsonl", "a") as file:
            file.write(json.dumps({"call": call, **values}) + "\n")


def calls(run: Path) -> list[dict[str, Any]]:
    file = run / "trackers" / "calls.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def steps(run: Path, call: str = "metrics") -> list[int]:
    return [each["step"] for each in calls(run) if each["call"] == call]
