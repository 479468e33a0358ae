"""Setting up the device that a process computes on, before anything is allocated there."""

from __future__ import annotations

import torch


def set_up_device(device: str | torch.device, memory: float = 1.0) -> None:
    """`memory`: the share of a GPU's memory that this process may take. Beyond it an allocation fails here, and not in
    another process on the same GPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return
    # cuDNN plans a kernel for every new shape, and packed batches rarely have the same shape twice.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if memory < 1.0:
        torch.cuda.set_per_process_memory_fraction(memory, device.index)  # None: the current device


def release_unused(device: torch.device) -> None:
    """Give memory that torch keeps for later, and this process will not use soon, back to the driver."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
