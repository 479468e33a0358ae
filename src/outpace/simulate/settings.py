"""What is simulated: a cluster, a workload, a pace and its faults. Names that `outpace train` has too mean the same."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outpace.config.section import Section


class ClusterSettings(Section):
    devices: int = Field(default=16, ge=2)
    """All devices, those that generate and those that train."""
    per_engine: int = Field(default=1, ge=1)
    """Devices of one engine."""
    training: int | None = Field(default=None, ge=1)
    """Devices that train; the rest generate. Default: the best split is searched."""
    workers: int = Field(default=8, ge=1)
    """Processes that run episodes; one that dies has to do its groups again."""


class EngineSettings(Section):
    slots: int = Field(default=256, ge=1)
    """Sequences that one engine decodes at once; what is above that waits in line."""
    step_s: float = Field(default=0.006, gt=0)
    """Seconds that one token takes whoever runs: reading the weights."""
    sequence_s: float = Field(default=0.00005, ge=0)
    """Seconds that every running sequence adds to it: reading its cache, computing."""
    prefill_tok_s: float = Field(default=20_000.0, gt=0)
    """Prompt tokens per second; nothing is decoded meanwhile."""
    load_s: float = Field(default=4.0, ge=0)
    """Seconds until a published version has reached an engine; it serves the older one meanwhile."""
    pause_s: float = Field(default=0.2, ge=0)
    """Seconds that swapping versions stops an engine for."""
    slow_share: float = Field(default=0.0, ge=0, le=1)
    """The share of engines that are stragglers."""
    slow_factor: float = Field(default=2.0, ge=1)
    """How much longer they take for everything."""


class LearnerSettings(Section):
    token_s: float = Field(default=0.00012, gt=0)
    """Device-seconds of one trained token, prompt tokens included; n devices take an n-th of it."""
    step_s: float = Field(default=1.0, ge=0)
    """Seconds of the optimizer step, however many devices there are."""
    publish_s: float = Field(default=0.5, ge=0)
    """Seconds that a snapshot of the weights holds the learner up."""
    checkpoint_s: float = Field(default=1.0, ge=0)
    """Seconds that a checkpoint holds it up."""


class WorkloadSettings(Section):
    group_size: int = Field(default=8, ge=1)
    """Episodes of one task."""
    tasks: int = Field(default=1_000_000, ge=1)
    """Tasks in one epoch."""
    prompt_tokens: int = Field(default=400, ge=0)
    """Tokens of a task before the first answer."""
    lengths: Literal["lognormal", "pareto", "fixed", "list"] = "lognormal"
    """How many tokens an episode samples: the distribution."""
    mean_tokens: float = Field(default=2000.0, ge=1)
    """Its mean, before `max_tokens` cuts it."""
    sigma: float = Field(default=0.8, ge=0)
    """Of the logarithm, for `lognormal`: 0.5 is mild, 1 long-tailed, 1.5 extreme."""
    tail: float = Field(default=2.0, gt=1)
    """Pareto's exponent, for `pareto`: the smaller, the longer the tail."""
    max_tokens: int = Field(default=16_384, ge=1)
    """Longer episodes are cut."""
    length_list: list[int] = []
    """Lengths that were seen, for `list`; drawn with equal chances."""
    turns: int = Field(default=1, ge=1)
    """Answers in one episode, its tokens spread over them."""
    turn_tokens: int = Field(default=200, ge=0)
    """Tokens that the environment adds between two answers."""
    turn_s: float = Field(default=0.0, ge=0)
    """Mean seconds that the environment takes between two answers."""
    turn_sigma: float = Field(default=1.0, ge=0)
    """Of the logarithm of those seconds."""
    grade_s: float = Field(default=0.5, ge=0)
    """Seconds from a group's last answer until it is closed."""
    filtered: float = Field(default=0.0, ge=0, lt=1)
    """The share of groups that teach nothing (all rewards alike); others take their place."""
    failed: float = Field(default=0.0, ge=0, lt=1)
    """The share of groups that fail as data."""


class PacingSettings(Section):
    max_lag: int = Field(default=2, ge=0)
    """No token is trained more than this many versions after it was sampled. 0 is synchronous training."""
    depth: float = Field(default=1.0, ge=0)
    """How many batches, beside the one being filled, may be under way. A fraction is fine."""
    groups_per_step: int = Field(default=128, ge=1)
    """Groups in one batch; one batch is one optimizer step and one version."""
    chunk_groups: int = Field(default=16, ge=1)
    """The learner starts on an open batch as soon as so many of its groups are there."""
    max_running: int | None = Field(default=None, ge=1)
    """Most episodes being rolled out at once; twice the slots of all engines when absent."""
    on_stale: Literal["wait", "requeue", "drop", "train"] = "wait"
    """What happens to a group that is still running when its batch is due."""
    warmup_steps: int = Field(default=0, ge=0)
    """So many first steps are on policy (lag 0) before `max_lag` applies."""


class WeightsSettings(Section):
    every: int = Field(default=1, ge=1)
    """Publish after every so many steps."""
    update: Literal["inflight", "drain"] = "inflight"
    """Swap while sequences are being sampled, or let running groups finish first."""


class CheckpointSettings(Section):
    every: int = Field(default=20, ge=0)
    """Checkpoint after every so many steps; 0: only at the end."""
    turns: bool = True
    """Answers of unfinished groups are recorded: a worker that was replaced goes on inside them."""


class SuperviseSection(Section):
    restarts: int = Field(default=5, ge=0)
    """How often a part that died is started again within `window_s`; then the run ends. 0: never."""
    window_s: float = Field(default=3600.0, gt=0)
    """The time in which restarts are counted."""


class FaultSettings(Section):
    engine_mtbf_s: float | None = Field(default=None, gt=0)
    """Mean seconds between two deaths of one engine. Default: none dies."""
    worker_mtbf_s: float | None = Field(default=None, gt=0)
    """Mean seconds between two deaths of one worker."""
    learner_mtbf_s: float | None = Field(default=None, gt=0)
    """Mean seconds between two deaths of the learner; the run is then resumed from its newest checkpoint."""
    restart_s: float = Field(default=60.0, ge=0)
    """Seconds until a part that is started again is up, beside the supervisor's own pause."""
    slow_load_share: float = Field(default=0.0, ge=0, le=1)
    """The share of weight loads that are slow."""
    slow_load_factor: float = Field(default=10.0, ge=1)
    """How much longer these take."""
    leave_every_s: float | None = Field(default=None, gt=0)
    """Mean seconds between two moments at which an engine is taken away, for as long as it was lent elsewhere."""
    away_s: float = Field(default=600.0, ge=0)
    """Seconds until an engine that was taken away is back."""
    join_at_s: list[float] = []
    """Moments at which one more engine joins, on devices of its own."""


class RunSettings(Section):
    steps: int = Field(default=40, ge=2)
    """Optimizer steps of a simulation whose figures are printed; the first quarter is not measured."""
    probe_steps: int = Field(default=12, ge=2)
    """Steps of each simulation that only looks for the best split."""
    seed: int = Field(default=0, ge=0)
    """Of lengths, outcomes and faults."""
    deterministic: bool = False
    """Lockstep, as in `outpace train`."""
    stall_s: float = Field(default=86_400.0, gt=0)
    """The simulation ends when no step was done for so many simulated seconds."""
    compare: bool = True
    """Also simulate synchronous training, with two pools of devices and with one that takes turns."""
    switch_s: float = Field(default=10.0, ge=0)
    """Seconds that devices which take turns need to change from generation to training and back, once per step."""


class SimulationSettings(Section):
    cluster: ClusterSettings = ClusterSettings()
    engine: EngineSettings = EngineSettings()
    learner: LearnerSettings = LearnerSettings()
    workload: WorkloadSettings = WorkloadSettings()
    pacing: PacingSettings = PacingSettings()
    weights: WeightsSettings = WeightsSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    supervise: SuperviseSection = SuperviseSection()
    faults: FaultSettings = FaultSettings()
    run: RunSettings = RunSettings()

    def changed(self, section: str, **values: object) -> SimulationSettings:
        """The same with some keys of one section changed, checked anew."""
        inner = {**getattr(self, section).model_dump(), **values}
        return SimulationSettings.model_validate({**self.model_dump(), section: inner})
