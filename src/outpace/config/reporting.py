"""Settings of experiment trackers. `run.report_to` names them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import Field

from outpace.config.base import Section
from outpace.runtime.references import closest_names, is_reference

TRACKERS = ("trackio", "wandb", "tensorboard", "mlflow")


class ReportConfig(Section):
    """What experiment trackers receive, and where they run.

    These settings apply if `run.report_to` names a tracker.
    """

    project: str = Field(default="outpace", min_length=1)
    """Project (trackio, wandb) or experiment (mlflow) that the run belongs to."""
    name: str | None = Field(default=None, min_length=1)
    """Name of the run in the trackers. Default: the name of the run directory."""
    tables_every: int = Field(default=10, ge=1)
    """Steps between two tables of completions: steps 1, 11, 21, …"""
    python: str | None = None
    """Python executable of the environment with the tracker packages. Default: the Python that runs outpace."""
    finish_s: float = Field(default=30.0, ge=0)
    """How long the end of the run waits for trackers. What they miss then, `outpace report` sends."""


def tracker_problems(names: Sequence[str]) -> Iterator[str]:
    """Yield a line for every name that is neither built in nor a reference, or that is given twice."""
    classes = [name.rpartition(":")[2] for name in names]  # they name the files in trackers/
    for name in names:
        if classes.count(name.rpartition(":")[2]) > 1:
            yield f"run.report_to: {name} is listed twice; remove one"
        elif name not in TRACKERS and not is_reference(name):
            yield f"run.report_to: {name!r} is not a tracker; {_hint(name)}"


def _hint(name: str) -> str:
    if name == "none":
        return "write [] for no tracker"
    close = closest_names(name, TRACKERS)
    return f"did you mean {close[0]}?" if close else f"use {', '.join(TRACKERS)} or your own, path/to/file.py:Class"
