"""Shared by the rollout tests: configs, environment sessions and an in-memory journal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from outpace.config import Config
from outpace.config.algorithm import AdvantageConfig, FilterConfig
from outpace.config.sections import (
    EnvironmentConfig,
    EvalConfig,
    ModelConfig,
    RewardsConfig,
    RolloutConfig,
    RunConfig,
    ToolsConfig,
)
from outpace.rollouts.environments.session import EnvironmentSessions, EnvironmentSource
from outpace.types import FinishedGroup, GroupRecord, JournalLocation


def rollout_config(
    *,
    system: str | None = None,
    seed: int = 11,
    stop_strings: tuple[str, ...] = ("\n",),
    text_prompts: Literal["message", "verbatim"] = "message",
    **changes: Any,
) -> Config:
    """A resolved config; `changes` are settings of `[rollout]`."""
    values = {"max_tokens": 16, "temperature": 0.5, "timeout_s": 60.0, "stop": list(stop_strings)}
    return Config(
        model=ModelConfig(system_prompt=system, text_prompts=text_prompts),
        run=RunConfig(seed=seed),
        rollout=RolloutConfig(**(values | changes)),
        rewards=RewardsConfig(timeout_s=60.0),
        eval=EvalConfig(seed=99, temperature=0.0),
        advantage=AdvantageConfig(name="dr_grpo"),
        filter=group_filter(),
    )


def group_filter(**changes: Any) -> FilterConfig:
    return FilterConfig(**({"uniform": True, "min_group": 2} | changes))


def environment_sessions(
    origins: Mapping[str, EnvironmentSource], call_timeout_s: float = 30.0, spare: int = 1, **settings: Any
) -> EnvironmentSessions:
    """`settings` are those of `[environment]`."""
    return EnvironmentSessions(origins, EnvironmentConfig(**settings), ToolsConfig(timeout_s=call_timeout_s), spare)


class RecordingJournal:
    """Keeps records in memory; the location of a record is its index."""

    def __init__(self) -> None:
        self.records: list[GroupRecord] = []
        self.kept: list[FinishedGroup] = []
        self.released: list[str] = []
        self.closed = False

    def append(self, kept: FinishedGroup, record: GroupRecord) -> JournalLocation:
        assert not self.closed
        self.kept.append(kept)
        self.records.append(record)
        return JournalLocation("memory", len(self.records) - 1, 1)

    def release(self, segments: list[str]) -> None:
        self.released += segments

    def close(self) -> None:
        self.closed = True
