"""`AsyncGRPOTrainer`: Axolotl's arguments and methods, on outpace's producers, pacing and corrections."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from outpace.algorithms import MASKS
from outpace.algorithms.registry import MaskRegistration
from outpace.compat.axolotl.config import AsyncGRPOConfig, producer_options, translate_async
from outpace.compat.trl.settings import Settings, refuse
from outpace.compat.trl.trainer import GRPOTrainer
from outpace.errors import BadInput
from outpace.monitoring.transformers_callbacks import Schedule
from outpace.tasks.producers import GRPODataProducer

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.algorithms.losses import Tokens


class AsyncGRPOTrainer(GRPOTrainer):
    """Axolotl's `AsyncGRPOTrainer`: rounds of prompts are produced and sampled while earlier ones are trained."""

    config_class = AsyncGRPOConfig

    @staticmethod
    def get_off_policy_mask(
        advantages: Tensor,
        per_token_logps: Tensor,
        sampling_per_token_logps: Tensor,
        mask: Tensor,
        off_policy_threshold: float,
    ) -> Tensor:
        """Return 1 to train and 0 to mask, per sequence or per token. Override it as a static method; it is called if
        `off_policy_mask_threshold` is set.

        Masks sequences with a negative advantage that the policy has moved away from. `advantages` has the shape
        (sequences, 1), the other tensors (sequences, tokens); `mask` is 1 for tokens that are trained on."""
        moved = ((sampling_per_token_logps - per_token_logps.detach()) * mask).sum(1, keepdim=True)
        is_near = moved <= off_policy_threshold * mask.sum(1, keepdim=True)
        return ((advantages >= 0) | is_near).to(mask.dtype)

    def _settings(self, rows: int | None) -> tuple[Settings, Schedule]:
        refused: dict[str, str] = {}
        settings, schedule = translate_async(self.args, rows, refused)
        refuse(refused)
        threshold = self.args.off_policy_mask_threshold
        if threshold is not None and self.get_off_policy_mask is not AsyncGRPOTrainer.get_off_policy_mask:
            name = f"{type(self).__qualname__}.get_off_policy_mask"
            if not isinstance(inspect.getattr_static(self, "get_off_policy_mask"), staticmethod):
                raise BadInput(f"{name}: make it a static method; the learner is another process")
            keep = padded_mask(self.get_off_policy_mask, threshold)
            MASKS.add(name, MaskRegistration(keep, {}, scope="sequence", alias=name))
            others = [mask for mask in settings["correction.masks"] if mask != "opsm"]
            settings["correction.masks"] = [*others, name]
            del settings["correction.opsm_delta"]
        return settings, schedule

    def _producer(self, rollout_func: Callable[..., Any] | None, tasks: Any) -> Any:
        if not self.args.use_data_producer or rollout_func is not None:
            return super()._producer(rollout_func, tasks)
        return self._create_data_producer(self.args, tasks)

    def _create_data_producer(self, args: Any, train_dataset: Any) -> Any:
        """Return the data producer. Override this method to use your own."""
        return GRPODataProducer(None, train_dataset, **producer_options(args))


def padded_mask(get_mask: Callable[..., Tensor], threshold: float) -> Callable[[Tokens, Tensor], Tensor]:
    """Return a mask for the learner that calls `get_mask` with one padded row per sequence."""

    def off_policy_mask(tokens: Tokens, log_rho_N: Tensor) -> Tensor:
        found = get_mask(
            advantages=tokens.padded(tokens.advantages_N)[:, :1],
            per_token_logps=tokens.padded(tokens.logp_N.detach()),
            sampling_per_token_logps=tokens.padded(tokens.sampler_logp_N),
            mask=tokens.padded(tokens.logp_N.new_ones(tokens.logp_N.shape, requires_grad=False)).long(),
            off_policy_threshold=threshold,
        )
        return tokens.unpadded(found.bool())

    return off_policy_mask
