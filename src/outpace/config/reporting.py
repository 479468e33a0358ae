"""Settings of experiment trackers. `run.report_to` names them."""

from __future__ import annotations

from pydantic import Field

from outpace.config.base import Section


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
