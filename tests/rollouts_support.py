"""Shared by the rollout tests: worker settings and an in-memory journal."""

from __future__ import annotations

from typing import Any

from outpace.algorithms.token_advantages import advantage_settings
from outpace.config.algorithm import AdvantageConfig, configured_advantage
from outpace.rollouts.group_scoring import GroupFilter, ScoringRules
from outpace.rollouts.requests import ClientSettings
from outpace.rollouts.worker import WorkerSettings
from outpace.types import FinishedGroup, GroupRecord, JournalLocation


def worker_settings(client: ClientSettings, advantage: str = "dr_grpo", **changes: Any) -> WorkerSettings:
    token_advantages = advantage_settings(configured_advantage(AdvantageConfig(name=advantage)))
    values: dict[str, Any] = {
        "eval_seed": 99,
        "eval_temperature": 0.0,
        "episode_timeout_s": 60.0,
        "reward_timeout_s": 60.0,
        "scoring": ScoringRules(token_advantages, GroupFilter()),
    }
    return WorkerSettings(client=client, **(values | changes))


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
