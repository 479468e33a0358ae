"""What several tests of the rollouts need: a worker's settings, and a journal in memory."""

from __future__ import annotations

from typing import Any

from outpace.algorithms.credit import credit_settings
from outpace.config.algorithm import AlgorithmConfig
from outpace.config.methods import chosen_advantage
from outpace.rollouts.closing import ClosingRules, Filter
from outpace.rollouts.policy.requests import ClientSettings
from outpace.rollouts.worker import WorkerSettings
from outpace.types import GroupRecord, Kept, Place


def worker_settings(client: ClientSettings, advantage: str = "dr_grpo", **changes: Any) -> WorkerSettings:
    credit = credit_settings(chosen_advantage(AlgorithmConfig(advantage=advantage)))
    values: dict[str, Any] = {
        "eval_seed": 99,
        "eval_temperature": 0.0,
        "episode_timeout_s": 60.0,
        "reward_timeout_s": 60.0,
        "closing": ClosingRules(credit, Filter()),
    }
    return WorkerSettings(client=client, **(values | changes))


class RecordingJournal:
    """Keeps records in memory; `place` is their number."""

    def __init__(self) -> None:
        self.records: list[GroupRecord] = []
        self.kept: list[Kept] = []
        self.released: list[str] = []
        self.closed = False

    def append(self, kept: Kept, record: GroupRecord) -> Place:
        assert not self.closed
        self.kept.append(kept)
        self.records.append(record)
        return Place("memory", len(self.records) - 1, 1)

    def release(self, segments: list[str]) -> None:
        self.released += segments

    def close(self) -> None:
        self.closed = True
