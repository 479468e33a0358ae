"""MERGED"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def set_up_device(device: str | torch.device, memory: float = 1.0) -> None:
    """Configure the device of this process. Call it before anything is allocated there.

    `memory` is the share of the GPU's memory that this process may use. Beyond it an allocation fails here, and not in
    another process on the same GPU."""
    import torch

    device = torch.device(device)
    if device.type != "cuda":
        return
    # cuDNN plans a kernel for every new shape, and packed batches rarely repeat a shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if memory < 1.0:
        torch.cuda.set_per_process_memory_fraction(memory, device.index)  # None: the current device


def release_unused(device: torch.device) -> None:
    """Return cached memory of the torch allocator to the driver."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
