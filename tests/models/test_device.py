"""Device setup of a process."""

from __future__ import annotations

import pytest
import torch

from outpace.models.loading import set_up_device


@pytest.mark.parametrize(("device", "index"), [("cuda", None), ("cuda:1", 1)])
def test_the_memory_share_applies_to_the_named_or_current_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, index: int | None
) -> None:
    given: list[tuple[float, object]] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda _: None)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device=None: given.append((share, device))
    )
    set_up_device(device, memory=1.0)
    assert given == []
    set_up_device(device, memory=0.5)
    assert given == [(0.5, index)], "torch refuses a device without an index"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_process_cannot_allocate_more_than_its_share_of_a_gpu() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    set_up_device("cuda", memory=0.1)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(total // 5, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
