"""Weights that are received beside the sampling, by a thread, and wait in this process until they are wanted."""

from __future__ import annotations

import threading

import torch

from outpace_vllm.collective import Meeting, receive
from outpace_vllm.sources import Named


class Fetch:
    """One transfer by process group, under way from the beginning."""

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        self.key: str = meeting["key"]
        self._meeting = meeting
        self._device = device
        self._weights: Named | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="outpace-fetch", daemon=True)
        self._thread.start()

    def weights(self) -> Named:
        """What came. Whoever sent it knows that it has come before anybody asks for it here."""
        self._thread.join(self._meeting["timeout_s"])
        if self._error is not None:
            raise self._error
        if self._weights is None:
            raise TimeoutError("the weights are still on their way")
        return self._weights

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has a current device of its own
            self._weights = list(receive(self._meeting))
        except Exception as error:  # it belongs to whoever asks for the weights
            self._error = error
