"""`AsyncGRPOTrainer` and `AsyncGRPOConfig` of Axolotl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.algorithms.corrections import opsm
from outpace.algorithms.losses import Tokens
from outpace.compat.axolotl import AsyncGRPOConfig, AsyncGRPOTrainer, BaseDataProducer
from outpace.compat.axolotl.trainer import padded_mask
from outpace.errors import BadInput
from support import INLINE

ROWS = [{"prompt": [{"role": "user", "content": f"{a} 2 1={a + 3}"}], "total": a + 3} for a in range(3, 10)]


def reward(completions: list[Any], total: list[int], **columns: Any) -> list[float]:
    return [float(number) for number, _ in enumerate(completions)]


class NothingTrained(AsyncGRPOTrainer):
    @staticmethod
    def get_off_policy_mask(
        advantages: Tensor,
        per_token_logps: Tensor,
        sampling_per_token_logps: Tensor,
        mask: Tensor,
        off_policy_threshold: float,
    ) -> Tensor:
        assert advantages.shape == (len(mask), 1)
        assert per_token_logps.shape == sampling_per_token_logps.shape == mask.shape
        assert off_policy_threshold == 0.25
        return torch.zeros_like(mask)


def trainer(kind: type[AsyncGRPOTrainer], run: Path, **fields: Any) -> AsyncGRPOTrainer:
    defaults = {
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "off_policy_mask_threshold": 0.25,
        "outpace": INLINE,
    }
    return kind("starter", reward, AsyncGRPOConfig(str(run), **(defaults | fields)), ROWS)


def tokens() -> Tokens:
    """Three sequences of 1, 4 and 3 tokens."""
    generator = torch.Generator().manual_seed(0)
    sequence_N = torch.tensor([0, 1, 1, 1, 1, 2, 2, 2])
    logp_N, sampler_logp_N = -torch.rand(2, 8, generator=generator)
    advantages_N = torch.tensor([-1.0, -1.0, 1.0])[sequence_N]
    return Tokens(logp_N.requires_grad_(), logp_N.detach(), sampler_logp_N, advantages_N, sequence_N, 3)


@pytest.mark.parametrize("threshold", [-0.3, 0.0, 0.05, 0.3])
def test_the_mask_of_the_trainer_is_off_policy_sequence_masking(threshold: float) -> None:
    given = tokens()
    kept_N = padded_mask(AsyncGRPOTrainer.get_off_policy_mask, threshold)(given, given.sampler_logp_N)
    assert kept_N.tolist() == opsm(given, given.sampler_logp_N, opsm_delta=threshold).tolist()


def test_a_mask_may_decide_about_single_tokens() -> None:
    def first_two(mask: Tensor, **_: Any) -> Tensor:
        return (torch.arange(mask.shape[1]) < 2).expand(mask.shape)

    kept_N = padded_mask(first_two, 0.5)(tokens(), torch.zeros(8))
    assert kept_N.tolist() == [True, True, True, False, False, True, True, False]


def test_a_mask_that_needs_the_trainer_is_refused(tmp_path: Path) -> None:
    class WithSelf(AsyncGRPOTrainer):
        def get_off_policy_mask(self, **_: Any) -> Tensor:  # type: ignore[override]
            return torch.ones(1)

    with pytest.raises(BadInput, match=r"get_off_policy_mask: .*static"):
        trainer(WithSelf, tmp_path)


def test_fields_that_cannot_be_used_are_refused_in_one_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"(?=.*min_p: )(?=.*replay_recompute_logps: )"):
        trainer(AsyncGRPOTrainer, tmp_path, min_p=0.1, replay_recompute_logps=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NothingTrained, AsyncGRPOTrainer])
def test_an_overridden_mask_decides_what_is_trained(tmp_path: Path, kind: type[AsyncGRPOTrainer]) -> None:
    trainer(kind, tmp_path / "run", use_data_producer=True, async_prefetch=True).train()
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    masked = kind is NothingTrained
    assert [step["offpolicy/masked"] == 1 for step in steps] == [masked, masked]
    assert [step["grad_norm"] == 0 for step in steps] == [masked, masked]
    assert sum(step["producer/rounds"] for step in steps) >= 2


@pytest.mark.slow
def test_a_trainer_may_create_its_own_producer(tmp_path: Path) -> None:
    class Rows(BaseDataProducer):
        def produce(self, model: Any, global_step: int, **kwargs: Any) -> Any:
            return [{"prompt": [{"role": "user", "content": "9 5=14"}], "total": 14}] * 2

    class Own(AsyncGRPOTrainer):
        def _create_data_producer(self, args: Any, train_dataset: Any) -> Any:
            assert train_dataset is ROWS
            return Rows()

    trainer(Own, tmp_path / "run", use_data_producer=True).train()
    assert "9 5=14" in (tmp_path / "run" / "journal" / "tasks.jsonl").read_text()
