"""Receives weights in a thread while the server samples, and keeps them until they are loaded."""

from __future__ import annotations

import threading

import torch

from outpace_vllm.collective import Meeting, receive
from outpace_vllm.sources import Named


class Fetch:
    """One transfer over a process group. Starts receiving on construction."""

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        self.key: str = meeting["key"]
        self._meeting = meeting
        self._device = device
        self._weights: Named | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="outpace-fetch", daemon=True)
        self._thread.start()

    def weights(self) -> Named:
        """The received weights. The sender knows that they arrived before this is called."""
        self._thread.join(self._meeting["timeout_s"])
        if self._error is not None:
            raise self._error
        if self._weights is None:
            raise TimeoutError("the weights have not arrived yet")
        return self._weights

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # the current device is per thread
            self._weights = list(receive(self._meeting))
        except Exception as error:  # raised by `weights`
            self._error = error
