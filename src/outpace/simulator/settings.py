"""Settings of a simulation (cluster, workload, pacing, faults), and loading them from a file and the command line.

Settings that `outpace train` has too mean the same here. `load_settings` is as strict as the config loader: an unknown
key or an invalid value is a one-line `BadInput` that starts with the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import Field
from pydantic.fields import FieldInfo

from outpace.config.base import Section, first_error
from outpace.config.defaults import by_section
from outpace.config.load import FIELDS as TRAINING_FIELDS
from outpace.config.load import parse_arguments, read_config_file
from outpace.controller.pacing import OnStale
from outpace.errors import BadInput, one_line
from outpace.runtime.references import closest_names


def _as_in_training(key: str) -> Any:
    """Return the field of a setting that `outpace train` has too, with its default, limits and description."""
    return copy(TRAINING_FIELDS[key])


class ClusterSettings(Section):
    """Devices and workers."""

    devices: int = Field(default=16, ge=2)
    """Total devices, for generation and training."""
    per_engine: int = Field(default=1, ge=1)
    """Devices per engine."""
    training: int | None = Field(default=None, ge=1)
    """Training devices; the rest generate. Default: search for the best split."""
    workers: int = Field(default=8, ge=1)
    """Rollout worker processes. A worker that dies has to redo its groups."""


class SimulatedEngineSettings(Section):
    """Engine speed and weight loading."""

    slots: int = Field(default=256, ge=1)
    """Maximum sequences that one engine decodes concurrently; further requests are queued."""
    step_s: float = Field(default=0.006, gt=0)
    """Fixed time of one decode step in seconds: reading the weights."""
    sequence_s: float = Field(default=0.00005, ge=0)
    """Time that each running sequence adds to a decode step, in seconds: reading its KV cache, compute."""
    prefill_tok_s: float = Field(default=20_000.0, gt=0)
    """Prefill speed in prompt tokens per second. Decoding stops during prefill."""
    load_s: float = Field(default=4.0, ge=0)
    """Seconds to transfer a published version to an engine, which serves the old version meanwhile."""
    pause_s: float = Field(default=0.2, ge=0)
    """Seconds that an engine pauses to swap weights."""
    slow_share: float = Field(default=0.0, ge=0, le=1)
    """Fraction of engines that are stragglers."""
    slow_factor: float = Field(default=2.0, ge=1)
    """Slowdown factor of stragglers."""


class SimulatedLearnerSettings(Section):
    """Learner speed."""

    token_s: float = Field(default=0.00012, gt=0)
    """Device-seconds per trained token, prompt tokens included; n devices take 1/n of the time."""
    step_s: float = Field(default=1.0, ge=0)
    """Seconds per optimizer step, independent of the number of devices."""
    publish_s: float = Field(default=0.5, ge=0)
    """Seconds that publishing a weight snapshot blocks the learner."""
    checkpoint_s: float = Field(default=1.0, ge=0)
    """Seconds that a checkpoint blocks the learner."""


class WorkloadSettings(Section):
    """Tasks, episode lengths and environments."""

    group_size: int = Field(default=8, ge=1)
    """Episodes per group."""
    tasks: int = Field(default=1_000_000, ge=1)
    """Tasks per epoch."""
    prompt_tokens: int = Field(default=400, ge=0)
    """Prompt tokens of a task."""
    lengths: Literal["lognormal", "pareto", "fixed", "list"] = "lognormal"
    """Distribution of the sampled tokens per episode."""
    mean_tokens: float = Field(default=2000.0, ge=1)
    """Mean of the distribution, before truncation at `max_tokens`."""
    sigma: float = Field(default=0.8, ge=0)
    """For `lognormal`: standard deviation of the log; 0.5 is mild, 1 long-tailed, 1.5 extreme."""
    tail: float = Field(default=2.0, gt=1)
    """For `pareto`: the exponent; smaller means a longer tail."""
    max_tokens: int = Field(default=16_384, ge=1)
    """Longer episodes are truncated."""
    length_list: list[int] = []
    """For `list`: observed lengths, drawn uniformly."""
    turns: int = Field(default=1, ge=1)
    """Turns per episode; its tokens are divided evenly among them."""
    turn_tokens: int = Field(default=200, ge=0)
    """Tokens that the environment adds between two turns."""
    turn_s: float = Field(default=0.0, ge=0)
    """Mean environment latency between two turns, in seconds."""
    turn_sigma: float = Field(default=1.0, ge=0)
    """Standard deviation of the log of the environment latency."""
    grade_s: float = Field(default=0.5, ge=0)
    """Seconds to score a group after its last episode ends."""
    filtered: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of groups that are filtered (all rewards equal) and replaced."""
    failed: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of groups that fail."""


class SimulatedPacingSettings(Section):
    """Batch size and staleness limits."""

    max_lag: int = _as_in_training("pacing.max_lag")
    depth: float = _as_in_training("pacing.depth")
    groups_per_step: int = Field(default=128, ge=1)
    """Groups per batch. One batch is one optimizer step and produces one policy version."""
    chunk_groups: int = _as_in_training("pacing.chunk_groups")
    max_running: int | None = _as_in_training("pacing.max_running")
    on_stale: OnStale = _as_in_training("pacing.on_stale")
    warmup_steps: int = _as_in_training("pacing.warmup_steps")


class SimulatedWeightsSettings(Section):
    """Weight sync from the learner to the engines."""

    every: int = _as_in_training("weights.every")
    update: Literal["inflight", "drain"] = _as_in_training("weights.update")


class SimulatedCheckpointSettings(Section):
    """Checkpoint interval."""

    every: int = _as_in_training("checkpoint.every")
    turns: bool = _as_in_training("checkpoint.turns")


class SimulatedSuperviseSettings(Section):
    """Restarts of engines and workers."""

    restarts: int = _as_in_training("supervise.restarts")
    window_s: float = _as_in_training("supervise.window_s")


class FaultSettings(Section):
    """Injected faults."""

    engine_mtbf_s: float | None = Field(default=None, gt=0)
    """Mean seconds between failures of one engine. Default: no failures."""
    worker_mtbf_s: float | None = Field(default=None, gt=0)
    """Mean seconds between failures of one worker. Default: no failures."""
    learner_mtbf_s: float | None = Field(default=None, gt=0)
    """Mean seconds between failures of the learner; the run then resumes from its latest checkpoint. Default: no
    failures."""
    restart_s: float = Field(default=60.0, ge=0)
    """Seconds that a component takes to restart, in addition to the supervisor's backoff."""
    slow_load_share: float = Field(default=0.0, ge=0, le=1)
    """Fraction of weight loads that are slow."""
    slow_load_factor: float = Field(default=10.0, ge=1)
    """Slowdown factor of slow weight loads."""
    leave_every_s: float | None = Field(default=None, gt=0)
    """Mean seconds between two preemptions, each of which removes one engine for `away_s`. Default: no preemptions."""
    away_s: float = Field(default=600.0, ge=0)
    """Seconds until a preempted engine is back."""
    join_at_s: list[float] = []
    """Times, in simulated seconds, at which one more engine joins, on additional devices."""


class SimulatedRunSettings(Section):
    """Length, seed and comparison."""

    steps: int = Field(default=40, ge=2)
    """Optimizer steps of each reported simulation; the first quarter is warmup and not measured."""
    probe_steps: int = Field(default=12, ge=2)
    """Optimizer steps of each simulation in the search for the best split."""
    seed: int = Field(default=0, ge=0)
    """Seed of lengths, outcomes and faults."""
    deterministic: bool = False
    """Deterministic mode, as in `outpace train`."""
    stall_s: float = Field(default=86_400.0, gt=0)
    """End the simulation when no step has completed for this many simulated seconds."""
    compare: bool = True
    """Also simulate synchronous training, with separate devices and with colocated generation and training."""
    switch_s: float = Field(default=10.0, ge=0)
    """Seconds per step that colocated devices need to switch from generation to training and back."""


class SimulationSettings(Section):
    """All settings of a simulation."""

    cluster: ClusterSettings = ClusterSettings()
    engine: SimulatedEngineSettings = SimulatedEngineSettings()
    learner: SimulatedLearnerSettings = SimulatedLearnerSettings()
    workload: WorkloadSettings = WorkloadSettings()
    pacing: SimulatedPacingSettings = SimulatedPacingSettings()
    weights: SimulatedWeightsSettings = SimulatedWeightsSettings()
    checkpoint: SimulatedCheckpointSettings = SimulatedCheckpointSettings()
    supervise: SimulatedSuperviseSettings = SimulatedSuperviseSettings()
    faults: FaultSettings = FaultSettings()
    run: SimulatedRunSettings = SimulatedRunSettings()

    def changed(self, section: str, **values: object) -> SimulationSettings:
        """Return a validated copy with some keys of one section changed."""
        inner = {**getattr(self, section).model_dump(), **values}
        return SimulationSettings.model_validate({**self.model_dump(), section: inner})


def _sections() -> dict[str, type[Section]]:
    sections = {name: info.annotation for name, info in SimulationSettings.model_fields.items()}
    return {name: section for name, section in sections.items() if isinstance(section, type)}


SECTIONS = _sections()
FIELDS: dict[str, FieldInfo] = {
    f"{name}.{key}": info for name, section in SECTIONS.items() for key, info in section.model_fields.items()
}


def load_settings(file: Path | None = None, words: Sequence[str] = ()) -> SimulationSettings:
    """Load settings from an optional file and the command line. The command line overrides the file."""
    from_file = _flat(read_config_file(file)) if file is not None else {}
    try:
        settings = SimulationSettings.model_validate(by_section(from_file | parse_arguments(words, FIELDS, _unknown)))
    except pydantic.ValidationError as error:
        raise BadInput(first_error(error)) from None
    _check(settings)
    return settings


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, values in content.items():
        if name not in SECTIONS:
            raise _unknown(str(name))
        if not isinstance(values, Mapping):
            raise BadInput(f"{name}: is a section, not a single setting; set its keys instead")
        flat |= {f"{name}.{key}": value for key, value in values.items()}
    for dotted in flat:
        if dotted not in FIELDS:
            raise _unknown(dotted)
    return flat


def _unknown(dotted: str) -> BadInput:
    _, dot, last = dotted.rpartition(".")
    same = [key for key in FIELDS if key.rpartition(".")[2] == last]
    close = same or closest_names(dotted, FIELDS if dot else SECTIONS)
    hint = f"did you mean {' or '.join(close)}?" if close else f"the sections are {', '.join(SECTIONS)}"
    return BadInput(f"{one_line(dotted)}: no such {'setting' if dot else 'section'} of a simulation; {hint}")


def _check(settings: SimulationSettings) -> None:
    """Reject invalid combinations of settings."""
    cluster, workload, pacing = settings.cluster, settings.workload, settings.pacing
    if cluster.training is not None and cluster.devices - cluster.training < cluster.per_engine:
        raise BadInput(
            f"cluster.training: {cluster.training} of {cluster.devices} devices leave too few for one engine with "
            f"cluster.per_engine = {cluster.per_engine}; lower it"
        )
    if cluster.devices <= cluster.per_engine:
        raise BadInput(
            f"cluster.devices: {cluster.devices} are too few for a learner and an engine with cluster.per_engine = "
            f"{cluster.per_engine}; raise it"
        )
    if workload.lengths == "list" and not workload.length_list:
        raise BadInput('workload.length_list: is empty, but workload.lengths = "list" draws from it; add lengths')
    if workload.length_list and min(workload.length_list) < 1:
        raise BadInput(f"workload.length_list: contains {min(workload.length_list)}; use lengths of at least 1")
    if workload.filtered + workload.failed >= 1:
        raise BadInput("workload.failed: workload.filtered and this leave no groups to train on; lower one")
    if pacing.max_lag < settings.weights.every - 1:
        raise BadInput(
            f"weights.every: publishing every {settings.weights.every} steps needs pacing.max_lag >= "
            f"{settings.weights.every - 1}, not {pacing.max_lag}"
        )
    if settings.run.deterministic and (pacing.on_stale != "wait" or settings.weights.update != "inflight"):
        raise BadInput('run.deterministic: needs pacing.on_stale = "wait" and weights.update = "inflight"')
