"""The weight-transfer engine: takes updates as plain JSON and loads each one completely, or raises.

    update_info   {"kind": "memory", "path", "label": {"incarnation", "version"}, "tensors"}
                  {"kind": "ipc", "device", "handle" (base64), "nbytes", "sums", "tensors"}
                  {"kind": "fetch", "meeting"}: start receiving over a process group; returns at once, loads nothing
                  {"kind": "fetched", "key"}: load the weights received by that fetch

Invariants
- One update is one call: between calls the model is always complete. `start` and `finish` do nothing here.
- Every failure is raised to the caller of the route; the next update finds a complete model.
- Works with vLLM 0.25 and 0.32: it overrides the methods that either of them calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from outpace_vllm.collective import Fetch, Meeting
from outpace_vllm.reloading import load_whole, pack_tied_layers_after_reloads
from outpace_vllm.sources import Named, from_device, from_memory


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: no setup is needed."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    kind: str = ""
    source: dict[str, Any] = field(default_factory=dict)


class OutpaceTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._fetch: Fetch | None = None
        pack_tied_layers_after_reloads()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        source = dict(update_dict)
        return UpdateInfo(kind=source.pop("kind", ""), source=source)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.kind == "fetch":
            self._begin_fetch(**update_info.source)
            return
        with self._source(update_info) as weights, set_current_vllm_config(self.vllm_config):
            load_whole(self.model, self.model_config, weights)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        self._fetch = None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        raise NotImplementedError("outpace's learner does not push weights: it publishes snapshots that servers load")

    def _source(self, update: UpdateInfo) -> AbstractContextManager[Named]:
        match update.kind:
            case "memory":
                return from_memory(**update.source)
            case "ipc":
                return from_device(**update.source, own=self.device)
            case "fetched":
                return self._fetched(**update.source)
        raise ValueError(f"unknown update kind {update.kind!r}")

    def _begin_fetch(self, meeting: Meeting) -> None:
        """Start receiving in a thread. Replaces an earlier fetch, whose sender has given up."""
        if self.parallel_config.world_size > 1:
            raise ValueError("this transport supports one worker only; with several, use memory or files")
        self._fetch = Fetch(meeting, self.device)

    @contextmanager
    def _fetched(self, key: str) -> Iterator[Named]:
        fetch, self._fetch = self._fetch, None
        if fetch is None or fetch.key != key:
            raise ValueError("these weights were not fetched, or a later fetch replaced them")
        yield fetch.weights()
